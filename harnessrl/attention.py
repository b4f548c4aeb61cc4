"""One attention function for every transformers model: who attends to whom is a layout passed with the forward call.

The model is told once to use ours (``use_layouts(model)``); each forward then carries ``layout=...``:

- ``Documents``: a flat pack of documents, each causal in itself, or of prefix trees. Exact, and what is padding nobody sees.
- ``Masked``: a dense boolean mask.
- the engine's ``Slots`` (engine/torch_engine.py): cached keys and values.

No mask of transformers is built and none of its caches is used, so nothing leaks between documents by a version's default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

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


@dataclass(frozen=True)
class Bucket:
    """Documents of similar length, as a right-padded batch of indices into the pack."""

    gather: Tensor
    """int64 [docs, longest]: pack position of each cell; padding repeats the document's last token."""
    cells: Tensor
    """int64 [tokens]: flat cell of each real token, in the order of `tokens`."""
    tokens: Tensor
    """int64 [tokens]: pack position of each real token."""
    mask: Tensor | None
    """bool [docs, 1, longest, longest]: ancestors, for trees; None is causal, where padding is hidden already."""


class Documents:
    """A pack of documents, each attending causally to itself only; or of trees, whose nodes attend to their ancestors.

    Documents are gathered into right-padded batches of like length (within 1.25x), where causality alone hides the
    padding from every real token: the cost is the sum of squared lengths, and no mask exists. Trees take a mask a tree.

    Args:
        cu_seqlens: [docs + 1] document starts, from 0 to the number of tokens.
        device: where the pack lies.
        subtree_end: [tokens], one past the last descendant of each node, for trees (`pack_tree`); None for documents.
    """

    def __init__(
        self, cu_seqlens: np.ndarray, device: torch.device | str = "cpu", subtree_end: np.ndarray | None = None
    ) -> None:
        starts, lengths = np.asarray(cu_seqlens[:-1], np.int64), np.diff(cu_seqlens).astype(np.int64)
        keep = lengths > 0
        starts, lengths = starts[keep], lengths[keep]
        self.buckets: list[Bucket] = []
        size_class = np.floor(np.log(lengths) / np.log(1.25)) if len(lengths) else lengths
        for size in np.unique(size_class):
            docs = np.flatnonzero(size_class == size)
            longest = int(lengths[docs].max())
            column = np.arange(longest)
            gather = starts[docs, None] + np.minimum(column, lengths[docs, None] - 1)
            cells = np.flatnonzero((column < lengths[docs, None]).ravel())
            mask = None
            if subtree_end is not None:
                end = subtree_end[gather] - starts[docs, None]
                causal = column[:, None] >= column[None, :]
                mask = (causal & (column[None, :, None] < end[:, None, :])) | np.eye(longest, dtype=bool)
                mask = torch.from_numpy(mask[:, None]).to(device)
            indices = (torch.from_numpy(x).to(device) for x in (gather, cells, gather.ravel()[cells]))
            self.buckets.append(Bucket(*indices, mask))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float | None) -> Tensor:
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # [T, H, D]
        out = torch.zeros_like(q)
        for bucket in self.buckets:
            batch = (  # [docs, H, longest, D]; index_select's backward is several times faster than that of x[index]
                x.index_select(0, bucket.gather.flatten()).view(*bucket.gather.shape, *x.shape[1:]).transpose(1, 2)
                for x in (q, k, v)
            )
            flat = sdpa(*batch, scaling, bucket.mask, causal=bucket.mask is None).transpose(1, 2).flatten(0, 1)
            out = out.index_copy(0, bucket.tokens, flat.index_select(0, bucket.cells))
        return out.transpose(0, 1).unsqueeze(0)


class Masked:
    """A dense mask: token t attends to token u where mask[t, u]. For tests and for models small enough."""

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float | None) -> Tensor:
        return sdpa(q, k, v, scaling, mask=self.mask)
