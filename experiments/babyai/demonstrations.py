"""Scripted demonstrations: the package's own BabyAI bot, with noise, in the real harness; and their rows of tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from experiments.babyai.harness import Message, play
from experiments.babyai.task import Room
from experiments.lookup.examples import Encoder, Row

COLOURS = ("blue", "green", "grey", "purple", "red", "yellow")
KINDS = ("ball", "box", "key")


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """How often the player errs; all zero is the bot."""

    wander: float = 0.0
    """Probability of a possible command that is drawn at random."""
    impossible: float = 0.0
    """Probability of a command that is not possible now, or of none at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One demonstrated model call."""

    messages: list[Message]
    """The history that the harness sent."""
    reply: str
    """What the player answered."""


def demonstrate(seeds: Sequence[int], noise: Noise, rng: random.Random) -> tuple[list[Turn], float]:
    """Play the rooms of `seeds` with a noisy player and return its turns and the reward."""
    rooms, turns = [Room(seed) for seed in seeds], []
    players = [_Player(room, noise, rng) for room in rooms]

    def ask(messages: list[Message]) -> str:
        player = next(player for player in players if not player.room.done)
        turns.append(Turn(messages=messages, reply=player.reply()))
        return turns[-1].reply

    return turns, play(rooms, ask)


class _Player:
    """The bot plans with the whole room in view, and is told what was really done."""

    def __init__(self, room: Room, noise: Noise, rng: random.Random) -> None:
        from minigrid.utils.baby_ai_bot import BabyAIBot

        self.room, self.noise, self.rng = room, noise, rng
        self.bot, self.last = BabyAIBot(room.env), None

    def reply(self) -> str:
        possible = self.room.commands()
        if self.rng.random() < self.noise.impossible:
            return self.rng.choice(_impossible(possible, self.rng))
        wish: Any = self.bot.replan(self.last)
        command = next((text for text, action in possible.items() if action == wish), "turn left")
        if self.rng.random() < self.noise.wander:
            command = self.rng.choice(list(possible))
        self.last = possible[command]
        return command


def _impossible(possible: dict[str, int], rng: random.Random) -> list[str]:
    thing = f"{rng.choice(COLOURS)} {rng.choice(KINDS)}"
    tries = ["go forward", f"take {thing}", f"drop {thing}", f"go {thing}", "turn"]
    return [text for text in tries if text not in possible]


def rows(turns: Sequence[Turn], encoder: Encoder, dropout: float, rng: random.Random) -> list[Row]:
    """Turns as rows of tokens: a new one where the harness dropped a reply or started over."""
    made: list[Row] = []
    for turn in turns:
        row = made[-1] if made and _continues(turn.messages, made[-1].messages) else None
        if row is None:
            made.append(row := Row(messages=turn.messages))
            row.add(encoder.prompt(turn.messages), trained=False)
        else:
            row.add(encoder.prompt(turn.messages[len(row.messages) + 1 :]), trained=False)
            row.messages = turn.messages
        row.add(encoder.reply(turn.reply, dropout, rng), trained=True)
    return made


def _continues(later: list[Message], earlier: list[Message]) -> bool:
    """Whether `later` is `earlier`, an assistant's turn and more."""
    held = len(earlier)
    return len(later) > held + 1 and later[:held] == earlier and later[held]["role"] == "assistant"
