"""The report as one HTML page: nothing is loaded from elsewhere, and nothing is hidden without saying so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from harnessrl.inspect import words
from harnessrl.inspect.pieces import TokenText
from harnessrl.inspect.report import Report
from harnessrl.inspect.shares import Float64, advantages, loss_shares, relative, silent_groups, spread
from harnessrl.inspect.style import STYLE
from harnessrl.inspect.tokens_html import break_html, rollout_html, text

ROLLOUTS = 64
"""Rollouts whose tokens and rows the page shows, the first of the file."""

TOKENS = 150_000
"""Tokens that the page shows in all, give or take a sample."""


def page(report: Report, name: str, tokenizer: TokenText | None) -> str:
    """The whole page.

    Args:
        name: the trace's name, for the title.
    """
    tokens, linked = _rollouts(report, tokenizer)
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(name)}: trace report</title><style>{STYLE}</style></head><body><main>",
        f'<header><div class="eyebrow">harnessrl inspect · strategy {report.strategy}</div><h1>{text(name)}</h1>'
        f"<p>{text(words.headline(report))}</p></header>",
        *(f'<p class="note">{text(note)}</p>' for note in report.notes),
        _tiles(report),
        _strategies(report),
        _breaks(report, tokenizer),
        _skipped(report),
        _weights(report, linked),
        _advantages(report, linked),
        tokens,
        "</main></body></html>\n",
    ]
    return "".join(parts)


def _tiles(report: Report) -> str:
    rate, single = report.samples_per_rollout, report.single_sample_share
    tiles = {
        "rollouts": f"{len(report.rows):,}",
        "calls": f"{report.calls:,}",
        "samples": f"{report.totals[report.strategy].samples:,}",
        "samples a rollout": "–" if np.isnan(rate) else f"{rate:.2f}",
        "of rollouts are one sample": "–" if np.isnan(single) else f"{single:.0%}",
        f"of {report.sampled:,} sampled tokens trained": f"{sum(sum(row.trained) for row in report.rows):,}",
    }
    boxes = "".join(f'<div class="tile"><b>{value}</b><span>{label}</span></div>' for label, value in tiles.items())
    return f'<div class="tiles">{boxes}</div>'


def _table(heads: Sequence[tuple[str, str]], rows: Iterable[str]) -> str:
    """Args: heads: (label, class) of each column."""
    head = "".join(f'<th class="{kind}">{label}</th>' for label, kind in heads)
    return f'<div class="card"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _bar(value: float, largest: float, mark: float | None = None) -> str:
    tick = "" if mark is None else f'<s style="left:{100 * mark / largest:.1f}%"></s>'
    return f'<span class="bar"><i style="width:{100 * value / largest:.1f}%"></i>{tick}</span>'


def _strategies(report: Report) -> str:
    largest = max(1, *(total.tokens for total in report.totals.values()))
    best = report.totals["best_effort"]
    lines = [
        (name, f"{total.samples:,}", f"{total.samples / len(report.rows):.2f}", total.tokens, total.trained, meaning)
        for name, total in report.totals.items()
        for meaning in [words.STRATEGIES[name]]
    ]
    saved = f"best_effort, with {best.tokens - report.tree_tokens:,} tokens of shared context computed once"
    lines.append(("+ tree packing", "", "", report.tree_tokens, best.trained, saved))
    rows = [
        f'<tr{" class=chosen" if name == report.strategy else ""}><td class="name">{name}</td>'
        f'<td class="n">{samples}</td><td class="n">{rate}</td><td>{_bar(tokens, largest)}</td>'
        f'<td class="n">{tokens:,}</td><td class="n">{trained:,}</td><td><small>{meaning}</small></td></tr>'
        for name, samples, rate, tokens, trained, meaning in lines
    ]
    heads = [("strategy", ""), ("samples", "n"), ("a rollout", "n"), ("tokens computed", ""), ("", "n")]
    return "<h2>What each strategy gives</h2>" + _table([*heads, ("trained tokens", "n"), ("", "")], rows)


def _breaks(report: Report, tokenizer: TokenText | None) -> str:
    counts = report.breaks
    lead = "A prompt that does not continue the tokens before it begins another sample. Tokens that differ are framed."
    title = f'<h2>Breaks: {counts.total():,}</h2><p class="lead">{lead}</p>'
    if not counts:
        return '<h2>Breaks: none</h2><p class="lead">Every rollout is at most one sample.</p>'
    parts = [title]
    for kind, count in counts.items():
        examples = report.examples[kind]
        summary = (
            f'<summary><span class="pill">{kind}</span> <b>{count:,}</b><small>{words.KINDS[kind]}</small></summary>'
        )
        bodies = [
            break_html(
                item, tokenizer, f"Rollout {text(item.rollout_id)}, sample {item.sample}, token {item.drift.position:,}"
            )
            for item in examples
        ]
        rest = count - len(examples)
        more = (
            f'<p class="lead">{rest:,} more of this kind, not repeated here: they stand in the tokens of their rollouts.</p>'
            if rest
            else ""
        )
        opened = " open" if kind == next(iter(counts)) else ""
        parts.append(f"<details{opened}>{summary}<div>{''.join(bodies)}{more}</div></details>")
    return "".join(parts)


def _skipped(report: Report) -> str:
    if not report.skipped:
        return '<h2>Skipped calls: none</h2><p class="lead">Every call is trained.</p>'
    rows = [
        f'<tr><td class="name">{reason}</td><td class="n">{count:,}</td>'
        f'<td class="n">{report.skipped_tokens[reason]:,}</td><td><small>{words.REASONS[reason]}</small></td></tr>'
        for reason, count in report.skipped.items()
    ]
    heads = [("reason", ""), ("calls", "n"), ("sampled tokens", "n"), ("", "")]
    return f"<h2>Skipped calls: {report.skipped.total():,}</h2>" + _table(heads, rows)


def _weights(report: Report, linked: int) -> str:
    values = {mode: relative(report.rows, share_R) for mode, share_R in loss_shares(report.rows).items()}
    largest = max([2.0, *(float(np.nanmax(value_R)) for value_R in values.values() if not np.isnan(value_R).all())])
    rows = []
    for r, row in enumerate(report.rows[:ROLLOUTS]):
        bars = [
            f'<td><span class="with">{_bar(value_R[r], largest, 1.0)}<span>{value_R[r]:.2f}</span></span></td>'
            if not np.isnan(value_R[r])
            else "<td><small>not trained</small></td>"
            for value_R in values.values()
        ]
        size = f'<td class="n">{len(row.trained)}</td><td class="n">{sum(row.trained):,}</td>'
        rows.append(f"<tr>{_rollout_cell(r, row.rollout_id, linked)}{size}{''.join(bars)}</tr>")
    heads = [("rollout", ""), ("samples", "n"), ("trained tokens", "n")]
    heads += [(f"{mode}<br><small>{words.NORMALIZERS[mode]}</small>", "") for mode in values]
    lead = "How much of the loss each rollout has under each normaliser. The line marks 1.00, an equal share of its update."
    return f'<h2>Weights</h2><p class="lead">{lead}</p>{_table(heads, rows)}{_left_out(report, "Rows")}'


def _advantages(report: Report, linked: int) -> str:
    values = advantages(report.rows)
    if not values:
        return (
            '<h2>Advantages</h2><p class="lead">No group has two scored rollouts, so no advantage has a baseline.</p>'
        )
    silent, scored = silent_groups(report.rows)
    lead = f"Computed over {words.counted(scored, 'group')}, {silent:,} of them without signal (equal rewards, or one scored rollout)."
    rows = [
        f"<tr>{_rollout_cell(r, row.rollout_id, linked)}<td>{text(row.group_id)}</td>"
        f'<td class="n">{"unscored" if row.reward is None else f"{row.reward:.4g}"}</td>{_numbers(values, r)}</tr>'
        for r, row in enumerate(report.rows[:ROLLOUTS])
    ]
    spans = [spread(value_R) for value_R in values.values()]
    cells = "".join(f'<td class="n"><small>{span["min"]:.2f} to {span["max"]:.2f}</small></td>' for span in spans)
    rows.append(f'<tr><td class="name">all</td><td></td><td></td>{cells}</tr>')
    heads = [("rollout", ""), ("group", ""), ("reward", "n"), *((name, "n") for name in values)]
    return f'<h2>Advantages</h2><p class="lead">{lead}</p>{_table(heads, rows)}{_left_out(report, "Rows")}'


def _numbers(values: dict[str, Float64], r: int) -> str:
    return "".join(f'<td class="n">{value_R[r]:.3f}</td>' for value_R in values.values())


def _rollout_cell(r: int, rollout_id: str, linked: int) -> str:
    name = f'<a href="#rollout-{r}">{text(rollout_id)}</a>' if r < linked else text(rollout_id)
    return f'<td class="name">{name}</td>'


def _left_out(report: Report, what: str) -> str:
    left = len(report.rows) - ROLLOUTS
    if left <= 0:
        return ""
    return f'<p class="note">{what} of {words.counted(left, "further rollout")} left out here; every number counts them.</p>'


def _rollouts(report: Report, tokenizer: TokenText | None) -> tuple[str, int]:
    """The tokens of the first rollouts, and how many rollouts those are."""
    parts = ["<h2>Tokens</h2>", _legend(tokenizer)]
    budget, count = TOKENS, 0
    for shown in report.shown[:ROLLOUTS]:
        if budget < 0:
            break
        body, spent = rollout_html(shown, tokenizer, budget)
        opened = "" if count else " open"
        summary = _summary(report, count)
        # The link's target lies inside, since browsers open what holds it.
        parts.append(f'<details{opened}>{summary}<div id="rollout-{count}">{body}</div></details>')
        budget, count = budget - spent, count + 1
    left = len(report.rows) - count
    if left:
        reason = f"the page shows at most {ROLLOUTS} rollouts and about {TOKENS:,} tokens"
        parts.append(f'<p class="note">Tokens of {words.counted(left, "further rollout")} left out here: {reason}.</p>')
    return "".join(parts), count


def _legend(tokenizer: TokenText | None) -> str:
    sample = ("sampled", "given", "differs") if tokenizer else ("4021", "77", "508")
    items = [
        f'<span class="tokens"><b>{sample[0]}</b></span>trained: sampled by the policy',
        f'<span class="tokens"><i>{sample[1]}</i></span>context: given, not trained',
        f'<span class="tokens"><u>{sample[2]}</u></span>break: the first tokens that differ from what was there before',
        '<span class="call">call 2</span>the call, in order of arrival, that sampled what follows',
        *(["⏎ a line break"] if tokenizer else []),
    ]
    hint = "Hover over a token for its id and logprob, over a call for its id."
    return (
        f'<p class="lead">{hint}</p><div class="card legend">{"".join(f"<span>{item}</span>" for item in items)}</div>'
    )


def _summary(report: Report, r: int) -> str:
    row = report.rows[r]
    reward = "unscored" if row.reward is None else f"reward {row.reward:.4g}"
    step = "" if row.step is None else f"step {row.step} · "
    size = f"{words.counted(row.calls, 'call')} → {words.counted(len(row.trained), 'sample')}"
    facts = f"<small>{step}group {text(row.group_id)} · {reward} · {size}</small>"
    pills = [kind if count == 1 else f"{count} {kind}" for kind, count in (*row.breaks.items(), *row.skipped.items())]
    return f"<summary><b>{text(row.rollout_id)}</b>{facts}{''.join(f' <span class=pill>{pill}</span>' for pill in pills)}</summary>"
