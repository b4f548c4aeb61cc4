"""Figure 7: training and validation reward of the lookup experiment, (rollout, rollout-mean)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from harnessrl.results import Results
from paper_figs import curves
from paper_figs.style import GREY, add_note, draw_band, draw_reported, label_panels

TASK = "lookup"
DATA = curves.tables(TASK)
MAKE = curves.make(TASK)
REPORTED = {
    "source": "arXiv:2608.17528, figure 7",
    "what": "search, Llama-3.2-3B-Instruct, GRPO, six question sets: another task and model than ours",
    "validation %, start and end": {"search": [25.1, 41.7]},
}
rebuild = curves.rebuild


def numbers(root: Path) -> dict[str, Any]:
    """Bands of the training and validation reward, None where nothing was validated, and what is quoted."""
    return experiment(root, TASK) | {"reported": REPORTED["validation %, start and end"]}


def experiment(root: Path, task: str) -> dict[str, Any]:
    """The curves of one task's reference setting."""
    results = Results.read(root / "ablations" / "results" / curves.TASKS[task])
    setting = curves.REFERENCE
    return {
        "training": curves.band(results, setting, "reward/mean"),
        "validation": curves.band(results, setting, "val/reward_mean", steps=1),
        "note": curves.note(results.only([key for key in results.runs if key[0] == setting])),
    }


def draw(figure: Figure, found: dict[str, Any]) -> None:
    """Ours on the left, the paper's two points on a scale of their own."""
    figure.set_size_inches(7.2, 2.8)
    axes = figure.subplots(1, 3, width_ratios=(3, 3, 1.3))
    for index, (axis, name) in enumerate(zip(axes, ("training", "validation"), strict=False)):
        if found[name] is None:
            axis.text(0.5, 0.5, "no validation was recorded", transform=axis.transAxes, ha="center", color=GREY)
        else:
            draw_band(axis, found[name], name, index)
        axis.set(xlabel="updates", ylabel="mean reward", ylim=(0, 1.02))
        axis.set_title(f"{name} (ours)")
    draw_reported(axes[2], found["reported"], "validation, % (their tasks)", {})
    axes[2].set(title="reported\nby others", ylim=(0, 102))
    add_note(figure, found["note"])
    label_panels(axes[:2])
