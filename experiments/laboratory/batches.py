"""Recorded batches of real runs: `python -m experiments.laboratory.batches RUN/rollouts.jsonl ...`

A checkpoint of step n is the policy that sampled the rollouts of step n. For each such step that was kept, and for the
start, the run's own batch is turned into the first update of every setting, by the functions that train it, and the
gradients are compared. `logprob_gap` says that it is the right policy: the largest difference between a recorded logprob
and the one computed here.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from experiments.laboratory.model import Floats
from experiments.laboratory.settings import UNITS
from experiments.laboratory.tables import Row, write
from harnessrl.adapter import Packed, PackedTree
from harnessrl.config import Config, from_mapping
from harnessrl.errors import ConfigError
from harnessrl.trace import read_steps
from harnessrl.train import checkpoint
from harnessrl.train.batch import Batch, Finished, make_batch, make_updates
from harnessrl.train.export import export
from harnessrl.train.loading import load_policy
from harnessrl.train.loop import policy_folder
from harnessrl.train.objective import policy_loss
from harnessrl.train.parallel import World
from harnessrl.train.policy import Policy, score

RESULTS = Path(__file__).parent / "results"
NORMALIZERS = ("token_mean", "seq_mean", "rollout_mean")
"""Not `constant`: in one batch its weights are those of token_mean times a number, so the direction is the same."""
CHOICES = tuple(itertools.product(UNITS, NORMALIZERS))


@dataclass(frozen=True, kw_only=True)
class Update:
    """What a batch makes of a policy under one setting."""

    gradient: Floats
    """[P], the direction of ascent."""
    balance: float
    """Sum of weight x advantage."""
    on_failed: float
    """Share of the weight that lies on tokens of failed rollouts (reward 0 or less)."""
    gap: float
    """Largest |recorded logprob - logprob computed here|, nats."""


def setting(config: Config, unit: str, normalizer: str) -> Config:
    """The run's configuration with another advantage unit and normaliser, its batch in one update."""
    return replace(
        config,
        advantage=replace(config.advantage, unit=unit),
        loss=replace(config.loss, normalizer=normalizer, scale=None),
        update=replace(config.update, rollouts_per_update=None, max_updates=None, filter_zero_signal=False),
    )


def update_of(policy: Policy, finished: Sequence[Finished], config: Config) -> Update:
    """The first update of a batch, at ratio 1."""
    batch = make_batch(finished, config)
    updates, _ = make_updates(batch, config, seed=0)
    policy.zero_grad(set_to_none=True)
    balance, gap, mass = 0.0, 0.0, np.zeros(2)
    for packed in itertools.chain.from_iterable(rank for update in updates for rank in update):
        at = packed.scored
        logprobs = score(policy, packed, config.policy.train_temperature).logprobs
        advantages, weights = (torch.from_numpy(column[at]) for column in (packed.advantages, packed.weights))
        clip = {"clip_low": config.loss.clip_low, "clip_high": config.loss.clip_high}
        loss, metrics = policy_loss(logprobs, logprobs.detach(), advantages, weights, **clip)
        loss.backward()
        balance += float(metrics["weight_advantage_sum"])
        gap = max(gap, float(np.abs(packed.logprobs[at] - logprobs.detach().numpy()).max(initial=0.0)))
        mass += np.bincount(_failed(packed, batch)[at].astype(np.intp), packed.weights[at], 2)
    gradient = [-p.grad.double().flatten().numpy() for p in policy.parameters() if p.grad is not None]
    return Update(gradient=np.concatenate(gradient), balance=balance, on_failed=float(mass[1] / mass.sum()), gap=gap)


def _failed(packed: Packed | PackedTree, batch: Batch) -> np.ndarray:
    """bool [T], whether a token's rollout failed."""
    lost = {f.rollout.rollout_id: not r > 0 for f, r in zip(batch.finished, batch.rewards.tolist(), strict=True)}
    of_sample = dict(zip(packed.order.tolist(), (lost[name] for name in packed.rollout_ids), strict=True))
    return np.array([of_sample[s] for s in packed.sample_index.tolist()], bool)


def cosine(a: Floats, b: Floats) -> float:
    """The cosine of two gradients; NaN where one is 0."""
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / norms if norms else float("nan")


