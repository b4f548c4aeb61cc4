"""Makes the reference run anew: python -m tests.reference.make [losses]

Twenty steps of the lookup experiment, 4 groups of 4, two updates a step, from weights that float16 holds exactly; then the
recorded rollouts are replayed and the numbers of that replay written to losses.csv. With `losses` only the replay is done:
that is what a change of mathematics needs, in a commit of its own that says why.
"""

from __future__ import annotations

import csv
import gzip
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from harnessrl.metrics import read_jsonl

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
STEPS = 20
KEYS = (
    "reward/mean", "rollout/samples_mean", "loss/policy", "loss/kl", "policy/grad_norm", "policy/entropy",
    "policy/ratio_mean", "policy/clip_fraction", "policy/engine_logprob_gap",
)  # fmt: skip
SETTINGS = (
    f"steps={STEPS}", "task.groups=4", "task.group_size=4", "update.rollouts_per_update=8", "loss.normalizer=token_mean",
    "loss.kl_coef=0.01", "checkpoint_every=20",
)  # fmt: skip


def unpack(folder: Path) -> tuple[Path, Path]:
    """The policy as a transformers folder and the recorded rollouts, made from the files beside this one."""
    policy = folder / "policy"
    shutil.copytree(ROOT / "experiments" / "lookup" / "tokenizer", policy)
    shutil.copy(HERE / "config.json", policy)
    weights = {name: tensor.float() for name, tensor in load_file(HERE / "policy.safetensors").items()}
    save_file(weights, policy / "model.safetensors", metadata={"format": "pt"})
    rollouts = folder / "rollouts.jsonl"
    rollouts.write_bytes(gzip.decompress((HERE / "rollouts.jsonl.gz").read_bytes()))
    return policy, rollouts


def train(folder: Path, run: str, policy: Path, *settings: str) -> Path:
    """One run of the lookup experiment; its folder."""
    argv = [sys.executable, "-m", "harnessrl", "train", str(ROOT / "experiments" / "lookup" / "config.yaml")]
    argv += [f"runs={folder}", f"run={run}", f"policy.source={policy}", *SETTINGS, *settings]
    subprocess.run(argv, cwd=ROOT, check=True)
    return folder / run


def record(folder: Path) -> None:
    """Write config.json, policy.safetensors and rollouts.jsonl.gz from a new run."""
    from experiments.lookup.warmstart import policy

    warm = policy(0, folder / "cache")
    shutil.copy(warm / "config.json", HERE)
    half = {name: tensor.to(torch.float16) for name, tensor in load_file(warm / "model.safetensors").items()}
    save_file(half, HERE / "policy.safetensors", metadata={"format": "pt"})
    (HERE / "rollouts.jsonl.gz").write_bytes(gzip.compress(b"", mtime=0))
    source, _ = unpack(folder)
    run = train(folder, "live", source, "deterministic=true")
    lines = "".join(json.dumps(small(line)) + "\n" for line in read_jsonl(run / "rollouts.jsonl"))
    (HERE / "rollouts.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))


def small(line: dict[str, Any]) -> dict[str, Any]:
    """A line of rollouts.jsonl without what a replay does not read; logprobs to six decimals."""
    calls = [
        {key: call[key] for key in ("prompt_ids", "response_ids", "policy_version", "agent")}
        | {"call_id": str(index), "logprobs": [round(value, 6) for value in call["logprobs"]]}
        for index, call in enumerate(line["calls"])
    ]
    kept = ("step", "advantage", "rollout_id", "group_id", "reward", "failure")
    return {key: line[key] for key in kept if key in line} | {"calls": calls}


def rows(run: Path) -> Iterator[dict[str, Any]]:
    """The numbers that the test compares, a step each."""
    for line in read_jsonl(run / "metrics.jsonl"):
        yield {"step": line["step"]} | {key: f"{line[key]:.8g}" for key in KEYS}


def main(arguments: list[str]) -> None:
    """Command line."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if arguments != ["losses"]:
            record(folder)
            shutil.rmtree(folder / "policy")
        policy, rollouts = unpack(folder)
        run = train(folder, "replay", policy, f"replay={rollouts}")
        with (HERE / "losses.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, ["step", *KEYS], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows(run))


if __name__ == "__main__":
    main(sys.argv[1:])
