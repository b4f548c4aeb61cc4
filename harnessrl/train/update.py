"""Optimizer updates from packs: `loss = sum(weight * token_loss)`, nothing averaged afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from harnessrl.adapter import Packed
from harnessrl.config import Config
from harnessrl.train.objective import importance_weights, kl_values, policy_loss, weighted_sum
from harnessrl.train.policy import Scored, score


@dataclass
class Sums:
    """What a step's updates add up to; `metrics` turns it into means."""

    tokens: int = 0
    """Trained tokens, over all updates."""
    pack_tokens: int = 0
    """Tokens computed, context included."""
    updates: int = 0
    values: dict[str, float] = field(default_factory=dict)
    """Sums over tokens or updates, by name."""
    engine_gap: float = 0.0
    """Largest |engine logprob - trainer logprob| over tokens of the current version, before the first update."""
    weight_advantage: float = 0.0
    """The update's sum of weight x advantage that is largest in size."""

    def add(self, **values: float | Tensor) -> None:
        """Add to named sums."""
        for name, value in values.items():
            self.values[name] = self.values.get(name, 0.0) + float(value)

    def metrics(self) -> dict[str, float]:
        """Means by the names of metrics.jsonl; a step without trained tokens has loss 0 and NaN means."""
        per_token = {
            "policy/entropy": "entropy",
            "policy/ratio_mean": "ratio",
            "policy/clip_fraction": "clipped",
            "policy/importance_mean": "importance_sum",
            "policy/truncated_share": "truncated",
            "policy/masked_share": "masked",
        }
        per_update = {"loss/policy": "loss", "loss/kl": "kl", "policy/grad_norm": "grad_norm"}
        out = {key: self.values.get(name, 0.0) / max(self.updates, 1) for key, name in per_update.items()}
        for key, name in per_token.items():
            out[key] = self.values.get(name, 0.0) / self.tokens if self.tokens else float("nan")
        return out | {
            "loss/weight_advantage_sum": self.weight_advantage,
            "policy/engine_logprob_gap": self.engine_gap,
            "update/count": float(self.updates),
            "update/trained_tokens": float(self.tokens),
        }


class Updater:
    """Runs the updates of a step on one process.

    Args:
        model: the policy; its parameters are changed in place.
        optimizer: steps once an update.
        reference: frozen policy of the KL term, or None.
        config: objective and clipping.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        optimizer: torch.optim.Optimizer,
        reference: PreTrainedModel | None,
        config: Config,
    ) -> None:
        self.model, self.optimizer, self.reference, self.config = model, optimizer, reference, config
        self.temperature = config.policy.train_temperature

    def step(self, updates: Sequence[Sequence[Packed]], version: int) -> Sums:
        """Run every update, `epochs` times over, and return what happened.

        The ratio's denominator is the trainer's own logprob before the first update. With a single update that is this
        forward's value (ratio 1); with more, a pass without gradient comes first.

        Args:
            updates: packs of each update (`make_updates`, one rank).
            version: the policy version that the updates start from.
        """
        sums = Sums()
        single = len(updates) * self.config.update.epochs == 1
        old = None if single else [[self._logprobs(p, version, sums) for p in packs] for packs in updates]
        for _ in range(self.config.update.epochs):
            for index, packs in enumerate(updates):
                self._update(packs, old[index] if old else None, version, sums)
        return sums

    @torch.no_grad()
    def _logprobs(self, packed: Packed, version: int, sums: Sums) -> Tensor:
        logprobs = score(self.model, packed, self.temperature).logprobs
        self._note_gap(packed, logprobs, version, sums)
        return logprobs

    def _note_gap(self, packed: Packed, logprobs: Tensor, version: int, sums: Sums) -> None:
        at = packed.scored
        current = packed.policy_version[at] == version
        gap = np.abs(packed.logprobs[at] - logprobs.detach().cpu().numpy())[current]
        if len(gap):
            sums.engine_gap = max(sums.engine_gap, float(gap.max()))

    def _update(self, packs: Sequence[Packed], old: Sequence[Tensor] | None, version: int, sums: Sums) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        balance = 0.0
        for index, packed in enumerate(packs):
            if len(packed.token_ids) == 0:
                continue
            scored = score(self.model, packed, self.temperature, entropy_gradient=self.config.loss.entropy_coef > 0)
            if old is None:
                self._note_gap(packed, scored.logprobs, version, sums)
            loss, pack_balance = self._loss(packed, scored, old[index] if old else None, sums)
            balance += pack_balance
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), self.config.update.grad_clip, error_if_nonfinite=True
        )
        self.optimizer.step()
        sums.updates += 1
        sums.add(grad_norm=norm)
        if abs(balance) >= abs(sums.weight_advantage):
            sums.weight_advantage = balance

    def _loss(self, packed: Packed, scored: Scored, old: Tensor | None, sums: Sums) -> tuple[Tensor, float]:
        """The pack's part of the update's loss, and its part of the sum of weight x advantage."""
        settings, at, device = self.config.loss, packed.scored, scored.logprobs.device
        advantages, weights = (torch.from_numpy(x[at]).to(device) for x in (packed.advantages, packed.weights))
        sequence = torch.from_numpy(packed.call_index[at].astype(np.int64)).to(device)
        engine = torch.from_numpy(packed.logprobs[at]).to(device)
        old = scored.logprobs.detach() if old is None else old
        correction, importance = importance_weights(
            old,
            engine,
            level=settings.importance,
            threshold=settings.importance_threshold,
            mask_below=settings.mask_below,
            mask_above=settings.mask_above,
            sequence=sequence,
        )
        loss, metrics = policy_loss(
            scored.logprobs,
            engine if settings.old == "engine" else old,
            advantages,
            weights * correction,
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            dual_clip=settings.dual_clip,
            kind=settings.kind,
            sequence=sequence,
        )
        sums.add(loss=loss.detach(), entropy=scored.entropy.detach().sum(), ratio=metrics["ratio_sum"])
        sums.add(clipped=metrics["clipped"], **importance)
        sums.tokens += len(at)
        sums.pack_tokens += len(packed.token_ids)
        if settings.entropy_coef:
            loss = loss - settings.entropy_coef * weighted_sum(scored.entropy, weights)
        if self.reference is not None:
            with torch.no_grad():
                reference = score(self.reference, packed, self.temperature).logprobs
            kl = weighted_sum(kl_values(scored.logprobs, reference, settings.kl), weights)
            sums.add(kl=kl.detach())
            loss = loss + settings.kl_coef * kl
        return loss, float((weights * advantages).sum())
