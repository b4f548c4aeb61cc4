"""KL in the reward: a rollout pays for its distance from the initial policy before advantages are computed.

    reward = reward - kl_coef * sum_t (logprob_t - reference_t)

over the rollout's trained tokens: logprob_t is the engine's, under which token t was sampled, and reference_t the frozen
initial policy's at the same temperature (k1). REINFORCE++ (arXiv:2501.03262) takes each token's KL from that token's
reward and normalises advantages over tokens. Here a rollout has one reward and one advantage, so its sum is taken: a
departure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from harnessrl.adapter import Packed, PackedTree
from harnessrl.config import Config
from harnessrl.errors import RunError
from harnessrl.train.batch import Batch, make_updates, with_rewards
from harnessrl.train.parallel import World
from harnessrl.train.policy import Policy, score


def reference_packs(batch: Batch, config: Config, world_size: int) -> list[list[Packed | PackedTree]]:
    """Every scored rollout of a step, [rank][pack], equally many packs a rank."""
    whole = replace(config.update, rollouts_per_update=None, max_updates=None, filter_zero_signal=False)
    batch = replace(batch, resampled=np.zeros(len(batch.finished), bool))
    updates, _ = make_updates(batch, replace(config, update=whole), seed=0, world_size=world_size)
    return [[packed for update in updates for packed in update[rank]] for rank in range(world_size)]


@torch.no_grad()
def rollout_kl(
    reference: Policy, packs: Sequence[Packed | PackedTree], temperature: float, here: World
) -> dict[str, float]:
    """sum_t (logprob_t - reference_t) of each rollout; every rank has its own packs and gets all sums.

    Raises:
        RunError: a sum is not finite, on every rank.
    """
    own: Counter[str] = Counter()
    for packed in packs:
        at = packed.scored
        scored = score(reference, packed, temperature, here.device).logprobs.cpu().numpy()
        gap = packed.logprobs[at].astype(np.float64) - scored
        sums = np.bincount(packed.sample_index[at], gap, minlength=int(packed.order.max(initial=-1)) + 1)
        for index, rollout in zip(packed.order.tolist(), packed.rollout_ids, strict=True):
            own[rollout] += float(sums[index])
    total: Counter[str] = Counter()
    for part in here.gather(own):
        total.update(part)
    if wrong := [rollout for rollout, value in sorted(total.items()) if not np.isfinite(value)]:
        raise RunError(f"rollout {wrong[0]}: its KL to the reference is {total[wrong[0]]}; it cannot be rewarded")
    return dict(total)


def penalised(batch: Batch, kl: Mapping[str, float], config: Config) -> tuple[Batch, dict[str, float]]:
    """The batch with rewards less their KL, and advantages from those; unscored rollouts stay unscored.

    Args:
        batch: advantages are computed again.
        kl: rollout id -> sum of k1; a rollout without trained tokens has none and pays nothing.
    Returns:
        the batch, and metrics over scored rollouts: `loss/kl`, mean over rollouts of the mean over their tokens, and
        `reward/kl_penalty`, mean of what was taken.
    """
    sums = np.array([kl.get(item.rollout.rollout_id, 0.0) for item in batch.finished])
    tokens = np.bincount(batch.owner, [s.loss_mask.sum() for s in batch.samples], minlength=len(sums))
    scored = ~np.isnan(batch.rewards)
    means = sums[scored] / np.maximum(tokens[scored], 1)
    penalty = config.loss.kl_coef * sums
    metrics = (
        {"loss/kl": float(means.mean()), "reward/kl_penalty": float(penalty[scored].mean())} if scored.any() else {}
    )
    return with_rewards(batch, batch.rewards - penalty, config), metrics
