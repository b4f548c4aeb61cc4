"""Rank 0's part of the loop: inputs in, rollouts out, and the run's record."""

from __future__ import annotations

import itertools
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedModel

from harnessrl.adapter import Packed, PackedTree, explain_break
from harnessrl.config import Config
from harnessrl.display import Display
from harnessrl.engine.torch_engine import TorchEngine
from harnessrl.errors import ConfigError, RunError
from harnessrl.metrics import VALIDATION, RunFolder, of_steps, read_jsonl
from harnessrl.preflight import resolve
from harnessrl.trace import read_steps
from harnessrl.train import checkpoint
from harnessrl.train.batch import Batch, Finished, make_batch, make_updates
from harnessrl.train.collect import Services, collect, rollout_specs
from harnessrl.train.engine_server import EngineServer
from harnessrl.train.replay import advantage_gap, check_calls
from harnessrl.train.resample import collect_groups
from harnessrl.train.summary import batch_metrics, drift_share, histograms, version_age
from harnessrl.train.validation import Validation


@dataclass(frozen=True)
class Rolled:
    """A step's rollouts on rank 0."""

    items: list[dict[str, Any]]
    """Trace lines as the service returned them."""
    batch: Batch
    packs: list[list[list[Packed | PackedTree]]] = field(default_factory=list)
    """[rank][update][pack], once they are planned."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the rollouts' age, of the KL in the reward and of the plan: its balance, padding, and what it left out."""

    @property
    def inputs(self) -> int:
        """Task inputs used: one a group."""
        return len({item["group_id"] for item in self.items})


