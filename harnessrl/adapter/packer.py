"""Samples laid end to end: one flat row of tokens whose columns know where every token came from.

Suffixes: S samples, N packed samples, L tokens of a sample, T tokens of the pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from harnessrl.adapter import checks
from harnessrl.adapter.checks import Float64, Int64
from harnessrl.adapter.types import Bool, Float32, Int32, Sample

Scalars = ArrayLike | Sequence[float | Float64]

IGNORE = -100
"""Label of a position that predicts nothing that is trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where one packed token came from."""

    rollout_id: str
    """Its rollout."""
    sample: int
    """Its sample, as an index into the `samples` that were packed."""
    call_id: str | None
    """The call that sampled it; None is context."""
    position: int
    """Its position in the sample."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packed:
    """One row of whole samples; every column of length T is aligned with token_ids.

    Example: samples [10, 11, 12] and [20, 21], prompts of one token, pack to labels [11, 12, -100, 21, -100]. The loss
    of the pack is the sum over ``scored`` of ``weights * token_loss``, where the logprob of ``token_ids[scored]`` is
    read from the hidden state of ``source``.
    """

    token_ids: Int32
    """int32 [T]"""
    position_ids: Int32
    """int32 [T], from 0 in every sample."""
    cu_seqlens: Int32
    """int32 [N + 1], where samples begin; from 0 to T; a sample without tokens repeats a value."""
    labels: Int64
    """int64 [T], token_ids[t + 1] where that token is trained and of the same sample, else -100."""
    loss_mask: Bool
    """bool [T], True on sampled tokens."""
    logprobs: Float32
    """float32 [T], the engine's; 0.0 on context, NaN where a trained call had none recorded."""
    policy_version: Int32
    """int32 [T], -1 on context."""
    weights: Float64
    """float64 [T], 0.0 on context; NaN on trained tokens where pack was given none."""
    advantages: Float64
    """float64 [T], 0.0 on context; NaN on trained tokens where pack was given none."""
    sample_index: Int32
    """int32 [T], index into the `samples` that were packed."""
    call_index: Int32
    """int32 [T], index into call_ids; -1 on context."""
    order: Int64
    """int64 [N], which of `samples` lie here, in the order of the row."""
    rollout_ids: tuple[str, ...]
    """[N], the rollout of each packed sample, in the order of the row."""
    call_ids: tuple[str, ...]
    """One a span, in the order of the row (call ids are unique in a rollout only)."""

    @property
    def scored(self) -> Int64:
        """int64, positions of the trained tokens that have a predecessor in their sample: those the loss sums over."""
        return np.flatnonzero(self.loss_mask & (self.position_ids > 0))

    @property
    def source(self) -> Int64:
        """int64, for each of ``scored`` the position whose hidden state predicts it."""
        return self.scored - 1

    @property
    def unscored(self) -> Int64:
        """int64, positions of trained tokens that open their sample (an empty prompt): no label, so never scored.

        ``merge_calls`` skips such calls; where samples come from elsewhere, leave these tokens out of the lengths that
        ``token_weights`` is given.
        """
        return np.flatnonzero(self.loss_mask & (self.position_ids == 0))

    def origin(self, token: int) -> Origin:
        """Tell where the token at this position of the row came from; ValueError where there is none."""
        check_place(token, len(self.token_ids), "token")
        segment = int(np.searchsorted(self.cu_seqlens, token, side="right")) - 1
        call = int(self.call_index[token])
        return Origin(
            rollout_id=self.rollout_ids[segment],
            sample=int(self.sample_index[token]),
            call_id=None if call < 0 else self.call_ids[call],
            position=int(self.position_ids[token]),
        )


