"""Training on recorded rollouts: rollouts.jsonl in the place of a service, so that runs repeat exactly."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harnessrl.errors import ConfigError
from harnessrl.trace import Trace
from harnessrl.train.batch import Batch


def read_steps(path: Path) -> Iterator[tuple[int, list[Mapping[str, Any]]]]:
    """The rollouts of a recorded run, step by step.

    Raises:
        ConfigError: a line that is no rollout or has no step, by file and line; steps out of order.
    """
    last = -1
    for step, group in itertools.groupby(Trace(path), key=lambda line: line.data.get("step")):
        lines = list(group)
        if step is None or step <= last:
            where = f"{path}, line {lines[0].number}"
            raise ConfigError(f"{where}: step is {step} after {last}; a recorded run has a growing step on every line")
        last = step
        yield step, [line.data for line in lines]


def advantage_gap(batch: Batch, items: Sequence[Mapping[str, Any]]) -> float:
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
