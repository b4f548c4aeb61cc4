"""From finished rollouts to weighted updates: rollouts -> samples -> advantages -> plan -> weights. numpy only.

The order matters: advantages are computed over all scored rollouts before anything is dropped, and weights over each
whole update before it is split into packs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from harnessrl.adapter import (
    Merge,
    Packed,
    PackedTree,
    Rollout,
    Sample,
    merge_calls,
    pack,
    pack_tree,
    plan_updates,
    rollout_advantages,
    token_weights,
    tree_items,
)
from harnessrl.config import Config, Task

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

    @classmethod
    def from_trace(cls, item: Mapping[str, Any], failure_reward: float = 0.0) -> Finished:
        """Read an item of `/api/traces` or a line of rollouts.jsonl."""
        rollout, failure = Rollout.from_dict(item), item.get("failure")
        if rollout.reward is None and failure in OWN_FAILURES:
            rollout = Rollout(
                rollout_id=rollout.rollout_id, group_id=rollout.group_id, calls=rollout.calls, reward=failure_reward
            )
        return cls(rollout=rollout, failure=failure, input=item.get("input"))


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
    """float64 [R]; 0 where unscored."""
    overlong: np.ndarray
    """bool [R], rollouts of more than `task.overlong_tokens` sampled tokens."""


def make_batch(finished: Sequence[Finished], config: Config) -> Batch:
    """Merge every rollout and give it its advantage; calls of agents outside `train_agents` are context only."""
    finished = sorted(finished, key=lambda item: (item.rollout.group_id, item.rollout.rollout_id))
    rollouts = [_trainable(item.rollout, config.train_agents) for item in finished]
    limit = config.update.max_sample_tokens
    merges = [merge_calls(r, config.update.strategy, max_sample_tokens=limit) for r in rollouts]
    counts = np.array([len(merge.samples) for merge in merges], np.int64)
    rewards, overlong = _rewards(rollouts, config.task)
    advantages = rollout_advantages(
        rewards,
        [r.group_id for r in rollouts],
        config.advantage.estimator,
        unit=config.advantage.unit,
        samples_per_rollout=counts,
        eps=config.advantage.eps,
    )
    return Batch(
        finished=finished,
        merges=merges,
        samples=[sample for merge in merges for sample in merge.samples],
        owner=np.repeat(np.arange(len(rollouts)), counts),
        rewards=rewards,
        advantages=advantages,
        overlong=overlong,
    )


def _trainable(rollout: Rollout, agents: Sequence[str] | None) -> Rollout:
    """The rollout with calls of agents that are not listed marked as not trainable; None lists all."""
    if agents is None:
        return rollout
    calls = [replace(call, trainable=call.trainable and call.agent in agents) for call in rollout.calls]
    return replace(rollout, calls=calls)


def _rewards(rollouts: Sequence[Rollout], task: Task) -> tuple[np.ndarray, np.ndarray]:
    """The rewards that advantages are computed from (NaN is unscored), and which rollouts are overlong."""
    rewards = np.array([np.nan if r.reward is None else r.reward for r in rollouts], np.float64)
    sampled = np.array([sum(len(call.response_ids) for call in r.calls) for r in rollouts], np.int64)
    overlong = sampled > task.overlong_tokens if task.overlong_tokens else np.zeros(len(rollouts), bool)
    if task.overlong == "mask":
        return np.where(overlong, np.nan, rewards), overlong
    return rewards - task.overlong_penalty * overlong, overlong


def make_updates(
    batch: Batch, config: Config, seed: int, world_size: int = 1
) -> tuple[list[list[list[Packed | PackedTree]]], dict[str, float]]:
    """The packs of each optimizer update, [updates][ranks][packs], with weights from the update's global counts.

    Unscored rollouts are never trained; with `update.filter_zero_signal` groups without an advantage neither, and
    weights do not count them. With `update.rollouts_per_update` groups stay whole.

    Returns:
        the packs, and metrics: `perf/rank_balance`, ranks' mean cost over the slowest rank's, over all updates (1 where
        none waits), and how many groups and updates were left out by configuration.
    """
    groups = np.unique([item.rollout.group_id for item in batch.finished], return_inverse=True)[1]
    used, filtered = _used(batch, groups, config.update.filter_zero_signal)
    metrics = {"perf/rank_balance": 1.0, "update/filtered_groups": filtered, "update/skipped_updates": 0.0}
    chosen = np.flatnonzero(used[batch.owner])
    if len(chosen) == 0:
        return [], metrics
    owner = batch.owner[chosen]
    samples = [batch.samples[s] for s in chosen]
    trained = np.array([int(sample.loss_mask.sum()) for sample in samples])
    items = _items(samples, config.update.tree)
    first = np.array([members[0] for members in items.members])
    plan = plan_updates(
        items.lengths,
        owner[first],
        rollouts_per_update=config.update.rollouts_per_update or len(batch.finished),
        world_size=world_size,
        max_tokens=config.update.max_tokens,
        group_index=groups[owner[first]],
        oversize="alone",
        seed=seed,
    )
    advantages = batch.advantages[owner]
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
    slowest = sum(update.step_time for update in run)
    if slowest:
        metrics["perf/rank_balance"] = sum(update.total_cost for update in run) / (world_size * slowest)
    return updates, metrics


def _used(batch: Batch, groups: np.ndarray, filter_zero_signal: bool) -> tuple[np.ndarray, float]:
    """Which rollouts are trained, bool [R], and how many groups were left out for want of a signal."""
    scored = ~np.isnan(batch.rewards)
    if not filter_zero_signal:
        return scored, 0.0
    silent = np.bincount(groups, batch.advantages != 0)[groups] == 0
    return scored & ~silent, float(len(np.unique(groups[scored & silent])))


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


def batch_metrics(batch: Batch, kinds: Counter[str]) -> dict[str, float]:
    """What the rollouts of a step were like; `kinds` counts breaks by cause."""
    counts = np.array([len(merge.samples) for merge in batch.merges])
    trained = np.bincount(batch.owner, [s.loss_mask.sum() for s in batch.samples], minlength=len(counts))
    sampled = sum(len(call.response_ids) for item in batch.finished for call in item.rollout.calls)
    scored = ~np.isnan(batch.rewards)
    rewards = np.array([item.rollout.reward for item in batch.finished if item.rollout.reward is not None])
    used = counts > 0
    skipped = Counter(item.reason for merge in batch.merges for item in merge.skipped)
    failed = Counter(item.failure for item in batch.finished if item.failure)
    metrics = {
        "reward/mean": _mean(rewards),
        "reward/std": float(rewards.std()) if len(rewards) else float("nan"),
        "rollout/count": float(len(counts)),
        "rollout/overlong": float(batch.overlong.sum()),
        "rollout/calls_mean": _mean(np.array([len(item.rollout.calls) for item in batch.finished])),
        "rollout/samples_mean": _mean(counts[used]),
        "rollout/single_sample_share": _mean(counts[used] == 1),
        "rollout/samples_reward_correlation": _correlation(counts[scored & used], batch.rewards[scored & used]),
        "rollout/tokens_mean": _mean(trained[used]),
        "rollout/trained_token_share": float(trained.sum() / sampled) if sampled else float("nan"),
        "sample/tokens_mean": _mean(np.array([len(s.token_ids) for s in batch.samples])),
        "advantage/std": float(batch.advantages[scored].std()) if scored.any() else float("nan"),
        "advantage/zero_signal_groups": float(_zero_signal(batch)),
    }
    metrics |= {f"merge/breaks_{kind}": float(n) for kind, n in kinds.items()}
    metrics |= {f"merge/skipped_{reason}": float(n) for reason, n in skipped.items()}
    metrics |= {f"rollout/failed_{reason}": float(n) for reason, n in failed.items()}
    return metrics


def _mean(values: np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else float("nan")


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Pearson's r; NaN where either is constant."""
    if len(a) < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return float("nan")
    return float(np.corrcoef(a, b)[0, 1])


def _zero_signal(batch: Batch) -> int:
    """Groups none of whose rollouts has an advantage."""
    groups = np.unique([item.rollout.group_id for item in batch.finished], return_inverse=True)[1]
    return int((np.bincount(groups, batch.advantages != 0) == 0).sum())
