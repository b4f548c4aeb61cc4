"""Checkpoints: everything a run needs to go on, written in the background, refused where damaged.

    checkpoints/step-00010/    complete: it has this name only once all of this is written
        .metadata, *.distcp    model and optimizer, by torch.distributed.checkpoint; loads on any number of ranks
        state.json             position, learning-rate schedule, random states, score
        manifest.json          size and sha256 of every other file (manifest.py)
    checkpoints/best.json      which of those kept has the best score, and its value

A kill at any moment leaves complete checkpoints and hidden folders, which the next save removes.
"""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.lr_scheduler import LRScheduler

from harnessrl.errors import ConfigError, RunError
from harnessrl.metrics import write_atomically
from harnessrl.train.manifest import damage, write_manifest
from harnessrl.train.parallel import World
from harnessrl.train.random_state import random_state, restore_random

STATE = "state.json"
VALIDATION, TRAINING = "val/reward_mean", "reward/mean"
WINDOW = 10
"""Steps over which the training reward is averaged before two checkpoints are compared by it."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a run stands."""

    step: int
    """Steps done; also the number of the next step."""
    version: int
    """Policy version of the weights."""
    inputs: int
    """Task inputs taken from the stream."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """What a checkpoint is compared by. Example: ``Score(metric="val/reward_mean", value=0.4)``"""

    metric: str
    """`val/reward_mean`, which is preferred, or `reward/mean`."""
    value: float
    """The larger the better."""


def score(lines: Sequence[Mapping[str, Any]], validated: Mapping[str, float]) -> Score | None:
    """The validation reward of the weights to be saved, else the mean training reward; None without either.

    Args:
        lines: metrics of the last `WINDOW` steps, in order.
        validated: metrics of the validation of these weights; empty where there was none.
    """
    values = [validated[VALIDATION]] if VALIDATION in validated else [line.get(TRAINING) for line in lines]
    values = [value for value in values if value is not None and math.isfinite(value)]
    metric = VALIDATION if VALIDATION in validated else TRAINING
    return Score(metric=metric, value=sum(values) / len(values)) if values else None


class Checkpoints:
    """Writes the checkpoints of a run; a context manager that waits for the last one. Every rank has one.

    Args:
        folder: the run's `checkpoints`.
        model, optimizer, scheduler: what is saved.
        here: this rank.
        keep: how many of the newest stay; the best stays besides.
    """

    def __init__(
        self,
        folder: Path,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: LRScheduler,
        here: World | None = None,
        keep: int = 2,
    ) -> None:
        self.folder, self.keep, self.here = folder, keep, here or World()
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        # Ranks agree on a checkpoint while training communicates, so they need a group of their own, on the CPU.
        self.group = dist.new_group(backend="gloo") if self.here.size > 1 else None
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.pending: Future[None] | None = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()
        self.thread.shutdown()

    def wait(self) -> None:
        """Wait until the last checkpoint is complete (on rank 0; elsewhere until its shards are written).

        Raises:
            RunError: it could not be written; those before are as they were.
        """
        pending, self.pending = self.pending, None
        try:
            if pending is not None:
                pending.result()
        except (CheckpointException, OSError) as error:
            raise RunError(f"{self.folder}: a checkpoint could not be written: {_cause(error)}") from error

    def save(self, position: Position, score: Score | None = None) -> None:
        """Copy everything, then write `folder/step-NNNNN` in the background; waits for the one before. A collective.

        Args:
            position: where the run stands.
            score: rank 0's, for `best.json`; None is not compared.
        """
        self.wait()
        final = self.folder / f"step-{position.step:05d}"
        partial = self.folder / f".{final.name}.partial"
        if self.here.leads:
            for left in self.folder.glob(".*step-*"):
                shutil.rmtree(left)
        state = {
            "position": asdict(position),
            "score": asdict(score) if score else None,
            "scheduler": self.scheduler.state_dict(),
            "optimizer": bool(self.optimizer.state),
            "random": self.here.gather(random_state()),  # also the moment from which all may write
        }
        _quiet()
        written = dcp.async_save(
            _tensors(self.model, self.optimizer if state["optimizer"] else None),
            checkpoint_id=partial,
            process_group=self.group,
            no_dist=self.group is None,
        )
        self.pending = self.thread.submit(self._commit, written, partial, final, json.dumps(state) + "\n")

    def _commit(self, written: Future[Any], partial: Path, final: Path, state: str) -> None:
        written.result()
        if not self.here.leads:
            return
        (partial / STATE).write_text(state)
        write_manifest(partial)
        if final.exists():
            _remove(final)
        partial.rename(final)
        kept = best(self.folder)
        if kept is not None:
            write_atomically(
                self.folder / "best.json", json.dumps({"checkpoint": kept[0].name} | asdict(kept[1])) + "\n"
            )
        for old in complete(self.folder)[: -self.keep]:
            if kept is None or old != kept[0]:
                _remove(old)


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints, damaged or not, in order of their steps."""
    return sorted((path for path in folder.glob("step-*") if path.name[5:].isdecimal()), key=step_of)


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    return int(path.name.removeprefix("step-"))


