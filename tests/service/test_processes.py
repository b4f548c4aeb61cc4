"""The service and the worker as processes: kill -9, restarts, signals, and start-up errors."""

import asyncio
import contextlib
import json
import resource
import signal
import socket
import sqlite3
from pathlib import Path

import aiohttp
import pytest

from harnessrl.service.settings import ServiceConfig, WorkerConfig, read_settings
from tests.service import harnesses
from tests.service.making import KEY, Client, chat_path, child, in_thread, service_child, worker_child
from tests.service.test_controller import alive, command, local, until

SERVICE, WORKER = "harnessrl.service.main", "harnessrl.service.worker"


def test_every_acknowledged_write_survives_kill_9(tmp_path, tokenizer, engine):
    """Twelve writers; the service is killed while they write; whatever was answered must be there afterwards."""
    settings = {"engine": engine.address, "tokenizer": tokenizer}
    acknowledged = {"events": [], "calls": []}

    async def write(client, writer, enough):
        path = f"/api/rollouts/r{writer}/attempt/0/events"
        for number in range(1000):
            _, event = await client.send("POST", path, {"event_type": "note", "event_id": f"{writer}-{number}"})
            acknowledged["events"].append((event["rollout_id"], event["timestamp"]))
            _, answer = await client.chat(f"r{writer}", f"key {number}")
            acknowledged["calls"].append((f"r{writer}", answer["id"].removeprefix("chatcmpl-")))
            if len(acknowledged["calls"]) == 60:
                enough.set()

    async def before(started):
        async with aiohttp.ClientSession() as session:
            client = Client(started.ready["url"], session)
            await client.create(*(f"r{n}" for n in range(12)))
            enough = asyncio.Event()
            writers = [asyncio.create_task(write(client, n, enough)) for n in range(12)]
            await enough.wait()
            started.process.kill()  # others are in the middle of a write
            ends = await asyncio.gather(*writers, return_exceptions=True)
            assert all(isinstance(end, aiohttp.ClientError) for end in ends)

    async def after(started):
        async with aiohttp.ClientSession() as session:
            client = Client(started.ready["url"], session)
            events, calls = set(), set()
            for n in range(12):
                for item in await client.get(f"/api/rollouts/r{n}/events"):
                    if item["event_type"] == "note":
                        events.add((f"r{n}", item["timestamp"]))
                    else:
                        calls.add((f"r{n}", item["data"]["call_id"]))
                        assert item["data"]["prompt_token_ids"] and item["data"]["response_token_ids"]
            assert set(acknowledged["events"]) <= events
            assert set(acknowledged["calls"]) <= calls
            assert len(acknowledged["calls"]) >= 60

    with service_child(tmp_path, **settings) as started:
        asyncio.run(before(started))
        started.kill()
    with service_child(tmp_path, **settings) as started:
        asyncio.run(after(started))


def test_a_restarted_service_runs_what_was_running_again_and_loses_nothing(tmp_path):
    async def first(started):
        async with aiohttp.ClientSession() as session:
            client = Client(started.ready["url"], session)
            await client.create("p", **command(harnesses.WAIT_WITH_CHILD))
            await client.create("f", **local("wait"))
            await client.create("elsewhere")
            await client.send("PATCH", "/api/rollouts/elsewhere", {"status": {"state": "running"}})
            events = await until(client, "/api/rollouts/p/events", len)
            await until(client, "/api/rollouts/f/events", len)
            return events[0]["data"]["pids"]

    async def second(started, pids):
        async with aiohttp.ClientSession() as session:
            client = Client(started.ready["url"], session)
            items = {item["rollout_id"]: item for item in await client.traces(2)}
            assert {name: (item["attempt"], item["reward"]) for name, item in items.items()} == {
                "p": ("1", 0.5),
                "f": ("1", 0.5),
            }
            assert (await client.get("/api/rollouts/elsewhere"))["rollout"]["status"]["state"] == "running"
            async with asyncio.timeout(10):
                while any(alive(pid) for pid in pids):
                    await asyncio.sleep(0)

    more = {"heartbeat_seconds": 0.2, "attempts": 1}  # a restart of the service is no loss of the rollout
    with service_child(tmp_path, **more) as started:
        controller = started.ready["controller"]
        with worker_child(controller) as worker:
            assert worker.ready
            pids = asyncio.run(first(started))
            started.kill()
            with service_child(tmp_path, controller=controller, **more) as again:
                asyncio.run(second(again, pids))
    with contextlib.closing(sqlite3.connect(tmp_path / "store.sqlite")) as db:
        assert db.execute("SELECT SUM(executions), SUM(losses) FROM rollouts").fetchone() == (4, 0)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, None])
