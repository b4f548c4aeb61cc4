"""`harnessrl inspect TRACE [key=value ...]`: read a trace, report on it, save the report."""

from __future__ import annotations

import io
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from harnessrl.adapter.merge import STRATEGIES
from harnessrl.errors import ConfigError
from harnessrl.inspect.html import ROLLOUTS, page
from harnessrl.inspect.pieces import TokenText, visible
from harnessrl.inspect.report import Report, as_json, survey
from harnessrl.trace import Line, Trace

QUIET_SECONDS = 5.0
"""Longest silence while a trace is read."""

TEXT_WIDTH = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What may be given as key=value."""

    tokenizer: str | None = None
    """Folder with a tokenizer.json: shows text, and tells why prefixes broke."""
    strategy: str = "best_effort"
    """How calls are merged in the report."""
    json: str = "false"
    """true prints one JSON object and saves only what html= and text= name."""
    html: str | None = None
    """The page; TRACE.html if not given."""
    text: str | None = None
    """The text; TRACE.txt if not given."""


def inspect(trace: str, overrides: Sequence[str]) -> int:
    """Run the command; returns its exit code.

    Raises:
        ConfigError: bad input, named by file, line and field or by key.
    """
    options = parse_options(overrides)
    tokenizer = None if options.tokenizer is None else TokenText(options.tokenizer)
    if options.strategy == "substitute" and tokenizer is None:
        raise ConfigError("strategy=substitute compares decoded text: give tokenizer=FOLDER")
    source = Trace(trace)
    report = survey(watched(source), options.strategy, tokenizer, keep=ROLLOUTS)
    if not report.rows:
        raise ConfigError(f"{trace}: no line holds a rollout")
    report.notes += notes(report, source, tokenizer)
    html, text = options.html, options.text
    if options.json == "true":
        print(json.dumps({"trace": trace} | as_json(report), allow_nan=False))
    else:
        _terminal(report, tokenizer)
        html, text = html or f"{trace}.html", text or f"{trace}.txt"
    if html is not None:
        _save("html", html, page(report, source.path.name, tokenizer))
    if text is not None:
        _save("text", text, _plain(report, source.path.name, tokenizer))
    if options.json == "false":
        print(f"\nWritten: {html}, {text}")
    return 0


def parse_options(overrides: Sequence[str]) -> Options:
    """Read key=value arguments; ConfigError names what is allowed."""
    given = {}
    allowed = ", ".join(Options.__dataclass_fields__)
    for item in overrides:
        key, equals, value = item.partition("=")
        if not equals or key not in Options.__dataclass_fields__:
            raise ConfigError(f"{item!r}: expected key=value; allowed keys: {allowed}")
        if not value:
            raise ConfigError(f"{key}: is empty")
        given[key] = value
    options = Options(**given)
    for key, value, choices in (("strategy", options.strategy, STRATEGIES), ("json", options.json, ("true", "false"))):
        if value not in choices:
            raise ConfigError(f"{key}={value}: allowed: {', '.join(choices)}")
    return options


def notes(report: Report, source: Trace, tokenizer: TokenText | None) -> list[str]:
    """What a reader has to know about the file and the report."""
    found = []
    if source.cut_line is not None:
        found.append(
            f"line {source.cut_line}, the last, is cut short and left out, as a run killed while writing leaves it"
        )
    times = Counter((row.step, row.rollout_id) for row in report.rows)
    repeated = [name for (_, name), count in times.items() if count > 1]
    if repeated:
        found.append(
            f"{len(report.rows) - len(times):,} lines repeat a rollout_id ({visible(repeated[0])} first); each line is "
            "counted as a rollout"
        )
    unscored = sum(row.reward is None for row in report.rows)
    if unscored == len(report.rows):
        found.append("no rollout has a reward; weights are shown as if all were scored")
    elif unscored:
        found.append(
            f"{unscored:,} of {len(report.rows):,} rollouts are unscored: outside every baseline, never trained"
        )
    if report.strategy == "substitute":
        found.append("substitute is not faithful: tokens stand behind other prompts than those they were sampled from")
    if tokenizer is None:
        found.append("without tokenizer=FOLDER tokens are shown as ids and causes of breaks cannot be told apart")
    return found


def watched(source: Trace) -> Iterator[Line]:
    """The lines of a trace, with progress on stderr: live on a terminal, else a line every few seconds."""
    began = spoke = time.monotonic()
    with ExitStack() as stack:
        update = _live(stack) if sys.stderr.isatty() else None
        for count, line in enumerate(source, 1):
            yield line
            now = time.monotonic()
            if update is not None and now - began > 0.5:
                update(source.fraction, count)
            elif update is None and now - spoke > QUIET_SECONDS:
                print(f"read {source.fraction:.0%}, {count:,} rollouts", file=sys.stderr, flush=True)
                spoke = now


def _live(stack: ExitStack) -> Callable[[float, int], None]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("reading"), BarColumn(), TextColumn("{task.fields[count]:,} rollouts"), TimeRemainingColumn())
    progress = stack.enter_context(Progress(*columns, console=Console(stderr=True), transient=True))
    task = progress.add_task("reading", total=1.0, count=0)
    return lambda fraction, count: progress.update(task, completed=fraction, count=count)


def _terminal(report: Report, tokenizer: TokenText | None) -> None:
    from rich.console import Console

    from harnessrl.inspect.text import print_report

    print_report(Console(highlight=False), report, tokenizer)


def _plain(report: Report, name: str, tokenizer: TokenText | None) -> str:
    from rich.console import Console

    from harnessrl.inspect.text import print_report

    text = io.StringIO()
    print_report(Console(file=text, width=TEXT_WIDTH, highlight=False, color_system=None), report, tokenizer)
    lines = [visible(name), "", *(line.rstrip() for line in text.getvalue().split("\n"))]
    return "\n".join(lines).rstrip() + "\n"


def _save(key: str, path: str, content: str) -> None:
    try:
        Path(path).write_bytes(content.encode())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}); {key}=PATH names another place") from error
