"""Figure 10: share of rollouts that merge into one sample, samples per rollout and drift over training, by setting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from paper_figs import curves
from paper_figs.style import add_note, draw_band, label_panels

DATA = curves.tables("lookup")
ALSO = curves.tables("babyai")
MAKE = curves.make("lookup")
REPORTED = {
    "source": "arXiv:2608.17528, figure 10",
    "what": "mean over a coding run (SWE-smith, Qwen3.5-9B): another task and model than ours",
    "means": {"rollout/single_sample_share": 0.36, "rollout/samples_mean": 2.41},
}
PANELS = {
    "rollout/single_sample_share": "single-sample share",
    "rollout/samples_mean": "samples per rollout",
    "rollout/drift_share": "drifting responses",
}
rebuild = curves.rebuild


def numbers(root: Path) -> dict[str, Any]:
    """By task and metric the band of each setting; by task the note; the paper's means by metric."""
    tasks = curves.read_tasks(root)
    return {
        "bands": {task: {key: curves.bands(results, key) for key in PANELS} for task, results in tasks.items()},
        "notes": {task: curves.note(results) for task, results in tasks.items()},
        "reported": REPORTED["means"],
    }


def draw(figure: Figure, found: dict[str, Any]) -> None:
    """A row a task, a column a metric; the paper's means stand in the note, not on axes of other tasks."""
    rows = len(found["bands"])
    figure.set_size_inches(8.8, 0.9 + 2.5 * rows)
    axes = figure.subplots(rows, len(PANELS), squeeze=False)
    settings: dict[str, int] = {}
    for row, (task, by_key) in zip(axes, found["bands"].items(), strict=True):
        for axis, (key, lines) in zip(row, by_key.items(), strict=True):
            for setting, band in lines.items():
                draw_band(axis, band, setting, settings.setdefault(setting, len(settings)))
            axis.set(title=f"{task}: {PANELS[key]}", xlabel="updates")
    label_panels(axes.flat)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    notes = "; ".join(f"{task}: {note}" for task, note in found["notes"].items())
    reported = ", ".join(f"{PANELS[key]} {value:g}" for key, value in found["reported"].items())
    add_note(
        figure, f"{notes}; running mean of 5 steps.\nReported by others, of coding runs of another model: {reported}."
    )
