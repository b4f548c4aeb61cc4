"""The synthetic laboratory: bias and error of each (advantage unit, normaliser), and where the bias leads.

Above: over the dials. Below: along the exact flow. experiments/laboratory/README.md says what was measured.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figs.style import COLOURS, add_note, label_panels

DATA = tuple(f"experiments/laboratory/results/{name}" for name in ("bias.csv", "paths.csv", "manifest.json"))
MAKE = "python -m experiments.laboratory"
NORMALIZERS = ("token_mean", "seq_mean", "rollout_mean", "constant")
COLOUR = dict(zip(NORMALIZERS, COLOURS, strict=False))
LINE = {"rollout": "-", "sample": "--"}
MARKER = {"token_mean": "o", "seq_mean": "s", "rollout_mean": "^", "constant": "x"}
ESTIMATOR, SUCCESS, DIAL = "grpo", 0.9, 0.5
BOTH = "failures are long and fragment (both dials)"

Row = dict[str, str]
Lines = dict[tuple[str, str], list[tuple[float, float]]]


def read(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def curves(rows: list[Row], x: str, y: str, keep: Callable[[Row], bool]) -> Lines:
    """(unit, normaliser) -> points, of the drawn estimator."""
    out: Lines = {}
    for row in rows:
        if row["estimator"] == ESTIMATOR and keep(row):
            out.setdefault((row["unit"], row["normalizer"]), []).append((float(row[x]), float(row[y])))
    return {key: sorted(points) if x.endswith("dial") else points for key, points in out.items()}


def together(policy: str) -> Callable[[Row], bool]:
    """Rows in which both dials agree."""
    return lambda row: (
        row["policy"] == policy and float(row["success"]) == SUCCESS and row["length_dial"] == row["fragment_dial"]
    )


def path(policy: str) -> Callable[[Row], bool]:
    """The flow at one dial."""
    return lambda row: row["policy"] == policy and float(row["length_dial"]) == DIAL


def numbers(root: Path) -> dict[str, Any]:
    """Title, x label, y label and lines of each panel; the manifest."""
    bias, paths, manifest = (root / name for name in DATA)
    return {"panels": panels(read(bias), read(paths)), "manifest": json.loads(manifest.read_text())}


def panels(bias: list[Row], paths: list[Row]) -> list[tuple[str, str, str, Lines]]:
    """Title, x label, y label and lines of each panel."""
    return [
        (
            "push on fragmenting",
            BOTH,
            "share of the expected update",
            curves(bias, "fragment_dial", "push_fragment_if_right", together("blind")),
        ),
        (
            "push on length",
            BOTH,
            "share of the expected update",
            curves(bias, "fragment_dial", "push_long_if_right", together("blind")),
        ),
        (
            "error of one batch, best scaling",
            BOTH,
            "squared error / |g|²",
            curves(bias, "fragment_dial", "error", together("blind")),
        ),
        (
            "drifting, a blind policy",
            "expected reward",
            "share that chooses to drift",
            curves(paths, "reward", "drift", path("blind")),
        ),
        (
            "drifting, a sighted policy",
            "expected reward",
            "share that chooses to drift",
            curves(paths, "reward", "drift", path("sighted")),
        ),
        (
            "length, a sighted policy",
            "expected reward",
            "share that chooses to be long",
            curves(paths, "reward", "long", path("sighted")),
        ),
    ]


def draw_panel(axis: Axes, title: str, x_label: str, y_label: str, lines: Lines) -> None:
    for (unit, normalizer), points in lines.items():
        x, y = zip(*points, strict=True)
        axis.plot(
            x,
            y,
            LINE[unit],
            color=COLOUR[normalizer],
            marker=MARKER[normalizer],
            markevery=max(1, len(x) // 5),
            label=f"{unit} + {normalizer.replace('_', '-')}",
        )
    axis.set(title=title, xlabel=x_label, ylabel=y_label)


def draw(figure: Figure, found: dict[str, Any]) -> None:
    """Six panels; colour and marker tell the normaliser, the line style the unit."""
    manifest = found["manifest"]
    figure.set_size_inches(9.6, 5.8)
    axes = figure.subplots(2, 3)
    for axis, panel in zip(axes.flat, found["panels"], strict=True):
        draw_panel(axis, *panel)
    label_panels(axes.flat)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    add_note(
        figure,
        f"{ESTIMATOR}, batches of {manifest['groups']} groups of {manifest['size']}. Above: blind policy, success {SUCCESS}; "
        f"expected updates are exact, the error is of {manifest['batches']} drawn batches.\nBelow: exact flow, both dials "
        f"{DIAL}, from inputs around success {manifest['start']} to reward {manifest['until']}. "
        "The true gradient pushes neither on fragmenting nor on length; settings that do not either lie on each other.",
    )
