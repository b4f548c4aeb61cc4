"""What a trace holds and what it would train on, as numbers. numpy only; one pass over the file, tokens not kept.

Suffixes: R rollouts of the trace, S samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harnessrl.adapter.drift import Drift, explain_break
from harnessrl.adapter.merge import merge_calls
from harnessrl.adapter.tree import tree_items
from harnessrl.adapter.types import Merge, Rollout
from harnessrl.inspect.pieces import TokenText
from harnessrl.inspect.shares import Row, advantages, loss_shares, relative, silent_groups, spread
from harnessrl.trace import Line

FAITHFUL = ("per_call", "adjacent", "best_effort")
EXAMPLES = 3
"""Breaks of each kind that are kept with their text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One break."""

    rollout_id: str
    sample: int
    """Index of the sample that begins there."""
    drift: Drift
    known: int
    """Arrival number of the call that was there first."""
    found: int
    """Arrival number of the call that came back different."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A rollout kept whole, so that its tokens can be shown."""

    rollout: Rollout
    merge: Merge
    drifts: tuple[Drift, ...]
    """Aligned with merge.breaks."""


@dataclass(slots=True, kw_only=True)
class Total:
    """What a strategy makes of the whole trace."""

    samples: int = 0
    tokens: int = 0
    """Tokens that a forward pass computes: whole samples, context included."""
    trained: int = 0
    """Tokens that are trained."""


@dataclass(slots=True, kw_only=True)
class Report:
    """Everything `inspect` says. Example: see ``survey``."""

    strategy: str
    """The one that rows, breaks, skipped and weights are of."""
    rows: list[Row] = field(default_factory=list)
    """[R], in the order of the file."""
    totals: dict[str, Total] = field(default_factory=dict)
    """By strategy."""
    tree_tokens: int = 0
    """Tokens computed where best_effort samples of a rollout share their common context (tree packing)."""
    skipped_tokens: Counter[str] = field(default_factory=Counter)
    """Sampled tokens that are not trained, by reason."""
    examples: dict[str, list[Example]] = field(default_factory=dict)
    """The first breaks of each kind."""
    shown: list[Shown] = field(default_factory=list)
    """The first rollouts, whole."""
    notes: list[str] = field(default_factory=list)
    """What a reader has to know about the file."""

    @property
    def calls(self) -> int:
        return sum(row.calls for row in self.rows)

    @property
    def sampled(self) -> int:
        return sum(row.sampled for row in self.rows)

    @property
    def breaks(self) -> Counter[str]:
        """By kind, the most frequent first."""
        return Counter(dict(sum((row.breaks for row in self.rows), Counter()).most_common()))

    @property
    def skipped(self) -> Counter[str]:
        """Calls by reason, the most frequent first."""
        return Counter(dict(sum((row.skipped for row in self.rows), Counter()).most_common()))

    @property
    def samples_R(self) -> NDArray[np.int64]:
        return np.array([len(row.trained) for row in self.rows], dtype=np.int64)

    @property
    def samples_per_rollout(self) -> float:
        """N_rho, over rollouts that have a sample, as training logs it; NaN where none has."""
        counts = self.samples_R[self.samples_R > 0]
        return float(counts.mean()) if len(counts) else float("nan")

    @property
    def single_sample_share(self) -> float:
        """Of the same rollouts."""
        counts = self.samples_R[self.samples_R > 0]
        return float((counts == 1).mean()) if len(counts) else float("nan")


