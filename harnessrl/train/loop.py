"""The training loop, read from top to bottom: config -> rollouts -> calls -> samples -> weights -> plan -> update.

    harnessrl train experiments/lookup/config.yaml steps=60

Differences from the textbook GRPO loop:

1. Samples come from an unmodified harness, so a rollout has a dynamic number of them; advantages, weights and updates
   are counted in rollouts (arXiv:2608.17528).
2. Weights of tokens are computed once an update from global counts; the loss is a sum, nothing is averaged later.
3. Ratios compare with the trainer's own logprobs; the engine's are compared with them at every step and the largest
   difference is logged, since a wrong mask or position still learns.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from harnessrl.config import Config
from harnessrl.display import Display
from harnessrl.preflight import check, locked, resolve
from harnessrl.train import checkpoint, faults
from harnessrl.train.export import copy_description
from harnessrl.train.loading import load_policy
from harnessrl.train.lora import add_adapters, copy_weights
from harnessrl.train.parallel import World, world
from harnessrl.train.penalty import penalised, reference_packs, rollout_kl
from harnessrl.train.policy import load_model
from harnessrl.train.roller import Rolled, Roller
from harnessrl.train.update import Sums, Updater, warmup
from harnessrl.train.verify import verify


def train(config: Config) -> dict[str, float]:
    """Train a policy as configured, from its last checkpoint if there is one; every rank of torchrun calls it.

    Returns:
        the metrics of the last step that ran (on rank 0); empty if all had run before.
    Raises:
        ConfigError: bad input, before anything is started.
        RunError: a loss or gradient norm that is not finite; the weights are those of the last whole update.
    """
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    with ExitStack() as stack:
        here = stack.enter_context(world(dtype=getattr(torch, config.policy.precision)))
        if here.leads:
            stack.enter_context(locked(config.folder))
            check(config)
        checkpoints = [checkpoint.usable(config.folder / "checkpoints")] * here.size if here.leads else None
        found, notes = here.deal(checkpoints)
        start = checkpoint.step_of(found) if found else 0
        display = stack.enter_context(Display(config.run, start, config.steps, shown=here.leads))
        for note in notes:
            display.note(note)
        if start >= config.steps:
            display.note(f"finished already: {start} steps in {config.folder}")
            return {}
        trainer = Trainer(config, here, found, display)
        stack.enter_context(trainer.checkpoints)
        roller = stack.enter_context(trainer.roller(display)) if here.leads else None
        trainer.copy_to(roller.model if roller else None)  # a resumed policy is not the one in the folder
        return run_steps(config, trainer, roller, display)


def run_steps(config: Config, trainer: Trainer, roller: Roller | None, display: Display) -> dict[str, float]:
    """The loop. Rank 0 has a roller; the others only train on the packs that it deals."""
    metrics: dict[str, float] = {}
    if roller:
        roller.validate(trainer.position.step)
    for step in range(trainer.position.step, config.steps):
        began = time.perf_counter()
        rolled = trainer.penalise(roller.roll(step) if roller else None)
        rolled = roller.plan(step, rolled, trainer.here.size) if roller and rolled else None
        collected = time.perf_counter()
        sums = trainer.update(rolled)
        trainer.copy_to(roller.model if roller else None)
        if roller:
            roller.serve(trainer.position.version)
        updated = time.perf_counter()
        if roller and rolled:
            metrics = sums.metrics() | roller.metrics(rolled)
            metrics |= {"time/rollout": collected - began, "time/update": updated - collected}
            metrics["update/computed_tokens"] = float(sums.totals["pack_tokens"])
            metrics["perf/train_tokens_per_second"] = sums.totals["pack_tokens"] / (updated - collected)
            roller.write(step, rolled, metrics, began)
            warn(step, metrics, config, display)
            roller.validate(step + 1)
        if (step + 1) % config.checkpoint_every == 0 or step + 1 == config.steps:
            trainer.save(roller.score() if roller else None)
        if roller:
            display.step(metrics)
    return metrics


FAR = 0.1
"""Nats a token; the largest seen between an engine and a trainer of the same weights is 0.04, in bfloat16 on lookup."""


def warn(step: int, metrics: dict[str, float], config: Config, display: Display) -> None:
    """Say what a person would want to know at once."""
    if metrics["policy/engine_logprob_gap"] > FAR and config.update.strategy != "substitute":  # whose gap is its bias
        gap = f"engine and trainer differ by {metrics['policy/engine_logprob_gap']:.2g} nats on a token of the same version"
        display.note(f"step {step + 1}: {gap}: was it this policy that sampled (a replay's seed and policy.source)?")
    if not metrics["update/trained_tokens"]:
        display.note(
            f"step {step + 1}: nothing was trained: no scored call of a trained agent, or no group with a signal"
        )


class Trainer:
    """Every rank's part: policy, optimizer and checkpoints."""

    def __init__(self, config: Config, here: World, found: Path | None, display: Display) -> None:
        self.config, self.here = config, here
        folders = [policy_folder(config, display)] * here.size if here.leads else None  # made once, then shared
        self.folder = here.deal(folders)
        self.dtype = getattr(torch, config.policy.precision)
        self.policy = load_policy(
            self.folder,
            here,
            recompute=config.update.recompute,
            dtype=self.dtype,
            lora=config.policy.lora,
            seed=config.seed,
        )
        self.reference = None
        if config.loss.kl_coef or config.loss.reference:
            self.reference = load_policy(self.folder, here, dtype=self.dtype).requires_grad_(False)
        update = config.update
        self.optimizer = torch.optim.AdamW(
            [p for p in self.policy.parameters() if p.requires_grad],
            update.lr,
            tuple(update.betas),
            weight_decay=update.weight_decay,
        )
        scheduler = warmup(self.optimizer, update.warmup_steps)
        in_loss = self.reference if config.loss.kl_in == "loss" else None
        self.updater = Updater(self.policy, self.optimizer, in_loss, config, here, scheduler)
        parts = (self.policy, self.optimizer, scheduler, here)
        self.checkpoints = checkpoint.Checkpoints(config.folder / "checkpoints", *parts, config.checkpoint_keep)
        if here.leads:
            copy_description(self.folder, self.checkpoints.folder)
        self.position = checkpoint.Position(step=0, version=0, inputs=0)
        if found:
            self.position = checkpoint.load(found, *parts)
            display.note(f"resumed at step {self.position.step}")

    def roller(self, display: Display) -> Roller:
        """Rank 0's roller; its engine begins with the weights of the policy's folder."""
        model = self.engine_model()
        verify(model)
        return Roller(self.config, self.folder, model, self.position, display)

    def penalise(self, rolled: Rolled | None) -> Rolled | None:
        """With the KL in the reward, take it from the rewards of rank 0's rollouts; all ranks compute it."""
        if self.config.loss.kl_in == "loss" or self.reference is None:
            return rolled
        packs = self.here.deal(reference_packs(rolled.batch, self.config, self.here.size) if rolled else None)
        kl = rollout_kl(self.reference, packs, self.config.policy.train_temperature, self.here)
        if rolled is None:
            return None
        batch, metrics = penalised(rolled.batch, kl, self.config)
        return replace(rolled, batch=batch, metrics=rolled.metrics | metrics)

    def update(self, rolled: Rolled | None) -> Sums:
        """Train on a step's packs, which rank 0 deals, and move on by one step and version."""
        at = self.position
        packs, used = self.here.deal([(packs, rolled.inputs) for packs in rolled.packs] if rolled else None)
        try:
            sums = self.updater.step(packs, at.version)
        except faults.Fault as fault:
            raise faults.record(fault, self.config.folder / "faults", at.step, at.version, self.here) from fault
        self.position = checkpoint.Position(step=at.step + 1, version=at.version + 1, inputs=at.inputs + used)
        return sums

    @property
    def shared(self) -> bool:
        """Whether the engine runs the policy's own modules: alone, in float32, without adapters."""
        return self.here.size == 1 and self.dtype == torch.float32 and not self.config.policy.lora.rank

    def engine_model(self) -> PreTrainedModel:
        """What the engine runs: the policy's modules where they are shared, else a copy of its own in `precision`."""
        if self.shared:
            return self.policy.model
        model = load_model(self.folder, self.here.device, self.dtype)
        if self.config.policy.lora.rank and not self.merges:
            add_adapters(model, self.config.policy.lora)
        return model

    @property
    def merges(self) -> bool:
        """Whether adapters are added to the engine's weights; bfloat16 would round most of what they add away."""
        return self.dtype == torch.float32

    def copy_to(self, target: PreTrainedModel | None) -> None:
        """Bring the weights into the engine's own model; every rank takes part. Where they are shared, do nothing."""
        if not self.shared:
            copy_weights(self.policy.model, target, merge=self.merges)

    def save(self, score: checkpoint.Score | None) -> None:
        """Write a checkpoint, in the background."""
        self.checkpoints.save(self.position, score)


def policy_folder(config: Config, display: Display | None = None) -> Path:
    """The transformers folder of the initial policy: `policy.source` itself, or what its function makes."""
    source = config.policy.source
    if ":" not in source:
        return Path(source)
    report = (
        (lambda done, total, loss: display.status(f"warm start {done}/{total}  loss {loss:.3f}")) if display else None
    )
    return Path(resolve(source)(config.seed, Path(config.runs) / "cache", report=report))
