"""What a trainer with padded batches reads: a row a sample, with a weight and an advantage for every token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from harnessrl.adapter import Rollout, Sample, merge_calls, rollout_advantages, token_weights


def weighted_samples(
    rollouts: Sequence[Rollout], estimator: str, normalizer: str
) -> tuple[list[Sample], np.ndarray, np.ndarray]:
    """Merge the rollouts of one optimizer update: samples, the weight of each one's trained tokens, its advantage."""
    rewards = np.array([np.nan if rollout.reward is None else rollout.reward for rollout in rollouts])
    advantages = rollout_advantages(rewards, [rollout.group_id for rollout in rollouts], estimator)
    scored = [r for r, rollout in enumerate(rollouts) if rollout.reward is not None]
    pairs = [(r, sample) for r in scored for sample in merge_calls(rollouts[r]).samples]
    owner, samples = np.array([r for r, _ in pairs], dtype=int), [sample for _, sample in pairs]
    lengths = np.array([sample.loss_mask.sum() for sample in samples], dtype=int)
    return samples, token_weights(lengths, owner, normalizer), advantages[owner]


def padded_rows(
    rollouts: Sequence[Rollout], pad_id: int, *, estimator: str = "grpo", normalizer: str = "rollout_mean"
) -> dict[str, Tensor]:
    """Lay samples out as rows: prompts padded on the left, responses on the right.

    A sample's response begins at its first sampled token; what the harness added later lies in it too, untrained.

    Args:
        rollouts: all rollouts of one optimizer update, whole groups: weights are taken over them.
        pad_id: fills both paddings; masked wherever it stands.

    Returns:
        prompts, prompt_mask int64 [S, P]; responses, response_attention, trained int64 [S, A]; logprobs (the engine's),
        weights, advantages float32 [S, A], 0.0 where not trained. loss = sum of weights * token_loss.
    """
    samples, weights, advantages = weighted_samples(rollouts, estimator, normalizer)
    if not samples:
        raise ValueError("no scored rollout has a trained token: there is no row")
    starts = [sample.spans[0].start for sample in samples]
    width = max(len(sample.token_ids) - start for sample, start in zip(samples, starts, strict=True))
    shapes = {"prompt": (len(samples), max(starts)), "response": (len(samples), width)}
    rows = {name: torch.full(shapes["prompt"], fill) for name, fill in (("prompts", pad_id), ("prompt_mask", 0))}
    rows["responses"] = torch.full(shapes["response"], pad_id)
    rows |= {name: torch.zeros(shapes["response"], dtype=torch.int64) for name in ("response_attention", "trained")}
    rows |= {name: torch.zeros(shapes["response"]) for name in ("logprobs", "weights", "advantages")}
    for s, (sample, start) in enumerate(zip(samples, starts, strict=True)):
        ids, mask = torch.tensor(sample.token_ids), torch.tensor(sample.loss_mask[start:])
        left, stop = max(starts) - start, len(ids) - start
        rows["prompts"][s, left:], rows["prompt_mask"][s, left:] = ids[:start], 1
        rows["responses"][s, :stop], rows["response_attention"][s, :stop] = ids[start:], 1
        rows["trained"][s, :stop] = mask.long()
        rows["logprobs"][s, :stop] = torch.tensor(sample.logprobs[start:])
        rows["weights"][s, :stop], rows["advantages"][s, :stop] = mask * weights[s], mask * advantages[s]
    return rows