class Roller:
    """Inputs, engine, service and record of a run. A context manager.

    Args:
        config: the run's.
        folder: the initial policy's, with its tokenizer.
        model: what the engine samples from.
        position: where the run stands.
        display: told what happens.
    """

    def __init__(
        self, config: Config, folder: Path, model: PreTrainedModel, position: checkpoint.Position, display: Display
    ) -> None:
        self.config, self.folder, self.model, self.display = config, folder, model, display
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.engine = TorchEngine(
            model,
            max_batch=config.policy.max_batch,
            max_context=config.policy.max_context,
            deterministic=config.deterministic,
        )
        self.engine.version = position.version
        self.start = position.step
        self.recorded = read_steps(Path(config.replay)) if config.replay else iter(())
        inputs = resolve(config.task.inputs)
        self.inputs: Iterator[Any] = itertools.islice(inputs(config.seed, "train"), position.inputs, None)
        self.validation = Validation(config, inputs) if config.validation.every and not config.replay else None
        self.validated: dict[str, float] = {}
        """Metrics of the validation of the present weights; empty where there was none."""

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
            earlier = of_steps(read_jsonl(self.config.folder / "metrics.jsonl"))
            if len(earlier) < self.start:
                lost = f"{len(earlier)} of the {self.start} steps before; the others are lost"
                self.display.note(f"metrics.jsonl in {self.config.folder} holds {lost}")
            self.recent = deque(earlier, maxlen=checkpoint.WINDOW)
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def roll(self, step: int) -> Rolled:
        """Collect a step's rollouts and give them advantages; the engine sleeps afterwards."""
        config = self.config
        items = self._replayed(step) if config.replay else self._collected(step)
        self.display.status("updating")
        finished = [Finished.from_trace(item, config.task.failure_reward) for item in items]
        batch = make_batch(finished, config, self)
        metrics = {"async/version_age_mean": version_age(batch, self.engine.version)} | self._drain()
        self.engine.sleep()
        self.engine.wake(("weights",))
        return Rolled(items, batch, metrics=metrics)

    def _drain(self) -> dict[str, float]:
        """Stop admitting calls and let open ones end (those of rollouts that timed out, say)."""
        began = time.perf_counter()
        self.engine.drain() if self.config.replay else self.server.drain()
        return {"async/drain_seconds": time.perf_counter() - began}

    def plan(self, step: int, rolled: Rolled, ranks: int) -> Rolled:
        """Lay out the step's updates."""
        updates, metrics = make_updates(rolled.batch, self.config, seed=self.config.seed + step, world_size=ranks)
        packs = [[update[rank] for update in updates] for rank in range(ranks)]
        return replace(rolled, packs=packs, metrics=rolled.metrics | metrics)

    def _collected(self, step: int) -> list[dict[str, Any]]:
        def groups(count: int, first: int) -> list[dict[str, Any]]:
            inputs = list(itertools.islice(self.inputs, count))
            if len(inputs) < count:
                raise RunError(
                    f"task.inputs: {self.config.task.inputs} ended: step {step} needs {count} inputs and got "
                    f"{len(inputs)}; a stream of inputs has no end"
                )
            size = self.config.task.group_size
            return self._run(rollout_specs(inputs, self.config, f"train-{self.config.seed}-{step:05d}", size, first))

        items = collect_groups(groups, self.config.task)
        self._note_failures(f"step {step + 1}", items)
        return items

    def _run(self, specs: Sequence[dict[str, Any]], what: str = "rollouts") -> list[dict[str, Any]]:
        report = lambda done, wanted: self.display.status(f"{what} {done}/{wanted}")  # noqa: E731
        return collect(self.services, self.server, specs, self.config.stall_seconds, report)

    def _note_failures(self, when: str, items: Sequence[dict[str, Any]]) -> None:
        failures = Counter((item["failure"], item.get("error_message")) for item in items)
        (reason, message), count = failures.most_common(1)[0]
        if reason is not None and count == len(items):
            self.display.note(f"{when}: all {count} rollouts failed: {reason}: {message or 'no message'}")

    def _replayed(self, step: int) -> list[dict[str, Any]]:
        for recorded, items in self.recorded:
            if recorded == step:
                model = self.model.config.get_text_config()
                check_calls(items, model.vocab_size, model.max_position_embeddings, str(self.config.replay))
                return [dict(item) for item in items]
        raise ConfigError(f"replay: {self.config.replay} has no step {step}")

    def validate(self, step: int) -> None:
        """Where it is due, run held-out inputs with the present weights, those that step `step` starts from.

        The metrics go into that step's line; after the last step they have a line of their own.
        """
        self.validated, began = {}, time.perf_counter()
        if self.validation is None or not self.validation.due(step):
            return
        items, self.validated = self.validation.run(lambda specs: self._run(specs, "validation"))
        self.services.forget([item["rollout_id"] for item in items])
        self._note_failures(f"validation at step {step}", items)
        self.record.record(({"step": step} | item for item in items), VALIDATION)
        self.validated["time/validation"] = time.perf_counter() - began
        reward = self.validated["val/reward_mean"]
        self.display.note(f"validation after {step} steps: reward {reward:.3f} over {len(items)} rollouts")
        if step == self.config.steps:
            self.record.log(step, self.validated)

    def score(self) -> checkpoint.Score | None:
        """What a checkpoint of the present weights is compared by."""
        return checkpoint.score(self.recent, self.validated)

    def serve(self, version: int) -> None:
        """Answer calls again, with the weights that the model now has."""
        self.engine.load(version)
        self.engine.wake(("kv_cache",))

    def metrics(self, rolled: Rolled) -> dict[str, float]:
        """What the rollouts were like."""
        breaks = [item for merge in rolled.batch.merges for item in merge.breaks]
        kinds = Counter(explain_break(item, self.decode).kind for item in breaks)
        metrics = batch_metrics(rolled.batch, kinds)
        metrics["rollout/drift_share"] = drift_share(rolled.batch, self.tokenizer)
        if self.config.replay:
            metrics["replay/advantage_gap"] = advantage_gap(rolled.batch, rolled.items)
        return metrics | rolled.metrics | self.validated

    def write(self, step: int, rolled: Rolled, metrics: dict[str, float], began: float) -> None:
        """Append to rollouts.jsonl, metrics.jsonl and TensorBoard; `began` is when the step did."""
        batch = rolled.batch
        advantage = {f.rollout.rollout_id: a for f, a in zip(batch.finished, batch.advantages.tolist(), strict=True)}
        lines = sorted(rolled.items, key=lambda item: (item["group_id"], item["rollout_id"]))
        self.record.record({"step": step, "advantage": advantage[item["rollout_id"]]} | item for item in lines)
        self.record.histograms(step, histograms(batch))
        metrics["time/step"] = time.perf_counter() - began
        self.record.log(step, metrics)
        self.recent.append(metrics)

    def decode(self, token_ids: Sequence[int], /) -> str:
        """Text of ids, special tokens included."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False)


def import_path() -> list[str]:
    """Folders that make MODULE:FUNCTION names resolve in a worker as they do here."""
    return [entry or str(Path.cwd()) for entry in sys.path if entry == "" or Path(entry).is_dir()]
