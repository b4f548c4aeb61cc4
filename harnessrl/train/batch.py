"""From finished rollouts to weighted updates: rollouts -> samples -> advantages -> plan -> weights. numpy only.

The order matters: advantages are computed over all scored rollouts before anything is dropped, and weights over each
whole update before it is split into packs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from harnessrl.adapter import (
    Merge,
    Packed,
    PackedTree,
    Rollout,
    Sample,
    Tokenizer,
    merge_calls,
    pack,
    pack_tree,
    plan_updates,
    rollout_advantages,
    token_weights,
    tree_items,
)
from harnessrl.config import Config, Task
from harnessrl.train.credit import sample_advantages, unused

OWN_FAILURES = frozenset({"timeout", "call_bound", "context_overflow", "exit_code"})
"""Failures that are the policy's: they earn `task.failure_reward`. Others leave a rollout unscored."""


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A terminal rollout as the service reports it."""

    rollout: Rollout
    """Its calls; the reward is None where unscored, and the failure reward where it failed on its own account."""
    failure: str | None
    """Why it ended without a reward; None where it did not."""
    input: Any
    """The task input."""
    resampled: bool = False
    """Its group was replaced for want of a signal: in the record and the metrics, not trained."""
    call_rewards: Mapping[str, float] = field(default_factory=dict)
    """call_id -> the reward that the harness gave this call, in units of the advantage."""

    @classmethod
    def from_trace(cls, item: Mapping[str, Any], failure_reward: float = 0.0) -> Finished:
        """Read an item of `/api/traces` or a line of rollouts.jsonl."""
        rollout, failure = Rollout.from_dict(item), item.get("failure")
        if rollout.reward is None and failure in OWN_FAILURES:
            rollout = Rollout(
                rollout_id=rollout.rollout_id, group_id=rollout.group_id, calls=rollout.calls, reward=failure_reward
            )
        return cls(
            rollout=rollout,
            failure=failure,
            input=item.get("input"),
            resampled=item.get("resampled", False),
            call_rewards=item.get("call_rewards", {}),
        )


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The rollouts of one step and the samples they became. R rollouts, S samples."""

    finished: Sequence[Finished]
    """[R], sorted by group and rollout id, so that nothing depends on the order of arrival."""
    merges: Sequence[Merge]
    """[R]"""
    samples: Sequence[Sample]
    """[S], in rollout order."""
    owner: np.ndarray
    """int64 [S], index of each sample's rollout."""
    rewards: np.ndarray
    """float64 [R], those that advantages are computed from: NaN where unscored, or overlong and masked."""
    advantages: np.ndarray
    """float64 [R]; 0 where unscored or replaced."""
    overlong: np.ndarray
    """bool [R], rollouts of more than `task.overlong_tokens` sampled tokens."""
    resampled: np.ndarray
    """bool [R], rollouts of groups that were replaced, which are not trained."""
    credit: Sequence[np.ndarray]
    """[S], the advantage of each sample's tokens: a number, or float64 [L] where it differs between calls."""
    unused_call_rewards: int
    """Rewards of calls that reach no trained token."""


def make_batch(finished: Sequence[Finished], config: Config, tokenizer: Tokenizer | None = None) -> Batch:
    """Merge every rollout and give it its advantage; calls of agents outside `train_agents` are context only.

    Args:
        finished: in any order.
        config: the run's.
        tokenizer: read by `update.strategy=substitute` alone.
    """
    finished = sorted(finished, key=lambda item: (item.rollout.group_id, item.rollout.rollout_id))
    rollouts = [_trainable(item.rollout, config.train_agents) for item in finished]
    limit = config.update.max_sample_tokens
    how = {"strategy": config.update.strategy, "max_sample_tokens": limit, "tokenizer": tokenizer}
    merges = [merge_calls(rollout, **how) for rollout in rollouts]
    counts = np.array([len(merge.samples) for merge in merges], np.int64)
    rewards, overlong = effective_rewards(rollouts, config.task)
    given = list(zip(finished, merges, strict=True))
    batch = Batch(
        finished=finished,
        merges=merges,
        samples=[sample for merge in merges for sample in merge.samples],
        owner=np.repeat(np.arange(len(rollouts)), counts),
        rewards=rewards,
        advantages=np.zeros(len(rollouts)),
        overlong=overlong,
        resampled=np.array([item.resampled for item in finished], bool),
        credit=(),
        unused_call_rewards=sum(
            len(item.call_rewards) if item.resampled else unused(merge, item.call_rewards, config.advantage)
            for item, merge in given
        ),
    )
    return with_rewards(batch, rewards, config)