def pack(
    samples: Sequence[Sample],
    order: ArrayLike,
    *,
    weights: Scalars | None = None,
    advantages: Scalars | None = None,
) -> Packed:
    """Lay samples end to end: labels[t] = token_ids[t + 1] where that token is trained and of the same sample.

    Args:
        samples: [S], all of them; only those named by `order` are packed.
        order: int [N], indices into samples in the order of the row, each at most once: a pack of the plan, or
            ``range(len(samples))``.
        weights: [S], aligned with samples (not with order): a number for each trained token of the sample, or float [L];
            from ``token_weights``. None leaves NaN on trained tokens.
        advantages: [S], likewise: a number a sample, or float [L] from ``token_advantages``.

    Returns:
        Packed; with an empty order one of no tokens.

    Raises:
        ValueError: an index outside samples or named twice, a column of the wrong length, a weight or an advantage of a
            trained token that is no finite number.

    Source: the paper's scheduling step, arXiv:2608.17528 (v1.0): flattening changes shapes only.
    """
    chosen = checked_order(order, samples)
    picked = [samples[index] for index in chosen]
    length_N = np.array([len(sample.token_ids) for sample in picked], dtype=np.int64)
    start_N = np.concatenate([[0], np.cumsum(length_N)])
    ids_T = joined([sample.token_ids for sample in picked], np.int32)
    mask_T = joined([sample.loss_mask for sample in picked], np.bool_)
    position_T = np.arange(len(ids_T), dtype=np.int32) - np.repeat(start_N[:-1].astype(np.int32), length_N)
    labels_T = np.full(len(ids_T), IGNORE, dtype=np.int64)
    trained = np.flatnonzero(mask_T)
    scored = trained[position_T[trained] > 0]
    labels_T[scored - 1] = ids_T[scored]
    return Packed(
        token_ids=ids_T,
        position_ids=position_T,
        cu_seqlens=start_N.astype(np.int32),
        labels=labels_T,
        loss_mask=mask_T,
        logprobs=joined([sample.logprobs for sample in picked], np.float32),
        policy_version=joined([sample.policy_version for sample in picked], np.int32),
        sample_index=np.repeat(chosen.astype(np.int32), length_N),
        weights=_on_trained(picked, start_N, values_of(samples, chosen, weights, "weights")),
        advantages=_on_trained(picked, start_N, values_of(samples, chosen, advantages, "advantages")),
        call_index=_call_index(picked, start_N),
        order=chosen,
        rollout_ids=tuple(sample.rollout_id for sample in picked),
        call_ids=tuple(span.call_id for sample in picked for span in sample.spans),
    )


def _on_trained(picked: Sequence[Sample], start_N: Int64, values: Sequence[Float64]) -> Float64:
    """Each sample's values on its trained tokens, 0.0 on context."""
    out_T = np.zeros(start_N[-1])
    for sample, start, value in zip(picked, start_N.tolist(), values, strict=False):
        np.copyto(out_T[start : start + len(sample.token_ids)], value, where=sample.loss_mask)
    return out_T


def _call_index(picked: Sequence[Sample], start_N: Int64) -> Int32:
    """The number of the span that each token lies in, spans counted along the row; -1 between them."""
    out_T = np.full(start_N[-1], -1, dtype=np.int32)
    call = 0
    for sample, start in zip(picked, start_N.tolist(), strict=False):
        for span in sample.spans:
            out_T[start + span.start : start + span.stop] = call
            call += 1
    return out_T


def unpack(packed: Packed, column: str | NDArray[Any]) -> list[NDArray[Any]]:
    """Cut a column back into samples: ``unpack(packed, "token_ids")[i]`` is the i-th packed sample's token_ids.

    Args:
        packed: from ``pack``.
        column: the name of a column of length T, or an array [T, ...] aligned with one (logprobs of a forward, say).

    Returns:
        One array a packed sample, in the order of `samples` (ascending ``packed.order``), whatever the row's order.

    Raises:
        ValueError: not a column of this pack.
    """
    tokens = len(packed.token_ids)
    if isinstance(column, str):
        values = getattr(packed, column, None) if column in COLUMNS else None
        if values is None:
            raise ValueError(f"column {column!r} is unknown; allowed: {', '.join(COLUMNS)}")
    else:
        values = checks.array(column, "column")
        if values.shape[:1] != (tokens,):
            raise ValueError(f"column has shape {values.shape}, the pack has {tokens} tokens")
    pieces = np.split(values, packed.cu_seqlens[1:-1]) if len(packed.order) else []
    return [pieces[place] for place in np.argsort(packed.order)]