def survey(lines: Iterator[Line], strategy: str, tokenizer: TokenText | None, keep: int) -> Report:
    """Read a whole trace.

    Args:
        lines: from ``Trace``.
        strategy: the one to report on; "substitute" needs a tokenizer.
        tokenizer: tells why a prefix broke; without one only branched, unrelated and diverged can be told.
        keep: rollouts kept whole, the first ones.
    """
    names = (*FAITHFUL, "substitute") if tokenizer else FAITHFUL
    decode = None if tokenizer is None else tokenizer.decode
    report = Report(strategy=strategy, totals={name: Total() for name in names})
    for line in lines:
        rollout = line.rollout
        merges = {name: merge_calls(rollout, name, tokenizer=tokenizer) for name in names}
        for name, merge in merges.items():
            total = report.totals[name]
            total.samples += len(merge.samples)
            total.tokens += sum(len(sample.token_ids) for sample in merge.samples)
            total.trained += sum(int(sample.loss_mask.sum()) for sample in merge.samples)
        report.tree_tokens += int(tree_items(merges["best_effort"].samples)[0].sum())
        merge = merges[strategy]
        drifts = tuple(explain_break(item, decode) for item in merge.breaks)
        report.rows.append(_row(line, merge, drifts))
        for skip in merge.skipped:
            report.skipped_tokens[skip.reason] += skip.tokens
        for broken, drift in zip(merge.breaks, drifts, strict=True):
            kept = report.examples.setdefault(drift.kind, [])
            if len(kept) < EXAMPLES:
                kept.append(example(rollout, broken.sample, drift))
        if len(report.shown) < keep:
            report.shown.append(Shown(rollout=rollout, merge=merge, drifts=drifts))
    return report


def example(rollout: Rollout, sample: int, drift: Drift) -> Example:
    """A break with the arrival numbers of its two calls."""
    number = {call.call_id: index for index, call in enumerate(rollout.calls)}
    return Example(
        rollout_id=rollout.rollout_id,
        sample=sample,
        drift=drift,
        known=number[drift.known_call],
        found=number[drift.found_call],
    )


def _row(line: Line, merge: Merge, drifts: Sequence[Drift]) -> Row:
    return Row(
        rollout_id=line.rollout.rollout_id,
        group_id=line.rollout.group_id,
        step=line.data.get("step"),
        reward=line.rollout.reward,
        calls=len(line.rollout.calls),
        sampled=sum(len(call.response_ids) for call in line.rollout.calls),
        trained=tuple(int(sample.loss_mask.sum()) for sample in merge.samples),
        breaks=Counter(drift.kind for drift in drifts),
        skipped=Counter(skip.reason for skip in merge.skipped),
    )


def as_json(report: Report) -> dict[str, Any]:
    """The report as one JSON-ready object; NaN is null."""
    shares, credit = loss_shares(report.rows), advantages(report.rows)
    groups = silent_groups(report.rows)
    best = report.totals["best_effort"]
    return {
        "rollouts": len(report.rows),
        "calls": report.calls,
        "strategy": report.strategy,
        "samples": {name: total.samples for name, total in report.totals.items()},
        "samples_per_rollout": _number(report.samples_per_rollout),
        "single_sample_share": _number(report.single_sample_share),
        "breaks": dict(report.breaks),
        "skipped": dict(report.skipped),
        "skipped_tokens": dict(report.skipped_tokens),
        "sampled_tokens": report.sampled,
        "tokens": {name: total.tokens for name, total in report.totals.items()},
        "trained_tokens": {name: total.trained for name, total in report.totals.items()},
        "tree": {"tokens": report.tree_tokens, "saved": best.tokens - report.tree_tokens},
        "weights": {mode: spread(relative(report.rows, share_R)) for mode, share_R in shares.items()},
        "advantages": {name: spread(value_R) for name, value_R in credit.items()},
        "groups": {"scored": groups[1], "zero_signal": groups[0]},
        "notes": report.notes,
        "per_rollout": [
            {
                "rollout_id": row.rollout_id,
                "group_id": row.group_id,
                "step": row.step,
                "reward": row.reward,
                "calls": row.calls,
                "samples": len(row.trained),
                "trained_tokens": sum(row.trained),
                "breaks": dict(row.breaks),
                "skipped": dict(row.skipped),
                "loss_share": {mode: float(share_R[r]) for mode, share_R in shares.items()},
                "advantage": {name: float(value_R[r]) for name, value_R in credit.items()},
            }
            for r, row in enumerate(report.rows)
        ],
    }


def _number(value: float) -> float | None:
    return None if np.isnan(value) else value
