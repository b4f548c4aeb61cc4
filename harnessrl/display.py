"""What a person sees of a run: one live line on a terminal, plain lines elsewhere, never silent for long."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

QUIET_SECONDS = 5.0
"""Longest silence on a plain output while work goes on."""

COLUMNS = {
    "reward": ("reward/mean", ".3f"),
    "N_rho": ("rollout/samples_mean", ".2f"),
    "drift": ("rollout/drift_share", ".3f"),
    "entropy": ("policy/entropy", ".3f"),
    "grad": ("policy/grad_norm", ".2f"),
    "gap": ("policy/engine_logprob_gap", ".0e"),
    "s/step": ("time/step", ".2f"),
}


def summarise(metrics: Mapping[str, float | None]) -> str:
    """The few numbers worth a glance, in one line."""
    parts = []
    for label, (key, form) in COLUMNS.items():
        value = metrics.get(key)
        if value is not None and value == value:
            parts.append(f"{label} {value:{form}}")
    return "  ".join(parts)


class Display:
    """Progress of a run; a context manager.

    Args:
        name: shown in front.
        start: first step that will run.
        steps: steps in all.
        shown: False keeps it silent (ranks that do not lead).
    """

    def __init__(self, name: str, start: int, steps: int, shown: bool = True) -> None:
        self.name, self.steps, self.done = name, steps, start
        self.console = Console(file=sys.stdout, quiet=not shown)
        self.live: Progress | None = None
        if self.console.is_terminal and shown:
            self.live = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[status]}"),
                console=self.console,
            )
            self.task = self.live.add_task(name, total=steps, completed=start, status="")
        self.spoke = time.monotonic()

    def __enter__(self) -> Display:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.stop()

    def status(self, text: str) -> None:
        """What happens now; often called, shown at once on a terminal and every few seconds elsewhere."""
        if self.live:
            self.live.update(self.task, status=text)
        elif time.monotonic() - self.spoke > QUIET_SECONDS:
            self.note(f"step {self.done + 1}/{self.steps}  {text}")

    def step(self, metrics: Mapping[str, float]) -> None:
        """A finished step."""
        self.done += 1
        if self.live:
            self.live.update(self.task, completed=self.done)
        self.note(f"step {self.done}/{self.steps}  {summarise(metrics)}")

    def note(self, text: str) -> None:
        """A line that stays."""
        self.console.print(f"{self.name}  {text}", highlight=False, soft_wrap=True)
        self.spoke = time.monotonic()
