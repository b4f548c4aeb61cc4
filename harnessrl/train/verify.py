"""Whether a policy's logprobs are its own: engine, packs and trees against the model's plain forward, before anything is trained."""

from __future__ import annotations

import numpy as np
import torch
from transformers import PreTrainedModel

from harnessrl.adapter import Call, Rollout, Sample, merge_calls, pack, pack_tree
from harnessrl.attention import NAME
from harnessrl.engine.torch_engine import TorchEngine
from harnessrl.errors import ConfigError
from harnessrl.service.wire import Sampling
from harnessrl.train.policy import Policy, score

SHARED, OWN, SAMPLED = 3, 4, 6
"""Tokens that both prompts start with, that each has of its own, and that are sampled after each."""
TOLERANCE = {torch.float32: 1e-3}
"""Nats a token; what is supported agrees to 1e-5 in float32, and what is not was wrong by 0.8 to 8 in random models."""
LOOSE = 0.5
"""The tolerance of coarser types."""


@torch.no_grad()
def verify(model: PreTrainedModel) -> None:
    """Sample two short responses, and compare the engine's logprobs, a pack's and a tree's with the plain forward's.

    It finds models that do other things than attend once a layer through a layout and map the last hidden state to
    logits: masks of their own, positions counted by themselves, another head. A policy that is not finite passes.

    Args:
        model: whole, prepared with `use_layouts`.
    Raises:
        ConfigError: they differ, by which and how far.
    """
    name = type(model).__name__
    try:
        plain, found = _logprobs(model)
    except ConfigError:
        raise
    except Exception as error:  # whatever a model of unknown make raises, it cannot be used
        raise ConfigError(f"policy.source: {name} cannot be sampled from or scored: {error}") from error
    for what, logprobs in found.items():
        gap = float(np.abs(logprobs - plain).max())
        if gap > TOLERANCE.get(model.dtype, LOOSE):
            raise ConfigError(
                f"policy.source: {name}: logprobs of {what} differ from those of its own forward by up to {gap:.2g} nats a "
                "token: it is not supported"
            )


def _logprobs(model: PreTrainedModel) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Of the sampled tokens: by the model's own forward, and by each of our ways."""
    vocabulary = model.config.get_text_config().vocab_size
    ids = np.random.default_rng(0).integers(0, vocabulary, SHARED + 2 * OWN).tolist()
    prompts = [ids[:-OWN], ids[:SHARED] + ids[-OWN:]]
    engine = TorchEngine(model, max_batch=2, max_context=SHARED + OWN + SAMPLED)
    replies = engine.generate(prompts, [Sampling(max_tokens=SAMPLED, noise=noise) for noise in (1, 2)])
    samples = _samples(prompts, [reply.ids for reply in replies])
    policy, device, tree = Policy(model), str(model.device), pack_tree(samples, [0, 1])
    by_node = score(policy, tree, 1.0, device).logprobs.float().cpu().numpy()
    order = np.argsort(tree.sample_index[tree.scored], kind="stable")  # a tree has its tokens in an order of its own
    found = {
        "a pack": score(policy, pack(samples, [0, 1]), 1.0, device).logprobs.float().cpu().numpy(),
        "a tree of prefixes": by_node[order],
        "the engine": np.concatenate([reply.logprobs for reply in replies]),
    }
    plain = [_plain(model, prompt, reply.ids) for prompt, reply in zip(prompts, replies, strict=True)]
    return np.concatenate(plain), found


def _samples(prompts: list[list[int]], responses: list[np.ndarray]) -> list[Sample]:
    calls = [
        Call(call_id=str(at), prompt_ids=prompt, response_ids=ids, logprobs=np.zeros(len(ids)))
        for at, (prompt, ids) in enumerate(zip(prompts, responses, strict=True))
    ]
    merged = merge_calls(Rollout(rollout_id="r", group_id="g", calls=calls), strategy="per_call")
    return sorted(merged.samples, key=lambda sample: sample.spans[0].call_id)


def _plain(model: PreTrainedModel, prompt: list[int], response: np.ndarray) -> np.ndarray:
    """Logprobs of a response by the model's own attention, mask and head."""
    ids = torch.tensor([[*prompt, *response.tolist()]], device=model.device)
    model.set_attn_implementation("eager")
    try:
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    finally:
        model.set_attn_implementation(NAME)
    return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].cpu().numpy()
