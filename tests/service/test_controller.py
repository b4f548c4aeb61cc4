"""Rollouts through real workers: harnesses as processes and as functions, and every way for them to end."""

import asyncio
import hashlib
import hmac
import signal
import sys
from pathlib import Path

import pytest
import zmq.asyncio

from harnessrl.service.controller import verdict
from harnessrl.service.shapes import environment
from tests.service import harnesses
from tests.service.making import KEY, Client, service, worker_child

MODULE = "tests.service.harnesses"


def over(tmp_path, test, workers=1, capacity=8, **settings):
    """Run an async test against a service with worker processes."""

    async def main():
        async with service(tmp_path, **settings) as client:
            started = [worker_child(client.controller, capacity) for _ in range(workers)]
            children = [await asyncio.to_thread(context.__enter__) for context in started]
            try:
                assert all(child.ready["worker"] for child in children)
                await test(client, *children)
            finally:
                for context in started:
                    await asyncio.to_thread(context.__exit__, None, None, None)

    asyncio.run(main())


async def until(client: Client, path: str, condition):
    """GET until the answer fulfils a condition."""
    async with asyncio.timeout(20):
        while not condition(answer := await client.get(path)):
            pass
    return answer


def local(name, **env_map):
    return {"config": {"local": {"agent_class": f"{MODULE}:{name}", "env_map": env_map}}}


def command(script, timeout=60, **env_map):
    return {
        "config": {"timeout_seconds": timeout, "local": {"command": [sys.executable, "-c", script], "env_map": env_map}}
    }