def test_both_end_quietly_with_their_harnesses(tmp_path, how):
    async def running(started):
        async with aiohttp.ClientSession() as session:
            client = Client(started.ready["url"], session)
            await client.create("p", **command(harnesses.WAIT_WITH_CHILD))
            (event,) = await until(client, "/api/rollouts/p/events", len)
            return event["data"]["pids"]

    with service_child(tmp_path) as started, worker_child(started.ready["controller"]) as worker:
        assert worker.ready
        pids = asyncio.run(running(started))
        for process in (worker, started):
            if how is not None:
                process.process.send_signal(how)
        ends = [process.end() for process in (worker, started)]
        assert [code for code, _ in ends] == [0, 0]
        assert not any("Traceback" in errors for _, errors in ends), ends
        assert not any(alive(pid) for pid in pids)


def test_a_long_poll_and_a_held_request_do_not_delay_the_end(tmp_path, tokenizer, engine):
    async def main(started):
        async with aiohttp.ClientSession() as session:
            client = Client(started.ready["url"], session)
            await client.create("a")
            engine.hold()
            calls = [asyncio.create_task(client.chat("a")), asyncio.create_task(client.get("/api/traces?wait=60"))]
            await in_thread(engine.wait, 1)
            started.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(15):
                await asyncio.gather(*calls, return_exceptions=True)

    with service_child(tmp_path, engine=engine.address, tokenizer=tokenizer) as started:
        asyncio.run(main(started))
        code, errors = started.end()
        assert code == 0 and "Traceback" not in errors, errors


