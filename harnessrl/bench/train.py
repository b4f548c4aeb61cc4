"""`harnessrl bench train`: tokens a second and peak memory of an update, beside its floor and its peers.

Every line of the table is one way to train on the same samples (`bench/methods.py`); all leave the same gradient. Steps
of one table are taken in turn, round by round, in one process with one thread, and counted in processor time,
which other processes disturb least; the ratio of a line is the median over rounds of its time over ours. Peak memory is
that of one step after a small one, each in a process of its own.
"""

from __future__ import annotations

import json
import multiprocessing
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from harnessrl.bench.memory import MiB, peak_memory
from harnessrl.bench.methods import Step, Work, floor, ours, packs, padded, padded_sorted, tree
from harnessrl.bench.trl_step import trl
from harnessrl.bench.workloads import DATA, MODELS, TOKENS, make_model, make_samples
from harnessrl.errors import ConfigError, RunError

METHODS: dict[str, Callable[[Work], Step | None]] = {
    "ours": ours,
    "floor": floor,
    "padded": padded,
    "padded, sorted": padded_sorted,
    "TRL": trl,
}
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The keys of the command."""

    model: str = "all"
    """tiny, middle or all."""
    data: str = "all"
    """short, lognormal, tree or all."""
    tokens: int = 0
    """Tokens of an update; 0 is 16384 of tiny, 6144 of middle."""
    max_tokens: int = 8192
    """Tokens of a pack, and of a padded batch with its padding."""
    repeats: int = 5
    """Rounds that are counted, after one that is not."""
    seed: int = 0
    """Of models and samples."""
    memory: bool = True
    """Whether peak memory is measured."""
    json: bool = False
    """Print the rows as JSON instead of a table."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to train on one kind of data."""

    model: str
    data: str
    method: str
    tokens: int
    """Of the samples, without padding and without sharing."""
    seconds: float
    """Processor time of a step, median."""
    times_ours: float
    """Median over rounds of its time over that of ours in the same round."""
    peak_mib: float | None
    """Memory of a step at its peak; None where it was not measured."""
    token_ratio: float | None = None
    """Of trees: tokens of the samples over nodes of the trees."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the samples over seconds."""
        return self.tokens / self.seconds


def run(overrides: Sequence[str] = ()) -> int:
    """Measure, print, return the exit code.

    Args:
        overrides: `key=value`, the keys of `Options`.
    Raises:
        ConfigError: an unknown key or value.
    """
    options = read_options(overrides)
    models = list(MODELS) if options.model == "all" else [options.model]
    kinds = list(DATA) if options.data == "all" else [options.data]
    sections = [(model, data) for model in models for data in kinds]
    rows: list[Row] = []
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.completed}/{task.total} {task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(sections))
        for model, data in sections:
            report = lambda text, model=model, data=data: progress.update(task, description=f"{model}, {data}: {text}")  # noqa: E731
            rows += measure(model, data, options, report)
            progress.advance(task)
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        show(rows)
    return 0


def read_options(overrides: Sequence[str]) -> Options:
    """Options from `key=value` strings."""
    known = {field.name: type(field.default) for field in fields(Options)}
    choices = {"model": [*MODELS, "all"], "data": [*DATA, "all"]}
    found: dict[str, Any] = {}
    for item in overrides:
        key, equals, value = item.partition("=")
        if not equals or key not in known:
            raise ConfigError(f"{item!r}: expected key=value, where key is one of {', '.join(known)}")
        allowed = {bool: ["true", "false"]}.get(known[key], choices.get(key))
        if known[key] is int:
            least = 0 if key in ("tokens", "seed") else 1
            if not value.isdecimal() or int(value) < least:
                raise ConfigError(f"{key}: expected a whole number from {least}, got {value!r}")
        elif value not in allowed:  # type: ignore[operator]
            raise ConfigError(f"{key}: expected one of {', '.join(allowed)}, got {value!r}")  # type: ignore[arg-type]
        found[key] = value == "true" if known[key] is bool else known[key](value)
    return Options(**found)


