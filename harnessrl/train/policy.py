"""The policy: loading it, and the logprob and entropy of every trained token of a pack."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from harnessrl.adapter import Packed, PackedTree
from harnessrl.attention import Layout, check_independence, documents, trees, use_layouts
from harnessrl.errors import ConfigError
from harnessrl.train.head import head_logprobs

HEAD_ELEMENTS = 2**26 if torch.cuda.is_available() else 2**20
"""Logits in a tile of the head: 4 MiB of float32, near a core's cache; on a GPU 256 MiB, work for whole kernels."""


def load_model(folder: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A causal LM whose attention takes layouts; dropout off, since the engine samples without it."""
    logging.disable_progress_bar()
    model = use_layouts(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)).eval()
    check_independence(model)
    return model


@dataclass(frozen=True)
class Scored:
    """Columns over the T trained tokens of a pack, in pack order."""

    logprobs: Tensor
    """float32 [T], nats, tempered; carries the gradient."""
    entropy: Tensor
    """float32 [T], nats, of the tempered distribution each token was drawn from."""


class Policy(nn.Module):
    """A causal LM that scores tokens: log_softmax(logits / temperature) at chosen positions, and the entropy there.

    Only chosen positions pass the output head, in tiles of `HEAD_ELEMENTS` (`head_logprobs`), so that no
    [tokens, vocabulary] tensor of the whole pack exists.

    Raises:
        ConfigError: a model whose logits are not a linear map of its last hidden state.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        _check_head(model)
        self.model = model

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        layout: Layout,
        source: Tensor,
        labels: Tensor,
        temperature: float,
        entropy_gradient: bool,
    ) -> Scored:
        """tokens, positions [1, N]; source [T] where to read, labels [T] what to score."""
        output = self.model.base_model(input_ids=tokens, position_ids=positions, use_cache=False, layout=layout)
        head = self.model.get_output_embeddings()
        columns = head_logprobs(
            output.last_hidden_state[0].index_select(0, source),
            head.weight,
            labels,
            temperature,
            bias=head.bias,
            entropy_gradient=entropy_gradient,
            elements=HEAD_ELEMENTS,
        )
        return Scored(*columns)


def _check_head(model: PreTrainedModel) -> None:
    """Refuse what would make our logits other than the model's own."""
    head, config, name = model.get_output_embeddings(), model.config.get_text_config(), type(model).__name__
    if not isinstance(head, nn.Linear):
        raise ConfigError(f"policy.source: {name} has a {type(head).__name__} as output head; expected a linear layer")
    for key in ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier"):
        if (value := getattr(config, key, None)) not in (None, 1):
            raise ConfigError(f"policy.source: {name} has {key}={value}, which changes logits: not supported")


def score(
    policy: Policy,
    packed: Packed | PackedTree,
    temperature: float,
    device: str = "cpu",
    *,
    entropy_gradient: bool = False,
) -> Scored:
    """Logprob and entropy of every trained token of a pack, each behind its own prompt.

    A pack of no tokens runs a forward of one token that scores nothing, so that all ranks of a sharded policy do the
    same collectives.

    Args:
        policy: scores.
        packed: a pack; its documents are independent.
        temperature: larger than 0, that of the sampling.
        device: where the policy computes.
        entropy_gradient: whether the entropy carries a gradient (an entropy bonus); False saves memory.
    Returns:
        columns over the pack's trained tokens.
    """
    empty = len(packed.token_ids) == 0
    columns = (
        ([0], [0], [], [])
        if empty
        else (packed.token_ids, packed.position_ids, packed.source, packed.token_ids[packed.scored])
    )
    tokens, positions, source, labels = (torch.from_numpy(np.asarray(x, np.int64)).to(device) for x in columns)
    return policy(tokens[None], positions[None], _layout(packed, device), source, labels, temperature, entropy_gradient)  # type: ignore[no-any-return]


def _layout(packed: Packed | PackedTree, device: str) -> Layout:
    if len(packed.token_ids) == 0:
        return documents(np.array([0, 1]), device)
    if isinstance(packed, PackedTree):
        return trees(packed.parent, packed.subtree_end, device)
    return documents(packed.cu_seqlens, device)
