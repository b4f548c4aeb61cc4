"""The report as text, for the terminal and for a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harnessrl.inspect import words
from harnessrl.inspect.pieces import TokenText, visible
from harnessrl.inspect.report import Example, Report
from harnessrl.inspect.shares import advantages, loss_shares, relative, silent_groups, spread

ROWS = 40
"""Rollouts that the text lists."""

WIDE = 100
"""Columns of a terminal from which on nothing is left out of the tables."""

ROLLOUT_COLUMNS: dict[str, Literal["left", "right"]] = {
    "rollout": "left",
    "group": "left",
    "reward": "right",
    "calls": "right",
    "samples": "right",
    "trained": "right",
    "token": "right",
    "seq": "right",
    "grpo": "right",
    "": "left",
}

SHARED, AFTER = 6, 4
"""Tokens in front of and behind the differing ones of a break."""


def print_report(console: Console, report: Report, tokenizer: TokenText | None) -> None:
    """Print the whole report."""
    console.print(Text(words.headline(report)))
    for note in report.notes:
        console.print(Text(f"Note: {note}", style="yellow"))
    console.print()
    console.print(_strategies(report, console.width >= WIDE))
    _print_breaks(console, report, tokenizer)
    _print_skipped(console, report)
    _print_weights(console, report)
    _print_advantages(console, report)
    _print_rollouts(console, report)


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)


def _strategies(report: Report, wide: bool) -> Table:
    table = _table("What each strategy gives")
    table.add_column("strategy", no_wrap=True)
    for label in ("samples", "a rollout", "tokens computed", "trained tokens"):
        table.add_column(label, justify="right")
    if wide:
        table.add_column("", overflow="fold")
    for name, total in report.totals.items():
        rate = f"{total.samples / len(report.rows):.2f}"
        cells = [name, f"{total.samples:,}", rate, f"{total.tokens:,}", f"{total.trained:,}"]
        cells += [words.STRATEGIES[name]] if wide else []
        table.add_row(*cells, style="bold" if name == report.strategy else "")
    best = report.totals["best_effort"]
    saved = f"{best.tokens - report.tree_tokens:,} tokens of best_effort are shared context, computed once"
    cells = ["+ tree packing", "", "", f"{report.tree_tokens:,}", f"{best.trained:,}"]
    table.add_row(*cells, *([saved] if wide else []))
    return table


def _print_breaks(console: Console, report: Report, tokenizer: TokenText | None) -> None:
    breaks = report.breaks
    console.print(Text(f"\nBreaks: {breaks.total():,}, each began another sample of its rollout", style="bold"))
    for kind, count in breaks.items():
        line = Text(f"  {count:>7,}  {kind:<12}", style="bold")
        console.print(line.append(f" {words.KINDS[kind]}", style="not bold"))
    for kind, count in breaks.items():
        for number, example in enumerate(report.examples[kind], 1):
            place = f"rollout {visible(example.rollout_id)}, sample {example.sample}, token {example.drift.position}"
            console.print(Text(f"\n  {kind} {number} of {count:,}: {place}", style="bold"))
            for line in break_lines(example, tokenizer):
                console.print(line, soft_wrap=True)


def break_lines(example: Example, tokenizer: TokenText | None) -> list[Text]:
    """Both sides of a break, a line each: bars between tokens, brackets around those that differ."""
    drift, lines = example.drift, []
    names = [
        visible(f"before  call {example.known} ({drift.known_call})"),
        visible(f"after   call {example.found} ({drift.found_call})"),
    ]
    for name, window in zip(names, words.windows(drift, SHARED), strict=True):
        shared, differs, after = (
            "|".join(visible(text) for _, text in words.token_texts(ids, tokenizer))
            for ids in (window.shared, window.differs, window.after[:AFTER])
        )
        line = Text(f"    {name:<{max(map(len, names))}}  {shared} ", style="dim")
        line.append("[", style="not dim").append(differs, style="bold not dim red").append("]", style="not dim")
        lines.append(line.append(f" {after}"))
    return lines


def _print_skipped(console: Console, report: Report) -> None:
    skipped = report.skipped
    if not skipped:
        console.print(Text("\nSkipped calls: none", style="bold"))
        return
    tokens = sum(report.skipped_tokens.values())
    console.print(Text(f"\nSkipped calls: {skipped.total():,} with {tokens:,} sampled tokens", style="bold"))
    for reason, count in skipped.items():
        line = Text(f"  {count:>7,}  {reason:<16}", style="bold")
        console.print(
            line.append(f" {words.REASONS[reason]}; {report.skipped_tokens[reason]:,} tokens", style="not bold")
        )


def _print_weights(console: Console, report: Report) -> None:
    table = _table("Weight of a rollout in the loss; 1.00 is an equal share")
    table.add_column("normaliser", no_wrap=True)
    for label in ("smallest", "median", "largest"):
        table.add_column(label, justify="right")
    table.add_column("heaviest rollout", overflow="fold")
    for mode, share_R in loss_shares(report.rows).items():
        relative_R = relative(report.rows, share_R)
        table.add_row(mode, *_three(relative_R), Text(_heaviest(report, relative_R)))
    console.print()
    console.print(table)


def _heaviest(report: Report, relative_R: np.ndarray) -> str:
    if np.isnan(relative_R).all():
        return "nothing is trained"
    if np.nanmax(relative_R) - np.nanmin(relative_R) < 1e-9:
        return "all weigh the same"
    row = report.rows[int(np.nanargmax(relative_R))]
    size = f"{words.counted(len(row.trained), 'sample')}, {words.counted(sum(row.trained), 'trained token')}"
    return f"{visible(row.rollout_id)}: {size}"


def _print_advantages(console: Console, report: Report) -> None:
    credit = advantages(report.rows)
    if not credit:
        console.print(Text("\nAdvantages: no group has two scored rollouts", style="bold"))
        return
    silent, scored = silent_groups(report.rows)
    table = _table(f"Advantages in {words.counted(scored, 'group')}, {silent:,} of them without signal")
    table.add_column("estimator", no_wrap=True)
    for label in ("smallest", "median", "largest"):
        table.add_column(label, justify="right")
    for name, value_R in credit.items():
        table.add_row(name, *_three(value_R))
    console.print()
    console.print(table)


def _three(value_R: np.ndarray) -> list[str]:
    return ["" if value is None else f"{value:.2f}" for value in spread(value_R).values()]


def _print_rollouts(console: Console, report: Report) -> None:
    table = _table("Rollouts: loss weight by token_mean and seq_mean, advantage by grpo, breaks and skipped calls")
    narrow = console.width < WIDE
    labels = [label for label in ROLLOUT_COLUMNS if not (narrow and label in ("group", "calls", "trained"))]
    for label in labels:
        table.add_column(label, justify=ROLLOUT_COLUMNS[label], overflow="fold")
    shares, credit = loss_shares(report.rows), advantages(report.rows)
    columns = {
        "token": relative(report.rows, shares["token_mean"]),
        "seq": relative(report.rows, shares["seq_mean"]),
        "grpo": credit.get("grpo", np.full(len(report.rows), np.nan)),
    }
    for r, row in enumerate(report.rows[:ROWS]):
        cells = {
            "rollout": visible(row.rollout_id),
            "group": visible(row.group_id),
            "reward": "" if row.reward is None else f"{row.reward:.3g}",
            "calls": str(row.calls),
            "samples": str(len(row.trained)),
            "trained": f"{sum(row.trained):,}",
            "": _listed([*row.breaks.items(), *row.skipped.items()]),
        }
        cells |= {name: "" if np.isnan(value_R[r]) else f"{value_R[r]:.2f}" for name, value_R in columns.items()}
        table.add_row(*(Text(cells[label]) for label in labels))
    console.print()
    console.print(table)
    if len(report.rows) > ROWS:
        left = words.counted(len(report.rows) - ROWS, "further rollout")
        console.print(Text(f"  {left} counted above, not listed here", style="yellow"))


def _listed(counts: Sequence[tuple[str, int]]) -> str:
    return ", ".join(name if count == 1 else f"{count} {name}" for name, count in counts)
