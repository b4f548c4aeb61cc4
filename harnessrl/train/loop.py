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

import fcntl
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from harnessrl.adapter import explain_break
from harnessrl.config import Config
from harnessrl.display import Display
from harnessrl.engine.torch_engine import TorchEngine
from harnessrl.errors import ConfigError
from harnessrl.metrics import RunFolder
from harnessrl.train import checkpoint
from harnessrl.train.batch import Batch, Finished, batch_metrics, make_batch, make_updates
from harnessrl.train.collect import EngineServer, Services, collect, rollout_specs, settings_of
from harnessrl.train.policy import load_policy, resolve
from harnessrl.train.update import Updater


def train(config: Config) -> dict[str, float]:
    """Train a policy as configured, from its last checkpoint if there is one.

    Returns:
        the metrics of the last step that ran; empty if all had run before.
    Raises:
        ConfigError: bad input, before anything is started.
    """
    check(config)
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    with locked(config.folder), ExitStack() as stack:
        found = checkpoint.latest(config.folder / "checkpoints")
        start = int(found.name.removeprefix("step-")) if found else 0
        display = stack.enter_context(Display(config.run, start, config.steps))
        if start >= config.steps:
            display.note(f"finished already: {start} steps in {config.folder}")
            return {}
        return Run(config, found, display, stack).steps()


class Run:
    """The parts of a run, and its steps."""

    def __init__(self, config: Config, found: Path | None, display: Display, stack: ExitStack) -> None:
        self.config, self.display = config, display
        folder = policy_folder(config, display)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.model = load_policy(folder)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            config.update.lr,
            tuple(config.update.betas),
            weight_decay=config.update.weight_decay,
        )
        reference = load_policy(folder).requires_grad_(False) if config.loss.kl_coef else None
        self.position = checkpoint.Position(step=0, version=0)
        if found:
            self.position = checkpoint.load(found, self.model, self.optimizer)
            display.note(f"resumed at step {self.position.step}")
        self.updater = Updater(self.model, self.optimizer, reference, config)
        self.engine = TorchEngine(self.model, max_batch=config.policy.max_batch, max_context=config.policy.max_context)
        self.engine.version = self.position.version
        self.inputs: Iterator[Any] = itertools.islice(
            resolve(config.task.inputs)(config.seed, "train"), self.position.step * config.task.groups, None
        )
        self.server = EngineServer(self.engine)
        stack.callback(self.server.close)
        display.status("starting the service and its workers")
        self.services = Services(
            config, folder, self.server.address, self.engine.max_context, self.position.step, import_path()
        )
        stack.callback(self.services.close)
        self.record = RunFolder(config.folder, self.position.step, settings_of(config))
        stack.callback(self.record.close)

    def steps(self) -> dict[str, float]:
        """Run until `config.steps`, with checkpoints on the way."""
        metrics: dict[str, float] = {}
        for step in range(self.position.step, self.config.steps):
            metrics = self.step(step)
            self.display.step(metrics)
            if (step + 1) % self.config.checkpoint_every == 0 or step + 1 == self.config.steps:
                checkpoint.save(self.config.folder / "checkpoints", self.model, self.optimizer, self.position)
        return metrics

    def step(self, step: int) -> dict[str, float]:
        """One step: rollouts in, one or more updates, new weights to the engine, everything logged."""
        config, began = self.config, time.perf_counter()
        specs = rollout_specs(list(itertools.islice(self.inputs, config.task.groups)), config, step)
        report = lambda done, wanted: self.display.status(f"rollouts {done}/{wanted}")  # noqa: E731
        items = collect(self.services, self.server, specs, config.stall_seconds, report)
        collected = time.perf_counter()

        self.display.status("updating")
        finished = [Finished.from_trace(item, config.task.failure_reward) for item in items]
        batch = make_batch(finished, config)
        ranks = list(make_updates(batch, config, seed=config.seed + step))
        version = self.position.version
        self.engine.drain()
        self.engine.sleep()
        self.engine.wake(("weights",))
        sums = self.updater.step([update[0] for update in ranks], version)
        self.position = checkpoint.Position(step=step + 1, version=version + 1)
        self.engine.load(version + 1)
        self.engine.wake(("kv_cache",))
        updated = time.perf_counter()

        kinds = Counter(explain_break(item, self._decode).kind for merge in batch.merges for item in merge.breaks)
        metrics = batch_metrics(batch, kinds) | sums.metrics()
        metrics["rollout/drift_share"] = drift_share(batch, self.tokenizer)
        metrics |= {
            "time/rollout": collected - began,
            "time/update": updated - collected,
            "perf/train_tokens_per_second": sums.pack_tokens / (updated - collected),
            "perf/padding_share": 0.0,
            "perf/rank_balance": 1.0,
        }
        self._write(step, batch, items)
        metrics["time/step"] = time.perf_counter() - began
        self.record.log(step, metrics)
        return metrics

    def _decode(self, ids: Any) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    def _write(self, step: int, batch: Batch, items: list[dict[str, Any]]) -> None:
        advantage = {f.rollout.rollout_id: a for f, a in zip(batch.finished, batch.advantages.tolist(), strict=True)}
        lines = sorted(items, key=lambda item: (item["group_id"], item["rollout_id"]))
        self.record.record({"step": step, "advantage": advantage[item["rollout_id"]]} | item for item in lines)
        counts = np.array([len(merge.samples) for merge in batch.merges])
        self.record.histograms(
            step,
            {
                "rollout/samples": counts,
                "rollout/reward": batch.rewards[~np.isnan(batch.rewards)],
                "sample/tokens": np.array([len(sample.token_ids) for sample in batch.samples]),
            },
        )


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


