"""Warm starts of small policies: a Llama-type model from nothing on rows of tokens, deterministic by seed and cached."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fcntl import LOCK_EX, flock
from hashlib import sha256
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from experiments.lookup.examples import IGNORE, Encoder, Row

Report = Callable[[int, int, float], None]
"""(steps done, steps, loss)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A model's size, and how it is trained."""

    hidden: int = 64
    intermediate: int = 176
    layers: int = 2
    heads: int = 4
    lr: float = 5e-3
    """Highest learning rate, after a linear warm-up; a cosine then takes it to a tenth."""
    warmup: int = 60
    """Steps."""
    betas: tuple[float, float] = (0.9, 0.99)
    clip: float = 1.0
    """Largest gradient norm."""


def cached(
    name: str, cache: Path, files: Sequence[Path], tokenizer: Path, fit: Fit, make: Callable[[], LlamaForCausalLM]
) -> Path:
    """The folder cache/{name}-{hash}: config.json, model.safetensors (float32) and the tokenizer's files.

    Args:
        name: of the experiment and seed.
        cache: folder of policies, made where it is missing; several processes may use it at once.
        files: code that decides the weights. With the tokenizer and `fit` it makes the hash: an entry is never stale.
        tokenizer: folder of the tokenizer.
        fit: size and training.
        make: trains the policy, where it is not cached.
    """
    digest = sha256(f"{torch.__version__} {fit!r}".encode())
    for file in [*files, Path(__file__), *sorted(tokenizer.iterdir())]:
        digest.update(file.read_bytes())
    folder = Path(cache) / f"{name}-{digest.hexdigest()[:16]}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        # Runs of one seed that start together train it once; the lock is free again when its holder ends.
        flock(lock, LOCK_EX)
        if not folder.is_dir():
            _make(folder, tokenizer, make)
    return folder


def _make(folder: Path, tokenizer: Path, make: Callable[[], LlamaForCausalLM]) -> None:
    """In a scratch folder that is renamed when it is whole."""
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        made = Path(scratch) / "policy"
        _save(make(), made)
        for file in sorted(tokenizer.iterdir()):
            shutil.copy(file, made)
        os.rename(made, folder)


def train(
    seed: int, encoder: Encoder, batches: Iterator[list[Row]], total: int, fit: Fit, report: Report | None = None
) -> LlamaForCausalLM:
    """Train a policy from nothing on one thread.

    Args:
        seed: of the initial weights; on one machine the same seed and rows give the same bits.
        encoder: its tokenizer.
        batches: the rows of each step; the loss is the mean over their trained tokens.
        total: how many batches there are.
        fit: size and training.
        report: called after every step.
    """
    with _one_thread_seeded(seed):
        model = LlamaForCausalLM(_config(fit, encoder))
        optimizer = torch.optim.AdamW(model.parameters(), lr=fit.lr, betas=fit.betas, weight_decay=0.0)
        for step, rows in enumerate(batches):
            optimizer.param_groups[0]["lr"] = fit.lr * schedule(step, total, fit.warmup)
            token_ids, labels = padded(rows, encoder.pad)
            # Rows are padded on the right and attention is causal: no real token sees the padding.
            logits = model(input_ids=token_ids, use_cache=False).logits
            loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), fit.clip)
            optimizer.step()
            optimizer.zero_grad()
            if report is not None:
                report(step + 1, total, loss.item())
    return model.eval()


def _save(model: LlamaForCausalLM, folder: Path) -> None:
    """What save_pretrained writes, without its progress bar, which would tear the caller's."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})


def padded(rows: list[Row], pad: int) -> tuple[Tensor, Tensor]:
    """Token ids and labels [rows, longest], padded on the right."""
    width = max(len(row.token_ids) for row in rows)
    token_ids = [row.token_ids + [pad] * (width - len(row.token_ids)) for row in rows]
    labels = [row.labels + [IGNORE] * (width - len(row.labels)) for row in rows]
    return torch.tensor(token_ids), torch.tensor(labels)


def schedule(step: int, total: int, warmup: int) -> float:
    """Share of the learning rate: linear warm-up times a cosine from 1 to 0.1."""
    return min(1.0, (step + 1) / warmup) * (0.55 + 0.45 * math.cos(math.pi * step / total))


def _config(fit: Fit, encoder: Encoder) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(encoder.vocabulary),
        hidden_size=fit.hidden,
        intermediate_size=fit.intermediate,
        num_hidden_layers=fit.layers,
        num_attention_heads=fit.heads,
        num_key_value_heads=fit.heads,
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
