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

import itertools
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from harnessrl.adapter import Packed, PackedTree, explain_break
from harnessrl.config import Config
from harnessrl.display import Display
from harnessrl.engine.torch_engine import TorchEngine
from harnessrl.errors import ConfigError, RunError
from harnessrl.metrics import RunFolder, read_jsonl
from harnessrl.preflight import check, locked, resolve
from harnessrl.trace import read_steps
from harnessrl.train import checkpoint, faults
from harnessrl.train.batch import Batch, Finished, batch_metrics, make_batch, make_updates
from harnessrl.train.collect import EngineServer, Services, collect, rollout_specs
from harnessrl.train.export import copy_description
from harnessrl.train.loading import load_policy
from harnessrl.train.parallel import World, copy_parameters, world
from harnessrl.train.policy import load_model
from harnessrl.train.replay import advantage_gap, check_vocabulary
from harnessrl.train.update import Sums, Updater, warmup


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
        here = stack.enter_context(world())
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
        roller = stack.enter_context(Roller(config, trainer, display)) if here.leads else None
        return run_steps(config, trainer, roller, display)


def run_steps(config: Config, trainer: Trainer, roller: Roller | None, display: Display) -> dict[str, float]:
    """The loop. Rank 0 has a roller; the others only train on the packs that it deals."""
    metrics: dict[str, float] = {}
    for step in range(trainer.position.step, config.steps):
        began = time.perf_counter()
        rolled = roller.roll(step, trainer.here.size) if roller else None
        collected = time.perf_counter()
        sums = trainer.update(rolled.packs if rolled else None)
        if roller:
            roller.serve(trainer)
        else:
            trainer.copy_to(None)
        updated = time.perf_counter()
        if roller and rolled:
            metrics = roller.metrics(rolled) | sums.metrics()
            metrics |= {"time/rollout": collected - began, "time/update": updated - collected}
            metrics["perf/train_tokens_per_second"] = sums.totals["pack_tokens"] / (updated - collected)
            roller.write(step, rolled, metrics, began)
        if (step + 1) % config.checkpoint_every == 0 or step + 1 == config.steps:
            trainer.save(checkpoint.score(roller.recent) if roller else None)
        if roller:
            display.step(metrics)
    return metrics


class Trainer:
    """Every rank's part: policy, optimizer and checkpoints."""

    def __init__(self, config: Config, here: World, found: Path | None, display: Display) -> None:
        self.config, self.here = config, here
        folders = [policy_folder(config, display)] * here.size if here.leads else None  # made once, then shared
        self.folder = here.deal(folders)
        self.policy = load_policy(self.folder, here, recompute=config.update.recompute)
        reference = load_policy(self.folder, here).requires_grad_(False) if config.loss.kl_coef else None
        update = config.update
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(), update.lr, tuple(update.betas), weight_decay=update.weight_decay
        )
        scheduler = warmup(self.optimizer, update.warmup_steps)
        self.updater = Updater(self.policy, self.optimizer, reference, config, here, scheduler)
        parts = (self.policy, self.optimizer, scheduler, here)
        self.checkpoints = checkpoint.Checkpoints(config.folder / "checkpoints", *parts, config.checkpoint_keep)
        if here.leads:
            copy_description(self.folder, self.checkpoints.folder)
        self.position = checkpoint.Position(step=0, version=0, inputs=0)
        if found:
            self.position = checkpoint.load(found, *parts)
            display.note(f"resumed at step {self.position.step}")

    def update(self, packs: list[list[list[Packed | PackedTree]]] | None) -> Sums:
        """Train on a step's packs, [rank][update][pack] on rank 0, and move on by one step and version."""
        at = self.position
        try:
            sums = self.updater.step(self.here.deal(packs), at.version)
        except faults.Fault as fault:
            raise faults.record(fault, self.config.folder / "faults", at.step, at.version, self.here) from fault
        inputs = at.inputs + self.config.task.groups
        self.position = checkpoint.Position(step=at.step + 1, version=at.version + 1, inputs=inputs)
        return sums

    def copy_to(self, target: PreTrainedModel | None) -> None:
        """Bring the weights into the engine's own model; every rank takes part. Alone they are shared: nothing to do."""
        if self.here.size > 1:
            copy_parameters(self.policy.model, target)

    def save(self, score: checkpoint.Score | None) -> None:
        """Write a checkpoint, in the background."""
        self.checkpoints.save(self.position, score)


@dataclass(frozen=True)
class Rolled:
    """A step's rollouts on rank 0."""

    items: list[dict[str, Any]]
    """Trace lines as the service returned them."""
    batch: Batch
    packs: list[list[list[Packed | PackedTree]]]
    """[rank][update][pack]"""
    plan: dict[str, float]
    """Metrics of the plan: its balance, and what it left out."""


