"""One attention function for every transformers model: who attends to whom is a layout passed with the forward call.

The model is told once to use ours (``use_layouts(model)``); each forward then carries ``layout=...``:

- ``Documents``: a flat pack of documents, each causal in itself, or of prefix trees. Exact, and what is padding nobody sees.
- ``Blocks``: the same packs as a block mask, for GPUs; ``documents`` and ``trees`` choose between the two by device.
- the engine's ``Slots`` (engine/torch_engine.py): cached keys and values.

No mask of transformers is built and none of its caches is used, so nothing leaks between documents by a version's default.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import AttentionInterface, PreTrainedModel

from harnessrl import strips
from harnessrl.errors import ConfigError

NAME = "harnessrl"
UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "head_mask", "position_bias", "attention_bias")
"""What a model may pass to its attention that changes it, and layouts know nothing of."""


class Layout(Protocol):
    """Who attends to whom. q [B, H, Q, D], k and v [B, Hkv, Q, D]; returns [B, H, Q, D]."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float | None) -> Tensor: ...


def use_layouts(model: PreTrainedModel) -> PreTrainedModel:
    """Make `model` take its attention from the layout given to each forward.

    Raises:
        ConfigError: a model whose tokens meet elsewhere than in full attention, or whose positions depend on others.
    """
    config, name = model.config.get_text_config(), type(model).__name__
    if other := sorted({*(getattr(config, "layer_types", None) or ())} - {"full_attention"}):
        raise ConfigError(f"policy.source: {name} has layers of {other[0]}; only full attention is supported")
    if not getattr(config, "layer_types", None) and getattr(config, "sliding_window", None):
        raise ConfigError(f"policy.source: {name} has a sliding window; only full attention is supported")
    if any(isinstance(module, torch.nn.Conv1d) for module in model.modules()):
        raise ConfigError(f"policy.source: {name} has convolutions over tokens; only full attention is supported")
    if (rope := _rope_types(config)) & {"dynamic", "longrope"}:
        raise ConfigError(
            f"policy.source: {name} has {min(rope & {'dynamic', 'longrope'})} positions, which depend on the longest "
            "sequence of a pack: not supported"
        )
    model.set_attn_implementation(NAME)
    return model


def _rope_types(config: Any) -> set[str]:
    """Kinds of rotary positions, of all layers."""
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [part for part in rope.values() if isinstance(part, dict)] or [rope]
    return {str(part.get("rope_type") or "default") for part in parts}


def check_independence(model: PreTrainedModel) -> None:
    """Refuse a model in which a document of a pack sees another, by whatever path: its gradient must be exactly 0.

    One forward and backward pass of six tokens, of a whole model prepared with `use_layouts`.

    Raises:
        ConfigError: it leaks, or has an attention that is not supported.
    """
    size = model.get_input_embeddings().weight.shape[1]
    embedded = (
        torch.cos(torch.arange(6.0 * size, device=model.device)).view(1, 6, size).to(model.dtype).requires_grad_()
    )
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]], device=model.device)
    layout, name = _Counted(np.array([0, 3, 6]), model.device), type(model).__name__
    with torch.enable_grad():
        try:
            output = model.base_model(inputs_embeds=embedded, position_ids=positions, use_cache=False, layout=layout)
        except Exception as error:  # whatever a model of unknown make raises, it cannot be used
            raise ConfigError(f"policy.source: {name} cannot be run with layouts: {error}") from error
        (grad,) = torch.autograd.grad(output.last_hidden_state[0, 3:].float().square().sum(), embedded)
    if grad.isfinite().all() and grad[0, :3].any():  # a weight that is not finite says nothing; training names it
        raise ConfigError(f"policy.source: {name}: documents of a pack see each other: it is not supported")
    layers = model.config.get_text_config().num_hidden_layers
    if sorted(layout.calls) != list(range(layers)):
        times = f"{len(layout.calls)} times in {layers} layers"
        raise ConfigError(f"policy.source: {name} attends {times}; once in each is supported")


