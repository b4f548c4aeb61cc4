"""One attention function for every transformers model: who attends to whom is a layout passed with the forward call.

The model is told once to use ours (``use_layouts(model)``); each forward then carries ``layout=...``:

- ``Documents``: a flat pack of documents, each causal in itself, or of prefix trees. Exact, and what is padding nobody sees.
- ``Masked``: a dense boolean mask.
- the engine's ``Slots`` (engine/torch_engine.py): cached keys and values.

No mask of transformers is built and none of its caches is used, so nothing leaks between documents by a version's default.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from harnessrl import strips

NAME = "harnessrl"


class Layout(Protocol):
    """Who attends to whom. q [B, H, Q, D], k and v [B, Hkv, Q, D]; returns [B, H, Q, D]."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float | None) -> Tensor: ...


def use_layouts(model: PreTrainedModel) -> PreTrainedModel:
    """Make `model` take its attention from the layout given to each forward."""
    model.set_attn_implementation(NAME)
    return model


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
    if kw.get("sliding_window") is not None:
        raise ValueError(f"layer {module.layer_idx}: sliding-window attention is not supported")
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
        return _Fill.apply(x, self)  # type: ignore[no-any-return,no-untyped-call]

    def read(self, x: Tensor) -> Tensor:
        """Cells to tokens, each from its home."""
        return _Read.apply(x, self)  # type: ignore[no-any-return,no-untyped-call]


class _Fill(torch.autograd.Function):
    """Nothing sees padding, so its gradient is zero: the backward pass reads homes and adds copies, and no more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cells: Cells) -> Tensor:
        ctx.cells = cells
        return x.index_select(0, cells.tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        cells: Cells = ctx.cells
        out = grad.index_select(0, cells.home)
        if len(cells.copies):
            out.index_add_(0, cells.tokens[cells.copies], grad.index_select(0, cells.copies))
        return out, None


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cells: Cells) -> Tensor:
        ctx.cells = cells
        return x.index_select(0, cells.home)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        cells: Cells = ctx.cells
        return grad.new_zeros(len(cells.tokens), *grad.shape[1:]).index_copy_(0, cells.home, grad), None


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


class Masked:
    """A dense mask: token t attends to token u where mask[t, u]. For tests and for models small enough."""

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float | None) -> Tensor:
        return sdpa(q, k, v, scaling, mask=self.mask)
