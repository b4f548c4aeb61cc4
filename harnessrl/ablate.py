"""Ablations: a grid of settings and seeds, run as parallel processes, resumed after an interruption, summarised.

An ablation file names a base configuration and lists only differences:

    base: ../experiments/lookup/config.yaml
    seeds: 2
    settings:
      NAME: {advantage.unit: sample, loss.normalizer: token_mean}
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from harnessrl.config import Config, from_mapping, read_yaml
from harnessrl.display import QUIET_SECONDS, summarise
from harnessrl.errors import ConfigError
from harnessrl.metrics import read_jsonl
from harnessrl.preflight import check
from harnessrl.report import draw_curves, summary_rows, summary_table, write_csv


@dataclass(kw_only=True)
class Cell:
    """One run of the grid."""

    setting: str
    """Name of the setting."""
    seed: int
    """Its seed."""
    config: Config
    """What it runs."""
    argv: list[str]
    """Arguments of `harnessrl`."""
    process: subprocess.Popen[bytes] | None = None
    """The running process."""
    failed: str = ""
    """Why it ended early; empty if it did not."""
    metrics: list[dict[str, Any]] = field(default_factory=list)
    """Lines of metrics.jsonl so far."""

    @property
    def log(self) -> Path:
        return self.config.folder / "train.log"

    @property
    def done(self) -> bool:
        """All steps are recorded and the last checkpoint is written."""
        return (self.config.folder / "checkpoints" / f"step-{self.config.steps:05d}").is_dir()

    def read(self) -> None:
        """Take note of steps that were recorded since."""
        self.metrics = read_jsonl(self.config.folder / "metrics.jsonl")


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A parsed ablation."""

    name: str
    cells: list[Cell]
    jobs: int
    folder: Path
    reported: list[str]


def read_grid(file: str | Path, overrides: Sequence[str]) -> Grid:
    """Read and check a whole grid before anything starts.

    Raises:
        ConfigError: by file, setting and key.
    """
    file = Path(file)
    data = read_yaml(file)
    unknown = sorted(data.keys() - {"base", "seeds", "jobs", "reported", "settings"})
    if unknown:
        raise ConfigError(f"{file}: unknown key {unknown[0]!r}; allowed: base, seeds, jobs, reported, settings")
    if not isinstance(data.get("base"), str) or not isinstance(data.get("settings"), dict) or not data["settings"]:
        raise ConfigError(
            f"{file}: needs `base` (a configuration file) and `settings` (a mapping of names to differences)"
        )
    own = {"seeds": data.get("seeds", 2), "jobs": data.get("jobs", 2)}
    passed = []
    for item in overrides:
        key, _, value = item.partition("=")
        if key in own:
            own[key] = value
        else:
            passed.append(item)
    counts = {key: _positive(key, value, file) for key, value in own.items()}
    base = file.parent / data["base"]
    cells = []
    for setting, differences in data["settings"].items():
        if not isinstance(differences, dict):
            raise ConfigError(f"{file}: settings.{setting}: expected a mapping of keys to values")
        for seed in range(counts["seeds"]):
            items = [f"{key}={value}" for key, value in differences.items()]
            items += [*passed, f"seed={seed}", f"run=ablations/{file.stem}/{setting}/seed-{seed}"]
            config = from_mapping(read_yaml(base), items, source=base)
            cells.append(Cell(setting=setting, seed=seed, config=config, argv=["train", str(base), *items]))
    return Grid(
        name=file.stem,
        cells=cells,
        jobs=counts["jobs"],
        folder=Path(cells[0].config.runs) / "ablations" / file.stem,
        reported=list(data.get("reported", [])),
    )


def ablate(file: str | Path, overrides: Sequence[str]) -> int:
    """Run what is left of a grid, then write summary.csv and curves.png and print the table. Returns the exit code."""
    grid = read_grid(file, overrides)
    for cell in grid.cells:
        check(cell.config)
    console = Console()
    started = time.monotonic()
    waiting = [cell for cell in grid.cells if not cell.done]
    if len(waiting) < len(grid.cells):
        console.print(f"{len(grid.cells) - len(waiting)} of {len(grid.cells)} runs are finished already")
    running: list[Cell] = []
    try:
        with Board(grid, console) as board:
            while waiting or running:
                while waiting and len(running) < grid.jobs:
                    running.append(_start(waiting.pop(0)))
                board.show(running)
                time.sleep(0.5)
                running = [cell for cell in running if not _ended(cell)]
            board.show(running)
    finally:
        _stop(running)
    return _finish(grid, console, time.monotonic() - started)


