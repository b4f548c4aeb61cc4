"""Checkpoints: everything a run needs to go on, written atomically with torch.distributed.checkpoint."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from harnessrl.train.parallel import World

KEEP = 2
"""Checkpoints kept: the newest and the one before it."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a run stands."""

    step: int
    """Steps done; also the number of the next step."""
    version: int
    """Policy version of the weights."""


def save(
    folder: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    position: Position,
    here: World | None = None,
) -> Path:
    """Write `folder/step-NNNNN`; it has that name only once it is complete. Older ones beyond `KEEP` are removed.

    Every rank calls it and writes its own shards; the rename is rank 0's, after all have written.
    """
    here = here or World()
    final = folder / f"step-{position.step:05d}"
    partial = folder / f".{final.name}.partial"
    if here.leads:
        for path in (partial, final):
            if path.exists():
                shutil.rmtree(path)
    here.gather(None)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    with _quiet():
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=partial)
    here.gather(None)
    if here.leads:
        (partial / "position.json").write_text(json.dumps({"step": position.step, "version": position.version}) + "\n")
        partial.rename(final)
        for old in _complete(folder)[:-KEEP]:
            shutil.rmtree(old)
    here.gather(None)
    return final


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    found = _complete(folder)
    return found[-1] if found else None


def load(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Position:
    """Fill model and optimizer from a checkpoint, in place.

    Raises:
        ValueError: the checkpoint cannot be read, by its path.
    """
    try:
        position: dict[str, Any] = json.loads((path / "position.json").read_text())
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        with _quiet():
            dcp.load(state, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    except Exception as error:  # a damaged file raises whatever its reader raises
        raise ValueError(f"{path}: not a usable checkpoint: {error}") from error
    return Position(step=position["step"], version=position["version"])


@contextmanager
def _quiet() -> Iterator[None]:
    """One process is what is meant here; DCP warns of it every time."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _complete(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*")) if folder.exists() else []
