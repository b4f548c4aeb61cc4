"""The chained-lookup task: follow a hidden table, redrawn every episode, from a start key over some hops.

Nothing in the prompt or in the weights tells where a key leads, so the only way to the reward is to call the tool,
read its answer and call again: memory solves one episode in 124.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any

LETTERS = "abcde"
KEYS = ["".join(letters) for letters in itertools.product(LETTERS, repeat=3)]
TABLE_SIZE = 12
HOPS = (2, 3)
SPLITS = ("train", "val", "warm")
"""What one trains on, validates on, and demonstrates (the warm start)."""


def inputs(seed: int, split: str = "train") -> Iterator[dict[str, Any]]:
    """Yield episodes for ever, the same ones for the same seed.

    Args:
        seed: of the stream; streams of different seeds share no episode in practice (50-bit episode seeds).
        split: one of SPLITS; episode seeds leave the split's index when divided by 3, so no episode is in two splits.

    Returns:
        JSON objects with `data_id`, `seed` (of the episode), `table` (key -> key), `start` and `hops`.

    Raises:
        ValueError: for another split.
    """
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}; allowed are {', '.join(SPLITS)}")
    for index in itertools.count():
        digest = blake2b(f"{split}/{seed}/{index}".encode(), digest_size=8).digest()
        episode_seed = (int.from_bytes(digest) >> 14) * 3 + SPLITS.index(split)
        yield {"data_id": f"{split}-{seed}-{index}", **episode(episode_seed)}


def episode(seed: int) -> dict[str, Any]:
    """Draw one episode: TABLE_SIZE keys in a ring, so that every value is a key and no chain of HOPS comes back."""
    rng = random.Random(seed)
    ring = rng.sample(KEYS, TABLE_SIZE)
    table = dict(sorted(zip(ring, ring[1:] + ring[:1], strict=True)))
    return {"seed": seed, "table": table, "start": ring[0], "hops": rng.choice(HOPS)}


def answer(task: Mapping[str, Any]) -> str:
    """The key that `hops` lookups lead to."""
    key = task["start"]
    for _ in range(task["hops"]):
        key = task["table"][key]
    return key
