"""mini-swe-agent's loop in a room: what it sends, what it drops, and how it ends; then through the real gateway."""

import asyncio
import json
import random
from typing import Any

import pytest

pytest.importorskip("minigrid", reason="needs the babyai extra: pip install -e .[babyai]")
pytest.importorskip("minisweagent", reason="needs the babyai extra: pip install -e .[babyai]")

from minigrid.utils.baby_ai_bot import BabyAIBot

from experiments.babyai import harness
from experiments.babyai.demonstrations import Noise, demonstrate
from experiments.babyai.harness import AGENTS, ERRORS, play, run
from experiments.babyai.task import MOST_STEPS, ROOMS, Room, inputs
from experiments.babyai.warmstart import FOLDER
from harnessrl.adapter import Rollout, explain_break, merge_calls
from harnessrl.service.tokens import TextCodec
from tests.service.making import KEY, service
from tests.service.toy_engine import ToyEngine

SEEDS = next(task["seeds"] for task in inputs(0) if "go forward" in Room(task["seeds"][0]).commands())


def rooms() -> list[Room]:
    return [Room(seed) for seed in SEEDS]


def script(replies: list[str]) -> tuple[float, list[str]]:
    """Play SEEDS with fixed replies; the reward and the history of every call as "role:content|..."."""
    asked: list[str] = []

    def ask(messages: list[dict[str, Any]]) -> str:
        asked.append("|".join(f"{message['role'][0]}:{message['content']}" for message in messages))
        return replies[len(asked) - 1]

    return play(rooms(), ask), asked


def seen(*commands: str) -> list[str]:
    """What the first room says at first and after each command."""
    room = rooms()[0]
    said = [f"{room.mission}. {room.describe()}"]
    for command in commands:
        room.act(command)
        said.append(room.describe())
    return said


def test_a_possible_command_is_done_and_the_reply_stays_as_it_was() -> None:
    first, second, third = seen("turn left", "turn right")
    _, asked = script(["turn left", " turn right\n", *["turn left"] * MOST_STEPS])
    assert asked[:3] == [
        f"s:play|u:{first}",
        f"s:play|u:{first}|a:turn left|u:{second}",
        f"s:play|u:{first}|a:turn left|u:{second}|a: turn right\n|u:{third}",
    ]


def test_the_agent_drops_a_reply_that_is_no_possible_command_and_says_so() -> None:
    first, second = seen("turn left")
    view = first.split(". ")[1]
    _, asked = script(["turn", *["turn left"] * MOST_STEPS])
    assert asked[1] == f"s:play|u:{first}|u:no. {view}"
    assert asked[2] == f"s:play|u:{first}|u:no. {view}|a:turn left|u:{second}"


def test_the_second_error_ends_an_agent_and_another_starts_where_it_stood() -> None:
    first, second = seen("turn left")
    mission = first.split(". ")[0]
    reward, asked = script(["turn", "turn left", "drop red ball", *["x"] * 9])
    assert asked[3] == f"s:play|u:{mission}. {second}"
    assert asked[4] == f"s:play|u:{mission}. {second}|u:no. {second}"
    assert (reward, len(asked)) == (0.0, 1 + AGENTS * ERRORS)


def test_a_second_room_opens_in_the_same_conversation_and_rewards_are_averaged() -> None:
    turns, reward = demonstrate(SEEDS, Noise(), random.Random(0))
    steps = [room.env.step_count for room in solved()]
    assert len(turns) == sum(steps)
    assert turns[steps[0]].messages[-1]["content"].startswith(f"done. {rooms()[1].mission}. see ")
    assert len(turns[-1].messages) == 2 * len(turns)
    assert reward == pytest.approx(1 - 0.9 * sum(steps) / (ROOMS * MOST_STEPS))
    first = [turn.reply for turn in turns[: steps[0]]]
    assert script([*first, *["x"] * 9])[0] == pytest.approx((1 - 0.9 * steps[0] / MOST_STEPS) / ROOMS)


def solved() -> list[Room]:
    """The rooms as the package's bot leaves them."""
    done = rooms()
    for room in done:
        bot = BabyAIBot(room.env)
        while not room.done:
            wish = bot.replan()
            room.act(next(text for text, action in room.commands().items() if action == wish))
    return done


def test_a_room_that_is_not_done_in_time_ends_the_episode() -> None:
    reward, asked = script(["turn left"] * 100)
    assert (reward, len(asked)) == (0.0, MOST_STEPS)


def test_through_the_gateway_dropped_replies_and_drift_break_and_nothing_else(tmp_path: Any) -> None:
    """Five calls: one is dropped, one written letter by letter. The samples are three, for these two reasons."""
    codec = TextCodec(str(FOLDER))
    (end,) = codec.stop_ids
    letters = [int(codec.encode(letter)[0]) for letter in "turn left"]
    canonical = codec.encode("turn right").tolist()
    replies = [canonical, letters, codec.encode("no").tolist(), canonical, letters, *[canonical] * MOST_STEPS]

    def answer(request: Any) -> tuple[list[int], list[float], str]:
        ids = [*replies.pop(0), end]
        return ids, [-0.5] * len(ids), "stop"

    async def main(address: str) -> list[dict[str, Any]]:
        async with service(tmp_path, engine=address, tokenizer=str(FOLDER)) as client:
            await client.create("r0")
            base = f"{client.url}/proxy/rollout/r0/attempt/0/mode/train/openai/v1"
            events = f"{client.url}/api/rollouts/r0/attempt/0/events"
            env = {"AGL_OPENAI_BASE_URL": base, "AGL_EVENT_URL": events, "AGL_KEY": KEY}
            await run({**env, "BABYAI_INPUT": json.dumps({"seeds": SEEDS})})
            rewards = await client.get("/api/rollouts/r0/events?event_type=reward")
            assert [event["data"]["value"] for event in rewards] == [0.0]
            return await client.calls("r0")

    with ToyEngine(answer) as engine:
        calls = asyncio.run(main(engine.address))
    assert len(calls) == MOST_STEPS + 1  # one was dropped
    rollout = Rollout.from_dict(
        {
            "rollout_id": "r0",
            "group_id": "g0",
            "reward": 0.0,
            "calls": [
                {
                    "call_id": str(index),
                    "prompt_ids": call["prompt_token_ids"],
                    "response_ids": call["response_token_ids"],
                    "logprobs": call["response_log_probs"],
                }
                for index, call in enumerate(calls)
            ],
        }
    )
    merged = merge_calls(rollout)
    assert [[int(span.call_id) for span in sample.spans] for sample in merged.samples] == [
        [0, 1],
        [2],
        [3, 4],
        list(range(5, MOST_STEPS + 1)),
    ]
    kinds = [explain_break(broken, lambda ids: "".join(codec.tokens(ids))).kind for broken in merged.breaks]
    assert kinds[0] == kinds[2] == "retokenized" and kinds[1] != "retokenized"


def test_a_refused_request_ends_the_run() -> None:
    env = {"AGL_OPENAI_BASE_URL": "http://127.0.0.1:1/v1", "AGL_EVENT_URL": "http://127.0.0.1:1/e", "AGL_KEY": "x"}
    tries, harness.TRIES = harness.TRIES, 1
    try:
        with pytest.raises(RuntimeError, match="/v1/chat/completions failed with ConnectionRefused"):
            asyncio.run(run({**env, "BABYAI_INPUT": json.dumps({"seeds": SEEDS})}))
    finally:
        harness.TRIES = tries
