"""The words and windows that the text report and the page share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harnessrl.adapter.drift import WINDOW, Drift
from harnessrl.inspect.pieces import UNFINISHED, TokenText
from harnessrl.inspect.report import Report

KINDS = {
    "retokenized": "the text came back the same, the token ids did not",
    "template": "only markup or white space where two turns meet differs",
    "rewritten": "the text of the history was edited",
    "summarized": "a later part of the history was replaced by something shorter",
    "branched": "another call had already continued this context",
    "unrelated": "another conversation: a sub-agent, or a fresh context",
    "diverged": "the token ids differ; tokenizer=FOLDER tells why",
}
REASONS = {
    "missing_ids": "the prompt's token ids were not recorded",
    "empty_response": "nothing was sampled",
    "undelivered": "the harness never received the answer",
    "superseded": "a later try of the same request was delivered",
    "constrained": "sampled under masked logits or in val mode, so not by the policy alone",
    "not_trainable": "a call of an agent that is not trained",
    "missing_logprobs": "logprobs were not recorded",
    "too_long": "longer than the limit of a sample",
}
STRATEGIES = {
    "per_call": "one sample a call",
    "adjacent": "extends only the sample of the call before",
    "best_effort": "extends the sample with the longest exact prefix",
    "substitute": "overwrites history where the text agrees: biased, for comparison only",
}
NORMALIZERS = {
    "token_mean": "every token weighs the same",
    "seq_mean": "every sample weighs the same",
    "rollout_mean": "every rollout weighs the same",
}
ANCHOR = 3
"""Equal tokens after which two windows count as agreeing again."""

NEAR = 8
"""Differing tokens, both sides together, up to which a single equal token at the end of one side is enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One side of a break: tokens that both sides share, those that differ, and what comes after them."""

    shared: Sequence[int]
    differs: Sequence[int]
    after: Sequence[int]


def windows(drift: Drift, before: int = WINDOW) -> tuple[Window, Window]:
    """The known and the found side of a break, around the tokens that differ.

    Args:
        before: shared tokens to keep in front.
    """
    at = min(drift.position, WINDOW)
    known, found = drift.known_ids.tolist(), drift.found_ids.tolist()
    i, j = _agree_again(known[at:], found[at:])
    start = max(0, at - before)
    return (
        Window(shared=known[start:at], differs=known[at : at + i], after=known[at + i :]),
        Window(shared=found[start:at], differs=found[at : at + j], after=found[at + j :]),
    )


def _agree_again(known: list[int], found: list[int]) -> tuple[int, int]:
    """Fewest tokens on either side after which the next ANCHOR tokens are equal; all of them where there are none."""
    for total in range(1, len(known) + len(found)):
        for i in range(min(total, len(known)) + 1):
            j = total - i
            anchor = known[i : i + ANCHOR]  # shorter only where the known side ends
            enough = len(anchor) > 1 or (len(anchor) == 1 and total <= NEAR)
            if enough and anchor == found[j : j + len(anchor)]:
                return i, j
    return len(known), len(found)


def token_texts(ids: Sequence[int], tokenizer: TokenText | None, before: int | None = None) -> list[tuple[str, str]]:
    """(ids, text) of each token, for people; without a tokenizer the text is the id."""
    if tokenizer is None:
        return [(str(token), str(token)) for token in ids]
    parts = [(" ".join(map(str, part)), text) for part, text in tokenizer.pieces(ids, before)]
    return [(part, text if text.strip(UNFINISHED) else f"‹{part}›") for part, text in parts]


def headline(report: Report) -> str:
    """The report in a few sentences."""
    samples = report.totals[report.strategy].samples
    first = f"{counted(len(report.rows), 'rollout')} made {counted(report.calls, 'call')}"
    if samples:
        rates = f"{report.samples_per_rollout:.2f} a rollout; {report.single_sample_share:.0%} of the rollouts are one sample"
        first += f", which {report.strategy} merges into {counted(samples, 'sample')} ({rates})."
    else:
        first += ", of which none can be trained."
    trained, skipped = sum(sum(row.trained) for row in report.rows), sum(report.skipped_tokens.values())
    if not skipped:
        return f"{first} All {report.sampled:,} sampled tokens are trained, each once."
    return f"{first} Of {report.sampled:,} sampled tokens {trained:,} are trained, each once; {skipped:,} are in skipped calls."


def counted(count: int, noun: str) -> str:
    """The count with its noun. Example: counted(2, "call") -> "2 calls"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
