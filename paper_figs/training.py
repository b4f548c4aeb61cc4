"""How the settings train: KL to the initial policy, gradient norm, and how long rollouts and samples are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from harnessrl.results import Results
from paper_figs import curves
from paper_figs.style import GREY, add_note, draw_band, label_panels, line_style

DATA = (*curves.tables("lookup"), "ablations/results/normalization/lengths.csv")
ALSO = (*curves.tables("babyai"), "ablations/results/normalization_babyai/lengths.csv")
MAKE = curves.make("lookup")
PANELS = {"loss/kl": "KL to the start", "policy/grad_norm": "gradient norm"}
LENGTHS = {"rollout": "trained tokens a rollout", "sample": "tokens a sample"}
rebuild = curves.rebuild

Share = tuple[list[float], list[float]]
"""Upper ends of the bins, the same for all of a panel; share of all that is below each."""


def numbers(root: Path) -> dict[str, Any]:
    """By task: bands of each metric and setting; shares below each length by quantity and setting, and at the start."""
    tasks = curves.read_tasks(root)
    return {
        "bands": {task: {key: curves.bands(results, key) for key in PANELS} for task, results in tasks.items()},
        "lengths": {task: {key: shares(results, key) for key in LENGTHS} for task, results in tasks.items()},
        "notes": {task: curves.note(results) for task, results in tasks.items()},
    }


def shares(results: Results, quantity: str) -> dict[str, Share]:
    """Of each setting in the last ten steps, all seeds together; "first ten steps" is of all settings together."""
    found = {"first ten steps": _counts(results, quantity, "early", results.settings)}
    found |= {setting: _counts(results, quantity, "late", [setting]) for setting in results.settings}
    ends = sorted(set().union(*found.values()))
    return {
        name: (ends, (np.cumsum([counts[end] for end in ends]) / counts.total()).tolist())
        for name, counts in found.items()
        if counts
    }


def _counts(results: Results, quantity: str, phase: str, settings: Sequence[str]) -> Counter[float]:
    counts: Counter[float] = Counter()
    for (setting, _), rows in results.lengths.items():
        for row in rows:
            if setting in settings and (row["quantity"], row["phase"]) == (quantity, phase):
                counts[float(row["below"])] += int(row["count"])
    return counts


def draw(figure: Figure, found: dict[str, Any]) -> None:
    """A row a task: two metrics over updates, then the share of rollouts and samples below a length."""
    rows = len(found["bands"])
    figure.set_size_inches(10.4, 0.9 + 2.5 * rows)
    axes = figure.subplots(rows, len(PANELS) + len(LENGTHS), squeeze=False)
    settings: dict[str, int] = {}
    for row, task in zip(axes, found["bands"], strict=True):
        for axis, (key, lines) in zip(row, found["bands"][task].items(), strict=False):
            for setting, band in lines.items():
                draw_band(axis, band, setting, settings.setdefault(setting, len(settings)))
            axis.set(title=f"{task}: {PANELS[key]}", xlabel="updates")
        row[0].set(yscale="log", ylabel="nats a token")  # single runs have spikes
        for axis, (quantity, by_setting) in zip(row[len(PANELS) :], found["lengths"][task].items(), strict=True):
            _draw_shares(axis, by_setting, settings)
            axis.set(
                title=f"{task}: {LENGTHS[quantity]}", xlabel="tokens", ylabel="share that is shorter", ylim=(0, 1.02)
            )
    label_panels(axes.flat)
    named = dict(zip(*reversed(axes[0, -1].get_legend_handles_labels()), strict=True))
    figure.legend(named.values(), named, loc="outside upper center", ncols=3)
    notes = "; ".join(f"{task}: {note}" for task, note in found["notes"].items())
    add_note(
        figure, f"{notes}; running mean of 5 steps. Lengths: last ten steps, all seeds; grey: first ten, all settings."
    )


def _draw_shares(axis: Any, by_setting: dict[str, Share], settings: dict[str, int]) -> None:
    for setting, (ends, below) in by_setting.items():
        at = settings.get(setting)
        look = {"color": GREY, "linewidth": 2.4, "alpha": 0.6} if at is None else line_style(at)
        axis.plot(ends, below, label=setting, **look)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:g}")