def measure(model: str, data: str, options: Options, report: Callable[[str], None] = lambda text: None) -> list[Row]:
    """The rows of one model and kind of data; times first, then memory, each in a fresh process."""
    arguments = (model, data, options)
    report("timing")
    tokens, times, ratio = _fresh(_times, *arguments)
    rows = []
    for method, seconds in times.items():
        report(f"memory of {method}")
        rows.append(
            Row(
                model=model,
                data=data,
                method=method,
                tokens=tokens,
                seconds=statistics.median(seconds),
                times_ours=statistics.median(a / b for a, b in zip(seconds, times["ours"], strict=True)),
                peak_mib=_fresh(_peak, method, *arguments) / MiB if options.memory else None,
                token_ratio=ratio if method == "trees" else None,
            )
        )
    return rows


def _fresh(function: Callable[..., T], *arguments: Any) -> T:
    """Call in a process that has imported everything and done nothing; it ends with the call, also where that is broken off."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, function, arguments))
    process.start()
    sender.close()
    try:
        return receiver.recv()  # type: ignore[no-any-return]
    except EOFError:
        process.join()
        raise RunError(f"bench: the process that measures ended with exit code {process.exitcode}") from None
    finally:
        process.kill()
        process.join()


def _answer(sender: Connection, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process: the parent answers, and ends this one
    sender.send(function(*arguments))


def _methods(data: str) -> dict[str, Callable[[Work], Step | None]]:
    return METHODS | ({"trees": tree} if data == "tree" else {})


def _work(model: str, data: str, options: Options, tokens: int) -> Work:
    samples = make_samples(data, tokens, MODELS[model]["vocab_size"], options.seed)
    return Work(make_model(model, options.seed), samples, options.max_tokens, options.seed)


def _times(model: str, data: str, options: Options) -> tuple[int, dict[str, list[float]], float]:
    """Tokens, the seconds of every round by method, and how many times fewer tokens the trees have."""
    torch.set_num_threads(1)
    steps = {}
    for name, method in _methods(data).items():
        work = _work(model, data, options, options.tokens or TOKENS[model])
        step = method(work)
        if step is not None:
            steps[name] = step
    tokens = sum(len(sample.token_ids) for sample in work.samples)
    nodes = sum(len(packed.token_ids) for packed in packs(work, tree=True))
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.repeats + 1):
        for name, step in steps.items():
            start = time.process_time()
            step()
            seconds[name].append(time.process_time() - start)
    return tokens, {name: values[1:] for name, values in seconds.items()}, tokens / nodes


def _peak(method: str, model: str, data: str, options: Options) -> int:
    """Bytes that a step takes at its peak, after a step on little has made gradients and optimizer state."""
    torch.set_num_threads(1)
    work = _work(model, data, options, options.tokens or TOKENS[model])
    small = Work(work.model, work.samples[:1], work.max_tokens, work.seed)
    for part in (small, work):
        step = _methods(data)[method](part)
        assert step is not None
        if part is small:
            step()
    return peak_memory(step)


def show(rows: Sequence[Row]) -> None:
    """Print a table for every model and kind of data."""
    console = Console()
    for section in dict.fromkeys((row.model, row.data) for row in rows):
        chosen = [row for row in rows if (row.model, row.data) == section]
        title = f"{section[0]} model, {section[1]} data, {chosen[0].tokens:,} tokens"
        table = Table("method", "tokens/s", "time / ours", "peak MiB", "note", title=title, title_justify="left")
        for row in chosen:
            peak = "-" if row.peak_mib is None else f"{row.peak_mib:,.0f}"
            table.add_row(row.method, f"{row.tokens_per_second:,.0f}", f"{row.times_ours:.2f}", peak, note(row))
        console.print(table)


def note(row: Row) -> str:
    """What a line says of the goal that it belongs to."""
    if row.method == "floor":
        return f"ours takes {1 / row.times_ours:.2f} x its time (goal 1.15)"
    if row.method == "padded" and row.data == "lognormal":
        return f"ours is {row.times_ours:.2f} x as fast (goal 2)"
    if row.token_ratio is not None:
        speedup = 1 / row.times_ours
        share = speedup / row.token_ratio
        return f"{row.token_ratio:.2f} x fewer tokens, {speedup:.2f} x as fast: {share:.0%} (goal 85%)"
    return ""