def check(config: Config) -> None:
    """Refuse what would fail later: names that do not resolve, folders that are absent, another run's folder, a port in use.

    Raises:
        ConfigError: by the key's path.
    """
    import socket

    names = {
        "task.inputs": config.task.inputs,
        "task.harness": config.task.harness,
        "policy.source": config.policy.source,
    }
    for key, name in names.items():
        if name is None:
            continue
        if key == "policy.source" and ":" not in name:
            missing = [f for f in ("config.json", "tokenizer.json") if not (Path(name) / f).is_file()]
            if missing:
                raise ConfigError(
                    f"{key}: {name} has no {missing[0]}; expected a transformers folder or MODULE:FUNCTION"
                )
            continue
        try:
            resolve(name)
        except ValueError as error:
            raise ConfigError(f"{key}: {error}") from error
    if config.service.port:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((config.service.host, config.service.port))
            except OSError as error:
                raise ConfigError(
                    f"service.port: {config.service.host}:{config.service.port}: {error.strerror}"
                ) from error
    _check_same(config)


def _check_same(config: Config) -> None:
    """A run folder belongs to one configuration; only how long and how often it is saved may change."""
    path = config.folder / "manifest.json"
    if not path.exists():
        return
    old, new = (
        flatten(value)
        for value in (json.loads(path.read_text())["config"], json.loads(json.dumps(settings_of(config))))
    )
    free = {"steps", "checkpoint_every", "threads", "stall_seconds", "runs"}
    changed = [
        key
        for key in sorted(old.keys() | new.keys())
        if key not in free and not key.startswith("service.") and old.get(key) != new.get(key)
    ]
    if changed:
        key = changed[0]
        raise ConfigError(
            f"{key}: {config.folder} was started with {old.get(key)!r}, now it is {new.get(key)!r}; "
            "take another run=NAME, or remove the folder"
        )


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys."""
    if not isinstance(value, dict):
        return {prefix[:-1]: value}
    return {k: v for name, item in value.items() for k, v in flatten(item, f"{prefix}{name}.").items()}


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a run folder alone.

    Raises:
        ConfigError: another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"run: {folder} is in use by another process") from error
        yield
