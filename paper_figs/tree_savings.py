"""What merging and tree packing save: tokens that an update computes, on recorded rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from harnessrl.adapter import Rollout, merge_calls, pack_tree
from paper_figs.style import BASE, COLOURS, HATCHES
from paper_figs.traces import read_rows, replace_rows, sources

DATA = ("paper_figs/data/tree_savings.csv",)
MAKE = "harnessrl figures from=RUNS tree_savings"
WAYS = {"per_call": "a sample a call", "best_effort": "best effort", "tree": "tree"}


def rebuild(runs: Path, root: Path) -> list[str]:
    """Count the tokens of every recorded source below `runs`."""
    return replace_rows(root / DATA[0], {source: [count(rollouts)] for source, rollouts in sources(runs, root)})


def count(rollouts: Sequence[Rollout]) -> dict[str, int]:
    """Tokens that an update computes in each way, and how many of them are trained."""
    found = dict.fromkeys(("rollouts", "calls", "samples", "trained", *WAYS), 0)
    for rollout in rollouts:
        merged = merge_calls(rollout).samples
        found["rollouts"] += 1
        found["calls"] += sum(len(sample.spans) for sample in merged)
        found["samples"] += len(merged)
        found["trained"] += sum(int(sample.loss_mask.sum()) for sample in merged)
        found["per_call"] += sum(len(sample.token_ids) for sample in merge_calls(rollout, "per_call").samples)
        found["best_effort"] += sum(len(sample.token_ids) for sample in merged)
        found["tree"] += len(pack_tree(merged, np.arange(len(merged))).token_ids)
    return found


def numbers(root: Path) -> dict[str, dict[str, float]]:
    """By source: tokens a way, as a share of those of a sample a call; trained tokens likewise; samples per rollout."""
    found = {}
    for row in read_rows(root / DATA[0]):
        base = float(row["per_call"])
        found[row["source"]] = {way: float(row[way]) / base for way in (*WAYS, "trained")}
        found[row["source"]]["samples"] = float(row["samples"]) / float(row["rollouts"])
        found[row["source"]]["calls"] = float(row["calls"]) / float(row["rollouts"])
    return found


def draw(figure: Figure, found: dict[str, Any]) -> None:
    """A group of bars a source."""
    figure.set_size_inches(max(5.0, 1.0 + 1.55 * len(found)), 3.2)
    axis = figure.subplots()
    for index, (way, label) in enumerate(WAYS.items()):
        places = np.arange(len(found)) + (index - 1) * 0.26
        shares = [values[way] for values in found.values()]
        look = {"color": COLOURS[(6, 4, 1)[index]], "hatch": HATCHES[index], "edgecolor": "black", "linewidth": 0.6}
        if way == "per_call":
            look["color"] = "#bdbdbd"
        axis.bar(places, shares, width=0.24, label=label, **look)
        for place, share in zip(places, shares, strict=True):
            axis.text(place, share, f"{share:.3f}", ha="center", va="bottom", fontsize=BASE - 1)
    axis.hlines(
        [values["trained"] for values in found.values()],
        np.arange(len(found)) - 0.42,
        np.arange(len(found)) + 0.42,
        color="black",
        linestyle=":",
        label="tokens that are trained",
    )
    names = [
        f"{source}\n{values['calls']:.2f} calls,\n{values['samples']:.2f} samples a rollout"
        for source, values in found.items()
    ]
    axis.set_xticks(range(len(found)), names)
    axis.set(ylabel="tokens of an update,\nshare of a sample a call", ylim=(0, 1.1))
    figure.legend(loc="outside upper center", ncols=4, columnspacing=1)
