"""LoRA through peft: small trained matrices beside frozen weights, and the plain weights that both amount to."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from harnessrl.config import Lora
from harnessrl.errors import ConfigError
from harnessrl.train.parallel import whole

BASE, ADAPTER = ".base_layer", ".lora_"
"""What peft puts into the names of weights: `q_proj.base_layer.weight`, `q_proj.lora_A.default.weight`."""


def add_adapters(model: PreTrainedModel, lora: Lora) -> None:
    """Freeze the model and put untrained adapters beside its linear layers, in place (before `shard`).

        y = W x + alpha / rank * B A x,    A [rank, in], B [out, rank]

    Args:
        model: its weights may be on the meta device, the adapters are there then too; `start_adapters` fills them.
        lora: rank larger than 0.
    Raises:
        ConfigError: peft is not installed; a target is no linear layer of the model, or is its output head.
    Source: arXiv:2106.09685.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ConfigError("policy.lora: needs peft, which is not installed: pip install 'harnessrl[lora]'") from error
    settings = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.targets) or "all-linear")
    meta = model.get_output_embeddings().weight.device.type == "meta"
    head = model.get_output_embeddings()
    try:
        inject_adapter_in_model(settings, model, low_cpu_mem_usage=meta)
    except ValueError as error:
        raise ConfigError(f"policy.lora.targets: {error}") from error
    for name, layer in adapted(model):
        if not isinstance(layer.base_layer, nn.Linear) or layer.base_layer is head:
            raise ConfigError(
                f"policy.lora.targets: {name} is not a linear layer of a block; adapters go to those only"
            )
    model.eval()


@torch.no_grad()
def start_adapters(model: nn.Module, seed: int) -> None:
    """Draw every A and set every B to 0, the same numbers however the model is sharded: at first nothing changes.

    A ~ uniform(-1 / sqrt(in), 1 / sqrt(in))
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ADAPTER in name:
            full = torch.zeros(parameter.shape)
            if ".lora_A." in name:
                full.uniform_(-1, 1, generator=generator).div_(math.sqrt(full.shape[1]))
            full = full.to(parameter.device)
            if isinstance(parameter, DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                full = distribute_tensor(full, mesh, placements, src_data_rank=None)  # every rank drew the same
            parameter.copy_(full)


def adapted(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Layers that have an adapter, by their names in the plain model."""
    return ((name, module) for name, module in model.named_modules() if hasattr(module, "lora_A"))


def plain_name(name: str) -> str:
    """The name that a parameter has in the model without adapters."""
    return name.replace(BASE, "")


@torch.no_grad()
def plain_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers of the plain model that computes the same, in full, one at a time; a collective each.

    With adapters a weight is W + alpha / rank * B A. Every rank takes all of them, in the same order.
    """
    layers = dict(adapted(model))
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if ADAPTER in name:
            continue
        full, layer = whole(value), layers.get(plain_name(name).rpartition(".")[0])
        if layer is not None and name.endswith(".weight"):
            a, b = (whole(part["default"].weight) for part in (layer.lora_A, layer.lora_B))
            full = torch.addmm(full, b, a, alpha=layer.scaling["default"])
        yield plain_name(name), full


@torch.no_grad()
def copy_weights(source: nn.Module, target: nn.Module | None, *, merge: bool = True) -> None:
    """Copy a policy's weights into another model, one at a time; every rank calls it, only those with a target keep them.

    Args:
        source: may be sharded.
        target: without adapters where they are merged, else with the same ones.
        merge: whether adapters are added to the weights (`plain_weights`).
    """
    kept = dict(target.named_parameters()) | dict(target.named_buffers()) if target is not None else {}
    as_they_are = ((name, whole(value)) for name, value in [*source.named_parameters(), *source.named_buffers()])
    for name, full in plain_weights(source) if merge else as_they_are:
        if name in kept:
            kept[name].copy_(full)
