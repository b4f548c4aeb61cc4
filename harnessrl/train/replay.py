"""Training on recorded rollouts: their advantages are computed again and compared with the stored ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from harnessrl.errors import ConfigError
from harnessrl.train.batch import Batch


def check_calls(items: Sequence[Mapping[str, Any]], vocabulary: int, context: int, path: str) -> None:
    """Refuse token ids and positions that the policy does not have: the record belongs to another one.

    Raises:
        ConfigError: by rollout and call.
    """
    for item in items:
        for call in item["calls"]:
            tokens = len(call["prompt_ids"] or ()) + len(call["response_ids"] or ())
            if tokens > context:
                raise ConfigError(
                    f"replay: {path}: rollout {item['rollout_id']!r}, call {call['call_id']!r} has {tokens} tokens; the "
                    f"policy has {context} positions"
                )
            largest = max((*(call["prompt_ids"] or ()), *(call["response_ids"] or ())), default=0)
            if largest >= vocabulary:
                raise ConfigError(
                    f"replay: {path}: rollout {item['rollout_id']!r}, call {call['call_id']!r} holds token id {largest}; "
                    f"the policy has {vocabulary}"
                )


def advantage_gap(batch: Batch, items: Sequence[Mapping[str, Any]]) -> float:
    """Largest |stored advantage - recomputed advantage|; NaN if none is stored.

    It is 0 to rounding where the recorded run had the same advantage settings, and tells how far they differ elsewhere.
    """
    stored = {item["rollout_id"]: item["advantage"] for item in items if item.get("advantage") is not None}
    gaps = [
        abs(stored[f.rollout.rollout_id] - advantage)
        for f, advantage in zip(batch.finished, batch.advantages.tolist(), strict=True)
        if f.rollout.rollout_id in stored
    ]
    return max(gaps, default=math.nan)