def _finish(grid: Grid, console: Console, seconds: float) -> int:
    for cell in grid.cells:
        cell.read()
    runs = [(cell.setting, cell.seed, cell.metrics) for cell in grid.cells if cell.done]
    failed = [cell for cell in grid.cells if not cell.done]
    if runs:
        rows = summary_rows(runs)
        write_csv(grid.folder / "summary.csv", rows)
        draw_curves(grid.folder / "curves.png", runs, grid.reported)
        console.print(summary_table(grid.name, rows))
        for line in grid.reported:
            console.print(line, highlight=False, markup=False)
        console.print(f"{grid.folder}/summary.csv and curves.png; {seconds:.0f} s", highlight=False, markup=False)
    for cell in failed:
        reason = f"{cell.failed} (log: {cell.log})"
        console.print(f"FAILED {cell.setting} seed {cell.seed}: {reason}", style="red", highlight=False, markup=False)
    return 1 if failed else 0


def _start(cell: Cell) -> Cell:
    cell.log.parent.mkdir(parents=True, exist_ok=True)
    with cell.log.open("ab") as log:
        cell.process = subprocess.Popen(
            [sys.executable, "-m", "harnessrl", *cell.argv],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "HARNESSRL_FOLLOW_STDIN": "1"},
            start_new_session=True,
        )
    return cell


def _ended(cell: Cell) -> bool:
    assert cell.process is not None
    code = cell.process.poll()
    if code is None:
        return False
    if code or not cell.done:
        lines = cell.log.read_text(errors="replace").strip().splitlines()
        cell.failed = f"exit code {code}: {lines[-1] if lines else 'no output'}"
    return True


def _stop(running: Sequence[Cell]) -> None:
    """End what still runs; each run stops its own children."""
    for cell in running:
        assert cell.process is not None
        if cell.process.poll() is None:
            cell.process.send_signal(signal.SIGTERM)
    for cell in running:
        assert cell.process is not None
        try:
            cell.process.wait(20)
        except subprocess.TimeoutExpired:
            cell.process.kill()
            cell.process.wait()


def _positive(key: str, value: Any, file: Path) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = 0
    if number < 1 or str(number) != str(value):
        raise ConfigError(f"{file}: {key} must be a whole number of at least 1, got {value!r}")
    return number


class Board:
    """Progress of the whole grid: a live table on a terminal, a line every few seconds elsewhere."""

    def __init__(self, grid: Grid, console: Console) -> None:
        self.grid, self.console = grid, console
        self.live = Live(console=console, refresh_per_second=2) if console.is_terminal else None
        self.started = self.spoke = time.monotonic()

    def __enter__(self) -> Board:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.stop()

    def show(self, running: Sequence[Cell]) -> None:
        """Read what the runs have recorded and show it."""
        for cell in self.grid.cells:
            if cell in running or (cell.done and len(cell.metrics) < cell.config.steps):
                cell.read()
        done = sum(len(cell.metrics) for cell in self.grid.cells)
        total = sum(cell.config.steps for cell in self.grid.cells)
        elapsed = time.monotonic() - self.started
        head = f"{self.grid.name}: {done}/{total} steps, {elapsed:.0f} s"
        if self.live:
            self.live.update(self._table(head, running))
        elif time.monotonic() - self.spoke > QUIET_SECONDS:
            states = [f"{cell.setting} seed {cell.seed}: {self._state(cell, running)}" for cell in running]
            self.console.print(f"{head} | " + " | ".join(states), highlight=False, markup=False, soft_wrap=True)
            self.spoke = time.monotonic()

    def _table(self, head: str, running: Sequence[Cell]) -> Table:
        table = Table(title=head, title_justify="left", box=None, padding=(0, 1))
        for name in ("setting", "seed", "steps", "state"):
            table.add_column(name, justify="right" if name in ("seed", "steps") else "left")
        for cell in self.grid.cells:
            steps = f"{len(cell.metrics)}/{cell.config.steps}"
            table.add_row(cell.setting, str(cell.seed), steps, self._state(cell, running))
        return table

    def _state(self, cell: Cell, running: Sequence[Cell]) -> str:
        if cell.failed:
            return "failed"
        if cell not in running:
            return summarise(cell.metrics[-1]) if cell.done and cell.metrics else "waiting"
        if cell.metrics:
            return summarise(cell.metrics[-1])
        lines = cell.log.read_text(errors="replace").strip().splitlines()
        return lines[-1].partition("  ")[2] if lines else "starting"
