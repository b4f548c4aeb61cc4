"""Bounds of the configuration's values, and combinations that cannot be."""

from __future__ import annotations

import math
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from harnessrl.errors import ConfigError

if TYPE_CHECKING:
    from harnessrl.config import Config

MOST_REWARD = 1e100
POSITIVE = [
    "steps",
    "threads",
    "checkpoint_every",
    "checkpoint_keep",
    "stall_seconds",
    "task.timeout",
    "task.groups",
    "task.group_size",
    "task.overlong_tokens",
    "policy.max_response",
    "policy.max_batch",
    "policy.train_temperature",
    "policy.lora.alpha",
    "update.epochs",
    "update.max_tokens",
    "update.max_updates",
    "update.max_sample_tokens",
    "update.lr",
    "update.grad_clip",
    "service.workers",
    "service.capacity",
    "service.attempts",
    "task.max_resample",
    "validation.inputs",
    "validation.rollouts",
    "advantage.eps",
    "loss.importance_threshold",
    "loss.scale",
]
NOT_NEGATIVE = [
    "seed",
    "policy.max_context",
    "policy.max_calls",
    "policy.lora.rank",
    "policy.val_temperature",
    "task.overlong_penalty",
    "validation.every",
    "update.warmup_steps",
    "update.weight_decay",
    "loss.kl_coef",
    "loss.entropy_coef",
    "loss.mask_below",
    "loss.clip_low",
    "loss.clip_high",
    "service.hold_seconds",
]


def check(config: Config) -> None:
    """Refuse what types cannot: ranges and impossible combinations.

    Raises:
        ConfigError: by the key's path, with what is allowed.
    """
    for key in POSITIVE:
        value = attrgetter(key)(config)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{key}: must be larger than 0 and finite, got {value}")
    for key in NOT_NEGATIVE:
        value = attrgetter(key)(config)
        if not 0 <= value < math.inf:
            raise ConfigError(f"{key}: must be finite and not negative, got {value}")
    _check_ranges(config)
    _check_combinations(config)


def _check_ranges(config: Config) -> None:
    task, loss, update = config.task, config.loss, config.update
    for key in ("failure_reward", "overlong_penalty"):
        value = getattr(task, key)
        if not abs(value) <= MOST_REWARD:
            raise ConfigError(f"task.{key}: must be finite and within +-{MOST_REWARD:g}, got {value}")
    if not config.seed < 2**63:
        raise ConfigError(f"seed: must be below 2^63, got {config.seed}")
    if config.threads > 1024:
        raise ConfigError(f"threads: must be at most 1024, got {config.threads}")
    if config.policy.lora.rank > 4096:
        raise ConfigError(f"policy.lora.rank: must be at most 4096, got {config.policy.lora.rank}")
    if not all(0 <= beta < 1 for beta in update.betas):
        raise ConfigError(f"update.betas: must lie in 0..1 (below 1), got {update.betas}")
    if not loss.clip_low <= 1:
        raise ConfigError(f"loss.clip_low: must be at most 1 (a ratio is not negative), got {loss.clip_low}")
    if loss.dual_clip is not None and not loss.dual_clip > 1:
        raise ConfigError(f"loss.dual_clip: must be larger than 1, or null, got {loss.dual_clip}")
    if not 0 <= config.advantage.discount <= 1:
        raise ConfigError(f"advantage.discount: must lie in 0..1, got {config.advantage.discount}")
    if not 0 <= config.service.port < 65536:
        raise ConfigError(f"service.port: must lie in 0..65535, got {config.service.port}")
    if Path(config.run) == Path() or Path(config.run).is_absolute() or ".." in Path(config.run).parts:
        raise ConfigError(f"run: must be a name below {config.runs}/, got {config.run!r}")


def _check_combinations(config: Config) -> None:
    task, loss, update = config.task, config.loss, config.update
    if bool(task.harness) == bool(task.command):
        raise ConfigError("task: give exactly one of task.harness (MODULE:FUNCTION) and task.command (argv)")
    if config.train_agents is not None and not config.train_agents:
        raise ConfigError("train_agents: must name at least one agent, or be null for all")
    if task.resample_zero_signal and task.group_size < 2:
        raise ConfigError(
            "task.resample_zero_signal: needs task.group_size of 2 or more; one rollout has no signal to compare"
        )
    if (loss.normalizer == "constant") != (loss.scale is not None):
        raise ConfigError("loss.scale: needed by, and only by, loss.normalizer=constant")
    if loss.old == "engine" and loss.importance != "none":
        raise ConfigError(
            "loss.importance: must be none with loss.old=engine, whose ratios carry the correction already"
        )
    if loss.kl_in == "reward" and not loss.kl_coef:
        raise ConfigError("loss.kl_in: reward needs loss.kl_coef larger than 0")
    if not loss.mask_below < loss.mask_above:
        raise ConfigError(f"loss.mask_below: {loss.mask_below} must be smaller than loss.mask_above={loss.mask_above}")
    if update.split_rollouts and (update.rollouts_per_update is None or update.tree):
        raise ConfigError(
            "update.split_rollouts: needs update.rollouts_per_update, and update.tree=false: trees are whole"
        )
    if update.rollouts_per_update is not None and update.rollouts_per_update < task.group_size:
        raise ConfigError(
            f"update.rollouts_per_update: {update.rollouts_per_update} is below task.group_size={task.group_size}; groups are never split"
        )
