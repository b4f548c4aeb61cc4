"""Figure 4: what a sample-level baseline does to a rollout that came in several samples (worked example)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from harnessrl.adapter import UNITS, rollout_advantages
from paper_figs.style import COLOURS, GREY, HATCHES, label_panels

DATA = ()
REWARDS, SAMPLES = [1.0, 0.0], [3, 1]
"""The paper's example: rollout A succeeds and has three samples, B fails and has one."""
REPORTED = {
    "source": "arXiv:2608.17528, figure 4",
    "baseline": {"rollout": 0.5, "sample": 0.75},
    "use": "the same example; our values are computed by rollout_advantages",
}


def numbers(root: Path) -> dict[str, dict[str, Any]]:
    """By unit: the baseline, each rollout's advantage, and the sum that all its samples push with."""
    found = {}
    for unit in UNITS:
        advantages = rollout_advantages(REWARDS, ["g", "g"], "dr_grpo", unit=unit, samples_per_rollout=SAMPLES)
        found[unit] = {
            "baseline": float(REWARDS[0] - advantages[0]),
            "advantages": advantages.tolist(),
            "sums": [float(a * n) for a, n in zip(advantages, SAMPLES, strict=True)],
        }
    return found


def draw(figure: Figure, found: dict[str, dict[str, Any]]) -> None:
    """A panel a unit, a bar a sample."""
    figure.set_size_inches(6.4, 2.8)
    axes = figure.subplots(1, len(found), sharey=True)
    for axis, (unit, values) in zip(axes, found.items(), strict=True):
        x = 0
        for rollout, (advantage, samples) in enumerate(zip(values["advantages"], SAMPLES, strict=True)):
            places = range(x, x + samples)
            look = {"color": COLOURS[rollout], "hatch": HATCHES[rollout], "edgecolor": "black", "linewidth": 0.6}
            axis.bar(places, [advantage] * samples, width=0.7, **look)
            for place in places:
                above = advantage > 0
                axis.text(
                    place,
                    advantage + (0.01 if above else -0.03),
                    f"{advantage:+.2f}",
                    ha="center",
                    va="bottom" if above else "top",
                )
            x += samples
        axis.axhline(0, color="black", linewidth=0.8)
        axis.set_title(f"unit = {unit}: baseline {values['baseline']:g}")
        axis.set_xticks(range(4), ["A1\nr = 1", "A2\nr = 1", "A3\nr = 1", "B1\nr = 0"])
        axis.set_ylim(-1, 0.75)
        axis.text(0, -0.9, f"sum over A {values['sums'][0]:+.2f}, over B {values['sums'][1]:+.2f}", color=GREY)
    axes[0].set_ylabel("advantage of a sample")
    label_panels(axes)