def halves(finished: Sequence[Finished], rng: np.random.Generator) -> tuple[list[Finished], list[Finished]]:
    """Split a batch at random into two, by whole groups."""
    names = rng.permutation(sorted({item.rollout.group_id for item in finished}))
    first = set(names[: len(names) // 2].tolist())
    inside = [item for item in finished if item.rollout.group_id in first]
    return inside, [item for item in finished if item.rollout.group_id not in first]


def compare(policy: Policy, finished: Sequence[Finished], config: Config, splits: int) -> tuple[list[Row], list[Row]]:
    """Rows of settings, and rows of pairs of settings, of one batch."""
    updates, rows = {}, []
    for unit, normalizer in CHOICES:
        own, rng = setting(config, unit, normalizer), np.random.default_rng(0)
        updates[unit, normalizer] = whole = update_of(policy, finished, own)
        pairs = [[update_of(policy, half, own).gradient for half in halves(finished, rng)] for _ in range(splits)]
        agree = np.array(
            [value for value in itertools.starmap(cosine, pairs) if not np.isnan(value)]
        )  # halves with a signal
        rows.append(
            {
                "unit": unit,
                "normalizer": normalizer,
                "half_batch_cosine": float(agree.mean()) if len(agree) else float("nan"),
                "half_batch_cosine_sd": float(agree.std(ddof=1)) if len(agree) > 1 else float("nan"),
                "weight_advantage_sum": whole.balance,
                "weight_on_failed": whole.on_failed,
                "gradient_norm": float(np.linalg.norm(whole.gradient)),
                "logprob_gap": whole.gap,
            }
        )
    pairs_of = [
        {"a": "+".join(a), "b": "+".join(b), "cosine": cosine(updates[a].gradient, updates[b].gradient)}
        for a, b in itertools.combinations(CHOICES, 2)
    ]
    return rows, pairs_of


def describe_batch(finished: Sequence[Finished], config: Config) -> Row:
    """What the batch is like: reward, N_rho, and how trained tokens and samples of a rollout go with failure."""
    batch = make_batch(finished, config)
    samples = np.array([len(merge.samples) for merge in batch.merges], np.float64)
    tokens = np.bincount(batch.owner, [s.loss_mask.sum() for s in batch.samples], len(samples))
    scored = ~np.isnan(batch.rewards)
    table = np.corrcoef(np.stack([-batch.rewards, samples, tokens])[:, scored])
    return {
        "reward": float(batch.rewards[scored].mean()),
        "samples": float(samples.mean()),
        "samples_failure_correlation": float(table[0, 1]),
        "tokens_failure_correlation": float(table[0, 2]),
        "samples_tokens_correlation": float(table[1, 2]),
    }


def batches(rollouts: Path, scratch: Path) -> Iterator[tuple[int, Config, Policy, list[Finished]]]:
    """The steps of a run whose policy is known: its start and its checkpoints.

    Raises:
        ConfigError: no manifest beside the rollouts, or a file that is no trace of a run.
    """
    run = rollouts.parent
    if not (run / "manifest.json").is_file():
        raise ConfigError(f"{rollouts}: expected RUN/rollouts.jsonl with the run's manifest.json beside it")
    manifest = json.loads((run / "manifest.json").read_text())
    config = from_mapping(manifest["config"], [], source=run / "manifest.json")
    kept = {checkpoint.step_of(path) for path in checkpoint.complete(run / "checkpoints")}
    for step, items in read_steps(rollouts):
        if step and step not in kept:
            continue
        folder = scratch / f"{run.name}-{step}"
        if step:
            export(run, folder, f"step={step}")
        policy = load_policy(folder if step else policy_folder(config), World())
        yield step, config, policy, [Finished.from_trace(item, config.task.failure_reward) for item in items]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rollouts", type=Path, nargs="+", metavar="RUN/rollouts.jsonl")
    parser.add_argument("--splits", type=int, default=8, help="random halvings of each batch, 2 or more")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    settings: list[Row] = []
    cosines: list[Row] = []
    try:
        with tempfile.TemporaryDirectory() as scratch:
            for number, rollouts in enumerate(args.rollouts):
                for step, config, policy, finished in batches(rollouts, Path(scratch) / str(number)):
                    place: Row = {"run": rollouts.parent.name, "seed": config.seed, "step": step}
                    about = describe_batch(finished, config)
                    rows, pairs = compare(policy, finished, config, args.splits)
                    settings += [place | about | row for row in rows]
                    cosines += [place | row for row in pairs]
                    print(
                        f"{rollouts.parent.name}, step {step}: reward {about['reward']:.3f}",
                        file=sys.stderr,
                        flush=True,
                    )
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not settings:
        print("error: no step of these runs has its checkpoint", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    write(args.out / "recorded_settings.csv", settings)
    write(args.out / "recorded_cosines.csv", cosines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
