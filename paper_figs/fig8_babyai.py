"""Figure 8: training and validation reward of the second experiment, (rollout, rollout-mean)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paper_figs import curves, fig7_lookup

TASK = "babyai"
DATA = curves.tables(TASK)
MAKE = curves.make(TASK)
REPORTED = {
    "source": "arXiv:2608.17528, figure 8",
    "what": "general instructions, Qwen3-4B-Instruct-2507, RLOO: another task and model than ours",
    "validation %, start and end": {"instructions": [51.9, 70.2]},
}
rebuild = curves.rebuild
draw = fig7_lookup.draw


def numbers(root: Path) -> dict[str, Any]:
    """As figure 7's, of the second experiment."""
    return fig7_lookup.experiment(root, TASK) | {"reported": REPORTED["validation %, start and end"]}
