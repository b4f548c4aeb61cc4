"""The synthetic laboratory: `python -m experiments.laboratory` writes results/*.csv and their manifest in about a minute."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from experiments.laboratory.exact import Groups
from experiments.laboratory.flow import STRIDE, follow, spread, train
from experiments.laboratory.measure import describe, sweep
from experiments.laboratory.model import Model
from experiments.laboratory.settings import SETTINGS, Setting
from experiments.laboratory.tables import Row, write

RESULTS = Path(__file__).parent / "results"
DIALS = (-1.0, -0.5, 0.0, 0.5, 1.0)
SUCCESSES = (0.3, 0.9)
"""Success rates at which bias and variance are measured: early and late in training."""
PATH_DIALS = (0.0, 0.5, 1.0)
"""Both dials of the paths that are followed."""
FOLLOWED = tuple(setting for setting in SETTINGS if setting.estimator == "grpo")
TRAINED = tuple(setting for setting in FOLLOWED if setting.normalizer != "constant")
TRAIN_DIAL = 0.5
START, UNTIL, MOST_STEPS = 0.3, 0.98, 1000
EVERY = 10
"""Steps between two points that are kept of a path."""
GAIN = 0.01
"""Reward that the first update of a drawn training gains in expectation."""

Report = Callable[[str], None]


def place(model: Model) -> Row:
    """The columns that name an environment and a policy."""
    return {
        "policy": "sighted" if model.sighted else "blind",
        "length_dial": model.length_dial,
        "fragment_dial": model.fragment_dial,
    }


def bias_rows(groups: Groups, batches: int, seed: int, report: Report) -> Iterator[Row]:
    """bias.csv: every setting over the dials."""
    for number, (model, row) in enumerate(sweep(groups, batches, seed, DIALS, SUCCESSES), 1):
        if number % (13 * len(SETTINGS)) == 0:
            report(f"bias and variance: {number} rows")
        yield place(model) | row


def path_rows(groups: Groups, report: Report) -> Iterator[Row]:
    """paths.csv: the exact flow of each setting, every `EVERY` steps and at its end."""
    for sighted in (False, True):
        for dial in PATH_DIALS:
            model = Model(length_dial=dial, fragment_dial=dial, sighted=sighted)
            for setting in FOLLOWED:
                points = list(follow(model, model.start(START), setting, groups, UNTIL, MOST_STEPS))
                kept = [*points[:-1:EVERY], points[-1]]
                yield from (place(model) | describe(setting) | point for point in kept)
            report(f"paths: {'sighted' if sighted else 'blind'}, dials {dial:g}")


def training_rows(groups: Groups, runs: int, steps: int, seed: int, report: Report) -> Iterator[Row]:
    """training.csv: what drawn batches make of it, over many runs."""
    for sighted in (False, True):
        model = Model(length_dial=TRAIN_DIAL, fragment_dial=TRAIN_DIAL, sighted=sighted)
        for setting in TRAINED:
            yield from _training(model, setting, groups, runs, steps, seed)
            report(f"training: {'sighted' if sighted else 'blind'}, {setting.name}")


def _training(model: Model, setting: Setting, groups: Groups, runs: int, steps: int, seed: int) -> Iterator[Row]:
    start = model.start(START)
    for step, theta in train(model, start, setting, groups, runs=runs, steps=steps, gain=GAIN, seed=seed):
        if step % EVERY == 0 or step == steps:
            yield place(model) | describe(setting) | {"step": step} | spread(model, theta)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=400, help="drawn a place, for the variance")
    parser.add_argument("--groups", type=int, default=16, help="a batch")
    parser.add_argument("--size", type=int, default=8, help="rollouts a group")
    parser.add_argument("--runs", type=int, default=32, help="drawn trainings a setting")
    parser.add_argument("--steps", type=int, default=400, help="of a drawn training")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    began = time.monotonic()

    def report(text: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {text}", file=sys.stderr, flush=True)

    args.out.mkdir(parents=True, exist_ok=True)
    groups = Groups(args.size, args.groups)
    write(args.out / "bias.csv", bias_rows(groups, args.batches, args.seed, report))
    write(args.out / "paths.csv", path_rows(groups, report))
    write(args.out / "training.csv", training_rows(groups, args.runs, args.steps, args.seed, report))
    numbers = {name: getattr(args, name) for name in ("batches", "groups", "size", "runs", "steps", "seed")}
    manifest = {
        "command": "python -m experiments.laboratory " + " ".join(f"--{k} {v}" for k, v in numbers.items()),
        **numbers,
        "start": START,
        "until": UNTIL,
        "stride": STRIDE,
        "gain": GAIN,
        "training_dial": TRAIN_DIAL,
        "possible_groups": len(groups.members),
        "seconds": round(time.monotonic() - began),
        "versions": {"python": platform.python_version(), "numpy": np.__version__}
        | {"harnessrl": importlib.metadata.version("harnessrl")},
    }
    (args.out / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")


if __name__ == "__main__":
    main()
