"""From one row a token to the small tables that are kept: python -m experiments.substitute_bias.tables TOKENS.csv FOLDER

delta = logprob behind the overwritten prompt - logprob behind the true one, in nats: the log of the importance ratio that
a trainer would see before its first step. Intervals are 95 %, from resampling whole chats.
"""

from __future__ import annotations

import csv
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

QUANTILES = (0.5, 0.75, 0.9, 0.95, 0.99)
OVER = (0.01, 0.1, 0.5)
CLIP = (0.8, 1.2)
"""The usual clip range of PPO and GRPO."""
DISTANCES = (0, 32, 64, 96, 128, 192, 10**6)
POSITIONS = (0, 1, 4, 8, 16, 24, 32, 10**6)
CHANGED = (1, 2, 3, 5, 9, 10**6)
RESAMPLES = 1000

Floats = NDArray[np.float64]
Statistic = Callable[[NDArray[np.float64]], float]


@dataclass(frozen=True)
class Tokens:
    """Columns, one entry a trained token behind overwritten history."""

    chat: NDArray[np.int64]
    turn: NDArray[np.int64]
    position: NDArray[np.int64]
    distance: NDArray[np.int64]
    changed: NDArray[np.int64]
    true: Floats
    substituted: Floats
    engine: Floats

    @property
    def delta(self) -> Floats:
        return self.substituted - self.true

    @property
    def rounding(self) -> Floats:
        """What the same comparison gives where nothing was overwritten: two computations of one number."""
        return self.engine - self.true


def read(path: Path) -> Tokens:
    """The file that `measure` writes.

    Raises:
        ValueError: it holds no row.
    """
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        raise ValueError(f"{path} holds no token: no history came back changed; more chats are needed")
    whole = ("chat", "turn", "position", "distance", "changed")
    columns = {name: np.array([float(row[name]) for row in rows]) for name in rows[0]}
    return Tokens(**{name: column.astype(np.int64) if name in whole else column for name, column in columns.items()})


def statistics() -> dict[str, Statistic]:
    """What is reported of a set of deltas."""
    chosen: dict[str, Statistic] = {"mean": lambda delta: float(delta.mean())}
    for q in QUANTILES:
        chosen[f"abs_q{round(q * 100)}"] = lambda delta, q=q: float(np.quantile(np.abs(delta), q))
    for limit in OVER:
        chosen[f"share_over_{limit}"] = lambda delta, limit=limit: float((np.abs(delta) > limit).mean())
    low, high = np.log(CLIP)
    chosen["share_outside_clip"] = lambda delta: float(((delta < low) | (delta > high)).mean())
    return chosen


def with_interval(values: Floats, chat: NDArray[np.int64], statistic: Statistic) -> tuple[float, float, float]:
    """A statistic with its 95 % interval over resampled chats."""
    of_chat = [values[chat == c] for c in np.unique(chat)]
    rng = np.random.default_rng(0)
    draws = [
        statistic(np.concatenate([of_chat[i] for i in rng.integers(len(of_chat), size=len(of_chat))]))
        for _ in range(RESAMPLES)
    ]
    return (statistic(values), *(float(x) for x in np.quantile(draws, (0.025, 0.975))))


def overall(tokens: Tokens) -> Iterable[Sequence[Any]]:
    """Statistics of single tokens and of whole responses (log of the product of their ratios, and its mean a token)."""
    yield "of", "statistic", "value", "low", "high"
    chat, total, mean, _ = sequences(tokens)
    for of, values, chats in (
        ("token", tokens.delta, tokens.chat),
        ("token, rounding only", tokens.rounding, tokens.chat),
        ("response, sum", total, chat),
        ("response, mean", mean, chat),
    ):
        for name, statistic in statistics().items():
            yield of, name, *map(number, with_interval(values, chats, statistic))


def sequences(tokens: Tokens) -> tuple[NDArray[np.int64], Floats, Floats, list[tuple[int, ...]]]:
    """One entry a response: its chat, the sum and the mean of delta, (chat, turn, tokens, distance, changed)."""
    keys, first, index = np.unique(np.stack([tokens.chat, tokens.turn]), axis=1, return_index=True, return_inverse=True)
    count = np.bincount(index)
    total = np.bincount(index, tokens.delta)
    about = [
        (*key, int(n), int(tokens.distance[at]), int(tokens.changed[at]))
        for key, n, at in zip(keys.T.tolist(), count, first, strict=True)
    ]
    return keys[0], total, total / count, about


def by_response(tokens: Tokens) -> Iterable[Sequence[Any]]:
    """One row a response."""
    yield "chat", "turn", "tokens", "distance", "changed", "sum", "mean"
    _, totals, means, about = sequences(tokens)
    for row, total, mean in zip(about, totals, means, strict=True):
        yield *row, number(total), number(mean)


def binned(tokens: Tokens, column: NDArray[np.int64], edges: Sequence[int]) -> Iterable[Sequence[Any]]:
    """Statistics of the tokens in each half-open bin of a column; empty bins are left out."""
    chosen = statistics()
    yield "from", "below", "tokens", *chosen
    for low, high in itertools.pairwise(edges):
        inside = (column >= low) & (column < high)
        if inside.any():
            values = tokens.delta[inside]
            yield low, high, len(values), *(number(statistic(values)) for statistic in chosen.values())


def survival(tokens: Tokens) -> Iterable[Sequence[Any]]:
    """Share of tokens whose |delta| is over a threshold; beside it, what rounding alone does."""
    yield "threshold", "substituted", "rounding"
    for threshold in np.logspace(-6, 1, 71):
        yield (
            number(threshold),
            *(number((np.abs(x) > threshold).mean()) for x in (tokens.delta, tokens.rounding)),
        )


def number(value: float) -> str:
    return f"{value:.4g}"


def write_tables(source: Path, folder: Path) -> None:
    """All tables of a token file."""
    tokens = read(source)
    tables = {
        "overall": overall(tokens),
        "by_distance": binned(tokens, tokens.distance, DISTANCES),
        "by_position": binned(tokens, tokens.position, POSITIONS),
        "by_changed": binned(tokens, tokens.changed, CHANGED),
        "by_turn": binned(tokens, tokens.turn, range(1, int(tokens.turn.max()) + 2)),
        "responses": by_response(tokens),
        "survival": survival(tokens),
    }
    for name, table in tables.items():
        with (folder / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(table)


if __name__ == "__main__":
    write_tables(Path(sys.argv[1]), Path(sys.argv[2]))
