"""Samples by hand, for the tests of the packers: token ids and the spans that were sampled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from harnessrl.adapter.types import Sample, Span


def make_sample(
    token_ids: Sequence[int], spans: Sequence[tuple[int, int]], *, rollout: str = "r", index: int = 0
) -> Sample:
    """A sample whose trained token at position t has logprob -(t + 1) / 8 and policy version index + 1."""
    mask = np.zeros(len(token_ids), dtype=np.bool_)
    for start, stop in spans:
        mask[start:stop] = True
    position = np.arange(len(token_ids))
    return Sample(
        rollout_id=rollout,
        group_id="g",
        index=index,
        token_ids=np.array(token_ids, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -(position + 1) / 8, 0.0).astype(np.float32),
        policy_version=np.where(mask, index + 1, -1).astype(np.int32),
        spans=tuple(Span(call_id=f"{index}.{start}", start=start, stop=stop) for start, stop in spans),
    )
