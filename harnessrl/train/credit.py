"""A rollout's advantage over the tokens of its samples, through the credit of its calls."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from harnessrl.adapter import Merge, Rollout, assign_credit, token_advantages
from harnessrl.config import Advantage


def sample_advantages(
    rollout: Rollout, merge: Merge, advantage: float, call_rewards: Mapping[str, float], settings: Advantage
) -> list[NDArray[np.float64]]:
    """What the tokens of each sample have as advantage.

    Args:
        rollout: its calls in order of arrival, which is the order of credit.
        merge: its samples; only the calls trained there take part.
        advantage: the rollout's.
        call_rewards: call_id -> reward of the call itself, in units of the advantage; 0 where there is none.
        settings: `credit` and `discount`.
    Returns:
        for each sample a number (credit `identical`), or float64 [L], 0.0 on context.
    Source: `harnessrl.adapter.assign_credit`.
    """
    if settings.credit == "identical":
        return [np.array(advantage)] * len(merge.samples)
    tokens = {span.call_id: span.stop - span.start for sample in merge.samples for span in sample.spans}
    calls = [call.call_id for call in rollout.calls if call.call_id in tokens]
    credit = assign_credit(
        advantage,
        [call_rewards.get(name, 0.0) for name in calls],
        settings.credit,
        call_tokens=[tokens[name] for name in calls],
        gamma=settings.discount,
    )
    by_call = dict(zip(calls, credit.tolist(), strict=True))
    return [token_advantages(sample, by_call) for sample in merge.samples]


def unused(merge: Merge, call_rewards: Mapping[str, float], settings: Advantage) -> int:
    """How many call rewards reach no trained token: all with `identical`, else those of calls that are not trained."""
    if settings.credit == "identical":
        return len(call_rewards)
    return len(call_rewards.keys() - {span.call_id for sample in merge.samples for span in sample.spans})