COLUMNS = (
    "token_ids",
    "position_ids",
    "labels",
    "loss_mask",
    "logprobs",
    "policy_version",
    "weights",
    "advantages",
    "sample_index",
    "call_index",
)
"""The columns of a Packed that are aligned with token_ids."""


def check_place(at: int, count: int, what: str) -> None:
    """Refuse an index that numpy would count from the end."""
    if not isinstance(at, (int, np.integer)) or not 0 <= at < count:
        raise ValueError(f"{what} is {at!r}, expected one of 0..{count - 1}")


def check_samples(samples: Sequence[Sample]) -> None:
    """Refuse what is no list of samples, by its place."""
    if not isinstance(samples, Sequence):
        raise ValueError(f"samples must be a list of Sample, got {checks.kind_of(samples)}")
    for index, sample in enumerate(samples):
        if not isinstance(sample, Sample):
            raise ValueError(f"samples[{index}] must be a Sample, got {checks.kind_of(sample)}")


def checked_order(order: ArrayLike, samples: Sequence[Sample]) -> Int64:
    """Indices into samples, each in range and named once."""
    check_samples(samples)
    chosen = checks.integers(order, "order")
    outside = (chosen < 0) | (chosen >= len(samples))
    if outside.any():
        at = int(np.argmax(outside))
        raise ValueError(f"order[{at}] is {chosen[at]}, there are {len(samples)} samples")
    values, counts = np.unique(chosen, return_counts=True)
    if (counts > 1).any():
        raise ValueError(f"order names sample {values[counts > 1][0]} more than once; it would be trained twice")
    return chosen


def joined(pieces: Sequence[NDArray[Any]], dtype: DTypeLike) -> NDArray[Any]:
    """Concatenate, also nothing at all, into an array of its own."""
    return np.concatenate([np.empty(0, dtype=dtype), *pieces], dtype=dtype)


def values_of(samples: Sequence[Sample], chosen: Int64, values: Scalars | None, name: str) -> list[Float64]:
    """Of each chosen sample float64, a number or [L], as it was given; NaN where nothing was."""
    if values is None:
        return [np.array(np.nan)] * len(chosen)
    if isinstance(values, np.ndarray):
        values = checks.array(values, name)
    if isinstance(values, str) or not np.iterable(values) or not hasattr(values, "__len__"):
        raise ValueError(f"{name} must have one entry a sample, got {values!r}")
    if len(values) != len(samples):
        raise ValueError(f"{name} has length {len(values)}, there are {len(samples)} samples")
    return [_value_of(samples[index], values[index], index, name) for index in chosen.tolist()]


def _value_of(sample: Sample, value: ArrayLike, index: int, name: str) -> Float64:
    """A number or [L], finite wherever a token is trained."""
    where = f"rollout {sample.rollout_id!r}, sample {index}: {name}"
    found, length = checks.array(value, where), len(sample.token_ids)
    if found.dtype.kind not in "fiu":
        raise ValueError(f"{where} must be a number or a vector of numbers, got {found.dtype}")
    if found.shape not in ((), (length,)):
        raise ValueError(f"{where} has shape {found.shape}, token_ids has length {length}")
    wrong = ~np.isfinite(found) if found.ndim == 0 else ~np.isfinite(found) & sample.loss_mask
    if wrong.any():
        raise ValueError(f"{where} is {found.reshape(-1)[int(np.argmax(wrong))]} on a trained token; it must be finite")
    return found.astype(np.float64)
