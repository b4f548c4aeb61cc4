"""`harnessrl bench adapter`: what the adapter costs, beside floors and peers timed in the same run.

Timings of one line are taken in turn, round by round, in processor time, which other processes disturb least. Times
are the best of all rounds; a ratio is the median over rounds of one time over the other of the same round, so only what
was taken side by side is compared. The cases are in `bench/cases.py`; peers are called where they are installed.
"""

from __future__ import annotations

import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from harnessrl.bench.cases import Case, Timed, cases

LINEAR = 1.2
"""Largest growth exponent that still counts as linear: one sort of a few thousand lengths grows by 1.1."""
ROUNDS = 5
"""Fewest rounds that are counted, after one that is not."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table; times in seconds."""

    work: str
    """What is done."""
    ours: float
    """By harnessrl, best."""
    floor: float | None = None
    """By the floor, best; None where there is none."""
    ratio: float | None = None
    """ours / floor, median over rounds."""
    goal: float | None = None
    """Largest ratio; None where there is no goal."""
    met: bool | None = None
    """Whether ratio, growth and what else the goal says are kept; None where there is no goal."""
    growth: float
    """Exponent: time goes with size to this power, from the smallest of three sizes to the largest."""
    unit_ns: Mapping[int, float]
    """Nanoseconds a unit (prompt token, rollout, sample, token), by size."""
    peers: Mapping[str, float] = field(default_factory=dict)
    """By others, where installed, best."""
    floor_is: str = ""
    """What the floor does."""
    note: str = ""
    """What the time does not say."""


def run(seconds: float = 1.0, *, as_json: bool = False) -> list[Row]:
    """Measure everything, print the table (or the rows as JSON), return the rows.

    Args:
        seconds: to spend on the timings of each line, at least; as much again goes to its growth.
        as_json: print JSON instead of a table.
    """
    rows = []
    for case in cases():
        if sys.stderr.isatty():
            print(case.work, file=sys.stderr)
        rows.append(measure(case, seconds))
    print(json.dumps([asdict(row) for row in rows])) if as_json else show(rows)
    return rows


def measure(case: Case, seconds: float) -> Row:
    """One line: its times, then its growth."""
    times = rounds(case.calls, seconds)
    sizes = rounds({str(size): call for size, call in case.growth}, seconds)
    unit = {size: min(sizes[str(size)]) for size, _ in case.growth}
    exponent = grows(unit)
    ratio = median_ratio(times["ours"], times["floor"]) if "floor" in times else None
    met = None if case.goal is None or ratio is None else ratio <= case.goal and exponent <= LINEAR and case.holds
    return Row(
        work=case.work,
        ours=min(times["ours"]),
        floor=min(times["floor"]) if "floor" in times else None,
        ratio=ratio,
        goal=case.goal,
        met=met,
        growth=exponent,
        unit_ns={size: 1e9 * spent / size for size, spent in unit.items()},
        peers={name: min(spent) for name, spent in times.items() if name not in ("ours", "floor", "joined")},
        floor_is=case.floor,
        note=case.note(times),
    )


def rounds(calls: Mapping[str, Timed | None], seconds: float) -> dict[str, list[float]]:
    """Processor seconds of each call by round, taken in turn until `seconds` are spent; a peer that fails is left out."""
    running = {name: call for name, call in calls.items() if call is not None}
    for name, call in list(running.items()):
        try:
            call()
        except Exception as error:
            if name in ("ours", "floor"):
                raise
            print(f"{name} is left out: {error!r}", file=sys.stderr)
            del running[name]
    spent: dict[str, list[float]] = {name: [] for name in running}
    gc.collect()
    gc.disable()
    try:
        start, done = time.perf_counter(), 0
        while done < ROUNDS or time.perf_counter() - start < seconds:
            for name, call in running.items():
                before = time.process_time()
                call()
                spent[name].append(time.process_time() - before)
            done += 1
    finally:
        gc.enable()
    return spent


def median_ratio(ours: Sequence[float], other: Sequence[float]) -> float:
    """The median over rounds of one time over the other."""
    return statistics.median(a / b for a, b in zip(ours, other, strict=True))


def grows(spent: Mapping[int, float]) -> float:
    """The exponent of growth between the smallest and the largest size: 1 is linear, 2 is quadratic."""
    small, large = min(spent), max(spent)
    return math.log(spent[large] / spent[small]) / math.log(large / small)


def show(rows: Sequence[Row]) -> None:
    """A table of the numbers, by rich where it is installed, and under it a line of words for each row."""
    titles = ("", "work", "ours ms", "floor ms", "ratio", "goal", "growth", "peers ms")
    lines = [
        (
            str(number),
            row.work,
            f"{1e3 * row.ours:.2f}",
            "-" if row.floor is None else f"{1e3 * row.floor:.2f}",
            "-" if row.ratio is None else f"{row.ratio:.2f}",
            "-" if row.goal is None else f"{row.goal:g} {'met' if row.met else 'MISSED'}",
            f"{row.growth:.2f}",
            ", ".join(f"{name} {1e3 * spent:.1f}" for name, spent in row.peers.items()) or "-",
        )
        for number, row in enumerate(rows, 1)
    ]
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        width = [max(len(line[column]) for line in (titles, *lines)) for column in range(len(titles))]
        for line in (titles, *lines):
            print("  ".join(cell.ljust(size) for cell, size in zip(line, width, strict=True)).rstrip())
    else:
        table = Table(*titles, pad_edge=False, padding=(0, 1, 0, 0))
        for line in lines:
            table.add_row(*line)
        console = Console()
        console.width = max(console.width, 110)
        console.print(table)
    print(f"growth: time goes with size to this power; up to {LINEAR:g} counts as linear")
    for number, row in enumerate(rows, 1):
        floor = [f"floor: {row.floor_is}"] if row.floor_is else []
        cost = ", ".join(f"{value:.3g} at {size:,}" for size, value in row.unit_ns.items())
        print("; ".join([f"{number:2d}  {row.work}", *floor, *([row.note] if row.note else []), f"ns a unit: {cost}"]))


if __name__ == "__main__":
    run()
