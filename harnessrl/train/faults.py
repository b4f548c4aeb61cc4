"""What stops an update: a loss or gradient norm that is not finite, traced to its rollouts and kept for a look.

An update looks at its losses and its gradient norm before the optimizer steps. Where one is not finite, every rollout
that may have caused it is run alone, forward and backward, to learn which ones did; the packs they lie in are written
to `RUN_FOLDER/faults/step-N/`, and the run ends. Nothing of that update reaches the weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from torch import Tensor

from harnessrl.adapter import Packed, PackedTree, pack, packer
from harnessrl.errors import RunError
from harnessrl.train.parallel import World

COLUMNS = tuple(name for name in packer.COLUMNS if name != "labels")
"""What documents and trees (which have no labels) say of each token; a fault's .npz holds these."""

Finite = Callable[[Packed | PackedTree, Tensor | None], bool]
"""Whether a pack alone, with the logprobs its ratios are taken to, gives a finite loss and gradient norm."""


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """A pack of an update that failed."""

    update: int
    """Which update of the step."""
    index: int
    """Which of this rank's packs of that update."""
    packed: Packed | PackedTree
    old: Tensor | None
    """[scored] logprobs that its ratios are taken to; None are its own."""


class Fault(Exception):
    """An update that must not reach the weights; raised alike on every rank.

    Args:
        what: what was not finite, e.g. "loss nan".
        rollouts: ids of the rollouts at fault, on all ranks.
        packs: this rank's packs that hold them.
    """

    def __init__(self, what: str, rollouts: Sequence[str], packs: Sequence[Suspect]) -> None:
        super().__init__(what)
        self.what, self.rollouts, self.packs = what, rollouts, packs


def trace(what: str, suspects: Sequence[Suspect], finite: Finite, here: World) -> Fault:
    """Find which rollouts of the suspect packs fail when they run alone; every rank calls it, also without suspects.

    A sharded policy computes with all ranks, so they take turns: one runs its rollout, the others an empty pack. If none
    fails alone, every rollout of the suspect packs is named.

    Args:
        what: what was not finite.
        suspects: this rank's.
        finite: a collective.
    """
    parts = [(suspect, rollout) for suspect in suspects for rollout in dict.fromkeys(suspect.packed.rollout_ids)]
    failed: list[tuple[Suspect, str]] = []
    for rank, count in enumerate(here.gather(len(parts))):
        for turn in range(count):
            if rank != here.rank:
                finite(pack([], []), None)
                continue
            suspect, rollout = parts[turn]
            if not finite(*cut(suspect.packed, suspect.old, rollout)):
                failed.append(parts[turn])
    if not any(here.gather(bool(failed))):
        failed = parts
    rollouts = {rollout for named in here.gather([rollout for _, rollout in failed]) for rollout in named}
    packs = {(suspect.update, suspect.index): suspect for suspect, _ in failed}
    return Fault(what, sorted(rollouts), list(packs.values()))


def cut(packed: Packed | PackedTree, old: Tensor | None, rollout: str) -> tuple[Packed | PackedTree, Tensor | None]:
    """One rollout of a pack as a pack of its own, with its part of `old`."""
    places = [place for place, name in enumerate(packed.rollout_ids) if name == rollout]
    tree = isinstance(packed, PackedTree)
    if tree:
        at = np.unique(np.concatenate([packed.nodes[place] for place in places]))
    else:
        at = np.concatenate([np.arange(*packed.cu_seqlens[place : place + 2]) for place in places])
    columns = {name: getattr(packed, name)[at] for name in (*COLUMNS, *([] if tree else ["labels"]))}
    columns |= {"order": packed.order[places], "rollout_ids": (rollout,) * len(places)}
    if tree:  # the nodes of a rollout lie side by side, so they only move
        columns["parent"] = np.maximum(packed.parent[at] - at[0], -1)
        columns["subtree_end"] = packed.subtree_end[at] - at[0]
        columns["nodes"] = tuple(packed.nodes[place] - at[0] for place in places)
    else:
        columns["cu_seqlens"] = np.append(0, np.cumsum(np.diff(packed.cu_seqlens)[places])).astype(np.int32)
    kept = None if old is None else old[np.flatnonzero(np.isin(packed.scored, at))]
    return replace(packed, **columns), kept


def record(fault: Fault, folder: Path, step: int, version: int, here: World) -> RunError:
    """Write this rank's packs with their provenance and return the error that ends the run, the same on every rank.

    Args:
        fault: from `trace`.
        folder: the run's `faults`; the packs go to `folder/step-N/rank-R-update-U-pack-P.npz` and `.json`.
        step: the step that failed.
        version: the version of the policy that its updates started from.
    """
    folder = folder / f"step-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    for suspect in fault.packs:
        packed = suspect.packed
        path = folder / f"rank-{here.rank}-update-{suspect.update}-pack-{suspect.index}"
        columns = {name: getattr(packed, name) for name in COLUMNS}
        columns |= {"parent": packed.parent} if isinstance(packed, PackedTree) else {"cu_seqlens": packed.cu_seqlens}
        if suspect.old is not None:
            columns["old_logprobs"] = suspect.old.cpu().numpy()
        np.savez(path.with_suffix(".npz"), **columns)
        about = {"step": step, "policy_version": version, "not_finite": fault.what, "at_fault": list(fault.rollouts)}
        about |= {"update": suspect.update, "pack": suspect.index, "rank": here.rank, "samples": _samples(packed)}
        path.with_suffix(".json").write_text(json.dumps(about, indent=1) + "\n")
    shown = ", ".join(fault.rollouts[:8]) + (f" and {len(fault.rollouts) - 8} more" if len(fault.rollouts) > 8 else "")
    here.gather(None)  # every rank has written before one ends and torchrun ends the others
    return RunError(
        f"step {step}: {fault.what}; rollout {shown}. The update was not applied; its packs are in {folder}"
    )


def _samples(packed: Packed | PackedTree) -> list[dict[str, object]]:
    """Which sample, rollout and calls each part of a pack came from."""
    out = []
    for index, rollout in zip(packed.order.tolist(), packed.rollout_ids, strict=True):
        calls = np.unique(packed.call_index[packed.loss_mask & (packed.sample_index == index)])
        out.append({"sample": index, "rollout_id": rollout, "call_ids": [packed.call_ids[call] for call in calls]})
    return out
