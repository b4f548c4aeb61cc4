"""Running ablations: a grid of settings and seeds as parallel processes, resumed after an interruption, summarised."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from harnessrl.display import QUIET_SECONDS, summarise
from harnessrl.errors import ConfigError
from harnessrl.grid import Cell, Grid, only_writer, read_grid
from harnessrl.preflight import check
from harnessrl.report import draw_curves, summary_tables
from harnessrl.results import Results


def ablate(file: str | Path, overrides: Sequence[str]) -> int:
    """Run what is left of a grid, recording each run as it ends; then draw curves.png and print the table.

    Returns:
        the exit code: 0 if every run of the grid is recorded.
    Raises:
        ConfigError: before anything starts.
    """
    grid = read_grid(file, overrides)
    console = Console()
    started = time.monotonic()
    with only_writer(grid.results):
        results = Results.read(grid.results)
        grid.earlier()
        for cell in grid.cells:
            cell.recorded = results.has(cell.key, cell.config)
            if not cell.recorded:
                _check(cell)
        _record(grid, results)
        waiting = [cell for cell in grid.cells if not cell.recorded]
        if len(waiting) < len(grid.cells):
            console.print(f"{len(grid.cells) - len(waiting)} of {len(grid.cells)} runs are finished already")
        _run(grid, results, waiting, console)
        return _finish(grid, results, console, time.monotonic() - started)


def _check(cell: Cell) -> None:
    """Whether a run can be started, or continued in its folder."""
    check(cell.config)
    cell.read()
    if len(cell.metrics) > cell.config.steps:
        text = f"{cell.config.folder} has {len(cell.metrics)} steps, more than steps={cell.config.steps}"
        raise ConfigError(f"{text}: take another runs=FOLDER")


def _run(grid: Grid, results: Results, waiting: list[Cell], console: Console) -> None:
    running: list[Cell] = []
    try:
        with Board(grid, console) as board:
            while waiting or running:
                while waiting and len(running) < grid.jobs:
                    running.append(_start(waiting.pop(0)))
                board.show(running)
                time.sleep(0.5)
                still = [cell for cell in running if not _ended(cell)]
                if len(still) < len(running):
                    running = still
                    _record(grid, results)
            board.show(running)
    finally:
        _stop(running)


def _record(grid: Grid, results: Results) -> None:
    """Give every finished run its row, at once: what has ended is kept whatever comes."""
    new = [cell for cell in grid.cells if cell.done and not cell.recorded]
    for cell in new:
        results.add(cell.key, cell.config)
        cell.recorded = True
    if new:
        grid.write(results)


def _finish(grid: Grid, results: Results, console: Console, seconds: float) -> int:
    shown = results.only([cell.key for cell in grid.cells])
    if shown.runs:
        draw_curves(grid.folder / "curves.png", shown, grid.reported)
        for table in summary_tables(grid.name, shown, grid.reference):
            console.print(table)
        for line in grid.reported:
            console.print(line, highlight=False, markup=False)
        commits = sorted({row.get("commit", "")[:7] for row in shown.runs.values()})
        console.print(f"rows of commits {', '.join(commits)}", highlight=False, markup=False)
        text = f"{grid.results}/summary.csv, {grid.folder}/curves.png; {seconds:.0f} s"
        console.print(text, highlight=False, markup=False)
    failed = [cell for cell in grid.cells if not cell.recorded]
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
