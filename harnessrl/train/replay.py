"""Training on recorded rollouts: rollouts.jsonl in the place of a service, so that runs repeat exactly."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harnessrl.errors import ConfigError
from harnessrl.train.batch import Batch

TOLERANCE = 1e-9
"""Largest difference between a stored and a recomputed advantage that is rounding."""


def read_steps(path: Path) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """The rollouts of a recorded run, step by step.

    Raises:
        ConfigError: an unreadable line or an absent field, by file and line; steps out of order.
    """
    last = -1
    for step, group in itertools.groupby(_lines(path), key=lambda item: item["step"]):
        if step <= last:
            raise ConfigError(f"{path}: step {step} comes after step {last}; a recorded run is ordered by step")
        last = step
        yield step, list(group)


def check_file(path: Path) -> None:
    """Refuse a file that is absent or whose first line is no recorded rollout.

    Raises:
        ConfigError: by file and line.
    """
    if next(read_steps(path), None) is None:
        raise ConfigError(f"{path}: no rollouts in it")


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        raise ConfigError(f"replay: {path}: no such file")
    with path.open() as file:
        for number, line in enumerate(file, 1):
            try:
                item = json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(f"replay: {path}, line {number}: not JSON: {error}") from error
            missing = [key for key in ("step", "rollout_id", "group_id", "calls") if key not in item]
            if missing:
                raise ConfigError(f"replay: {path}, line {number}: field {missing[0]!r} is missing")
            yield item


def advantage_gap(batch: Batch, items: list[Mapping[str, Any]]) -> float:
    """Largest |stored advantage - recomputed advantage|; NaN if none is stored.

    It is 0 to rounding where the recorded run had the same advantage settings, and tells how far they differ elsewhere.
    """
    stored = {item["rollout_id"]: item["advantage"] for item in items if item.get("advantage") is not None}
    gaps = [
        abs(stored[f.rollout.rollout_id] - advantage)
        for f, advantage in zip(batch.finished, batch.advantages.tolist(), strict=True)
        if f.rollout.rollout_id in stored
    ]
    return max(gaps, default=math.nan)