def stat(pid):
    """State letter and parent of a process; None where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0], int(fields[1])


def alive(pid):
    found = stat(pid)
    return found is not None and found[0] != "Z"


def test_functions_and_processes_are_run_to_their_reward(tmp_path, tokenizer, engine):
    script = harnesses.SCRIPT + (
        "body = {'messages': [{'role': 'user', 'content': os.environ['QUESTION']}]}\n"
        "assert os.environ['OPENAI_BASE_URL'] == os.environ['AGL_OPENAI_BASE_URL']\n"
        "assert os.environ['OPENAI_API_KEY'] == os.environ['AGL_KEY']\n"
        "post(os.environ['OPENAI_BASE_URL'] + '/chat/completions', body)\n"
        "print('said it'); event('reward', value=2)\n"
    )

    async def test(client, _):
        question = {"input": {"items": ["the door"]}}
        await client.create("f", **question, **local("solve", QUESTION="input.items.0"))
        await client.create("p", **question, is_train=False, **command(script, QUESTION="input.items.0"))
        items = {item["rollout_id"]: item for item in await client.traces(2)}
        assert [(items[name]["state"], items[name]["reward"]) for name in "fp"] == [
            ("succeeded", 1.0),
            ("succeeded", 2),
        ]
        assert [len(items[name]["calls"]) for name in "fp"] == [2, 1]
        assert items["f"]["calls"][0]["prompt_ids"] == items["p"]["calls"][0]["prompt_ids"]
        assert (tmp_path / "harness" / "p-0.log").read_text() == "said it\n"
        assert {request.sampling.temperature for request in engine.requests} == {1.0, 0.7}

    over(tmp_path, test, engine=engine.address, tokenizer=tokenizer)


def test_every_way_to_end(tmp_path):
    ways = {
        "raise": local("fail"),
        "exit0": local("leave", CODE="0"),
        "exit3": local("leave", CODE="3"),
        "cancelled": local("give_up"),
        "sync": local("not_async"),
        "nowhere": {"config": {"local": {"agent_class": "no.such:thing"}}},
        "nameless": local("no_such_function"),
        "exits": {"config": {"local": {"agent_class": "tests.service.exits_at_import:run"}}},
        "code": command("print('last words'); raise SystemExit(4)"),
        "missing": {"config": {"local": {"command": ["/no/such/program"]}}},
        "timeout": {"config": {"timeout_seconds": 0.2, "local": {"agent_class": "asyncio:sleep"}}},
        "late": {"config": {"timeout_seconds": 0.2, "local": {"agent_class": f"{MODULE}:wait"}}},
    }

    async def test(client, _):
        for name, fields in ways.items():  # the worker survives them all
            await client.create(name, **fields)
        items = {item["rollout_id"]: item for item in await client.traces(len(ways))}
        endings = {name: (item["state"], item["failure"]) for name, item in items.items()}
        assert endings == {
            "raise": ("failed", "exit_code"),
            "exit0": ("succeeded", "no_reward"),
            "exit3": ("failed", "exit_code"),
            "cancelled": ("failed", "exit_code"),
            "sync": ("failed", "lost"),
            "nowhere": ("failed", "lost"),
            "nameless": ("failed", "lost"),
            "exits": ("failed", "lost"),
            "code": ("failed", "exit_code"),
            "missing": ("failed", "lost"),
            "timeout": ("failed", "exit_code"),  # asyncio.sleep refuses a mapping
            "late": ("failed", "timeout"),
        }
        said = {name: item["error_message"] for name, item in items.items()}
        assert "RuntimeError: the harness broke" in said["raise"]
        assert said["code"] == "exit code 4\nlast words"
        missing = "lost in all of 2 attempts; last: /no/such/program cannot be started: [Errno 2]"
        assert said["missing"].startswith(missing)
        assert "has no attribute 'no_such_function'" in said["nameless"] and "SystemExit: 5" in said["exits"]
        tries = {name: item["attempt"] for name, item in items.items() if item["attempt"] != "0"}
        assert tries == dict.fromkeys(("sync", "nowhere", "nameless", "exits", "missing"), "1")
        assert {items[name]["reward"] for name in tries} == {None}
        assert "must be an async function" in said["sync"] and "No module named 'no'" in said["nowhere"]
        assert said["late"] == "timeout after 0.2 s"
        assert "the harness broke" in (tmp_path / "harness" / "raise-0.log").read_text()

    over(tmp_path, test)


def test_a_timeout_ends_the_whole_process_group(tmp_path):
    async def test(client, _):
        await client.create("a", **command(harnesses.WAIT_WITH_CHILD, timeout=1.5))
        (item,) = await client.traces(1)
        assert (item["state"], item["failure"]) == ("failed", "timeout")
        (started,) = await client.get("/api/rollouts/a/events")
        assert not any(alive(pid) for pid in started["data"]["pids"])  # the grandchild ignores SIGTERM

    over(tmp_path, test)


@pytest.mark.parametrize("how", ["kill -9", "end of stdin"])
def test_rollouts_of_a_lost_worker_run_again_elsewhere(tmp_path, how):
    async def test(client, first, second):
        await client.create("p", **command(harnesses.WAIT_WITH_CHILD))
        await client.create("f", **local("wait"))
        pids = []
        for name in "pf":
            (started,) = await until(client, f"/api/rollouts/{name}/events", len)
            pids += started["data"].get("pids", [])
        # each worker has one rollout: lose whichever has the process
        parent = stat(pids[0])[1]
        lost = first if first.process.pid == parent else second
        await asyncio.to_thread(lost.kill if how == "kill -9" else lost.end)
        (item,) = await client.traces(1)
        assert (item["rollout_id"], item["attempt"], item["reward"]) == ("p", "1", 0.5)
        assert (await client.get("/api/rollouts/p"))["attempts"] == ["0", "1"]
        events = await client.get("/api/rollouts/p/events")
        assert [event["event_type"] for event in events] == ["started", "reward"]  # of attempt 1 alone
        async with asyncio.timeout(10):
            while any(alive(pid) for pid in pids):  # what the lost worker had started is gone too
                await asyncio.sleep(0)

    over(tmp_path, test, workers=2, heartbeat_seconds=0.25)


def test_a_rollout_lost_in_all_attempts_is_lost(tmp_path):
    async def test(client, *workers):
        await client.create("a", **local("wait"))
        await until(client, "/api/rollouts/a/events", len)
        for worker in workers:
            await asyncio.to_thread(worker.kill)
        (item,) = await client.traces(1)
        assert (item["state"], item["failure"], item["attempt"]) == ("failed", "lost", "0")
        assert item["error_message"] == "lost in all of 1 attempts; last: its worker fell silent"

    over(tmp_path, test, heartbeat_seconds=0.25, attempts=1)


def test_a_stopped_worker_that_comes_back_starts_over(tmp_path):
    """SIGSTOP makes a worker silent without killing it: its old attempt must end before a new one begins."""

    async def test(client, worker):
        await client.create("a", **command(harnesses.WAIT_WITH_CHILD))
        (started,) = await until(client, "/api/rollouts/a/events", len)
        worker.process.send_signal(signal.SIGSTOP)
        try:
            await until(client, "/api/rollouts/a", lambda body: body["rollout"]["status"]["state"] == "queuing")
        finally:
            worker.process.send_signal(signal.SIGCONT)
        (item,) = await client.traces(1)
        assert (item["attempt"], item["reward"], item["state"]) == ("1", 0.5, "succeeded")
        assert len(started["data"]["pids"]) == 2  # the harness and its child
        async with asyncio.timeout(10):  # passing in time is the assertion
            while any(alive(pid) for pid in started["data"]["pids"]):
                await asyncio.sleep(0)

    over(tmp_path, test, heartbeat_seconds=0.25)


def test_what_a_given_up_attempt_reports_is_ignored(tmp_path):
    """A worker played by hand: it drops attempt 0, takes attempt 1, and then reports both."""

    async def main():
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.DEALER)
        async with service(tmp_path, heartbeat_seconds=60) as client:
            socket.connect(client.controller)

            async def say(op, **more):
                await socket.send_json({"op": op, "worker": "w", **more})

            async def hear(op):
                message = await asyncio.wait_for(socket.recv_json(), 10)
                assert message["op"] == op, message
                return message

            def ending(attempt, **more):
                return {"rollout_id": "a", "attempt": attempt, "ok": True, "failure": None, "message": None, **more}

            await say("hello", epoch=0, capacity=1)
            assert (await hear("welcome"))["epoch"] == 0
            await client.create("a", **local("wait", Q="literal"))
            run = await hear("run")
            assert (run["attempt"], run["timeout"]) == ("0", 1800.0)
            models = f"{client.url}/proxy/rollout/a/attempt/0/mode/train/openai/v1"
            key = hmac.new(KEY.encode(), b"rollout\0a", hashlib.sha256).hexdigest()
            assert run["env"] == {  # these and no others: each leads to a route that exists
                "AGL_OPENAI_BASE_URL": models,
                "AGL_EVENT_URL": f"{client.url}/api/rollouts/a/attempt/0/events",
                "AGL_KEY": key,
                "OPENAI_BASE_URL": models,
                "OPENAI_API_KEY": key,
                "Q": "literal",
            }
            assert run["log"] == str(tmp_path / "harness" / "a-0.log")
            await say("bye")
            await say("done", **ending("0"))  # after the bye: nobody's
            await say("beat", epoch=0)
            assert (await hear("who"))["epoch"] == 0
            await say("hello", epoch=1, capacity=1)
            await hear("welcome")
            assert (await hear("run"))["attempt"] == "1"
            await say("done", **ending("0"))  # late
            await socket.send(b"noise")
            await say("done", **ending("1", ok=False, failure="exit_code", message="no"))
            (item,) = await client.traces(1)
            assert (item["state"], item["attempt"], item["error_message"]) == ("failed", "1", "no")
        context.destroy(linger=0)

    asyncio.run(main())


def test_a_busy_worker_is_not_a_lost_one(tmp_path):
    async def test(client, _):
        await client.create("a", **local("block"))
        (item,) = await client.traces(1)
        assert (item["attempt"], item["reward"]) == ("0", 1.0)

    over(tmp_path, test, heartbeat_seconds=0.2)


def test_capacity_bounds_what_runs_at_once(tmp_path):
    async def test(client, _):
        await client.create("a", "b", "c", **local("wait"))
        await until(client, "/api/rollouts/b/events", len)
        states = [(await client.get(f"/api/rollouts/{name}"))["rollout"]["status"]["state"] for name in "abc"]
        assert states == ["running", "running", "queuing"]
        await client.send("PATCH", "/api/rollouts/a", {"status": {"state": "failed"}})
        await until(client, "/api/rollouts/c/events", len)  # the room is used at once

    over(tmp_path, test, capacity=2)


@pytest.mark.parametrize("how", ["PATCH", "DELETE"])
def test_ending_or_deleting_a_rollout_stops_its_harness(tmp_path, how):
    async def test(client, _):
        await client.create("a", **command(harnesses.WAIT_WITH_CHILD))
        (started,) = await until(client, "/api/rollouts/a/events", len)
        await client.send(how, "/api/rollouts/a", {"status": {"state": "failed"}})
        assert len(started["data"]["pids"]) == 2  # the harness and its child
        async with asyncio.timeout(10):  # passing in time is the assertion
            while any(alive(pid) for pid in started["data"]["pids"]):
                await asyncio.sleep(0)

    over(tmp_path, test)


def test_refusals_become_the_failure_and_engine_trouble_becomes_a_retry(tmp_path, tokenizer, engine):
    async def test(client, _):
        engine.answer = lambda request: ([5] * 4, [-0.5] * 4, "length")
        await client.create("bound", **local("chat_only"))
        (item,) = await client.traces(1)
        assert (item["state"], item["failure"], len(item["calls"])) == ("failed", "call_bound", 3)
        await client.create("overflow", input={"q": "the key " * 40}, **local("solve", QUESTION="input.q"))
        item = (await client.traces(2))[1]
        assert (item["failure"], item["calls"], item["attempt"]) == ("context_overflow", [], "0")
        engine.answer = lambda request: ([], [], "error")
        await client.create("engine", **local("solve"))
        item = (await client.traces(3))[2]
        assert (item["failure"], item["attempt"]) == ("lost", "1")

    over(tmp_path, test, engine=engine.address, tokenizer=tokenizer, max_calls=3, max_context=60)


@pytest.mark.parametrize(
    ("failure", "scored", "errors", "expected"),
    [
        ("exit_code", False, [], "exit_code"),
        ("timeout", False, [{}], "timeout"),
        ("exit_code", False, [{"http_status": 400, "code": "context_length_exceeded"}, {}], "context_overflow"),
        ("exit_code", True, [{"http_status": 400, "code": "context_length_exceeded"}], "exit_code"),
        ("timeout", False, [{}, {"http_status": 400, "code": "call_limit_exceeded"}], "call_bound"),
        ("exit_code", False, [{}, {"http_status": 503, "code": None}], "lost"),
        ("exit_code", False, [{"http_status": 503, "code": None}, {}], "exit_code"),
        ("lost", False, [], "lost"),
    ],
)
def test_the_verdict(failure, scored, errors, expected):
    assert verdict(failure, scored, errors) == expected


def test_env_maps_look_into_the_input():
    task = {"question": "é?", "items": [{"n": 1}, "two"], "flag": None}
    paths = {
        "A": "input.question",
        "B": "input.items.0",
        "C": "input.items.1",
        "D": "literal.text",
        "E": "inputs",
        "F": "input.flag",
        "G": "input",
    }
    assert environment(task, paths) == {
        "A": "é?",
        "B": '{"n":1}',
        "C": "two",
        "D": "literal.text",
        "E": "inputs",
        "F": "null",
        "G": '{"question":"é?","items":[{"n":1},"two"],"flag":null}',
    }
    for path in ("input.items.2", "input.question.x", "input.items.-1", "input."):
        with pytest.raises(ValueError, match=f"X: the input has no {path}"):
            environment(task, {"X": path})
    with pytest.raises(ValueError, match="'A=B'"):
        environment(task, {"A=B": "x"})