def _attention(
    module: torch.nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    **kw: Any,
) -> tuple[Tensor, None]:
    if kw.get("layout") is None:
        raise ValueError("this model was given to harnessrl: call it with layout=Documents(...) or another layout")
    if unknown := [name for name in UNSUPPORTED if kw.get(name) is not None]:
        raise ValueError(f"layer {module.layer_idx}: attention with {unknown[0]} is not supported")
    if kw.get("dropout"):
        raise ValueError("attention dropout must be 0: a policy that trains under dropout is not the one that sampled")
    out = kw["layout"].attend(module.layer_idx, q, k, v, scaling)
    return out.transpose(1, 2), None


AttentionInterface.register(NAME, _attention)


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, scaling: float | None, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """PyTorch's attention with grouped key heads repeated (exact on every backend)."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scaling)


class Cells:
    """Where the tokens of a pack lie in batches of strips laid end to end: some in several cells, each at home in one.

    Args:
        tokens: int64 [cells], the token in each.
        home: bool [cells], once for every token.
        copies: bool [cells], its other cells that anything sees.
        device: where the pack lies.
    """

    def __init__(self, tokens: np.ndarray, home: np.ndarray, copies: np.ndarray, device: torch.device | str) -> None:
        home = np.flatnonzero(home)
        home, copies = home[np.argsort(tokens[home])], np.flatnonzero(copies)
        self.tokens, self.home, self.copies = (torch.from_numpy(x).to(device) for x in (tokens, home, copies))

    def fill(self, x: Tensor) -> Tensor:
        """Tokens [T, ...] to cells [cells, ...]."""
        return _Gather.apply(x, self.tokens, self._fill_back)  # type: ignore[no-any-return,no-untyped-call]

    def _fill_back(self, grad: Tensor) -> Tensor:
        """Nothing sees padding, so its gradient is zero: homes are read and copies added, and no more."""
        out = grad.index_select(0, self.home)
        if len(self.copies):
            out.index_add_(0, self.tokens[self.copies], grad.index_select(0, self.copies))
        return out

    def read(self, x: Tensor) -> Tensor:
        """Cells to tokens, each from its home."""
        return _Gather.apply(x, self.home, self._read_back)  # type: ignore[no-any-return,no-untyped-call]

    def _read_back(self, grad: Tensor) -> Tensor:
        return grad.new_zeros(len(self.tokens), *grad.shape[1:]).index_copy_(0, self.home, grad)


class _Gather(torch.autograd.Function):
    """x[index] with a backward pass of one's own: the general one adds up every cell, padding included."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


class Documents:
    """A pack of documents, each attending causally to itself only; or of prefix trees, whose nodes attend to ancestors.

    The pack is cut into strips (`harnessrl.strips`), and strips of like size form right-padded batches; those of
    documents need no mask. One gather fills all batches: a gather a batch would cost the whole pack each time in the
    backward pass.

    Args:
        cu_seqlens: [docs + 1], document starts, from 0 to the number of tokens.
        device: where the pack lies.
    """

    def __init__(self, cu_seqlens: np.ndarray, device: torch.device | str = "cpu") -> None:
        self._lay_out(strips.documents(cu_seqlens), device)

    @classmethod
    def trees(cls, parent: np.ndarray, subtree_end: np.ndarray, device: torch.device | str = "cpu") -> Documents:
        """A pack of prefix trees.

        Args:
            parent: [T], the node before each, -1 at roots; depth first (`pack_tree`).
            subtree_end: [T], one past each node's last descendant.
            device: where the pack lies.
        """
        self = cls.__new__(cls)
        self._lay_out(strips.trees(parent, subtree_end), device)
        return self

    def _lay_out(self, batches: Sequence[strips.Batch], device: torch.device | str) -> None:
        def joined(name: str) -> np.ndarray:
            return np.concatenate([getattr(batch, name).ravel() for batch in batches])

        real, own = joined("real"), joined("own")
        self.queries = Cells(joined("queries"), real, np.zeros_like(real), device)
        self.keys = Cells(joined("keys"), own, joined("real_keys") & ~own, device)
        self.shapes = [(*batch.queries.shape, batch.keys.shape[1]) for batch in batches]
        masks = [batch.mask for batch in batches]
        self.masks = [None if mask is None else torch.from_numpy(mask[:, None]).to(device) for mask in masks]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float | None) -> Tensor:
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # [T, H, D]
        q, k, v = self.queries.fill(q), self.keys.fill(k), self.keys.fill(v)
        q_sizes, k_sizes = zip(*((strips * q, strips * k) for strips, q, k in self.shapes), strict=True)
        pieces = zip(self.shapes, self.masks, q.split(q_sizes), k.split(k_sizes), v.split(k_sizes), strict=True)
        out = []
        for (count, queries, keys), mask, q, k, v in pieces:
            batch = (x.unflatten(0, (count, n)).transpose(1, 2) for x, n in ((q, queries), (k, keys), (v, keys)))
            out.append(sdpa(*batch, scaling, mask, causal=mask is None).transpose(1, 2).flatten(0, 1))
        return self.queries.read(torch.cat(out)).transpose(0, 1).unsqueeze(0)


