"""Draws the bias of "substitute" from its tables: python paper_figs/substitute_bias.py [OUT.png]

Left: how often a trained token's logprob is off by more than x. Middle: by distance from the last changed token.
Right: the ratio of whole responses. experiments/substitute_bias/README.md says what was measured.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

RESULTS = Path(__file__).parents[1] / "experiments" / "substitute_bias" / "results"
BLUE, GREY, RED = "#1f5fa8", "#8a8a8a", "#b3372f"
CLIP = (0.8, 1.2)


def read(name: str) -> list[dict[str, float]]:
    with (RESULTS / f"{name}.csv").open(newline="") as file:
        return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]


def draw_survival(axis: Any) -> None:
    rows = read("survival")
    threshold = [row["threshold"] for row in rows]
    for name, colour, label in (
        ("substituted", BLUE, "history overwritten"),
        ("rounding", GREY, "same history, computed twice"),
    ):
        share = [row[name] or np.nan for row in rows]
        axis.loglog(threshold, share, color=colour, label=label)
    axis.axvline(np.log(CLIP[1]), color=RED, linewidth=0.8, linestyle=":")
    axis.text(np.log(CLIP[1]) * 0.85, 3e-4, "clip at 1.2", color=RED, fontsize=8, rotation=90, va="bottom", ha="right")
    axis.set(xlabel="x, nats", ylabel="share of trained tokens with |delta| > x", ylim=(2e-4, 1.3))
    axis.legend(frameon=False, fontsize=8, loc="lower left")


def draw_distance(axis: Any) -> None:
    rows = read("by_distance")
    place = np.arange(len(rows))
    for quantile, alpha in ((50, 1.0), (90, 0.7), (99, 0.4)):
        values = [row[f"abs_q{quantile}"] for row in rows]
        axis.semilogy(place, values, "o-", color=BLUE, alpha=alpha, label=f"{quantile} % of |delta|", markersize=4)
    ends = [f"{row['from']:.0f}-{row['below'] - 1:.0f}" for row in rows[:-1]] + [f"{rows[-1]['from']:.0f}+"]
    axis.set_xticks(place, ends, fontsize=8)
    axis.set(xlabel="tokens since the last changed token", ylabel="|delta|, nats")
    axis.legend(frameon=False, fontsize=8)


def draw_responses(axis: Any) -> None:
    rows = read("responses")
    total = np.sort([row["sum"] for row in rows])
    axis.step(total, np.arange(1, len(total) + 1) / len(total), where="post", color=BLUE)
    axis.set_xscale("symlog", linthresh=0.5)
    ticks = (-10, -3, -1, -0.3, 0, 0.3, 1)
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
    axis.axvspan(*np.log(CLIP), color=RED, alpha=0.12, linewidth=0)
    axis.text(0, 0.02, "clip range", color=RED, fontsize=8, ha="center", va="bottom", rotation=90)
    axis.set(xlabel="log ratio of a response (sum of delta), nats", ylabel="share of responses below")


def main(path: Path) -> None:
    manifest = json.loads((RESULTS / "manifest.json").read_text())
    figure, axes = plt.subplots(1, 3, figsize=(12.5, 4))
    for axis, draw in zip(axes, (draw_survival, draw_distance, draw_responses), strict=True):
        draw(axis)
        axis.grid(alpha=0.25)
    figure.suptitle(
        f"delta = logprob behind substituted history - logprob behind the true prompt; "
        f"{manifest['tokens_behind_overwritten_history']} tokens of "
        f"{manifest['later_calls_behind_overwritten_history']} responses in "
        f"{manifest['chats_with_overwritten_history']} chats, SmolLM2-135M-Instruct",
        fontsize=10,
    )
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("runs/figs/substitute_bias.png"))
