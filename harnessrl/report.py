"""What an ablation found: a row a run, a table with intervals, and curves."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from harnessrl.metrics import write_atomically

Run = tuple[str, int, list[dict[str, Any]]]
"""setting, seed, lines of metrics.jsonl"""

LAST = 10
"""Steps that "final" averages over."""

ENOUGH_SEEDS = 5
"""From here on an interval is shown, below it the range."""


def column(metrics: Sequence[dict[str, Any]], key: str) -> np.ndarray:
    """float64 [steps]; NaN where a step has no value."""
    return np.array([np.nan if line.get(key) is None else line[key] for line in metrics], np.float64)


def summary_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One row a run. "final" is the mean of the last 10 steps, "best" the best mean of 10 steps in a row."""
    return [_row(setting, seed, metrics) for setting, seed, metrics in runs]


def _row(setting: str, seed: int, metrics: list[dict[str, Any]]) -> dict[str, Any]:
    reward = column(metrics, "reward/mean")
    window = min(LAST, len(reward))
    last = {key: float(np.nanmean(column(metrics, key)[-LAST:])) for key in ("rollout/drift_share", "policy/entropy")}
    return {
        "setting": setting,
        "seed": seed,
        "steps": len(metrics),
        "final_reward": float(np.nanmean(reward[-LAST:])),
        "best_reward": float(np.nanmax(np.convolve(reward, np.full(window, 1 / window), "valid"))),
        "samples_per_rollout": float(np.nanmean(column(metrics, "rollout/samples_mean"))),
        "single_sample_share": float(np.nanmean(column(metrics, "rollout/single_sample_share"))),
        "drift_share_final": last["rollout/drift_share"],
        "entropy_final": last["policy/entropy"],
        "grad_norm_mean": float(np.nanmean(column(metrics, "policy/grad_norm"))),
        "seconds": float(np.nansum(column(metrics, "time/step"))),
    }


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows with six significant digits."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()})
    write_atomically(path, text.getvalue())


def interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Low and high end over axis 0: Student's 95 % interval of the mean from five values on, the range below.

    Args:
        values: float64 [seeds, ...].
    """
    n = len(values)
    if n < ENOUGH_SEEDS:
        return values.min(0), values.max(0)
    from scipy.stats import t

    half = t.ppf(0.975, n - 1) * values.std(0, ddof=1) / np.sqrt(n)
    return values.mean(0) - half, values.mean(0) + half


def summary_table(name: str, rows: Sequence[dict[str, Any]]) -> Table:
    """Mean and interval of each setting."""
    seeds = len({row["seed"] for row in rows})
    kind = "95 % interval of the mean" if seeds >= ENOUGH_SEEDS else "range"
    table = Table(
        title=f"{name}: mean over {seeds} seeds\n({kind} below it)", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    table.add_column("setting", no_wrap=True)
    shown = {
        "final_reward": "final\nreward",
        "samples_per_rollout": "N_rho",
        "single_sample_share": "single-\nsample",
        "drift_share_final": "final\ndrift",
        "entropy_final": "final\nentropy",
    }
    for label in shown.values():
        table.add_column(label, justify="right", no_wrap=True)
    for setting in dict.fromkeys(row["setting"] for row in rows):
        cells = []
        for key in shown:
            values = np.array([row[key] for row in rows if row["setting"] == setting])
            low, high = interval(values)
            cells.append(f"{values.mean():.3f}\n{low:.2f}–{high:.2f}")
        table.add_row(setting, *cells, end_section=True)
    return table


PANELS = {
    "reward/mean": "mean reward",
    "policy/entropy": "entropy (nats a token)",
    "rollout/samples_mean": "samples per rollout, N_rho",
    "rollout/drift_share": "share of drifting responses",
}
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
"""Okabe and Ito's palette, told apart by most colour-blind readers; line styles tell them apart in grey."""
STYLES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
SMOOTH = 5


def draw_curves(path: Path, runs: Sequence[Run], reported: Sequence[str]) -> None:
    """Draw each panel's mean over seeds with its interval (range and single runs below five seeds).

    Curves are running means over `SMOOTH` steps. Steps that not all seeds of a setting have are left out.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 7.5), sharex=True)
    settings = list(dict.fromkeys(setting for setting, _, _ in runs))
    for axis, (key, label) in zip(axes.flat, PANELS.items(), strict=True):
        for index, setting in enumerate(settings):
            curves = [_smooth(column(metrics, key)) for name, _, metrics in runs if name == setting]
            _draw(axis, curves, setting, index)
        axis.set_ylabel(label)
        axis.grid(alpha=0.25)
    for axis in axes[1]:
        axis.set_xlabel("step")
    seeds = max(sum(name == setting for name, _, _ in runs) for setting in settings)
    kind = "95 % interval" if seeds >= ENOUGH_SEEDS else "points: single seeds, band: range"
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=2, frameon=False)
    note = f"{seeds} seeds; line: mean; {kind}; running mean of {SMOOTH} steps.\n" + "\n".join(reported)
    figure.text(0.01, 0.005, note, fontsize=7.5, va="bottom")
    figure.tight_layout(rect=(0, 0.03 + 0.018 * len(reported), 1, 0.93))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp.png")
    figure.savefig(temporary, dpi=140)
    plt.close(figure)
    temporary.replace(path)


def _draw(axis: Any, curves: Sequence[np.ndarray], setting: str, index: int) -> None:
    length = min(len(curve) for curve in curves)
    values = np.stack([curve[:length] for curve in curves])
    steps = np.arange(1, length + 1)
    low, high = interval(values)
    colour = COLOURS[index % len(COLOURS)]
    axis.plot(
        steps, values.mean(0), color=colour, linestyle=STYLES[index % len(STYLES)], label=setting.replace("_", ", ")
    )
    axis.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
    if len(curves) < ENOUGH_SEEDS:
        marks = steps[4 + index :: 10] - 1
        for curve in values:
            axis.plot(steps[marks], curve[marks], ".", color=colour, markersize=3.5)


def _smooth(values: np.ndarray) -> np.ndarray:
    """Running mean of the last `SMOOTH` steps (fewer at the start)."""
    return np.array([np.nanmean(values[max(0, i - SMOOTH + 1) : i + 1]) for i in range(len(values))])
