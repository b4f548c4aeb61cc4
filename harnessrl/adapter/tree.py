"""Tree packing: samples of a rollout share their exact common context, stored and computed once.

A node is a token after a given prefix. Sample [1, 2, 3] with 3 sampled, and sample [1, 2, 3, 4, 5] with 5 sampled, make
five nodes instead of eight tokens: 1 - 2 - 3 - 4 - 5, where node 3 is trained for the first sample and is context for
the second. Where two samples *train* the same token after the same prefix, each keeps a node of its own: one of the two
carries what follows, the other is a leaf; their hidden states are equal, so what follows loses nothing.

Suffixes: S samples, N packed samples, L tokens of a sample, T nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from harnessrl.adapter import checks
from harnessrl.adapter.checks import Float64, Int64
from harnessrl.adapter.packer import Origin, Scalars, check_place, check_samples, checked_order, joined, values_of
from harnessrl.adapter.trie import Trie, build_trie, subtree_end
from harnessrl.adapter.types import Bool, Float32, Int32, Sample


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedTree:
    """A row of trees, one a rollout; every column of length T has one entry a node, parents before children.

    Node t has the position of its depth, attends to itself and its ancestors (``ancestor_mask``), and is scored from
    the hidden state of its parent: the loss is the sum over ``scored`` of ``weights * token_loss``, the logprob of
    ``token_ids[scored]`` read at ``source``. Every logprob and gradient equals that of the samples run one by one.
    """

    token_ids: Int32
    """int32 [T]"""
    parent: Int32
    """int32 [T], the node before; -1 where a tree begins."""
    position_ids: Int32
    """int32 [T], the depth, from 0."""
    subtree_end: Int32
    """int32 [T]; the descendants of t, and t itself, are t..subtree_end[t] - 1: q attends to k where
    ``k <= q < subtree_end[k]`` (a mask function for flex_attention)."""
    loss_mask: Bool
    """bool [T], True on nodes that one sample trains."""
    logprobs: Float32
    """float32 [T], the engine's for that sample; 0.0 on context, NaN where a trained call had none recorded."""
    policy_version: Int32
    """int32 [T], -1 on context."""
    weights: Float64
    """float64 [T], 0.0 on context; NaN on trained nodes where none were given."""
    advantages: Float64
    """float64 [T], likewise."""
    sample_index: Int32
    """int32 [T], the sample that trains the node, as an index into the `samples` that were packed; on context one that
    contains it."""
    call_index: Int32
    """int32 [T], index into call_ids; -1 on context."""
    order: Int64
    """int64 [N], which of `samples` lie here."""
    nodes: tuple[Int64, ...]
    """[N] of int64 [L], the node of each token of each packed sample, aligned with order."""
    rollout_ids: tuple[str, ...]
    """[N], aligned with order."""
    call_ids: tuple[str, ...]
    """One a span (call ids are unique in a rollout only)."""

    @property
    def scored(self) -> Int64:
        """int64, trained nodes that have a parent: those the loss sums over."""
        return np.flatnonzero(self.loss_mask & (self.parent >= 0))

    @property
    def source(self) -> Int64:
        """int64, for each of ``scored`` the node whose hidden state predicts it."""
        return self.parent[self.scored].astype(np.int64)

    @property
    def unscored(self) -> Int64:
        """int64, trained nodes that open their sample (an empty prompt) and cannot be scored."""
        return np.flatnonzero(self.loss_mask & (self.parent < 0))

    @property
    def flat_tokens(self) -> int:
        """Tokens that ``pack`` would need for the same samples."""
        return sum(len(nodes) for nodes in self.nodes)

    @property
    def tokens_saved(self) -> int:
        """flat_tokens less the nodes of the trees."""
        return self.flat_tokens - len(self.token_ids)

    def origin(self, node: int) -> Origin:
        """Tell where a node's token came from: the sample that trains it, or one that has it as context."""
        check_place(node, len(self.token_ids), "node")
        sample, call = int(self.sample_index[node]), int(self.call_index[node])
        return Origin(
            rollout_id=self.rollout_ids[int(np.flatnonzero(self.order == sample)[0])],
            sample=sample,
            call_id=None if call < 0 else self.call_ids[call],
            position=int(self.position_ids[node]),
        )


def pack_tree(
    samples: Sequence[Sample],
    order: ArrayLike,
    *,
    weights: Scalars | None = None,
    advantages: Scalars | None = None,
) -> PackedTree:
    """Lay the prefix trees of the samples' rollouts end to end.

    The number of nodes is the number of distinct prefixes of a rollout's samples, plus one for each further time that
    the same token is trained after the same prefix: the fewest that keep every trained token's own columns.

    Args:
        samples: [S], all of them; only those named by `order` are packed.
        order: int [N], indices into samples, each at most once (``np.concatenate`` of some members of ``tree_items``).
            Samples of one rollout share a tree wherever they stand in it.
        weights: [S], aligned with samples: a number for each trained token of the sample, or float [L].
        advantages: [S], likewise.

    Returns:
        PackedTree.

    Raises:
        ValueError: as ``pack``.

    Source: arXiv:2608.17528 (v1.0), tree attention as the third way to merge; the nodes' ownership is ours.
    """
    chosen = checked_order(order, samples)
    picked = [samples[index] for index in chosen]
    nodes: list[Int64] = [np.empty(0, dtype=np.int64)] * len(picked)
    trees: list[Trie] = []
    count = 0
    for members in _by_rollout(picked):
        tree = build_trie([picked[place] for place in members], start=count)
        trees.append(tree)
        count += len(tree.token_ids)
        for place, path in zip(members, tree.nodes, strict=True):
            nodes[place] = path
    given = {
        "weights": values_of(samples, chosen, weights, "weights"),
        "advantages": values_of(samples, chosen, advantages, "advantages"),
    }
    parent_T = joined([tree.parent for tree in trees], np.int32)
    depth_T = joined([tree.depth for tree in trees], np.int32)
    return PackedTree(
        token_ids=joined([tree.token_ids for tree in trees], np.int32),
        parent=parent_T,
        position_ids=depth_T,
        subtree_end=subtree_end(parent_T, depth_T),
        order=chosen,
        nodes=tuple(nodes),
        rollout_ids=tuple(sample.rollout_id for sample in picked),
        call_ids=tuple(span.call_id for sample in picked for span in sample.spans),
        **_node_columns(picked, chosen, nodes, given, count),
    )