def test_an_occupied_port_is_one_clear_line_and_exit_code_2(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with service_child(tmp_path, port=port) as started:
            code, errors = started.end()
        assert code == 2 and errors.count("\n") == 1
        assert f"127.0.0.1:{port}" in errors and "in use" in errors.lower(), errors
        with service_child(tmp_path, controller=f"tcp://127.0.0.1:{port}") as started:
            code, errors = started.end()
        assert code == 2 and f"tcp://127.0.0.1:{port}" in errors and errors.count("\n") == 1, errors


@pytest.mark.parametrize(
    ("module", "config", "part"),
    [
        (SERVICE, {"store": "/no/such/folder/s.sqlite", "key": "k"}, "/no/such/folder"),
        (
            SERVICE,
            {"store": "x", "key": "k", "engine": "tcp://h:1", "tokenizer": "/none"},
            "tokenizer.json cannot be read",
        ),
        (SERVICE, {"store": "x", "key": "k", "sotre": 1}, "unknown key 'sotre'"),
        (WORKER, {"controller": "nowhere"}, "'nowhere' cannot be connected to"),
        (WORKER, "text", "must be a JSON object"),
    ],
)
def test_a_bad_configuration_is_one_clear_line_and_exit_code_2(module, config, part):
    with child(module, config) as started:
        code, errors = started.end()
    assert code == 2 and part in errors and errors.count("\n") == 1, errors
    assert not errors.startswith("harnessrl:")  # the parent says that


@pytest.mark.parametrize(
    ("kind", "more", "part"),
    [
        (ServiceConfig, {"port": "80"}, "port must be int, got '80'"),
        (ServiceConfig, {"port": True}, "port must be int, got True"),
        (ServiceConfig, {"engine": "tcp://h:1"}, "engine needs tokenizer"),
        (ServiceConfig, {"engine": "tcp://h:1", "upstream": "u"}, "exclude each other"),
        (ServiceConfig, {"attempts": 0}, "attempts must be 1 or more, got 0"),
        (ServiceConfig, {"train_temperature": 0}, "train_temperature must be above 0"),
        (ServiceConfig, {"rollout_timeout": float("inf")}, "rollout_timeout must be a finite float, got inf"),
        (ServiceConfig, {"hold_seconds": float("nan")}, "hold_seconds must be a finite float, got nan"),
        (ServiceConfig, {"val_temperature": 10**400}, "val_temperature must be a finite float, got 1000"),
        (ServiceConfig, {"max_calls": float("inf")}, "max_calls must be int, got inf"),
        (ServiceConfig, {"key": ""}, "key must not be empty"),
        (ServiceConfig, {"run_folder": 3}, "run_folder must be str | None, got 3"),
        (WorkerConfig, {"capacity": 0}, "capacity must be 1 or more, got 0"),
        (WorkerConfig, {"path": [1]}, "path must be list[str], got [1]"),
    ],
)
def test_settings_name_the_key_and_what_is_allowed(kind, more, part):
    needed = {"store": "x", "key": "k"} if kind is ServiceConfig else {"controller": "c"}
    assert read_settings(kind, json.dumps(needed))
    with pytest.raises(ValueError) as caught:
        read_settings(kind, json.dumps({**needed, **more}))
    assert part in str(caught.value)


def test_a_missing_key_and_broken_json_are_told():
    with pytest.raises(ValueError, match="'key'"):
        read_settings(ServiceConfig, '{"store": "x"}')
    with pytest.raises(ValueError, match="not JSON"):
        read_settings(WorkerConfig, "{")


def test_a_disk_that_is_full_ends_the_service_with_one_line(tmp_path):
    """The system refuses to let the service's files grow: the next commit fails, and nothing is acknowledged after."""

    async def main(started):
        async with aiohttp.ClientSession() as session:
            client = Client(started.ready["url"], session)
            await client.create("a")
            size = Path(tmp_path / "store.sqlite-wal").stat().st_size
            resource.prlimit(started.process.pid, resource.RLIMIT_FSIZE, (size, size))
            with pytest.raises(aiohttp.ClientError):
                await client.create("b", input="x" * 100_000)

    with service_child(tmp_path) as started:
        asyncio.run(main(started))
        code, errors = started.end()
    assert code == 1 and errors == f"store '{tmp_path / 'store.sqlite'}' cannot be written: disk I/O error\n"
    with contextlib.closing(sqlite3.connect(tmp_path / "store.sqlite")) as db:
        assert db.execute("SELECT rollout_id FROM rollouts").fetchall() == [("a",)]


def test_a_store_belongs_to_one_service(tmp_path):
    with service_child(tmp_path) as first:
        assert first.ready
        with service_child(tmp_path) as second:
            code, errors = second.end()
        assert code == 2 and "in use by another service" in errors


def test_a_file_that_is_no_store_is_refused(tmp_path):
    Path(tmp_path / "store.sqlite").write_text("a diary " * 200)
    with service_child(tmp_path) as started:
        code, errors = started.end()
    assert code == 2 and "cannot be opened" in errors


def test_ids_and_logprobs_are_raw_columns(tmp_path, tokenizer, engine):
    """Anyone can read the store: int32 and float32, little-endian, no JSON."""

    async def main(started):
        async with aiohttp.ClientSession() as session:
            client = Client(started.ready["url"], session)
            await client.create("a")
            await client.send("POST", chat_path("a"), {"messages": [{"role": "user", "content": "the key"}]})

    with service_child(tmp_path, engine=engine.address, tokenizer=tokenizer) as started:
        asyncio.run(main(started))
    with contextlib.closing(sqlite3.connect(tmp_path / "store.sqlite")) as db:
        prompt, logprobs, request = db.execute("SELECT prompt_ids, logprobs, request FROM events").fetchone()
        assert db.execute("SELECT COUNT(*) FROM deliveries").fetchone() == (1,)
    assert prompt == engine.requests[0].prompt_ids.tobytes()
    assert len(logprobs) == 16 and json.loads(request)["messages"][0]["content"] == "the key"
    assert KEY.encode() not in Path(tmp_path / "store.sqlite").read_bytes()
