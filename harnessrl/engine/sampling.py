"""Choosing tokens: tempered, truncated, and repeatable whatever else is in the batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from harnessrl.service.wire import Sampling


def uniform(noise: np.ndarray, position: np.ndarray) -> np.ndarray:
    """One number in [0, 1) for each (key, position): SplitMix64 (Steele, Lea and Flood 2014) of key + position.

    Args:
        noise: uint64 [B], each request's key.
        position: [B], index of the token in its response.
    Returns:
        float64 [B], multiples of 2^-53.
    """
    with np.errstate(over="ignore"):
        z = noise.astype(np.uint64) + (position.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


def truncate(logprobs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Keep each row's `top_k` likeliest tokens (0: all), of those the fewest that hold `top_p`, and renormalise."""
    ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logprobs.shape[-1], device=logprobs.device)
    drop = (top_k[:, None] > 0) & (rank >= top_k[:, None])
    kept = ordered.masked_fill(drop, -torch.inf).log_softmax(-1)
    before = kept.exp().cumsum(-1) - kept.exp()
    drop |= (before >= top_p[:, None]) & (rank > 0)
    dropped = torch.zeros_like(drop).scatter(-1, order, drop)
    return logprobs.masked_fill(dropped, -torch.inf).log_softmax(-1)


def choose(logits: Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Sample one token a row by inverting the cumulative distribution at the row's own uniform number.

    Args:
        logits: float32 [B, V].
        samplings: [B].
        positions: [B], index of the token in its response.
    Returns:
        tokens int64 [B]; logprobs float32 [B] of the distribution sampled from.
    """
    temperature = torch.tensor([s.temperature for s in samplings], dtype=torch.float64, device=logits.device)
    greedy = temperature == 0
    # In float64: float32 log_softmax is off by 1e-5 over 50k entries, as much as all else that parts engine and trainer.
    logprobs = (logits.double() / torch.where(greedy, 1.0, temperature)[:, None]).log_softmax(-1)
    if any(s.top_k or s.top_p < 1 for s in samplings):
        top_k = torch.tensor([s.top_k for s in samplings], device=logits.device)
        top_p = torch.tensor([s.top_p for s in samplings], device=logits.device)
        logprobs = truncate(logprobs, top_k, top_p)
    u = uniform(np.array([s.noise for s in samplings], np.uint64), np.array(positions))
    cumulative = logprobs.exp().cumsum(-1)
    target = torch.from_numpy(u).to(logits.device) * cumulative[:, -1]
    token = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    token = torch.where(greedy, logits.argmax(-1), token)
    chosen = logprobs.gather(-1, token[:, None])[:, 0].float()
    return token.cpu().numpy(), chosen.cpu().numpy()