class _Counted(Documents):
    """Documents that note which layers attend."""

    def __init__(self, cu_seqlens: np.ndarray, device: torch.device | str) -> None:
        super().__init__(cu_seqlens, device)
        self.calls: list[int] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float | None) -> Tensor:
        self.calls.append(layer)
        return super().attend(layer, q, k, v, scaling)


class Blocks:
    """What `Documents` does, for a GPU: one fused kernel, in which q sees k where k <= q < end[k].

    Blocks of 128 x 128 in which nothing is seen are skipped. On CUDA the mask and the kernel are compiled, so the first
    pack takes longer, and no T x T mask is stored. Elsewhere PyTorch has neither a fused kernel nor a backward pass for
    it: that is for tests of the forward pass. Not yet run on a GPU.

    Args:
        end: [T], one past the last token that may see each: its document's end, or its subtree's.
        device: where the pack lies.

    Source: torch.nn.attention.flex_attention, arXiv:2412.05496.
    """

    def __init__(self, end: np.ndarray, device: torch.device | str) -> None:
        ends = torch.from_numpy(end.astype(np.int32)).to(device)

        def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (k <= q) & (q < ends[k])

        make = _compiled(create_block_mask) if ends.is_cuda else create_block_mask
        self.mask: BlockMask = make(seen, None, None, len(end), len(end), device=device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float | None) -> Tensor:
        flex = _compiled(flex_attention) if q.is_cuda else flex_attention
        return flex(q, k, v, block_mask=self.mask, scale=scaling, enable_gqa=q.shape[1] != k.shape[1])  # type: ignore[no-any-return]


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled when first needed, once a process."""
    return torch.compile(function)


def documents(cu_seqlens: np.ndarray, device: torch.device | str = "cpu") -> Layout:
    """The layout of a pack of documents, by device: `Blocks` on CUDA, else `Documents`.

    Args:
        cu_seqlens: [docs + 1], document starts, from 0 to the number of tokens.
        device: where the pack lies.
    """
    if torch.device(device).type == "cuda":
        return Blocks(np.repeat(cu_seqlens[1:], np.diff(cu_seqlens)), device)
    return Documents(cu_seqlens, device)


def trees(parent: np.ndarray, subtree_end: np.ndarray, device: torch.device | str = "cpu") -> Layout:
    """The layout of a pack of prefix trees, by device: `Blocks` on CUDA, else `Documents.trees`.

    Args:
        parent: [T], the node before each, -1 at roots; depth first (`pack_tree`).
        subtree_end: [T], one past each node's last descendant.
        device: where the pack lies.
    """
    if torch.device(device).type == "cuda":
        return Blocks(subtree_end, device)
    return Documents.trees(parent, subtree_end, device)
