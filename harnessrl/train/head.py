"""The output head and what follows it, fused: logprob and entropy of tokens, never holding more than tiles of logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

WIDTH = 1024
"""Vocabulary entries of a tile, at least, where there are as many: narrow and tall tiles stay in the cache."""


def head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float,
    *,
    bias: Tensor | None = None,
    entropy_gradient: bool = False,
    elements: int = 2**20,
) -> tuple[Tensor, Tensor]:
    """Score labels by the log-softmax of tempered logits, and measure each distribution's entropy.

        z_tv    = (hidden_t . weight_v + bias_v) / temperature,    p_t = softmax(z_t)
        logprob = z_t,label - logsumexp_v z_tv,    entropy = -sum_v p_tv log p_tv

    Equal to the plain computation up to rounding, forward and backward. Logits exist one tile of tokens x vocabulary at
    a time: the forward passes over the vocabulary with a running maximum and running sums; the backward computes each
    tile again and turns it in place into the gradient of its logits. The price is one matrix product beside the three
    of any head.

    Args:
        hidden: [T, D], of any float type; products are taken in it, sums in float32 or wider.
        weight: [V, D], of the same type.
        labels: int64 [T], the tokens to score.
        temperature: larger than 0; 1 is the model's own distribution.
        bias: [V], or None.
        entropy_gradient: whether the entropy carries a gradient.
        elements: numbers in a tile. Two tiles are held, beside the gradients of hidden and weight.
    Returns:
        logprobs [T] and entropy [T], nats, float32 (float64 for float64).
    Source: running softmax, arXiv:1805.02867, alg. 3; logits recomputed by tile, arXiv:2411.09009.
    """
    return _Head.apply(hidden, weight, bias, labels, temperature, entropy_gradient, elements)  # type: ignore[no-any-return,no-untyped-call]


class _Tiles:
    """Tempered logits, tile by tile; all vocabulary of some tokens before the next tokens."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, temperature: float, elements: int
    ) -> None:
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.labels, self.temperature = labels, temperature
        self.dtype = torch.promote_types(hidden.dtype, torch.float32)
        vocabulary = len(weight)
        self.rows = max(1, min(len(hidden), elements // min(vocabulary, WIDTH)))
        self.columns = min(vocabulary, max(1, elements // self.rows))
        self.buffers = hidden.new_empty((2, self.rows * self.columns), dtype=self.dtype)

    def __iter__(self) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
        """Rows, columns, the logits there, and scratch of the same shape; both are overwritten by the next tile."""
        for row in range(0, len(self.hidden), self.rows):
            rows = slice(row, min(row + self.rows, len(self.hidden)))
            for column in range(0, len(self.weight), self.columns):
                columns = slice(column, min(column + self.columns, len(self.weight)))
                shape = rows.stop - rows.start, columns.stop - columns.start
                logits, scratch = (buffer[: shape[0] * shape[1]].view(shape) for buffer in self.buffers)
                self._logits(rows, columns, out=logits)
                yield rows, columns, logits, scratch

    def _logits(self, rows: slice, columns: slice, out: Tensor) -> None:
        if self.hidden.dtype == self.dtype:
            torch.mm(self.hidden[rows], self.weight[columns].t(), out=out)
        else:
            out.copy_(self.hidden[rows] @ self.weight[columns].t())
        if self.bias is not None:
            out.add_(self.bias[columns])
        if self.temperature != 1:
            out.div_(self.temperature)

    def label_cells(self, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
        """[rows, 1] column of each label in the tile, and [rows, 1] whether it lies there (the column is any if not)."""
        cell = self.labels[rows, None] - columns.start
        width = columns.stop - columns.start
        return cell.clamp(0, width - 1), (cell >= 0) & (cell < width)


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        temperature: float,
        entropy_gradient: bool,
        elements: int,
    ) -> tuple[Tensor, Tensor]:
        tiles = _Tiles(hidden, weight, bias, labels, temperature, elements)
        count, lowest = len(hidden), torch.finfo(tiles.dtype).min  # not -inf: inf - inf is nan
        largest = hidden.new_full((count,), lowest, dtype=tiles.dtype)
        total, moment, picked = hidden.new_zeros((3, count), dtype=tiles.dtype)
        for rows, columns, logits, scratch in tiles:
            m, s, u = largest[rows], total[rows], moment[rows]  # s = sum exp(z - m), u = sum (z - m) exp(z - m)
            cell, here = tiles.label_cells(rows, columns)
            picked[rows] += logits.gather(1, cell).mul_(here)[:, 0]
            new = torch.maximum(m, logits.amax(1))
            down = m - new
            exponential = torch.exp(logits.sub_(new[:, None]), out=scratch)
            u.add_(s * down).mul_(down.exp()).add_(logits.mul_(exponential).sum(1))
            s.mul_(down.exp()).add_(exponential.sum(1))
            m.copy_(new)
        lse, entropy = largest + total.log(), total.log() - moment / total
        ctx.save_for_backward(hidden, weight, bias, labels, lse, entropy)
        ctx.settings = temperature, entropy_gradient, elements
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return picked - lse, entropy

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, lse, entropy = ctx.saved_tensors
        temperature, entropy_gradient, elements = ctx.settings
        tiles = _Tiles(hidden, weight, bias, labels, temperature, elements)
        given = zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
        of_hidden, of_weight, of_bias = (torch.zeros_like(x, dtype=tiles.dtype) if use else None for x, use in given)
        g = grad[:, None] / temperature
        for rows, columns, logits, scratch in tiles:
            logprobs = logits.sub_(lse[rows, None])
            slope = torch.exp(logprobs, out=scratch)  # becomes d loss / d logit, times 1 / temperature
            if entropy_gradient:  # d entropy / d z_v = -p_v (log p_v + entropy)
                g_entropy = grad_entropy[rows, None] / temperature  # type: ignore[index]
                slope.mul_(logprobs.add_(entropy[rows, None]).mul_(g_entropy).add_(g[rows]).neg_())
            else:
                slope.mul_(-g[rows])
            cell, here = tiles.label_cells(rows, columns)
            slope.scatter_add_(1, cell, g[rows] * here)
            if of_hidden is not None:
                _add_product(of_hidden[rows], slope, weight[columns])
            if of_weight is not None:
                _add_product(of_weight[columns], slope.t(), hidden[rows])
            if of_bias is not None:
                of_bias[columns] += slope.sum(0)
        sums = (of_hidden, of_weight, of_bias)
        return (*(None if x is None else x.to(hidden.dtype) for x in sums), None, None, None, None)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, the product taken in b's type."""
    if total.dtype == b.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a.to(b.dtype) @ b)
