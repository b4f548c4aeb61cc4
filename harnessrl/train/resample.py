"""Dynamic sampling: groups of equal rewards teach nothing, so a step replaces them by groups of the next inputs.

DAPO (arXiv:2503.14476, section 3.2) does so until the batch is full; here for `task.max_resample` rounds at most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from harnessrl.adapter import rollout_advantages
from harnessrl.config import Task
from harnessrl.train.batch import Finished, effective_rewards

Items = list[dict[str, Any]]


def collect_groups(collect: Callable[[int, int], Items], task: Task) -> Items:
    """Collect a step's `task.groups` groups, and with `task.resample_zero_signal` replace those without a signal.

    Each round collects as many groups as the one before left without a signal. What is replaced stays in the step's
    record and metrics as `"resampled": true`, and is not trained; after the last round nothing is replaced, so every
    step trains `task.groups` groups.

    Args:
        collect: (count, first) -> trace lines of `count` groups of the next inputs; `first` were collected in this step.
        task: sizes, bounds, and what a reward is (failures, overlong rollouts).
    Returns:
        trace lines of all groups.
    """
    items, count, first = [], task.groups, 0
    for _ in range(task.max_resample if task.resample_zero_signal else 0):
        fresh = collect(count, first)
        silent = silent_groups(fresh, task)
        items += [item | ({"resampled": True} if item["group_id"] in silent else {}) for item in fresh]
        first, count = first + count, len(silent)
        if not count:
            return items
    return items + collect(count, first)


def silent_groups(items: Sequence[Mapping[str, Any]], task: Task) -> set[str]:
    """The groups whose scored rollouts all have equal rewards, or that have fewer than two; by their ids."""
    finished = [Finished.from_trace(item, task.failure_reward) for item in items]
    rewards, _ = effective_rewards([item.rollout for item in finished], task)
    groups = np.array([item.rollout.group_id for item in finished])
    signal = rollout_advantages(rewards, groups.tolist(), "dr_grpo") != 0
    return set(groups.tolist()) - set(groups[signal].tolist())
