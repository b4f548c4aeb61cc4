"""Figure 9: reward and entropy by (advantage unit, normaliser), and the differences to the reference over seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from paper_figs import curves
from paper_figs.style import GREY, add_note, draw_band, draw_differences, draw_reported, label_panels

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
    "reward/mean": ("training reward", 5, 10),
    "val/reward_mean": ("validation reward", 1, 1),
    "policy/entropy": ("entropy, nats a token", 5, 10),
}
"""Metric -> what it is, the steps of its running mean, and those that a difference is the mean of."""
rebuild = curves.rebuild


def numbers(root: Path) -> dict[str, Any]:
    """By task and metric (where any task has it) the band of each setting and its differences; notes; what is quoted."""
    tasks = curves.read_tasks(root)
    bands = {
        task: {key: curves.bands(results, key, steps) for key, (_, steps, _) in PANELS.items()}
        for task, results in tasks.items()
    }
    recorded = [key for key in PANELS if any(by_key[key] for by_key in bands.values())]
    return {
        "bands": {task: {key: by_key[key] for key in recorded} for task, by_key in bands.items()},
        "differences": {
            task: {
                key: {name: curves.paired(tasks[task], name, key, PANELS[key][2]) for name in by_key[key]}
                for key in recorded
            }
            for task, by_key in bands.items()
        },
        "notes": {task: curves.note(results) for task, results in tasks.items()},
        "reported": REPORTED["validation % at step 128"],
    }


def draw(figure: Figure, found: dict[str, Any]) -> None:
    """Two rows a task, its curves and its differences, a column a metric; the paper's numbers on a scale of their own."""
    rows, columns = 2 * len(found["bands"]), len(next(iter(found["bands"].values())))
    figure.set_size_inches(2.2 + 2.5 * columns, 1.1 + 2.0 * rows)
    axes = figure.subplots(rows, columns + 1, squeeze=False, width_ratios=(*[3] * columns, 1.9))
    settings = {name: at for at, name in enumerate(dict.fromkeys(_names(found["bands"])))}
    for at, (task, by_key) in enumerate(found["bands"].items()):
        for axis, below, (key, lines) in zip(axes[2 * at], axes[2 * at + 1], by_key.items(), strict=False):
            _draw_lines(axis, lines, settings)
            differences = found["differences"][task][key]
            others = [name for name in settings if name in differences and name != curves.REFERENCE]
            draw_differences(below, {name: differences[name] for name in others}, settings)
            axis.set_title(f"{task}: {PANELS[key][0]}")
            below.set(title="difference", xlabel="updates")
    place = axes[0, -1].get_gridspec()[:2, -1]
    for axis in axes[:, -1]:
        axis.remove()
    reported = figure.add_subplot(place)
    draw_reported(reported, found["reported"], "validation at step 128, %", settings)
    reported.set_title("reported\nby others")
    reported.tick_params(axis="x", rotation=60)
    label_panels(axes[:, :-1].flat)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    notes = "; ".join(f"{task}: {note}" for task, note in found["notes"].items())
    add_note(
        figure,
        f"{notes}.\nBands: of {curves.REFERENCE} alone. Training reward and entropy are running means of 5 steps. "
        f"Differences: to {curves.REFERENCE}, paired by seed,\nof means of 10 steps (validation: of single ones), "
        "interquartile mean and 95 % interval.",
    )


def _names(bands: dict[str, Any]) -> list[str]:
    return [name for by_key in bands.values() for lines in by_key.values() for name in lines]


def _draw_lines(axis: Any, lines: dict[str, Any], settings: dict[str, int]) -> None:
    """A line a setting; the reference has its band."""
    for name, band in lines.items():
        draw_band(axis, band, name, settings[name], shaded=name == curves.REFERENCE)
    if not lines:
        axis.text(0.5, 0.5, "not recorded", transform=axis.transAxes, ha="center", color=GREY)