def with_rewards(batch: Batch, rewards: np.ndarray, config: Config) -> Batch:
    """The batch with other rewards, [R], and the advantages that follow from them."""
    advantages = rollout_advantages(
        np.where(batch.resampled, np.nan, rewards),  # what is replaced has no part in a batch's statistics either
        [item.rollout.group_id for item in batch.finished],
        config.advantage.estimator,
        unit=config.advantage.unit,
        samples_per_rollout=np.bincount(batch.owner, minlength=len(rewards)),
        eps=config.advantage.eps,
    )
    credit = [
        sample_advantages(item.rollout, merge, advantage, item.call_rewards, config.advantage)
        for item, merge, advantage in zip(batch.finished, batch.merges, advantages.tolist(), strict=True)
    ]
    credit = [value for parts in credit for value in parts]
    return replace(batch, rewards=rewards, advantages=advantages, credit=credit)


def _trainable(rollout: Rollout, agents: Sequence[str] | None) -> Rollout:
    """The rollout with calls of agents that are not listed marked as not trainable; None lists all."""
    if agents is None:
        return rollout
    calls = [replace(call, trainable=call.trainable and call.agent in agents) for call in rollout.calls]
    return replace(rollout, calls=calls)


def effective_rewards(rollouts: Sequence[Rollout], task: Task) -> tuple[np.ndarray, np.ndarray]:
    """The rewards that advantages are computed from (NaN is unscored), and which rollouts are overlong.

    What was sampled and never delivered does not count: how much of it is recorded depends on the moment.
    """
    rewards = np.array([np.nan if r.reward is None else r.reward for r in rollouts], np.float64)
    sampled = np.array([sum(len(c.response_ids) for c in r.calls if c.delivered) for r in rollouts], np.int64)
    overlong = sampled > task.overlong_tokens if task.overlong_tokens else np.zeros(len(rollouts), bool)
    if task.overlong == "mask":
        return np.where(overlong, np.nan, rewards), overlong
    return rewards - task.overlong_penalty * overlong, overlong


def make_updates(
    batch: Batch, config: Config, seed: int, world_size: int = 1
) -> tuple[list[list[list[Packed | PackedTree]]], dict[str, float]]:
    """The packs of each optimizer update, [updates][ranks][packs], with weights from the update's global counts.

    Unscored rollouts and replaced groups are never trained; with `update.filter_zero_signal` groups without an advantage
    neither, and weights do not count them. With `update.rollouts_per_update` groups stay whole, except under
    `update.split_rollouts`, which deals out as many updates sample by sample.

    Returns:
        the packs, and metrics: `perf/rank_balance`, ranks' mean cost over the slowest rank's, over all updates (1 where
        none waits), `perf/padding_share`, and how many groups and updates were left out by configuration.
    """
    groups = np.unique([item.rollout.group_id for item in batch.finished], return_inverse=True)[1]
    used, filtered = _used(batch, groups, config.update.filter_zero_signal)
    metrics = {"perf/rank_balance": 1.0, "update/filtered_groups": filtered, "update/skipped_updates": 0.0}
    metrics["perf/padding_share"] = 0.0
    chosen = np.flatnonzero(used[batch.owner])
    if len(chosen) == 0:
        return [], metrics
    owner = batch.owner[chosen]
    samples = [batch.samples[s] for s in chosen]
    advantages = [batch.credit[s] for s in chosen]
    trained = np.array([int(sample.loss_mask.sum()) for sample in samples])
    items = _items(samples, config.update.tree)
    plan = plan_updates(
        items.lengths,
        **_counted(owner[[members[0] for members in items.members]], groups, config),
        world_size=world_size,
        max_tokens=config.update.max_tokens,
        oversize="alone",
        seed=seed,
    )
    run = plan.updates[: config.update.max_updates]
    metrics["update/skipped_updates"] = float(len(plan.updates) - len(run))
    updates = []
    for update in run:
        inside = np.concatenate([items.members[item] for item in update.samples])
        weights = np.zeros(len(samples))
        weights[inside] = token_weights(trained[inside], owner[inside], config.loss.normalizer, scale=config.loss.scale)
        packs = [
            [
                items.pack(samples, order, weights=weights, advantages=advantages)
                for order in map(items.samples_of, rank)
            ]
            for rank in update.ranks
        ]
        updates.append(packs)
    metrics["perf/padding_share"] = padding_share(updates)
    slowest = sum(update.step_time for update in run)
    if slowest:
        metrics["perf/rank_balance"] = sum(update.total_cost for update in run) / (world_size * slowest)
    return updates, metrics


