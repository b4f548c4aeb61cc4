"""Figure 9: reward and entropy by (advantage unit, normaliser), with bands over seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from paper_figs import curves
from paper_figs.style import GREY, add_note, draw_band, draw_reported, label_panels

DATA = curves.tables("lookup")
ALSO = curves.tables("babyai")
MAKE = curves.make("lookup")
REPORTED = {
    "source": "arXiv:2608.17528, figure 9",
    "what": "SWE-smith, Qwen3.5-9B, GRPO, one run a setting: another task and model than ours",
    "validation % at step 128": {
        "sample+token-mean": [35.0],
        "rollout+token-mean": [33.1],
        "rollout+rollout-mean": [38.2],
    },
}
PANELS = {
    "reward/mean": ("training reward", 5),
    "val/reward_mean": ("validation reward", 1),
    "policy/entropy": ("entropy, nats a token", 5),
}
"""Metric -> what it is, and the steps of its running mean."""
rebuild = curves.rebuild


def numbers(root: Path) -> dict[str, Any]:
    """By task and metric (where any task has it) the band of each setting; by task the note; what is quoted."""
    tasks = curves.read_tasks(root)
    bands = {
        task: {key: curves.bands(results, key, steps) for key, (_, steps) in PANELS.items()}
        for task, results in tasks.items()
    }
    recorded = [key for key in PANELS if any(by_key[key] for by_key in bands.values())]
    return {
        "bands": {task: {key: by_key[key] for key in recorded} for task, by_key in bands.items()},
        "notes": {task: curves.note(results) for task, results in tasks.items()},
        "reported": REPORTED["validation % at step 128"],
    }


def draw(figure: Figure, found: dict[str, Any]) -> None:
    """A row a task, a column a metric; the paper's three numbers on a scale of their own."""
    rows, columns = len(found["bands"]), len(next(iter(found["bands"].values())))
    figure.set_size_inches(2.2 + 2.5 * columns, 0.9 + 2.5 * rows)
    axes = figure.subplots(rows, columns + 1, squeeze=False, width_ratios=(*[3] * columns, 1.9))
    settings: dict[str, int] = {}
    for row, (task, by_key) in zip(axes, found["bands"].items(), strict=True):
        for axis, (key, lines) in zip(row, by_key.items(), strict=False):
            for setting, band in lines.items():
                draw_band(axis, band, setting, settings.setdefault(setting, len(settings)))
            axis.set_title(f"{task}: {PANELS[key][0]}")
            axis.set_xlabel("updates")
            if not lines:
                axis.text(0.5, 0.5, "not recorded", transform=axis.transAxes, ha="center", color=GREY)
    for axis in axes[1:, -1]:
        axis.remove()
    draw_reported(axes[0, -1], found["reported"], "validation at step 128, %", settings)
    axes[0, -1].set_title("reported\nby others")
    axes[0, -1].tick_params(axis="x", rotation=60)
    label_panels(axes[:, :-1].flat)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    notes = "; ".join(f"{task}: {note}" for task, note in found["notes"].items())
    add_note(figure, f"{notes}; training reward and entropy are running means of 5 steps")
