"""Figure 5: how much of the loss each rollout gets under three normalisers (worked example)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from harnessrl.adapter import token_weights
from paper_figs.style import COLOURS, HATCHES

DATA = ()
LENGTHS, ROLLOUTS = [50, 100, 30, 30, 30, 40], [0, 0, 1, 1, 1, 2]
"""The paper's example: trained tokens of each sample of rollouts A, B and C."""
NORMALIZERS = ("token_mean", "seq_mean", "rollout_mean")
REPORTED = {
    "source": "arXiv:2608.17528, figure 5",
    "shares": {"token_mean": "150/280, 90/280, 40/280", "seq_mean": "2/6, 3/6, 1/6", "rollout_mean": "1/3 each"},
    "use": "the same example; our values are computed by token_weights",
}


def numbers(root: Path) -> dict[str, list[float]]:
    """By normaliser: the share of the loss of each of the six samples."""
    return {
        mode: [float(w * n) for w, n in zip(token_weights(LENGTHS, ROLLOUTS, mode), LENGTHS, strict=True)]
        for mode in NORMALIZERS
    }


def draw(figure: Figure, found: dict[str, Any]) -> None:
    """A bar a normaliser, split by sample."""
    figure.set_size_inches(6.4, 2.4)
    axis = figure.subplots()
    for place, shares in enumerate(found.values()):
        left = 0.0
        for share, rollout in zip(shares, ROLLOUTS, strict=True):
            look = {"color": COLOURS[(4, 1, 2)[rollout]], "hatch": HATCHES[rollout], "edgecolor": "black"}
            axis.barh(place, share, left=left, height=0.6, linewidth=0.6, **look)
            left += share
        start = 0.0
        for rollout, name in enumerate("ABC"):
            share = sum(s for s, r in zip(shares, ROLLOUTS, strict=True) if r == rollout)
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1.2}
            axis.text(start + share / 2, place, f"{name}  {share:.3f}", ha="center", va="center", bbox=box)
            start += share
    axis.set_yticks(range(len(found)), [name.replace("_", "-") for name in found])
    axis.invert_yaxis()
    axis.set(xlim=(0, 1), xlabel="share of the loss; A has samples of 50 and 100 tokens, B three of 30, C one of 40")
    axis.grid(visible=False)
