"""Scripted demonstrations: a player that reads the text and knows what to do, and noise that makes it err.

The player runs in the real harness (`harness.play`), so the conversations it leaves are those the policy will meet:
retries, helpers and summaries included.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from experiments.lookup.harness import BAD_CALL, NO_KEY, Message, play
from experiments.lookup.task import KEYS


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """How often the player errs; all zero is the perfect player."""

    wrong_key: float = 0.0
    """Probability that a call asks for a key that is not in the table."""
    malformed: float = 0.0
    """Probability that a call cannot be parsed."""
    wrong_answer: float = 0.0
    """Probability that the last answer names another key."""
    loose: float = 0.0
    """Probability that a reply is well-formed but not in the harness's canonical form, which will rewrite it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One demonstrated model call."""

    messages: list[Message]
    """The history that the harness sent."""
    reply: str
    """What the player answered."""


def right_reply(messages: list[Message]) -> str:
    """The perfect player: a function of the history alone.

    Worked trace: "follow abc 2 times" -> "get abc"; then tool "cde" -> "get cde"; then tool "eab" -> "say eab".
    """
    hops, seen, now = 1, 0, ""
    for message in messages:
        words = message["content"].split()
        if message["role"] == "user" and words[0] == "follow":
            now, hops = words[1], int(words[2])
        elif message["role"] == "user" and words[0] == "look":
            now = words[2]
        elif message["role"] == "user":
            seen, now = int(words[2]), words[4]
        elif message["role"] == "tool" and message["content"] not in (BAD_CALL, NO_KEY):
            seen, now = seen + 1, message["content"]
    return f"say {now}" if seen >= hops else f"get {now}"


def demonstrate(task: Mapping[str, Any], noise: Noise, rng: random.Random) -> tuple[list[Turn], float]:
    """Play `task` with a noisy player and return its turns and the reward."""
    turns: list[Turn] = []

    async def ask(messages: list[Message], agent: str) -> str:
        reply = _noisy(right_reply(messages), task, noise, rng)
        turns.append(Turn(messages=messages, reply=reply))
        return reply

    return turns, _run(play(task, ask, rng))


def _run(coroutine: Any) -> Any:
    """Run a coroutine that never waits: no event loop is needed."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("the player waited")


def _noisy(reply: str, task: Mapping[str, Any], noise: Noise, rng: random.Random) -> str:
    verb, key = reply.split()
    if verb == "say" and rng.random() < noise.wrong_answer:
        key = rng.choice(KEYS)
    if verb == "get" and rng.random() < noise.wrong_key:
        key = rng.choice([other for other in KEYS if other not in task["table"]])
    if verb == "get" and rng.random() < noise.malformed:
        return rng.choice([key, "get", f"get {key} {key}"])
    if rng.random() < noise.loose:
        return rng.choice([f"{verb.title()} {key}", f"{verb}: {key}", f"{verb} {key}."])
    return f"{verb} {key}"
