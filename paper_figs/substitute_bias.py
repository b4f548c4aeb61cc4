"""How wrong "substitute" is: the change of logprobs when history is overwritten by what was sampled."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figs.style import BASE, COLOURS, GREY, MARKERS, STYLES, add_note, label_panels

FOLDER = "experiments/substitute_bias/results"
DATA = tuple(f"{FOLDER}/{name}" for name in ("survival.csv", "by_distance.csv", "responses.csv", "manifest.json"))
MAKE = "python -m experiments.substitute_bias.measure"
CLIP = (0.8, 1.2)
QUANTILES = (50, 90, 99)


def numbers(root: Path) -> dict[str, Any]:
    """Share of tokens over each threshold, quantiles of |delta| by distance, sorted log ratios of responses, the counts."""
    survival, by_distance, responses = (_read(root / name) for name in DATA[:3])
    return {
        "survival": {name: [row[name] for row in survival] for name in survival[0]},
        "distance": [(row["from"], row["below"]) for row in by_distance],
        "quantiles": {q: [row[f"abs_q{q}"] for row in by_distance] for q in QUANTILES},
        "responses": sorted(row["sum"] for row in responses),
        "manifest": json.loads((root / DATA[3]).read_text()),
    }


def _read(path: Path) -> list[dict[str, float]]:
    with path.open(newline="") as file:
        return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]


def draw(figure: Figure, found: dict[str, Any]) -> None:
    """Three panels: thresholds, distance, whole responses."""
    figure.set_size_inches(9.6, 3.2)
    axes = figure.subplots(1, 3)
    _draw_survival(axes[0], found["survival"])
    _draw_distance(axes[1], found)
    _draw_responses(axes[2], found["responses"])
    axes[0].set_title("single tokens")
    axes[1].set_title("by distance")
    axes[2].set_title("whole responses")
    label_panels(axes)
    counts = found["manifest"]
    add_note(
        figure,
        "delta = logprob behind substituted history - logprob behind the true prompt; "
        f"{counts['tokens_behind_overwritten_history']} tokens of {counts['later_calls_behind_overwritten_history']} "
        f"responses in {counts['chats_with_overwritten_history']} chats, SmolLM2-135M-Instruct",
    )


def _draw_survival(axis: Axes, columns: dict[str, list[float]]) -> None:
    for index, (name, label) in enumerate(
        (("substituted", "history overwritten"), ("rounding", "same history, computed twice"))
    ):
        share = [value or np.nan for value in columns[name]]
        axis.loglog(columns["threshold"], share, color=COLOURS[index], linestyle=STYLES[index], label=label)
    axis.axvline(np.log(CLIP[1]), color=GREY, linewidth=0.8, linestyle=":")
    axis.text(np.log(CLIP[1]) * 1.25, 0.95, "clip at 1.2", color=GREY, rotation=90, va="top", ha="left")
    axis.set(xlabel="x, nats", ylabel="share of trained tokens with |delta| > x", ylim=(2e-5, 1.3))
    axis.legend(loc="lower left", fontsize=BASE - 1)


def _draw_distance(axis: Axes, found: dict[str, Any]) -> None:
    place = range(len(found["distance"]))
    for index, (quantile, values) in enumerate(found["quantiles"].items()):
        look = {"color": COLOURS[index], "linestyle": STYLES[index], "marker": MARKERS[index]}
        axis.semilogy(place, values, label=f"{quantile} % of |delta|", **look)
    ends = [f"{low:.0f}-{below - 1:.0f}" for low, below in found["distance"][:-1]]
    axis.set_xticks(place, [*ends, f"{found['distance'][-1][0]:.0f}+"])
    axis.set(xlabel="tokens since the last changed token", ylabel="|delta|, nats")
    axis.legend(fontsize=BASE - 1)


def _draw_responses(axis: Axes, total: list[float]) -> None:
    axis.step(total, np.arange(1, len(total) + 1) / len(total), where="post", color=COLOURS[0])
    axis.set_xscale("symlog", linthresh=0.5)
    ticks = (-10, -3, -1, 0, 1)
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
    axis.axvspan(*np.log(CLIP), color=GREY, alpha=0.2, linewidth=0)
    axis.text(0, 0.02, "clip range", color=GREY, ha="center", va="bottom", rotation=90)
    axis.set(xlabel="log ratio of a response (sum of delta), nats", ylabel="share of responses below")
