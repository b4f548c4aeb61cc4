"""The task: BabyAI's "go to the red ball" (level GoToLocal of the minigrid package), as a room in words.

The level, its missions, its dynamics and its reward (1 - 0.9 * steps / most steps on success, else 0) are the
package's. Ours are the words: what the agent sees, and the commands that are possible at a moment.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

SPLITS = ("train", "val", "warm")
"""What one trains on, validates on, and demonstrates (the warm start)."""
ROOM_SIZE = 6
"""Cells a side, walls included."""
OBJECTS = 3
ROOMS = 2
"""Rooms of an episode; the next opens when the mission of the one before is done."""
MOST_STEPS = 16
"""Steps until the package ends a room; also the scale of its reward."""


def inputs(seed: int, split: str = "train") -> Iterator[dict[str, Any]]:
    """Yield episodes for ever, the same ones for the same seed.

    Args:
        seed: of the stream; streams of different seeds share no room in practice (50-bit room seeds).
        split: one of SPLITS; room seeds leave the split's index when divided by 3, so no room is in two splits.

    Returns:
        JSON objects with `data_id` and `seeds`, one a room.

    Raises:
        ValueError: for another split.
    """
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}; allowed are {', '.join(SPLITS)}")
    for index in itertools.count():
        names = [f"babyai/{split}/{seed}/{index}/{room}" for room in range(ROOMS)]
        drawn = [int.from_bytes(blake2b(name.encode(), digest_size=8).digest()) for name in names]
        seeds = [(number >> 14) * len(SPLITS) + SPLITS.index(split) for number in drawn]
        yield {"data_id": f"{split}-{seed}-{index}", "seeds": seeds}


class Room:
    """One room, in words. Example: ``Room(3).describe()`` -> "see red ball 2 left 1, blue box 1" """

    def __init__(self, seed: int) -> None:
        """Build the level. Not from several threads at once: the package prints what it rejects, which is silenced."""
        os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
        from minigrid.envs.babyai import GoToLocal

        with contextlib.redirect_stdout(None):
            self.env = GoToLocal(room_size=ROOM_SIZE, num_dists=OBJECTS, max_steps=MOST_STEPS)
            self.env.reset(seed=seed)
        self.mission: str = self.env.mission
        self.reward, self.done = 0.0, False
        self._words: str | None = None

    def describe(self) -> str:
        """What lies in view: cells ahead, cells to the side, what the mission names first, then the nearest.

        A wall is told where it is in front, and what is held comes last.
        """
        if self._words is None:
            self._words = self._look()
        return self._words

    def _look(self) -> str:
        grid, visible = self.env.gen_obs_grid()
        here, seen = self.env.agent_view_size // 2, []
        for i, j in itertools.product(range(grid.width), range(grid.height)):
            thing, ahead, side = grid.get(i, j), grid.height - 1 - j, i - here
            if visible[i, j] and _movable(thing) and (ahead or side):
                where = f" {'left' if side < 0 else 'right'} {abs(side)}" if side else ""
                other = not self.mission.endswith(title(thing))
                seen.append((other, ahead + abs(side), f"{title(thing)} {ahead}{where}"))
        words = [text for _, _, text in sorted(seen)]
        if (front := self._front()) is not None and not _movable(front):
            words.append("wall")
        held = [f"hold {title(self.env.carrying)}"] if self.env.carrying else []
        return ", ".join(["see " + ", ".join(words) if words else "see nothing", *held])

    def commands(self) -> dict[str, int]:
        """The commands that are possible now, with the package's actions."""
        actions, front, held = self.env.actions, self._front(), self.env.carrying
        possible = {"turn left": actions.left, "turn right": actions.right}
        if front is None:
            possible["go forward"] = actions.forward
        if front is None and held is not None:
            possible[f"drop {title(held)}"] = actions.drop
        if _movable(front) and held is None:
            possible[f"take {title(front)}"] = actions.pickup
        return possible

    def act(self, command: str) -> None:
        """Take one of `commands()`; `reward` and `done` are as the package says."""
        _, reward, terminated, truncated, _ = self.env.step(self.commands()[command])
        self.reward, self.done, self._words = float(reward), terminated or truncated, None

    def _front(self) -> Any:
        return self.env.grid.get(*self.env.front_pos)


def title(thing: Any) -> str:
    """Colour and kind."""
    return f"{thing.color} {thing.type}"


def _movable(thing: Any) -> bool:
    return thing is not None and thing.can_pickup()
