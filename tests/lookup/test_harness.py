"""The harness: what it sends, what it accepts and how it ends, over real HTTP and without."""

import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from experiments.lookup import harness
from experiments.lookup.demonstrations import right_reply
from experiments.lookup.harness import Message, parse, play, run
from experiments.lookup.task import inputs

TASK = {"seed": 7, "table": {"abc": "cde", "cde": "eab", "eab": "bbb", "bbb": "abc"}, "start": "abc", "hops": 2}


class Fixed(random.Random):
    """A source whose every draw is `value`: 0.0 hands every hop off, 1.0 none."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def random(self) -> float:
        return self.value


NEVER, ALWAYS = Fixed(1.0), Fixed(0.0)


def script(
    replies: list[str], task: Mapping[str, Any] = TASK, rng: random.Random = NEVER
) -> tuple[float, list[tuple[str, str]]]:
    """Play `task` with fixed replies; return the reward and (agent, history as "role:content|...") of every turn."""
    asked: list[tuple[str, str]] = []

    async def ask(messages: list[Message], agent: str) -> str:
        asked.append((agent, "|".join(f"{message['role'][0]}:{message['content']}" for message in messages)))
        return replies[len(asked) - 1]

    return asyncio.run(play(task, ask, rng)), asked


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("get abc", ("get", "abc")),
        ("  GET:  Abc. ", ("get", "abc")),
        ("say eab.\n", ("say", "eab")),
        ("getabc", ("get", "abc")),
        ("get", None),
        ("abc", None),
        ("get abc abc", None),
        ("get abc say abc", None),
        ("please get abc", None),
        ("get a1c", None),
        ("", None),
    ],
)
def test_parsing(text: str, call: tuple[str, str] | None) -> None:
    assert parse(text) == call


def test_a_worked_episode_echoes_replies_in_canonical_form() -> None:
    reward, asked = script(["Get: abc.", " get CDE", "say eab"])
    assert reward == 1.0
    assert asked == [
        ("main", "u:follow abc 2 times"),
        ("main", "u:follow abc 2 times|a:get abc|t:cde"),
        ("main", "u:follow abc 2 times|a:get abc|t:cde|a:get cde|t:eab"),
    ]


def test_a_wrong_answer_is_worth_nothing() -> None:
    assert script(["get abc", "say cde"])[0] == 0.0
    assert script(["say eab"])[0] == 1.0  # a lucky guess


def test_errors_are_told_and_the_text_that_caused_them_comes_back_as_it_was() -> None:
    reward, asked = script([" Hm abc ", "get ddd", "get abc", "get cde", "say eab"])
    assert reward == 1.0
    assert asked[1][1] == "u:follow abc 2 times|a:Hm abc|t:bad call"
    assert asked[2][1] == "u:follow abc 2 times|a:Hm abc|t:bad call|a:get ddd|t:no key"


def test_the_fourth_error_ends_the_episode() -> None:
    reward, asked = script(["x"] * 3 + ["get abc", "get cde", "say eab"])
    assert (reward, len(asked)) == (1.0, 6)
    reward, asked = script(["x"] * 4 + ["never asked"])
    assert (reward, len(asked)) == (0.0, 4)


def test_an_episode_that_never_answers_ends_after_ten_turns() -> None:
    reward, asked = script(["get abc"] * 11)
    assert (reward, len(asked)) == (0.0, 10)


def test_a_history_over_the_limit_becomes_one_line_that_keeps_the_progress() -> None:
    _, asked = script(["get abc", "get cde", "get eab", "get bbb", "say abc"], {**TASK, "hops": 3})
    lengths = [sum(len(part) - 2 for part in history.split("|")) for _, history in asked]
    assert lengths == [18, 28, 38, 34, 44]  # 48 would be too long
    assert asked[3][1] == "u:follow abc 3 times|u:so far 3 now bbb"
    assert asked[4][1] == "u:follow abc 3 times|u:so far 3 now bbb|a:get bbb|t:abc"


def test_a_summary_before_any_value_names_the_start() -> None:
    _, asked = script(["a very long reply without any call", "say abc"])
    assert asked[1][1] == "u:follow abc 2 times|u:so far 0 now abc"


def test_a_hop_handed_off_is_a_conversation_of_its_own() -> None:
    replies = ["get abc", "get abc", "say cde", "get cde", "oops", "get cde", "say eab", "say eab"]
    reward, asked = script(replies, rng=ALWAYS)
    assert reward == 1.0
    assert asked == [
        ("main", "u:follow abc 2 times"),
        ("helper", "u:look up abc"),
        ("helper", "u:look up abc|a:get abc|t:cde"),
        ("main", "u:follow abc 2 times|a:get abc|t:cde"),
        ("helper", "u:look up cde"),
        ("helper", "u:look up cde|a:oops|t:bad call"),
        ("helper", "u:look up cde|a:oops|t:bad call|a:get cde|t:eab"),
        ("main", "u:follow abc 2 times|a:get abc|t:cde|a:get cde|t:eab"),
    ]


def test_a_helper_that_gives_up_is_an_error_of_its_caller() -> None:
    _, asked = script(["get abc", "x", "x", "say abc"], rng=ALWAYS)
    assert [agent for agent, _ in asked] == ["main", "helper", "helper", "main"]
    assert asked[3][1] == "u:follow abc 2 times|a:get abc|t:no key"


def test_hand_offs_are_rarer_before_an_error_than_after() -> None:
    _, asked = script(["get abc", "x", "get cde", "say eab", "say eab"], rng=Fixed(0.3))
    assert [agent for agent, _ in asked] == ["main", "main", "main", "helper", "main"]


DROP = object()


class Endpoint:
    """A chat endpoint and an event sink; `answer` makes of a request's body a text, a whole response, or DROP."""

    def __init__(self, answer: Callable[[dict[str, Any]], Any]) -> None:
        self.answer, self.bodies, self.events, self.connections = answer, [], [], set()
        self.keys: set[str] = set()
        self.agents: list[str] = []

    async def chat(self, request: web.Request) -> web.Response:
        self.keys.add(request.headers["Authorization"])
        self.connections.add(request.transport)
        body = await request.json()
        self.bodies.append(body)
        self.agents.append(request.headers["X-Agent"])
        answer = self.answer(body)
        if answer is DROP:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if isinstance(answer, web.Response):
            return answer
        message = {"role": "assistant", "content": answer}
        return web.json_response({"id": f"call-{len(self.bodies)}", "choices": [{"message": message}]})

    async def event(self, request: web.Request) -> web.Response:
        self.keys.add(request.headers["Authorization"])
        self.events.append((request.match_info["rollout"], await request.json()))
        return web.json_response({})

    async def serve(self, client: Callable[[str], Awaitable[None]]) -> None:
        """Listen on a free port of the loopback, call `client` with the server's address, stop."""
        app = web.Application()
        app.router.add_post("/proxy/rollout/{rollout}/attempt/0/mode/train/openai/v1/chat/completions", self.chat)
        app.router.add_post("/api/rollouts/{rollout}/attempt/0/events", self.event)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = runner.addresses[0][:2]
            await client(f"http://{host}:{port}")
        finally:
            await runner.cleanup()


