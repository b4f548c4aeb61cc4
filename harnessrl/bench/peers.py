"""The same work by other libraries, called as they are, where they are installed, and one by the book.

Each function but the last takes the benchmark's data, does the conversion that the peer needs outside the timed call,
and returns the call to time, or None where the peer cannot be imported.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from harnessrl.adapter import Rollout

Timed = Callable[[], Any]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Peers may greet, warn or configure logging on import."""
    level = logging.root.manager.disable
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(level)


def _left_out(peer: str, error: Exception) -> None:
    """Say why a peer that is installed cannot be measured; one that is not needs no word."""
    if not isinstance(error, ModuleNotFoundError):
        print(f"{peer} is left out: {error!r}", file=sys.stderr)


def tinker_merge(rollouts: Sequence[Rollout]) -> Timed | None:
    """tinker-cookbook: extends the previous call's sample only."""
    try:
        with _quiet():
            import tinker
            from tinker_cookbook.completers import TokensWithLogprobs
            from tinker_cookbook.rl.data_processing import trajectory_to_data
            from tinker_cookbook.rl.types import Trajectory, Transition
    except Exception as error:
        return _left_out("tinker-cookbook", error)
    trajectories = []
    for rollout in rollouts:
        steps = [
            Transition(
                ob=tinker.ModelInput.from_ints(call.prompt_ids.tolist()),
                ac=TokensWithLogprobs(tokens=call.response_ids.tolist(), maybe_logprobs=call.logprobs.tolist()),
                reward=0.0,
                episode_done=False,
            )
            for call in rollout.calls
        ]
        trajectories.append(Trajectory(transitions=steps, final_ob=tinker.ModelInput.from_ints([0])))
    return lambda: [trajectory_to_data(trajectory, 1.0) for trajectory in trajectories]


def skyrl_merge(rollouts: Sequence[Rollout]) -> Timed | None:
    """SkyRL: extends the previous call's sample only."""
    try:
        with _quiet():
            from skyrl.train.generators.utils import merge_stepwise_output
    except Exception as error:
        return _left_out("SkyRL", error)
    calls = [(rollout, index, call) for rollout in rollouts for index, call in enumerate(rollout.calls)]
    output = {
        "prompt_token_ids": [call.prompt_ids.tolist() for _, _, call in calls],
        "response_ids": [call.response_ids.tolist() for _, _, call in calls],
        "rewards": [0.0 for _ in calls],
        "loss_masks": [[1] * len(call.response_ids) for _, _, call in calls],
        "rollout_logprobs": [call.logprobs.tolist() for _, _, call in calls],
        "stop_reasons": ["stop" for _ in calls],
        "trajectory_ids": [rollout.rollout_id for rollout, _, _ in calls],
        "is_last_step": [index == len(rollout.calls) - 1 for rollout, index, _ in calls],
        "rollout_metrics": None,
    }
    return lambda: merge_stepwise_output(output)


def verl_grpo(rewards: np.ndarray, group_ids: np.ndarray, *, vectorized: bool) -> Timed | None:
    """verl: advantages of every token; one token a rollout here."""
    try:
        with _quiet():
            from verl.trainer.ppo import core_algos
    except Exception as error:
        return _left_out("verl", error)
    import torch  # after it: loading torch for nothing takes seconds

    scores, mask = torch.tensor(rewards, dtype=torch.float64)[:, None], torch.ones(len(rewards), 1)
    compute = (
        core_algos.compute_grpo_vectorized_outcome_advantage
        if vectorized
        else core_algos.compute_grpo_outcome_advantage
    )
    return lambda: compute(scores, mask, group_ids)


def verl_partitions(lengths: Sequence[int], parts: int) -> Timed | None:
    """verl: Karmarkar-Karp into parts of like sums; returns indices."""
    try:
        with _quiet():
            from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions
    except Exception as error:
        return _left_out("verl", error)
    return lambda: get_seqlen_balanced_partitions(list(lengths), parts, equal_size=False)


def skyrl_bins(lengths: Sequence[int], room: int) -> Timed | None:
    """SkyRL: first-fit decreasing; returns indices."""
    try:
        with _quiet():
            from skyrl.train.dataset.bin_packing import FirstFitDecreasing
    except Exception as error:
        return _left_out("SkyRL", error)
    return lambda: FirstFitDecreasing(bin_capacity=room).pack(list(lengths))


def first_fit_decreasing(lengths: Sequence[int], room: int) -> list[list[int]]:
    """First-fit decreasing as it is usually written: every bin is tried in turn; the indices in each bin."""
    bins: list[list[int]] = []
    left: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[index]
        for place, space in enumerate(left):
            if length <= space:
                bins[place].append(index)
                left[place] = space - length
                break
        else:
            bins.append([index])
            left.append(room - length)
    return bins
