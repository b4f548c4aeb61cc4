"""Recorded rollouts that small tables are counted from, and those tables in paper_figs/data/."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harnessrl.adapter import Rollout
from harnessrl.preflight import check_same
from harnessrl.results import LAST
from harnessrl.statistics import ENOUGH_SEEDS
from harnessrl.trace import Trace
from paper_figs.curves import REFERENCE, TASKS, grid_of

Row = dict[str, Any]
CHATS = "SmolLM2 chats"
"""Source of experiments/substitute_bias: five-turn chats whose text goes back as it was decoded."""


def sources(runs: Path, root: Path) -> Iterator[tuple[str, list[Rollout]]]:
    """Name and rollouts of each recorded source below `runs`: the first and last steps of each task's reference, chats.

    A task with fewer than `ENOUGH_SEEDS` finished runs is left out, and said: counts of more are not replaced by them.

    Raises:
        ConfigError: a run of another configuration.
    """
    for task, name in TASKS.items():
        grid = grid_of(name, runs, root)
        finished = [cell for cell in grid.cells if cell.done and cell.setting == REFERENCE] if grid else []
        if not finished:
            continue
        if len(finished) < ENOUGH_SEEDS:
            where = f"{runs}/ablations/{name}/{REFERENCE}"
            print(
                f"{where}: {len(finished)} finished runs of the {ENOUGH_SEEDS} that counts need: they stay as they are"
            )
            continue
        early, late = [], []
        for cell in finished:
            check_same(cell.config)
            for line in Trace(cell.config.folder / "rollouts.jsonl"):
                if line.data["step"] < LAST:
                    early.append(line.rollout)
                if line.data["step"] >= cell.config.steps - LAST:
                    late.append(line.rollout)
        if early and late:
            yield f"{task}, first {LAST} steps", early
            yield f"{task}, last {LAST} steps", late
    chats = runs / "substitute_bias" / "chats.jsonl"
    if chats.exists():
        yield CHATS, [line.rollout for line in Trace(chats)]


def read_rows(path: Path) -> list[Row]:
    """The rows of a table; none where it is absent."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def replace_rows(path: Path, found: Mapping[str, Sequence[Row]]) -> list[str]:
    """Write a table in which the rows of the found sources are new, and those of other sources stay."""
    rows: dict[str, list[Row]] = {}
    for row in read_rows(path):
        rows.setdefault(row["source"], []).append(row)
    rows |= {source: [{"source": source, **row} for row in new] for source, new in found.items()}
    flat = [row for some in rows.values() for row in some]
    if not flat:
        return []
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(flat[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat)
    return [f"{path}: rows of {source}" for source in found]
