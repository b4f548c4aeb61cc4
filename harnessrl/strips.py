"""Which queries meet which keys in a pack: documents and prefix trees cut into strips of attention. numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]
Bool = NDArray[np.bool_]

FINE = 256
"""Strips this long and longer are batched with their own length only: padding them would cost more than a call."""


@dataclass(frozen=True)
class Strip:
    """Some tokens of a pack that query, and the path of keys that holds all they may see."""

    keys: Int64
    """int64 [K], tokens of the pack along a path; the last Q of them are the queries."""
    seen: Int64
    """int64 [Q], how many leading keys each query sees, beside itself."""


@dataclass(frozen=True)
class Batch:
    """Strips of like size, right-padded; padding repeats a strip's last token, and no real query sees it."""

    queries: Int64
    """int64 [strips, Q], tokens of the pack."""
    keys: Int64
    """int64 [strips, K]"""
    real: Bool
    """bool [strips, Q], False on padding."""
    real_keys: Bool
    """bool [strips, K]"""
    own: Bool
    """bool [strips, K], True on the keys that are real queries here: over all batches, on every token once."""
    mask: Bool | None
    """bool [strips, Q, K]; None is causal, with queries and keys the same: order alone hides the padding."""


def documents(cu_seqlens: np.ndarray) -> list[Batch]:
    """Every document is a causal strip.

    Args:
        cu_seqlens: [docs + 1], from 0 to the number of tokens; documents may be empty.
    """
    starts, lengths = np.asarray(cu_seqlens[:-1], np.int64), np.diff(cu_seqlens).astype(np.int64)
    return _causal(np.arange(int(cu_seqlens[-1])), starts[lengths > 0], lengths[lengths > 0])


def trees(parent: np.ndarray, subtree_end: np.ndarray) -> list[Batch]:
    """The trunk of every tree is a causal strip; each branch is one whose keys begin with the path that leads to it.

    Trunks and branches follow the child with most descendants at every fork. Branches of a single token that hang from
    one path share a strip. So the cost is close to the sum of the nodes' depths. Example: parent [-1, 0, 1, 0, 3, 4] has
    the trunk 0 3 4 5, and the branch 1 2 behind the path 0.

    Args:
        parent: [T], the node before each, -1 at roots; depth first.
        subtree_end: [T], one past each node's last descendant.
    """
    head = _chain_heads(np.asarray(parent, np.int64), np.asarray(subtree_end, np.int64))
    by_chain = np.argsort(head, kind="stable")
    heads, starts, lengths = np.unique(head[by_chain], return_index=True, return_counts=True)
    trunk = parent[heads] < 0
    branches, hanging, paths = [], {}, {}
    for first, start, length in zip(heads.tolist(), starts.tolist(), lengths.tolist(), strict=True):
        chain, above = by_chain[start : start + length], int(parent[first])
        if above < 0:
            paths[first] = chain
        elif length == 1:
            hanging.setdefault(int(head[above]), []).append(first)
        else:
            before = _path_to(above, paths[int(head[above])])
            paths[first] = np.concatenate([before, chain])
            branches.append(Strip(paths[first], len(before) + np.arange(length)))
    for chain_head, leaves in hanging.items():
        above = parent[leaves].astype(np.int64)
        path = _path_to(above.max(), paths[chain_head])
        branches.append(Strip(np.concatenate([path, leaves]), np.searchsorted(path, above) + 1))
    return [*_causal(by_chain, starts[trunk], lengths[trunk]), *_masked(branches)]


def _chain_heads(parent: Int64, subtree_end: Int64) -> Int64:
    """int64 [T], the first node of each node's chain; chains go on to the child with most descendants."""
    nodes = np.arange(len(parent))
    by_size = np.argsort(subtree_end - nodes, kind="stable")
    by_size = by_size[parent[by_size] >= 0]
    successor = np.full(len(parent), -1)
    successor[parent[by_size]] = by_size  # the last one written is the largest
    follows = (parent >= 0) & (successor[parent] == nodes)
    head = np.where(follows, parent, nodes)
    while (further := head[head]).tobytes() != head.tobytes():  # doubles the distance each time
        head = further
    return head


def _path_to(node: int, path: Int64) -> Int64:
    """The path up to a node on it."""
    return path[: np.searchsorted(path, node) + 1]


def _causal(tokens: Int64, starts: Int64, lengths: Int64) -> list[Batch]:
    """Batches of the strips tokens[start : start + length]."""
    out = []
    for strips in _alike(lengths):
        column, length = np.arange(lengths[strips].max()), lengths[strips, None]
        cells = tokens[starts[strips, None] + np.minimum(column, length - 1)]
        real = column < length
        out.append(Batch(cells, cells, real, real, real, None))
    return out


def _masked(strips: Sequence[Strip]) -> list[Batch]:
    """Batches of strips whose queries see different keys."""
    out = []
    key_counts = np.array([len(strip.keys) for strip in strips], np.int64)
    query_counts = np.array([len(strip.seen) for strip in strips], np.int64)
    for members in _alike(key_counts, query_counts, within=2.0):  # so many calls cost more than masked padding
        chosen = [strips[index] for index in members]
        k, q = key_counts[members, None], query_counts[members, None]
        column, row = np.arange(k.max()), np.arange(q.max())
        keys = np.stack([strip.keys[np.minimum(column, len(strip.keys) - 1)] for strip in chosen])
        at = k - q + np.minimum(row, q - 1)  # [strips, Q], where the queries lie among the keys
        seen = np.stack([strip.seen[np.minimum(row, len(strip.seen) - 1)] for strip in chosen])
        mask = (column < seen[:, :, None]) | (column == at[:, :, None])
        real_keys = column < k
        out.append(
            Batch(np.take_along_axis(keys, at, 1), keys, row < q, real_keys, real_keys & (column >= k - q), mask)
        )
    return out


def _alike(*sizes: Int64, within: float = 1.25) -> list[Int64]:
    """Indices of strips of like size in every respect: within a factor below `FINE`, equal from there on."""
    coarse = [np.floor(np.log(np.minimum(size, FINE)) / np.log(within)) for size in sizes]
    keys = np.stack([np.where(size < FINE, level, size) for size, level in zip(sizes, coarse, strict=True)], 1)
    kind = np.unique(keys, axis=0, return_inverse=True)[1].ravel()
    return [np.flatnonzero(kind == index) for index in range(kind.max(initial=-1) + 1)]
