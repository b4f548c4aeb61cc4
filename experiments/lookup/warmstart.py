"""The warm start: a small Llama-type policy, trained on scripted demonstrations, deterministic by seed and cached.

Two phases: clean demonstrations first, until the policy copies keys; then noisy ones, which take the reward down to
where learning by trial has something to do (wrong keys, malformed calls, wrong answers). With noise from the start, or
a short first phase, copying stays half formed and the training that follows stalls below 0.9.

    python -m experiments.lookup.warmstart CACHE [SEED]
"""

from __future__ import annotations

import math
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from experiments.lookup.demonstrations import Noise, demonstrate
from experiments.lookup.examples import FOLDER, IGNORE, Encoder, Row
from experiments.lookup.task import inputs

LOOSE = 0.08
Report = Callable[[int, int, float], None]
"""(steps done, steps, loss)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that decides the weights, beside the seed."""

    hidden: int = 64
    intermediate: int = 176
    layers: int = 2
    heads: int = 4
    phases: tuple[tuple[int, Noise], ...] = (
        (400, Noise(loose=LOOSE)),
        (140, Noise(wrong_key=0.25, malformed=0.1, wrong_answer=0.15, loose=LOOSE)),
    )
    """(steps, noise of the demonstrations) in order."""
    batch: int = 32
    """Rows a step, at least; an episode is never divided between steps."""
    dropout: float = 0.15
    """BPE dropout of the replies."""
    lr: float = 5e-3
    """Highest learning rate, after a linear warm-up; a cosine then takes it to a tenth."""
    warmup: int = 60
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
        cache/lookup-seed{seed}-{hash of recipe, code and tokenizer}: config.json, model.safetensors (float32) and the
        tokenizer's three files.
    """
    folder = Path(cache) / f"lookup-seed{seed}-{_fingerprint(recipe)}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".lookup-", dir=folder.parent) as scratch:
        made = Path(scratch) / "policy"
        _save(train(seed, recipe, report), made)
        for file in sorted(FOLDER.iterdir()):
            shutil.copy(file, made)
        try:
            os.rename(made, folder)
        except OSError:  # another process was faster: its folder is whole, and equal
            if not folder.is_dir():
                raise
    return folder


def _save(model: LlamaForCausalLM, folder: Path) -> None:
    """What save_pretrained writes, without its progress bar, which would tear the caller's."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})


def train(seed: int, recipe: Recipe = RECIPE, report: Report | None = None) -> LlamaForCausalLM:
    """Train a policy from nothing on one thread."""
    encoder = Encoder()
    total = sum(steps for steps, _ in recipe.phases)
    with _one_thread_seeded(seed):
        model = LlamaForCausalLM(_config(recipe, encoder))
        optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=recipe.betas, weight_decay=0.0)
        for step, rows in enumerate(_batches(seed, recipe, encoder)):
            optimizer.param_groups[0]["lr"] = recipe.lr * _schedule(step, total, recipe.warmup)
            token_ids, labels = _padded(rows, encoder.pad)
            # Rows are padded on the right and attention is causal: no real token sees the padding.
            logits = model(input_ids=token_ids, use_cache=False).logits
            loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
            optimizer.step()
            optimizer.zero_grad()
            if report is not None:
                report(step + 1, total, loss.item())
    return model.eval()


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


def _padded(rows: list[Row], pad: int) -> tuple[Tensor, Tensor]:
    """Token ids and labels [rows, longest], padded on the right."""
    width = max(len(row.token_ids) for row in rows)
    token_ids = [row.token_ids + [pad] * (width - len(row.token_ids)) for row in rows]
    labels = [row.labels + [IGNORE] * (width - len(row.labels)) for row in rows]
    return torch.tensor(token_ids), torch.tensor(labels)


def _schedule(step: int, total: int, warmup: int) -> float:
    """Share of the learning rate: linear warm-up times a cosine from 1 to 0.1."""
    return min(1.0, (step + 1) / warmup) * (0.55 + 0.45 * math.cos(math.pi * step / total))


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


@contextmanager
def _one_thread_seeded(seed: int) -> Iterator[None]:
    """One thread, because sums over several depend on their number; the caller's random state is left as it was."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)


def _fingerprint(recipe: Recipe) -> str:
    """A hash of everything that decides the weights: a cache entry is never stale."""
    digest = sha256(f"{torch.__version__} {recipe!r}".encode())
    here = Path(__file__).parent
    sources = [here / f"{name}.py" for name in ("task", "harness", "demonstrations", "examples", "warmstart")]
    for file in [*sources, *sorted(FOLDER.iterdir())]:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


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