def best(folder: Path) -> tuple[Path, Score] | None:
    """The complete checkpoint of the best score, the first where several are: validation counts before training."""
    found, recorded = [], _recorded_best(folder)
    for path in complete(folder):
        try:
            item = json.loads((path / STATE).read_text())["score"]
            score = None if item is None else Score(**item)
        except (OSError, ValueError, KeyError, TypeError):
            score = recorded.get(path.name)  # damaged; whoever loads it says so
        if score is not None:
            found.append((path, score))
    return max(found, key=lambda item: (item[1].metric == VALIDATION, item[1].value), default=None)


def _recorded_best(folder: Path) -> dict[str, Score]:
    """Name and score in best.json; empty where there is none."""
    try:
        item = json.loads((folder / "best.json").read_text())
        return {item["checkpoint"]: Score(metric=item["metric"], value=float(item["value"]))}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def usable(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest undamaged checkpoint, and a line about each newer one, which is renamed to `damaged-step-NNNNN`.

    Raises:
        ConfigError: there are checkpoints and all are damaged; nothing is changed then.
    """
    refused: list[tuple[Path, str]] = []
    for path in reversed(complete(folder)):
        reason = damage(path)
        if reason is None:
            break
        refused.append((path, reason))
    else:
        if refused:
            reasons = "; ".join(f"{path.name}: {reason}" for path, reason in refused)
            raise ConfigError(f"{folder}: no checkpoint is usable ({reasons}); restore one, or take another run=NAME")
        return None, []
    for damaged, _ in refused:
        aside = damaged.with_name(f"damaged-{damaged.name}")
        if aside.exists():
            _remove(aside)
        damaged.rename(aside)
    notes = [f"{item.name} is damaged ({reason}), set aside; using {path.name}" for item, reason in refused]
    return path, notes


def load(
    path: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler,
    here: World | None = None,
) -> Position:
    """Fill everything from a checkpoint that any number of ranks wrote, in place. A collective.

    A rank takes its own random states back, or rank 0's where there were fewer ranks.

    Raises:
        ConfigError: it is not of this policy and optimizer, by its path.
    """
    here = here or World()
    state = json.loads((path / STATE).read_text())
    tensors = _tensors(model, optimizer if state["optimizer"] else None)
    _quiet()
    try:
        dcp.load(tensors, checkpoint_id=path, no_dist=here.size == 1)
    except CheckpointException as error:  # the bytes are right, so they are of something else
        raise ConfigError(f"{path}: not a checkpoint of this policy and optimizer: {_cause(error)}") from error
    set_model_state_dict(model, tensors["model"])
    if state["optimizer"]:
        set_optimizer_state_dict(model, optimizer, tensors["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    for group, lr in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
        group["lr"] = lr
    states = state["random"]
    restore_random(states[here.rank if here.rank < len(states) else 0])
    return Position(**state["position"])


def load_policy(path: Path, model: torch.nn.Module) -> None:
    """Fill an unsharded model alone from a checkpoint, in one process."""
    tensors = _tensors(model, None)
    _quiet()
    dcp.load(tensors, checkpoint_id=path, no_dist=True)
    set_model_state_dict(model, tensors["model"])


def _tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """State dicts by names that no sharding changes.

    An optimizer that has not stepped has no state, and to ask for it would make it step: the caller passes None then.
    """
    tensors = {"model": get_model_state_dict(model)}
    return tensors if optimizer is None else tensors | {"optimizer": get_optimizer_state_dict(model, optimizer)}


def _quiet() -> None:
    """One process is what is meant; DCP warns of it every time, in a thread that no context manager covers."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def _cause(error: BaseException) -> str:
    """What went wrong: DCP's errors end with it, after their ranks' tracebacks."""
    return str(error).strip().splitlines()[-1].strip()


def _remove(path: Path) -> None:
    """Take a folder's name away, then its content: a kill in between leaves nothing that looks complete."""
    hidden = path.with_name(f".{path.name}.removed")
    path.rename(hidden)
    shutil.rmtree(hidden)
