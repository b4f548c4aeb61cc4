"""`harnessrl export RUN_FOLDER OUT [step=N|best]`: a checkpoint as a plain transformers folder."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from harnessrl.config import Lora
from harnessrl.errors import ConfigError
from harnessrl.metrics import read_manifest
from harnessrl.train import checkpoint
from harnessrl.train.lora import add_adapters, copy_weights
from harnessrl.train.manifest import damage
from harnessrl.train.policy import Policy

DESCRIPTION = "policy"
"""Folder beside the checkpoints: the policy's configuration and tokenizer, all of its files but the weights."""
SUFFIXES = (".json", ".jinja", ".model", ".txt")


def copy_description(source: Path, checkpoints: Path) -> None:
    """Copy configuration and tokenizer of a transformers folder into `checkpoints/policy`, once a run."""
    target = checkpoints / DESCRIPTION
    if target.exists():
        return
    partial = target.with_name(f".{DESCRIPTION}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix in SUFFIXES and not file.name.endswith(".index.json"):
            shutil.copy(file, partial)
    partial.rename(target)


def export(run: str | Path, out: str | Path, which: str = "") -> Path:
    """Write a run's policy as config, float32 safetensors and tokenizer; `AutoModelForCausalLM` loads the folder.

    Adapters are merged into the weights: the folder needs neither them nor peft.

    Args:
        run: the run folder.
        out: a folder that does not exist yet; it appears once it is complete.
        which: "" (the newest checkpoint), "step=N" or "step=best".
    Returns:
        the checkpoint that was exported.
    Raises:
        ConfigError: no such run or checkpoint, a damaged one, or `out` exists.
    """
    checkpoints, out = Path(run) / "checkpoints", Path(out)
    path = _choose(checkpoints, which)
    if out.exists():
        raise ConfigError(f"{out} exists; export writes a new folder")
    reason = damage(path)
    if reason:
        raise ConfigError(f"{path} is damaged: {reason}")
    description = checkpoints / DESCRIPTION
    logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(description)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{description}: no configuration of a policy: {str(error).splitlines()[0]}") from error
    model, lora = AutoModelForCausalLM.from_config(config, dtype=torch.float32), _lora(Path(run))
    trained = model
    if lora.rank:
        trained = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        add_adapters(trained, lora)
    checkpoint.load_policy(path, Policy(trained))
    if lora.rank:
        copy_weights(trained, model)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    for file in description.iterdir():
        if file.name != "config.json":
            shutil.copy(file, partial)
    partial.rename(out)
    return path


def _lora(run: Path) -> Lora:
    """The adapters that a run trains, by its manifest."""
    config = read_manifest(run).get("config", {})
    return Lora(**config.get("policy", {}).get("lora", {}))


def _choose(checkpoints: Path, which: str) -> Path:
    """The checkpoint folder that `step=N`, `step=best` or nothing names."""
    complete = checkpoint.complete(checkpoints)
    if not complete:
        raise ConfigError(f"{checkpoints} holds no checkpoint; expected a run folder such as runs/NAME")
    key, _, value = which.partition("=")
    if not which:
        return complete[-1]
    if key == "step" and value == "best":
        found = checkpoint.best(checkpoints)
        if found is None:
            raise ConfigError(f"{checkpoints}: no checkpoint has a score; give step=N")
        return found[0]
    named = {str(checkpoint.step_of(path)): path for path in complete}
    if key != "step" or value not in named:
        raise ConfigError(f"{which!r}: expected step=best or step=N, where N is one of {', '.join(named)}")
    return named[value]


def main(run: str, out: str, overrides: Sequence[str]) -> int:
    """The command; returns its exit code."""
    if len(overrides) > 1:
        raise ConfigError(f"{overrides[1]!r}: one of step=N and step=best is enough")
    path = export(run, out, *overrides)
    print(f"{path.name} of {run} is in {out}")
    return 0