def environment(url: str, rollout: str, task: Mapping[str, Any] = TASK) -> dict[str, str]:
    return {
        "AGL_OPENAI_BASE_URL": f"{url}/proxy/rollout/{rollout}/attempt/0/mode/train/openai/v1",
        "AGL_EVENT_URL": f"{url}/api/rollouts/{rollout}/attempt/0/events",
        "AGL_KEY": "secret",
        "LOOKUP_INPUT": json.dumps(task),
    }


def right(body: dict[str, Any]) -> str:
    return right_reply(body["messages"])


def test_a_perfect_player_is_rewarded_over_http_and_connections_are_shared() -> None:
    endpoint = Endpoint(right)
    tasks = [task for task, _ in zip(inputs(0, "val"), range(40), strict=False)]

    async def client(url: str) -> None:
        for _ in range(2):
            await asyncio.gather(*(run(environment(url, f"r{k}", task)) for k, task in enumerate(tasks)))
        assert len(harness._SESSIONS) == 1

    asyncio.run(endpoint.serve(client))
    assert [event for _, event in endpoint.events] == [{"event_type": "reward", "data": {"value": 1.0}}] * 80
    assert sorted(rollout for rollout, _ in endpoint.events) == sorted([f"r{k}" for k in range(40)] * 2)
    assert endpoint.keys == {"Bearer secret"}
    assert len(endpoint.bodies) > 280 and len(endpoint.connections) <= 40
    assert set(endpoint.agents) == {"main", "helper"}
    assert not harness._SESSIONS  # closed with its loop


