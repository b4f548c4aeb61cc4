"""Samples as HTML: every token in a box of its own, told apart by trained, context and break."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from harnessrl.adapter.drift import Drift
from harnessrl.adapter.types import Break, Call, Sample
from harnessrl.inspect import words
from harnessrl.inspect.pieces import TokenText, visible
from harnessrl.inspect.report import Example, Shown, example

CONTEXT, TRAINED, BREAK = "i", "b", "u"
"""The elements of the three kinds of token."""

EDGES = {CONTEXT: 120, TRAINED: 1000, BREAK: 1000}
"""Tokens shown at either end of a run; the middle of a longer one is counted instead."""


SHARED, AFTER = 8, 6
"""Tokens in front of and behind the differing ones of a break."""

NEW_LINE = "⏎\n"


def text(value: object) -> str:
    """Any text of the trace, made visible and escaped."""
    return escape(visible(str(value)))


def rollout_html(shown: Shown, tokenizer: TokenText | None, budget: int) -> tuple[str, int]:
    """All samples of a rollout, and the number of tokens shown.

    Args:
        budget: tokens that may be shown; at least one sample is, the samples after it are counted instead.
    """
    calls = {call.call_id: (number, call) for number, call in enumerate(shown.rollout.calls)}
    breaks = {item.sample: (item, drift) for item, drift in zip(shown.merge.breaks, shown.drifts, strict=True)}
    parts, spent = [], 0
    for sample in shown.merge.samples:
        if spent > budget:
            left = len(shown.merge.samples) - sample.index
            parts.append(f'<p class="note">{words.counted(left, "further sample")} of this rollout left out here.</p>')
            break
        broken, drift = breaks.get(sample.index, (None, None))
        parts.append(f'<div class="sample">{_title(sample)}')
        if broken is not None and drift is not None:
            title = f'<span class="pill">{drift.kind}</span>at token {drift.position:,}: {words.KINDS[drift.kind]}'
            parts.append(break_html(example(shown.rollout, sample.index, drift), tokenizer, title))
        body, count = _tokens(sample, broken, drift, shown, calls, tokenizer)
        parts.append(f"{body}</div>")
        spent += count
    for skip in shown.merge.skipped:
        reason = f"{skip.reason}: {words.REASONS[skip.reason]}"
        tokens = words.counted(skip.tokens, "sampled token")
        parts.append(
            f'<p class="lead">Call {calls[skip.call_id][0]} ({text(skip.call_id)}) is not trained, {tokens}. {text(reason)}.</p>'
        )
    return "".join(parts), spent


def _title(sample: Sample) -> str:
    size = f"{words.counted(len(sample.spans), 'call')}, {words.counted(len(sample.token_ids), 'token')}"
    trained = f"{int(sample.loss_mask.sum()):,} trained"
    biased = "" if sample.faithful else " · not faithful: history was overwritten"
    return f"<h3>Sample {sample.index}<small>{size}, {trained}{biased}</small></h3>"


def break_html(example: Example, tokenizer: TokenText | None, title: str) -> str:
    """Both sides of a break, one under the other, so that the tokens in front of it stand in the same columns.

    Args:
        title: HTML above them.
    """
    drift, sides = example.drift, []
    labels = (("before", example.known, drift.known_call), ("after", example.found, drift.found_call))
    for (label, number, call_id), window in zip(labels, words.windows(drift, SHARED), strict=True):
        tokens = _boxes(window.shared, CONTEXT, tokenizer) + _boxes(window.differs, BREAK, tokenizer)
        tokens += _boxes(window.after[:AFTER], CONTEXT, tokenizer)
        name = f'<span title="call {text(call_id)}">{label}, call {number}</span>'
        sides.append(f'<div class="side">{name}<span>{tokens.replace(NEW_LINE, "⏎")}</span></div>')
    return f'<div class="break"><p>{title}</p>{"".join(sides)}</div>'


def _tokens(
    sample: Sample,
    broken: Break | None,
    drift: Drift | None,
    shown: Shown,
    calls: dict[str, tuple[int, Call]],
    tokenizer: TokenText | None,
) -> tuple[str, int]:
    """One sample's tokens; what it shares with an earlier sample, up to its break, is folded into a line."""
    ids, parts, count = sample.token_ids.tolist(), [], 0
    position = differs = 0
    if broken is not None and drift is not None:
        position = min(broken.position, sample.spans[0].start)
        folded = max(0, position - EDGES[CONTEXT] // 4)
        if folded:
            origin = _holder(shown.merge.samples, broken.earlier.call_id)
            parts.append(f'<span class="fold">the first {folded:,} tokens are those of sample {origin}</span>')
        parts.append(_boxes(ids[folded:position], CONTEXT, tokenizer, ids[folded - 1] if folded else None))
        parts.append(f'<span class="pill cut">break · {drift.kind}</span>')
        count += position - folded
        known, found = words.windows(drift)
        differs = len((known if drift.known_call == broken.call.call_id else found).differs)
    for element, start, stop, call_id in _runs(sample, position, differs):
        if call_id is not None:
            parts.append(_call_mark(*calls[call_id]))
        html, shown_count = _folded(sample, element, start, stop, tokenizer)
        parts.append(html)
        count += shown_count
    return f'<div class="tokens">{"".join(parts)}</div>', count


def _runs(sample: Sample, position: int, differs: int) -> list[tuple[str, int, int, str | None]]:
    """(element, start, stop, call that sampled it) of the tokens from ``position`` on."""
    runs: list[tuple[str, int, int, str | None]] = []
    at, marked = position, min(position + differs, sample.spans[0].start)
    if marked > at:
        runs.append((BREAK, at, marked, None))
        at = marked
    for span in sample.spans:
        if span.start > at:
            runs.append((CONTEXT, at, span.start, None))
        runs.append((TRAINED, span.start, span.stop, span.call_id))
        at = span.stop
    return runs


def _folded(sample: Sample, element: str, start: int, stop: int, tokenizer: TokenText | None) -> tuple[str, int]:
    """A run, without its middle where it is long."""
    ids, edge = sample.token_ids.tolist(), EDGES[element]
    logprobs = sample.logprobs.tolist() if element == TRAINED else None

    def boxes(begin: int, end: int) -> str:
        values = None if logprobs is None else logprobs[begin:end]
        return _boxes(ids[begin:end], element, tokenizer, ids[begin - 1] if begin else None, values)

    if stop - start <= 2 * edge + edge // 2:
        return boxes(start, stop), stop - start
    kind = "trained" if element == TRAINED else "context"
    middle = f'<span class="fold">{stop - start - 2 * edge:,} {kind} tokens left out here</span>'
    return boxes(start, start + edge) + middle + boxes(stop - edge, stop), 2 * edge


def _boxes(
    ids: Sequence[int],
    element: str,
    tokenizer: TokenText | None,
    before: int | None = None,
    logprobs: Sequence[float] | None = None,
) -> str:
    """Each token as an element whose title says its id and logprob."""
    parts, at = [], 0
    for numbers, piece in words.token_texts(ids, tokenizer, before):
        size = numbers.count(" ") + 1
        title = f"id {numbers}"
        if logprobs is not None:
            title += ", logprob " + " ".join(f"{value:.3g}" for value in logprobs[at : at + size])
        shown = text(piece).replace("␊", NEW_LINE)
        parts.append(f'<{element} title="{title}">{shown}</{element}>{"" if tokenizer else " "}')
        at += size
    return "".join(parts)


def _call_mark(number: int, call: Call) -> str:
    version = call.policy_version if isinstance(call.policy_version, int) else "several"
    title = f"call {call.call_id}, policy version {version}, finish reason {call.finish_reason}"
    agent = f" {call.agent}" if call.agent else ""
    return f'<span class="call" title="{text(title)}">call {number}{text(agent)}</span>'


def _holder(samples: Sequence[Sample], call_id: str) -> int:
    return next(sample.index for sample in samples if any(span.call_id == call_id for span in sample.spans))
