"""The prefix tree of one rollout's samples: which token is stored where, and after which other.

Suffixes: L tokens of a sample, T nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from harnessrl.adapter.types import Int32, Sample

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trie:
    """The shape of one tree, before its columns. Example: samples [1, 2] and [1, 3] -> parent [-1, 0, 0]."""

    token_ids: Int32
    """int32 [T], nodes depth first."""
    parent: Int32
    """int32 [T], -1 at the root."""
    depth: Int32
    """int32 [T], from 0."""
    nodes: list[Int64]
    """one int64 [L] a sample: the node of each of its tokens."""


def build_trie(samples: Sequence[Sample], start: int) -> Trie:
    """One prefix tree, its nodes numbered from `start` in depth-first order.

    In the order of their token ids, each sample shares with the one before it all that it shares with any before it.
    """
    size = sum(len(sample.token_ids) for sample in samples)
    token_T, parent_T, depth_T, rank_T = (np.empty(size, dtype=np.int64) for _ in range(4))
    trained_T = np.zeros(size, dtype=np.bool_)
    paths: list[Int64] = [np.empty(0, dtype=np.int64)] * len(samples)
    before, path, count = np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int64), 0
    for place in sorted(range(len(samples)), key=lambda place: samples[place].token_ids.astype(">i4").tobytes()):
        ids, mask = samples[place].token_ids, samples[place].loss_mask
        shared = _common_prefix(before, ids)
        tail = np.arange(count, count + len(ids) - shared)
        path = np.concatenate([path[:shared], tail])
        twice = np.flatnonzero(mask[:shared] & trained_T[path[:shared]])  # trained for two samples: a node for each
        leaves = np.arange(count + len(tail), count + len(tail) + len(twice))
        own = path.copy()
        own[twice] = leaves
        for new, at in ((tail, np.arange(shared, len(ids))), (leaves, twice)):
            token_T[new], depth_T[new] = ids[at], at
            parent_T[new] = np.where(at > 0, path[at - 1], -1)
            rank_T[new] = 2 * path[at]
        rank_T[tail] += 1  # a leaf stands just before the node whose token it repeats, which keeps subtrees contiguous
        trained_T[own[mask]] = True
        paths[place], before, count = own, ids, count + len(tail) + len(twice)
    by_depth_first = np.argsort(rank_T[:count], kind="stable")
    number_T = np.empty(count + 1, dtype=np.int64)
    number_T[by_depth_first] = np.arange(start, start + count)
    number_T[-1] = -1  # the parent of a root
    return Trie(
        token_ids=token_T[by_depth_first].astype(np.int32),
        parent=number_T[parent_T[by_depth_first]].astype(np.int32),
        depth=depth_T[by_depth_first].astype(np.int32),
        nodes=[number_T[path] for path in paths],
    )


def _common_prefix(left: Int32, right: Int32) -> int:
    """Length of the longest common prefix."""
    shorter = min(len(left), len(right))
    differs = left[:shorter] != right[:shorter]
    return int(np.argmax(differs)) if differs.any() else shorter


def subtree_end(parent_T: Int32, depth_T: Int32) -> Int32:
    """One past the last descendant of each node: the next node that is no deeper.

    Nodes come in runs, each the child of the one before; from the last run back, a stack holds the heads of later runs
    that no nearer head hides. Every head is pushed and popped once.
    """
    node_T = np.arange(len(parent_T), dtype=np.int32)
    head = np.flatnonzero((parent_T != node_T - 1) | (node_T == 0)).tolist()
    end_T = np.empty(len(parent_T), dtype=np.int32)
    later = [(-1, len(parent_T))]  # (depth, node) of later heads, nearest last
    for start, last in reversed(list(pairwise([*head, len(parent_T)]))):
        depth = int(depth_T[start])
        while last > start:
            limit, node = later[-1]
            first = max(start, start + limit - depth)  # from here on the run is at least as deep as that head
            end_T[first:last] = node
            last = min(last, first)
            if limit >= depth:
                later.pop()
        later.append((depth, start))
    return end_T