def test_failed_calls_are_given_their_reward_before_the_rollout_has_its_own() -> None:
    replies = iter(["what", "get ddd"])  # malformed, then a key that no table has; right from there on
    endpoint = Endpoint(lambda body: next(replies, None) or right(body))
    asyncio.run(endpoint.serve(lambda url: run(environment(url, "r0") | {"LOOKUP_FAILED_CALL": "-0.5"})))
    *calls, last = [event for _, event in endpoint.events]
    assert calls == [
        {"event_type": "call_reward", "data": {"call_id": name, "value": -0.5}} for name in ("call-1", "call-2")
    ]
    assert last == {"event_type": "reward", "data": {"value": 1.0}}


def test_siblings_differ_in_their_own_choices_and_a_rollout_repeats() -> None:
    def agents(rollout: str) -> list[str]:
        endpoint = Endpoint(right)
        asyncio.run(endpoint.serve(lambda url: run(environment(url, rollout))))
        return endpoint.agents

    runs = {f"r{k}": agents(f"r{k}") for k in range(20)}
    assert len({tuple(run) for run in runs.values()}) > 1
    assert all(agents(rollout) == run for rollout, run in list(runs.items())[:5])


def test_overload_and_dropped_connections_are_tried_again() -> None:
    faults: list[Any] = [503, DROP, 429]

    def answer(body: dict[str, Any]) -> Any:
        fault = faults.pop(0) if faults else right(body)
        return web.Response(status=fault, headers={"Retry-After": "0"}) if isinstance(fault, int) else fault

    endpoint = Endpoint(answer)
    asyncio.run(endpoint.serve(lambda url: run(environment(url, "r0"))))
    assert endpoint.bodies[0] == endpoint.bodies[1] == endpoint.bodies[2] == endpoint.bodies[3]
    assert len(endpoint.bodies) >= 6
    assert endpoint.events[0][1]["data"] == {"value": 1.0}


def test_a_refused_request_ends_the_run_without_a_reward() -> None:
    endpoint = Endpoint(lambda body: web.json_response({"error": {"code": "context_length_exceeded"}}, status=400))

    async def client(url: str) -> None:
        with pytest.raises(RuntimeError, match=r"400: .*context_length_exceeded"):
            await run(environment(url, "r0"))

    asyncio.run(endpoint.serve(client))
    assert len(endpoint.bodies) == 1 and endpoint.events == []


def test_it_is_a_program_too_and_loads_neither_the_library_nor_torch() -> None:
    endpoint = Endpoint(right)
    code = (
        "import runpy, sys; runpy.run_module('experiments.lookup.harness', run_name='__main__'); "
        "sys.exit(any(name.split('.')[0] in ('harnessrl', 'torch', 'transformers') for name in sys.modules))"
    )

    async def client(url: str) -> None:
        env = {**os.environ, **environment(url, "r0")}
        root = Path(harness.__file__).parents[2]
        done = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-c", code], env=env, cwd=root, capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, "")

    asyncio.run(endpoint.serve(client))
    assert endpoint.events == [("r0", {"event_type": "reward", "data": {"value": 1.0}})]


def test_random_text_never_breaks_the_harness() -> None:
    rng = random.Random(0)
    for _ in range(200):
        replies = ["".join(rng.choices("abcdegtsay .:", k=rng.randrange(0, 17))) for _ in range(60)]
        reward, asked = script(replies, rng=random.Random(1))
        assert reward in (0.0, 1.0) and 1 <= len(asked) <= 10 * 5
