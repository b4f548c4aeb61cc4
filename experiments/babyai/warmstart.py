"""The warm start: a small Llama-type policy, trained on the bot's demonstrations, deterministic by seed and cached.

Clean demonstrations first, until the policy finds its way; then noisy ones, which take the reward down to where
learning by trial has something to do. Each is gone through several times, encoded anew under BPE dropout.

    python -m experiments.babyai.warmstart CACHE [SEED]
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from transformers import LlamaForCausalLM

from experiments import warm
from experiments.babyai.demonstrations import Noise, demonstrate, rows
from experiments.babyai.task import inputs
from experiments.lookup.examples import Encoder, Row

HERE = Path(__file__).parent
FOLDER = HERE / "tokenizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe(warm.Fit):
    """Everything that decides the weights, beside the seed."""

    phases: tuple[tuple[Noise, int, int], ...] = (
        (Noise(wander=0.1), 400, 9),
        (Noise(wander=0.2, impossible=0.35), 200, 3),
    )
    """(noise of the demonstrations, episodes, passes through them) in order."""
    batch: int = 20
    """Episodes a step."""
    dropout: float = 0.01
    """BPE dropout of the replies."""
    warmup: int = 30
    """Steps."""


RECIPE = Recipe()


def policy(seed: int, cache: Path, report: warm.Report | None = None, recipe: Recipe = RECIPE) -> Path:
    """Return a transformers folder with the warm-started policy and its tokenizer, training it where it is not cached.

    Args:
        seed: of initial weights and demonstrations; on one machine the same seed gives the same bits.
        cache: folder of policies, made where it is missing; several processes may use it at once.
        report: called after every step.
        recipe: the rest.

    Returns:
        cache/babyai-seed{seed}-{hash of recipe, code and tokenizer}.
    """
    files = [HERE / f"{name}.py" for name in ("task", "harness", "demonstrations", "warmstart")]
    files.append(HERE.parent / "lookup" / "examples.py")
    return warm.cached(f"babyai-seed{seed}", cache, files, FOLDER, recipe, lambda: train(seed, recipe, report))


def train(seed: int, recipe: Recipe = RECIPE, report: warm.Report | None = None) -> LlamaForCausalLM:
    """Train a policy from nothing on one thread."""
    encoder = Encoder(FOLDER)
    total = sum(passes * -(-episodes // recipe.batch) for _, episodes, passes in recipe.phases)
    return warm.train(seed, encoder, _batches(seed, recipe, encoder), total, recipe, report)


def _batches(seed: int, recipe: Recipe, encoder: Encoder) -> Iterator[list[Row]]:
    """The rows of every step, pass after pass in a new order and a new encoding."""
    rng = random.Random(f"babyai warm start {seed}")
    tasks = inputs(seed, "warm")
    for noise, count, passes in recipe.phases:
        episodes = [demonstrate(task["seeds"], noise, rng)[0] for task in islice(tasks, count)]
        for _ in range(passes):
            rng.shuffle(episodes)
            for first in range(0, count, recipe.batch):
                chosen = episodes[first : first + recipe.batch]
                yield [row for turns in chosen for row in rows(turns, encoder, recipe.dropout, rng)]


def main(arguments: list[str]) -> None:
    """Command line."""

    def report(step: int, steps: int, loss: float) -> None:
        if step % 20 == 0:
            print(f"step {step} of {steps}, loss {loss:.3f}", flush=True)

    if not arguments:
        sys.exit("usage: python -m experiments.babyai.warmstart CACHE [SEED]")
    print(policy(int(arguments[1]) if len(arguments) > 1 else 0, Path(arguments[0]), report))


if __name__ == "__main__":
    main(sys.argv[1:])
