"""Validation runs: held-out inputs in `val` mode, not trained, the same ones each time."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from harnessrl.config import Config
from harnessrl.errors import ConfigError
from harnessrl.train.batch import Finished, make_batch
from harnessrl.train.collect import rollout_specs
from harnessrl.train.summary import batch_metrics

NAMES = {
    "reward/mean": "val/reward_mean",
    "rollout/count": "val/count",
    "rollout/samples_mean": "val/samples_mean",
    "rollout/tokens_mean": "val/tokens_mean",
}
FAILED = "rollout/failed_"


class Validation:
    """Runs the first `validation.inputs` inputs of the task's split "val".

    A rollout has the same id each time, and its sampling noise and whatever its harness draws from the id repeat: equal
    weights give equal rewards, and two validations differ by their weights alone.

    Args:
        config: the run's.
        inputs: `task.inputs`.
    Raises:
        ConfigError: the split has fewer inputs.
    """

    def __init__(self, config: Config, inputs: Callable[[int, str], Iterator[Any]]) -> None:
        self.config = config
        wanted = config.validation.inputs
        held_out = list(itertools.islice(inputs(config.seed, "val"), wanted))
        if len(held_out) < wanted:
            raise ConfigError(
                f"validation.inputs: {wanted}, but {config.task.inputs} has {len(held_out)} of the split 'val'"
            )
        exact = replace(config.update, strategy="best_effort")  # nothing is trained: "substitute" has no place here
        self.merging = replace(config, update=exact)
        self.specs = rollout_specs(held_out, config, f"val-{config.seed}", config.validation.rollouts, train=False)

    def due(self, step: int) -> bool:
        """Whether the weights that step `step` starts from are validated; step `steps` is after the last."""
        return step % self.config.validation.every == 0 or step == self.config.steps

    def run(
        self, collect: Callable[[Sequence[dict[str, Any]]], list[dict[str, Any]]]
    ) -> tuple[list[dict[str, Any]], dict[str, float]]:
        """Run all rollouts.

        Args:
            collect: runs rollouts of these requests to their ends.
        Returns:
            their trace lines in the order of their ids, and the metrics val/reward_mean, val/count, val/samples_mean,
            val/tokens_mean (trained tokens, were they trained) and val/failed_REASON.
        """
        items = sorted(collect(self.specs), key=lambda item: (item["group_id"], item["rollout_id"]))
        finished = [Finished.from_trace(item, self.config.task.failure_reward) for item in items]
        metrics = batch_metrics(make_batch(finished, self.merging), Counter())
        out = {name: metrics[key] for key, name in NAMES.items()}
        return items, out | {key.replace(FAILED, "val/failed_"): n for key, n in metrics.items() if FAILED in key}
