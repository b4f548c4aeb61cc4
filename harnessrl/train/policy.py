"""The policy: loading it, and the logprob and entropy of every trained token of a pack."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel

from harnessrl.adapter import Packed
from harnessrl.attention import Documents, use_layouts

HEAD_ELEMENTS = 2**23
"""Logits held at once by the head, tokens x vocabulary (32 MiB of float32)."""


def resolve(name: str) -> Callable[..., Any]:
    """The function behind `MODULE:FUNCTION`.

    Raises:
        ValueError: no such module or function, by name.
    """
    module, colon, function = name.partition(":")
    if not colon:
        raise ValueError(f"{name!r}: expected MODULE:FUNCTION")
    try:
        return getattr(importlib.import_module(module), function)  # type: ignore[no-any-return]
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name!r}: {error}") from error


def load_policy(folder: Path, device: str = "cpu") -> PreTrainedModel:
    """A causal LM in float32 whose attention takes layouts; dropout off, since the engine samples without it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    return use_layouts(model).eval()


@dataclass(frozen=True)
class Scored:
    """Columns over the T trained tokens of a pack, in pack order."""

    logprobs: Tensor
    """float32 [T], nats, tempered; carries the gradient."""
    entropy: Tensor
    """float32 [T], nats, of the tempered distribution each token was drawn from."""


def score(model: PreTrainedModel, packed: Packed, temperature: float, *, entropy_gradient: bool = False) -> Scored:
    """Logprob and entropy of every trained token: log_softmax(logits / temperature) at the token's own prompt.

    Only trained positions pass the output head, in chunks of `HEAD_ELEMENTS`, so that no [tokens, vocabulary] tensor of
    the whole pack exists; with several chunks each is recomputed in the backward pass.

    Args:
        model: a policy from `load_policy`.
        packed: a pack; its documents are independent.
        temperature: larger than 0, that of the sampling.
        entropy_gradient: whether the entropy carries a gradient (an entropy bonus); False saves memory.
    Returns:
        columns over the pack's trained tokens.
    """
    device = model.device
    tokens, positions = (
        torch.from_numpy(x.astype(np.int64))[None].to(device) for x in (packed.token_ids, packed.position_ids)
    )
    layout = Documents(packed.cu_seqlens, device)
    hidden = model.base_model(
        input_ids=tokens, position_ids=positions, use_cache=False, layout=layout
    ).last_hidden_state[0]
    at = torch.from_numpy(packed.source).to(device)
    labels = torch.from_numpy(packed.labels.astype(np.int64)).to(device)[at]
    head = model.get_output_embeddings()
    chunk = max(1, HEAD_ELEMENTS // head.weight.shape[0])
    if len(at) <= chunk:
        return Scored(*_head(head, hidden[at], labels, temperature, entropy_gradient))
    parts = [
        checkpoint(
            _head,
            head,
            hidden[at[i : i + chunk]],
            labels[i : i + chunk],
            temperature,
            entropy_gradient,
            use_reentrant=False,
        )
        for i in range(0, len(at), chunk)
    ]
    return Scored(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _head(
    head: torch.nn.Module, hidden: Tensor, labels: Tensor, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    logits = head(hidden).float() / temperature
    logprobs = logits.log_softmax(-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, labels[:, None])[:, 0], entropy
