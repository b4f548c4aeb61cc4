"""The warm start: a small Llama-type policy, trained on the bot's demonstrations, deterministic by seed and cached.

Clean demonstrations first, until the policy finds its way; then noisy ones, which take the reward down to where
learning by trial has something to do. Each is gone through several times, encoded anew under BPE dropout.

    python -m experiments.babyai.warmstart CACHE [SEED]
"""

from __future__ import annotations

import math
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from experiments.babyai.demonstrations import Noise, demonstrate, rows
from experiments.babyai.task import inputs
from experiments.lookup.examples import IGNORE, Encoder, Row

FOLDER = Path(__file__).parent / "tokenizer"
Report = Callable[[int, int, float], None]
"""(steps done, steps, loss)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that decides the weights, beside the seed."""

    hidden: int = 64
    intermediate: int = 176
    layers: int = 2
    heads: int = 4
    phases: tuple[tuple[Noise, int, int], ...] = (
        (Noise(wander=0.1), 400, 9),
        (Noise(wander=0.2, impossible=0.35), 200, 3),
    )
    """(noise of the demonstrations, episodes, passes through them) in order."""
    batch: int = 20
    """Episodes a step."""
    dropout: float = 0.02
    """BPE dropout of the replies."""
    lr: float = 5e-3
    """Highest learning rate, after a linear warm-up; a cosine then takes it to a tenth."""
    warmup: int = 30
    """Steps."""
    betas: tuple[float, float] = (0.9, 0.99)
    clip: float = 1.0
    """Largest gradient norm."""


RECIPE = Recipe()


def policy(seed: int, cache: Path, report: Report | None = None, recipe: Recipe = RECIPE) -> Path:
    """Return a transformers folder with the warm-started policy and its tokenizer, training it where it is not cached.

    Args:
        seed: of initial weights and demonstrations; on one machine the same seed gives the same bits.
        cache: folder of policies, made where it is missing; several processes may use it at once.
        report: called after every step.
        recipe: the rest.

    Returns:
        cache/babyai-seed{seed}-{hash of recipe, code and tokenizer}: config.json, model.safetensors (float32) and the
        tokenizer's three files.
    """
    folder = Path(cache) / f"babyai-seed{seed}-{_fingerprint(recipe)}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".babyai-", dir=folder.parent) as scratch:
        made = Path(scratch) / "policy"
        model = train(seed, recipe, report)
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(made)
        save_file(model.state_dict(), made / "model.safetensors", metadata={"format": "pt"})
        for file in sorted(FOLDER.iterdir()):
            shutil.copy(file, made)
        try:
            os.rename(made, folder)
        except OSError:  # another process was faster: its folder is whole, and equal
            if not folder.is_dir():
                raise
    return folder


def train(seed: int, recipe: Recipe = RECIPE, report: Report | None = None) -> LlamaForCausalLM:
    """Train a policy from nothing, on one thread, since sums over several depend on their number."""
    encoder, threads = Encoder(FOLDER), torch.get_num_threads()
    total = sum(passes * -(-episodes // recipe.batch) for _, episodes, passes in recipe.phases)
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = LlamaForCausalLM(_config(recipe, encoder))
            optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=recipe.betas, weight_decay=0.0)
            for step, batch in enumerate(_batches(seed, recipe, encoder)):
                rate = min(1.0, (step + 1) / recipe.warmup) * (0.55 + 0.45 * math.cos(math.pi * step / total))
                optimizer.param_groups[0]["lr"] = recipe.lr * rate
                loss = _loss(model, batch, encoder.pad)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
                optimizer.step()
                optimizer.zero_grad()
                if report is not None:
                    report(step + 1, total, loss.item())
    finally:
        torch.set_num_threads(threads)
    return model.eval()


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


def _loss(model: LlamaForCausalLM, batch: list[Row], pad: int) -> torch.Tensor:
    """Mean over reply tokens. Rows are padded on the right and attention is causal: no real token sees the padding."""
    width = max(len(row.token_ids) for row in batch)
    token_ids = torch.tensor([row.token_ids + [pad] * (width - len(row.token_ids)) for row in batch])
    labels = torch.tensor([row.labels + [IGNORE] * (width - len(row.labels)) for row in batch])
    logits = model(input_ids=token_ids, use_cache=False).logits
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE)


def _config(recipe: Recipe, encoder: Encoder) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(encoder.vocabulary),
        hidden_size=recipe.hidden,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        max_position_embeddings=encoder.tokenizer.model_max_length,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=encoder.end,
        pad_token_id=encoder.pad,
    )


def _fingerprint(recipe: Recipe) -> str:
    """A hash of everything that decides the weights: a cache entry is never stale."""
    digest = sha256(f"{torch.__version__} {recipe!r}".encode())
    here = Path(__file__).parent
    sources = [here / f"{name}.py" for name in ("task", "harness", "demonstrations", "warmstart")]
    sources.append(here.parent / "lookup" / "examples.py")
    for file in [*sources, *sorted(FOLDER.iterdir())]:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


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
