"""What the trainer's benchmark trains: random models of two shapes, and samples of three kinds."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from harnessrl.adapter import Call, Rollout, Sample, Span, merge_calls

MODELS = {
    "tiny": {"vocab_size": 130, "hidden_size": 64, "intermediate_size": 176, "layers": 2, "heads": 4},
    "middle": {"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 688, "layers": 6, "heads": 8},
}
"""The embedded experiment's shape (0.1 M parameters), and one where the output head weighs something (9 M)."""
TOKENS = {"tiny": 16384, "middle": 6144}
"""Tokens of an update, where none are asked for: a second or a few on one core."""
DATA = ("short", "lognormal", "tree")
"""About 30 tokens a sample; 64 to 2048, lognormal; rollouts whose chains break, 2.4 samples a rollout."""
BREAKS = (0, 1, 1, 2, 3)
"""Breaks of the rollouts in turn: 1.4 on average, so 2.4 samples."""


def make_model(name: str, seed: int = 0) -> LlamaForCausalLM:
    """A random model of a shape in `MODELS`, in float32."""
    shape = dict(MODELS[name])
    layers, heads = shape.pop("layers"), shape.pop("heads")
    torch.manual_seed(seed)
    config = LlamaConfig(
        **shape,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()


def make_samples(data: str, tokens: int, vocabulary: int, seed: int = 0) -> list[Sample]:
    """Samples of a kind in `DATA`: of whole rollouts, until they hold `tokens` tokens or more."""
    rng = np.random.default_rng(seed)
    stream = _chains(rng, vocabulary) if data == "tree" else _single(rng, vocabulary, data)
    samples: list[Sample] = []
    while sum(len(sample.token_ids) for sample in samples) < tokens:
        samples += next(stream)
    return samples


def _single(rng: np.random.Generator, vocabulary: int, data: str) -> Iterator[list[Sample]]:
    """Rollouts of one sample; the second half of its tokens is trained."""
    index = 0
    while True:
        length = rng.normal(30, 10) if data == "short" else rng.lognormal(np.log(400), 0.8)
        length = int(np.clip(length, *((8, 70) if data == "short" else (64, 2048))))
        mask = np.arange(length) >= length // 2
        yield [
            Sample(
                rollout_id=f"r{index}",
                group_id="g",
                index=0,
                token_ids=rng.integers(0, vocabulary, length).astype(np.int32),
                loss_mask=mask,
                logprobs=np.where(mask, -np.log(vocabulary), 0).astype(np.float32),
                policy_version=np.where(mask, 0, -1).astype(np.int32),
                spans=(Span(call_id="c", start=length // 2, stop=length),),
            )
        ]
        index += 1


def _chains(rng: np.random.Generator, vocabulary: int) -> Iterator[list[Sample]]:
    """Rollouts of 12 calls that add about 60 tokens each, 24 of them sampled; where a chain breaks, the last response
    comes back with another first token."""
    index = 0
    while True:
        broken = rng.choice(np.arange(1, 12), BREAKS[index % len(BREAKS)], replace=False)
        context, response, calls = np.empty(0, np.int32), np.empty(0, np.int32), []
        for number in range(12):
            context = np.concatenate([context, response])
            if number in broken:
                context[-len(response)] = (context[-len(response)] + 1) % vocabulary
            added, sampled = rng.integers(12, 60), rng.integers(4, 44)
            context = np.concatenate([context, rng.integers(0, vocabulary, added, dtype=np.int32)])
            response = rng.integers(0, vocabulary, sampled, dtype=np.int32)
            logprobs = np.full(sampled, -np.log(vocabulary), np.float32)
            calls.append(Call(call_id=str(number), prompt_ids=context, response_ids=response, logprobs=logprobs))
        yield merge_calls(Rollout(rollout_id=f"r{index}", group_id="g", calls=calls, reward=1.0)).samples
        index += 1