def _counted(owner: np.ndarray, groups: np.ndarray, config: Config) -> dict[str, Any]:
    """What updates are counted in: rollouts in whole groups, or (for ablation) single samples. `owner` is of the items."""
    rollouts = len(np.unique(owner))
    size = config.update.rollouts_per_update or rollouts
    if config.update.split_rollouts:
        return {"rollout_index": np.arange(len(owner)), "num_updates": min(-(-rollouts // size), len(owner))}
    return {"rollout_index": owner, "rollouts_per_update": size, "group_index": groups[owner]}


def _used(batch: Batch, groups: np.ndarray, filter_zero_signal: bool) -> tuple[np.ndarray, float]:
    """Which rollouts are trained, bool [R], and how many groups were left out for want of a signal."""
    used = ~np.isnan(batch.rewards) & ~batch.resampled
    if not filter_zero_signal:
        return used, 0.0
    silent = np.bincount(groups, has_signal(batch) & used)[groups] == 0
    return used & ~silent, float(len(np.unique(groups[used & silent])))


def has_signal(batch: Batch) -> np.ndarray:
    """Which rollouts have a token whose advantage is not 0, its own or through the credit of a call; bool [R]."""
    credited = [bool(np.any(value)) for value in batch.credit]
    return (batch.advantages != 0) | (np.bincount(batch.owner, credited, minlength=len(batch.advantages)) > 0)


def padding_share(updates: Sequence[Sequence[Sequence[Packed | PackedTree]]]) -> float:
    """Share of the tokens that the forward passes compute which belong to no sample.

    Packs are laid out without padding; what there is are empty packs, which compute one token so that all ranks do the
    same collectives (`harnessrl.train.policy.score`).

    Args:
        updates: [update][rank][pack]
    """
    tokens = [len(packed.token_ids) for ranks in updates for packs in ranks for packed in packs]
    empty = tokens.count(0)
    return empty / (sum(tokens) + empty) if tokens else 0.0


@dataclass(frozen=True)
class Items:
    """What the plan distributes: single samples, or whole rollouts as trees."""

    lengths: np.ndarray
    """int64 [I], tokens to compute."""
    members: Sequence[np.ndarray]
    """[I], the samples of each item."""
    pack: Callable[..., Packed | PackedTree]
    """How samples become a pack."""

    def samples_of(self, items: np.ndarray) -> np.ndarray:
        """The samples of a pack's items."""
        return np.concatenate([np.empty(0, np.int64), *(self.members[item] for item in items)])


def _items(samples: Sequence[Sample], tree: bool) -> Items:
    if tree:
        return Items(*tree_items(samples), pack_tree)
    lengths = np.array([len(sample.token_ids) for sample in samples])
    return Items(lengths, [np.array([index]) for index in range(len(samples))], pack)
