"""The warm start: a small Llama-type policy, trained on scripted demonstrations, deterministic by seed and cached.

Two phases: clean demonstrations first, until the policy copies keys; then noisy ones, which take the reward down to
where learning by trial has something to do (wrong keys, malformed calls, wrong answers). With noise from the start, or
a short first phase, copying stays half formed and the training that follows stalls below 0.9.

    python -m experiments.lookup.warmstart CACHE [SEED]
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from transformers import LlamaForCausalLM

from experiments import warm
from experiments.lookup.demonstrations import Noise, demonstrate
from experiments.lookup.examples import FOLDER, Encoder, Row
from experiments.lookup.task import inputs

LOOSE = 0.08
HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe(warm.Fit):
    """Everything that decides the weights, beside the seed."""

    phases: tuple[tuple[int, Noise], ...] = (
        (400, Noise(loose=LOOSE)),
        (140, Noise(wrong_key=0.25, malformed=0.1, wrong_answer=0.15, loose=LOOSE)),
    )
    """(steps, noise of the demonstrations) in order."""
    batch: int = 32
    """Rows a step, at least; an episode is never divided between steps."""
    dropout: float = 0.15
    """BPE dropout of the replies."""


RECIPE = Recipe()


def policy(seed: int, cache: Path, report: warm.Report | None = None, recipe: Recipe = RECIPE) -> Path:
    """Return a transformers folder with the warm-started policy and its tokenizer, training it where it is not cached.

    Args:
        seed: of initial weights and demonstrations; on one machine the same seed gives the same bits.
        cache: folder of policies, made where it is missing; several processes may use it at once.
        report: called after every step.
        recipe: the rest.

    Returns:
        cache/lookup-seed{seed}-{hash of recipe, code and tokenizer}.
    """
    files = [HERE / f"{name}.py" for name in ("task", "harness", "demonstrations", "examples", "warmstart")]
    return warm.cached(f"lookup-seed{seed}", cache, files, FOLDER, recipe, lambda: train(seed, recipe, report))


def train(seed: int, recipe: Recipe = RECIPE, report: warm.Report | None = None) -> LlamaForCausalLM:
    """Train a policy from nothing on one thread."""
    encoder, total = Encoder(), sum(steps for steps, _ in recipe.phases)
    return warm.train(seed, encoder, _batches(seed, recipe, encoder), total, recipe, report)


def _batches(seed: int, recipe: Recipe, encoder: Encoder) -> Iterator[list[Row]]:
    """The rows of every step, phase after phase."""
    rng = random.Random(f"lookup warm start {seed}")
    tasks = inputs(seed, "warm")
    for steps, noise in recipe.phases:
        for _ in range(steps):
            rows: list[Row] = []
            while len(rows) < recipe.batch:
                turns, _ = demonstrate(next(tasks), noise, rng)
                rows += encoder.rows(turns, recipe.dropout, rng)
            yield rows


def main(arguments: list[str]) -> None:
    """Command line."""

    def report(step: int, steps: int, loss: float) -> None:
        if step % 20 == 0:
            print(f"step {step} of {steps}, loss {loss:.3f}", flush=True)

    if not arguments:
        sys.exit("usage: python -m experiments.lookup.warmstart CACHE [SEED]")
    print(policy(int(arguments[1]) if len(arguments) > 1 else 0, Path(arguments[0]), report))


if __name__ == "__main__":
    main(sys.argv[1:])
