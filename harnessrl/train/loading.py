"""Bring a policy from a transformers folder straight into the shards of all ranks: no rank ever holds it whole."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from harnessrl.attention import use_layouts
from harnessrl.config import Lora
from harnessrl.train.lora import ADAPTER, add_adapters, plain_name, start_adapters
from harnessrl.train.parallel import World, recompute_blocks, shard
from harnessrl.train.policy import Policy, load_model

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def load_policy(
    folder: Path,
    here: World,
    *,
    recompute: bool = False,
    dtype: torch.dtype = torch.float32,
    lora: Lora | None = None,
    seed: int = 0,
) -> Policy:
    """The policy in a transformers folder, its weights in float32, sharded over all ranks; every rank calls it.

    The model is made on the meta device, where parameters take no memory, and sharded there; each rank then reads its
    own rows of every tensor. Alone this is `Policy(load_model(folder))`. A folder whose safetensors do not bear the
    model's own names (transformers converts some on loading) is loaded whole by every rank before it is sharded.

    Args:
        folder: config.json and weights, readable by every rank.
        here: this rank.
        recompute: keep only each block's input for the backward pass (`recompute_blocks`).
        dtype: what it computes in (`shard`).
        lora: adapters that are trained in place of the weights; None or of rank 0 are none.
        seed: fixes the start of the adapters.
    Raises:
        ValueError: a tensor whose shape is not the model's.
        ConfigError: adapters that cannot be (`add_adapters`).
    """
    model = _empty(folder) if here.size > 1 else None
    tensors = _tensors(folder)
    whole = model is None or {name for name, _ in model.named_parameters()} != tensors.keys()
    policy = Policy(load_model(folder, here.device) if whole else use_layouts(model).eval())
    if lora is not None and lora.rank:
        add_adapters(policy.model, lora)
    if recompute:
        recompute_blocks(policy.model)
    shard(policy, policy.model, here, dtype=dtype)
    if not whole:
        _allocate(policy, here.device)
        for name, parameter in policy.model.named_parameters():
            if ADAPTER not in name:
                _read_rows(parameter, plain_name(name), tensors[plain_name(name)], here)
    if lora is not None and lora.rank:
        start_adapters(policy.model, seed)
    return policy


def _empty(folder: Path) -> PreTrainedModel:
    """The model without memory for its parameters; its buffers, which are computed and not stored, are real."""
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    model.tie_weights()  # accelerate has made one parameter of each name
    return model  # type: ignore[no-any-return]


def _tensors(folder: Path) -> dict[str, Path]:
    """The file of each stored tensor; empty if there are no safetensors."""
    if (folder / INDEX).exists():
        files: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
        return {name: folder / file for name, file in files.items()}
    if not (folder / SINGLE).exists():
        return {}
    with safe_open(folder / SINGLE, framework="pt") as file:
        return dict.fromkeys(file.keys(), folder / SINGLE)


def _allocate(policy: nn.Module, device: str) -> None:
    """Give the shards memory, and keep the buffers."""
    buffers = {name: buffer.clone() for name, buffer in policy.named_buffers()}
    policy.to_empty(device=device)
    for name, buffer in policy.named_buffers():
        buffer.copy_(buffers[name])


@torch.no_grad()
def _read_rows(parameter: nn.Parameter, name: str, file: Path, here: World) -> None:
    """Fill this rank's rows of a parameter: ranks hold equal numbers, rounded up, but for the last ones."""
    assert isinstance(parameter, DTensor) and list(parameter.placements) == [Shard(0)], name
    local, rows = parameter.to_local(), len(parameter)
    first = min(rows, here.rank * -(-rows // here.size))
    assert len(local) == min(rows, first + -(-rows // here.size)) - first, name
    with safe_open(file, framework="pt") as stored:
        piece = stored.get_slice(name)
        if piece.get_shape() != list(parameter.shape):
            raise ValueError(f"{file}: {name} has shape {piece.get_shape()}, the model wants {list(parameter.shape)}")
        local.copy_(piece[first : first + len(local)])