def _node_columns(
    picked: Sequence[Sample], chosen: Int64, nodes: Sequence[Int64], given: Mapping[str, list[Float64]], count: int
) -> dict[str, NDArray[Any]]:
    """Columns of the nodes: what the sample that trains a node says of it, else the values of context."""
    out: dict[str, NDArray[Any]] = {
        "loss_mask": np.zeros(count, dtype=np.bool_),
        "logprobs": np.zeros(count, dtype=np.float32),
        "policy_version": np.full(count, -1, dtype=np.int32),
        "weights": np.zeros(count),
        "advantages": np.zeros(count),
        "sample_index": np.zeros(count, dtype=np.int32),
        "call_index": np.full(count, -1, dtype=np.int32),
    }
    for path, index in zip(nodes, chosen, strict=True):
        out["sample_index"][path] = index
    call = 0
    for place, sample in enumerate(picked):
        own = nodes[place][sample.loss_mask]
        out["loss_mask"][own], out["sample_index"][own] = True, chosen[place]
        for name in ("logprobs", "policy_version"):
            out[name][own] = getattr(sample, name)[sample.loss_mask]
        for name, values in given.items():
            out[name][own] = values[place][sample.loss_mask] if values[place].ndim else values[place]
        for span in sample.spans:
            out["call_index"][nodes[place][span.start : span.stop]] = call
            call += 1
    return out


def unpack_tree(packed: PackedTree, column: str | NDArray[Any]) -> list[NDArray[Any]]:
    """Read a column back as one array a packed sample, in the order of `samples`, as ``unpack`` does for ``pack``.

    Args:
        packed: from ``pack_tree``.
        column: the name of a column, or an array [T, ...] with one entry a node (logprobs of a forward, say; an
            entry is then repeated for every sample that has the node).

    Returns:
        One array a packed sample, ascending in ``packed.order``. Of a named column a sample sees its own values only:
        where a node is trained for another sample, it is context here.

    Raises:
        ValueError: not a column of these trees.
    """
    named = isinstance(column, str)
    if isinstance(column, str) and column not in (*_SHARED, *_ON_CONTEXT):
        raise ValueError(f"column {column!r} is unknown; allowed: {', '.join((*_SHARED, *_ON_CONTEXT))}")
    values = getattr(packed, column) if isinstance(column, str) else checks.array(column, "column")
    if not named and values.shape[:1] != packed.token_ids.shape:
        raise ValueError(f"column has shape {values.shape}, the trees have {len(packed.token_ids)} nodes")
    out = []
    for place in np.argsort(packed.order):
        nodes = packed.nodes[place]
        found = values[nodes]
        if isinstance(column, str) and column in _ON_CONTEXT:
            own = packed.loss_mask[nodes] & (packed.sample_index[nodes] == packed.order[place])
            found[~own] = _ON_CONTEXT[column]
        out.append(found)
    return out


_SHARED = ("token_ids", "position_ids")
_ON_CONTEXT: dict[str, Any] = {
    "loss_mask": False,
    "logprobs": 0.0,
    "policy_version": -1,
    "weights": 0.0,
    "advantages": 0.0,
    "call_index": -1,
}


def tree_items(samples: Sequence[Sample]) -> tuple[Int64, list[Int64]]:
    """Count each rollout's tree, for ``plan_updates(lengths, np.arange(len(lengths)), ...)``: one item a tree.

    Args:
        samples: [S], of any number of rollouts.

    Returns:
        int64 [R], nodes of each rollout's tree in order of first appearance; and [R] arrays, the indices of its samples:
        for pack k of the plan, ``pack_tree(samples, np.concatenate([members[item] for item in pack_k]))``.
    """
    check_samples(samples)
    members = _by_rollout(samples)
    lengths = [len(build_trie([samples[index] for index in indices], start=0).token_ids) for indices in members]
    return np.array(lengths, dtype=np.int64), members


def ancestor_mask(packed: PackedTree) -> Bool:
    """Build the dense attention mask: mask[q, k] is True where k is q or an ancestor of q.

    Args:
        packed: from ``pack_tree``, T nodes.

    Returns:
        bool [T, T]; trees of different rollouts do not see each other. Memory T^2, for backends without a mask function.
    """
    node_T = np.arange(len(packed.parent), dtype=np.int32)
    return (node_T[None, :] <= node_T[:, None]) & (node_T[:, None] < packed.subtree_end[None, :])


def _by_rollout(samples: Sequence[Sample]) -> list[Int64]:
    """Places of each rollout's samples, in order of first appearance."""
    places: dict[str, list[int]] = {}
    for place, sample in enumerate(samples):
        places.setdefault(sample.rollout_id, []).append(place)
    return [np.array(found, dtype=np.int64) for found in places.values()]
