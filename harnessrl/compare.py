"""Two runs side by side: how their configurations differ, then final numbers, then curves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from harnessrl.errors import ConfigError
from harnessrl.metrics import of_steps, read_jsonl, read_manifest
from harnessrl.preflight import flatten
from harnessrl.report import PANELS, panels, save
from harnessrl.results import LAST, column, mean_of_known

BARS = "▁▂▃▄▅▆▇█"
KINDS = (".png", ".pdf", ".svg")
WIDTH = 12
"""Characters of a curve on the terminal."""


def compare(first: str, second: str, out: str | None = None) -> int:
    """Print two runs side by side and draw their curves to `out` (default: compare.png in the first run's folder).

    Raises:
        ConfigError: a folder that holds no run; a picture of no known kind, or that cannot be written.
    """
    path = Path(out) if out else Path(first) / "compare.png"
    if path.suffix not in KINDS:
        raise ConfigError(f"out: {path} should end in one of {', '.join(KINDS)}")
    runs = [Path(name) for name in (first, second)]
    configs = [_config(run) for run in runs]
    metrics = [_metrics(run) for run in runs]
    names = [run.name if runs[0].name != runs[1].name else str(run) for run in runs]
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    console.print(_differences(names, configs))
    console.print(_numbers(names, metrics))
    try:
        curves = [{key: column(lines, key)[None] for key in PANELS} for lines in metrics]
        save(panels(dict(zip(names, curves, strict=True))), path)
    except OSError as error:
        raise ConfigError(f"out: {path} cannot be written: {error.strerror}") from error
    console.print(str(path), highlight=False, markup=False)
    return 0


def _config(run: Path) -> dict[str, Any]:
    manifest = read_manifest(run)
    if not manifest:
        raise ConfigError(f"{run}: not a run folder: it has no manifest.json")
    return flatten(manifest["config"])


def _metrics(run: Path) -> list[dict[str, Any]]:
    lines = of_steps(read_jsonl(run / "metrics.jsonl"))
    if not lines:
        raise ConfigError(f"{run}: no step is recorded in metrics.jsonl")
    return lines


def _differences(names: list[str], configs: list[dict[str, Any]]) -> Table:
    table = Table(title="configuration", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("key", *names):
        table.add_column(name, overflow="fold")
    absent = object()
    keys = sorted(configs[0].keys() | configs[1].keys())
    differing = [key for key in keys if configs[0].get(key, absent) != configs[1].get(key, absent)]
    for key in differing:
        table.add_row(key, *(str(config[key]) if key in config else "(no such key)" for config in configs))
    if not differing:
        table.add_row("(no key differs)", "", "")
    return table


def _numbers(names: list[str], metrics: list[list[dict[str, Any]]]) -> Table:
    """Mean of each metric over the last steps that both have, its difference, and both curves."""
    steps = min(map(len, metrics))
    last = min(LAST, steps)
    table = Table(
        title=f"mean of steps {steps - last + 1} to {steps} (the last that both runs have); curves of all steps",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("metric", overflow="fold")
    for name in (*names, "difference"):
        table.add_column(name, justify="right", min_width=9, overflow="fold")
    for name in names:
        table.add_column(name, min_width=WIDTH, overflow="fold")
    for key in sorted({key for lines in metrics for line in lines for key in line} - {"step"}):
        curves = [np.where(np.isfinite(curve), curve, np.nan) for curve in (column(lines, key) for lines in metrics)]
        ends = [mean_of_known(curve[steps - last : steps]) for curve in curves]
        known = np.concatenate([curve[~np.isnan(curve)] for curve in curves])
        low, high = (known.min(), known.max()) if len(known) else (0.0, 0.0)
        bars = [sparkline(curve, float(low), float(high)) for curve in curves]
        table.add_row(key, *(_shown(end) for end in ends), _shown(ends[1] - ends[0], "+"), *bars)
    return table


def _shown(value: float, sign: str = "") -> str:
    return "" if np.isnan(value) else f"{value:{sign}.4g}"


def sparkline(values: np.ndarray, low: float, high: float, width: int = WIDTH) -> str:
    """A curve as at most `width` characters between `low` and `high`; each is the mean of its steps, a space is none."""
    text = ""
    for part in np.array_split(values, min(width, len(values))):
        mean = mean_of_known(part)
        if np.isnan(mean):
            text += " "
        else:
            place = (mean - low) / (high - low) if high > low else 0.0
            text += BARS[min(int(place * len(BARS)), len(BARS) - 1)]
    return text