class Roller:
    """Rank 0's part: inputs, engine, service and the run's record. A context manager."""

    def __init__(self, config: Config, trainer: Trainer, display: Display) -> None:
        self.config, self.display, position = config, display, trainer.position
        self.tokenizer = Tokenizer.from_file(str(trainer.folder / "tokenizer.json"))
        shared = trainer.here.size == 1
        self.model = trainer.policy.model if shared else load_model(trainer.folder, trainer.here.device)
        self.engine = TorchEngine(self.model, max_batch=config.policy.max_batch, max_context=config.policy.max_context)
        self.engine.version = position.version
        self.recorded = read_steps(Path(config.replay)) if config.replay else iter(())
        stream = resolve(config.task.inputs)(config.seed, "train")
        self.inputs: Iterator[Any] = itertools.islice(stream, position.inputs, None)
        self.start = position.step
        self.folder = trainer.folder

    def __enter__(self) -> Roller:
        with ExitStack() as stack:
            if not self.config.replay:
                self.server = EngineServer(self.engine)
                stack.callback(self.server.close)
                self.display.status("starting the service and its workers")
                self.services = Services(
                    self.config, self.folder, self.server.address, self.engine.max_context, self.start, import_path()
                )
                stack.callback(self.services.close)
            self.record = RunFolder(self.config.folder, self.start, asdict(self.config))
            stack.callback(self.record.close)
            self.recent = deque(read_jsonl(self.config.folder / "metrics.jsonl"), maxlen=checkpoint.WINDOW)
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def roll(self, step: int, ranks: int) -> Rolled:
        """Collect a step's rollouts and plan its updates; the engine sleeps afterwards."""
        config = self.config
        items = self._replayed(step) if config.replay else self._collected(step)
        self.display.status("updating")
        batch = make_batch([Finished.from_trace(item, config.task.failure_reward) for item in items], config)
        updates, plan = make_updates(batch, config, seed=config.seed + step, world_size=ranks)
        self.engine.drain() if config.replay else self.server.drain()
        self.engine.sleep()
        self.engine.wake(("weights",))
        return Rolled(items, batch, [[update[rank] for update in updates] for rank in range(ranks)], plan)

    def _collected(self, step: int) -> list[dict[str, Any]]:
        inputs = list(itertools.islice(self.inputs, self.config.task.groups))
        if len(inputs) < self.config.task.groups:
            raise RunError(
                f"task.inputs: {self.config.task.inputs} ended: step {step} needs {self.config.task.groups} inputs and got "
                f"{len(inputs)}; a stream of inputs has no end"
            )
        specs = rollout_specs(inputs, self.config, step)
        report = lambda done, wanted: self.display.status(f"rollouts {done}/{wanted}")  # noqa: E731
        items = collect(self.services, self.server, specs, self.config.stall_seconds, report)
        failures = Counter((item["failure"], item.get("error_message")) for item in items)
        (reason, message), count = failures.most_common(1)[0]
        if reason is not None and count == len(items):
            self.display.note(f"step {step + 1}: all {count} rollouts failed: {reason}: {message or 'no message'}")
        return items

    def _replayed(self, step: int) -> list[dict[str, Any]]:
        for recorded, items in self.recorded:
            if recorded == step:
                check_vocabulary(items, self.model.config.get_text_config().vocab_size, str(self.config.replay))
                return [dict(item) for item in items]
        raise ConfigError(f"replay: {self.config.replay} has no step {step}")

    def serve(self, trainer: Trainer) -> None:
        """Take the new weights and answer calls again."""
        trainer.copy_to(self.model)
        self.engine.load(trainer.position.version)
        self.engine.wake(("kv_cache",))

    def metrics(self, rolled: Rolled) -> dict[str, float]:
        """What the rollouts were like."""
        breaks = [item for merge in rolled.batch.merges for item in merge.breaks]
        kinds = Counter(explain_break(item, self._decode).kind for item in breaks)
        metrics = batch_metrics(rolled.batch, kinds)
        metrics["rollout/drift_share"] = drift_share(rolled.batch, self.tokenizer)
        if self.config.replay:
            metrics["replay/advantage_gap"] = advantage_gap(rolled.batch, rolled.items)
        return metrics | {"perf/padding_share": 0.0} | rolled.plan

    def write(self, step: int, rolled: Rolled, metrics: dict[str, float], began: float) -> None:
        """Append to rollouts.jsonl, metrics.jsonl and TensorBoard; `began` is when the step did."""
        batch = rolled.batch
        advantage = {f.rollout.rollout_id: a for f, a in zip(batch.finished, batch.advantages.tolist(), strict=True)}
        lines = sorted(rolled.items, key=lambda item: (item["group_id"], item["rollout_id"]))
        self.record.record({"step": step, "advantage": advantage[item["rollout_id"]]} | item for item in lines)
        columns = {
            "rollout/samples": np.array([len(merge.samples) for merge in batch.merges]),
            "rollout/reward": batch.rewards[~np.isnan(batch.rewards)],
            "sample/tokens": np.array([len(sample.token_ids) for sample in batch.samples]),
        }
        self.record.histograms(step, columns)
        metrics["time/step"] = time.perf_counter() - began
        self.record.log(step, metrics)
        self.recent.append(metrics)

    def _decode(self, ids: Any) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)


def drift_share(batch: Batch, tokenizer: Tokenizer) -> float:
    """Share of non-empty responses whose ids do not survive decode and re-encode; NaN if there are none."""
    ids = [call.response_ids.tolist() for f in batch.finished for call in f.rollout.calls if len(call.response_ids)]
    if not ids:
        return float("nan")
    texts = tokenizer.decode_batch(ids, skip_special_tokens=False)
    again = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return float(np.mean([encoding.ids != row for encoding, row in zip(again, ids, strict=True)]))


def import_path() -> list[str]:
    """Folders that make MODULE:FUNCTION names resolve in a worker as they do here."""
    return [entry or str(Path.cwd()) for entry in sys.path if entry == "" or Path(entry).is_dir()]


def policy_folder(config: Config, display: Display | None = None) -> Path:
    """The transformers folder of the initial policy: `policy.source` itself, or what its function makes."""
    source = config.policy.source
    if ":" not in source:
        return Path(source)
    report = (
        (lambda done, total, loss: display.status(f"warm start {done}/{total}  loss {loss:.3f}")) if display else None
    )
    return Path(resolve(source)(config.seed, Path(config.runs) / "cache", report=report))
