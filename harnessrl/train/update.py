"""Optimizer updates from packs: `loss = sum(weight * token_loss)`, nothing averaged afterwards."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from harnessrl.adapter import Packed, PackedTree
from harnessrl.config import Config
from harnessrl.train.faults import Suspect, trace
from harnessrl.train.objective import importance_weights, kl_values, policy_loss, weighted_sum
from harnessrl.train.parallel import World, whole
from harnessrl.train.policy import Policy, Scored, score

PER_TOKEN = {
    "policy/entropy": "entropy",
    "policy/ratio_mean": "ratio",
    "policy/clip_fraction": "clipped",
    "policy/importance_mean": "importance_sum",
    "policy/truncated_share": "truncated",
    "policy/masked_share": "masked",
}
PER_UPDATE = {"loss/policy": "loss", "loss/kl": "kl"}


@dataclass
class Sums:
    """What one rank's packs of a step add up to."""

    totals: Counter[str] = field(default_factory=Counter)
    """Sums over packs, by name; `tokens` counts trained tokens, `pack_tokens` all that were computed."""
    balances: list[float] = field(default_factory=list)
    """[updates], sum of weight x advantage over this rank's packs."""
    norms: list[float] = field(default_factory=list)
    """[updates], gradient norm before clipping, over all ranks."""
    engine_gap: float = 0.0
    """Largest |engine logprob - trainer logprob| over tokens of the current version, before the first update."""

    def add(self, **values: float | Tensor) -> None:
        """Add to named sums."""
        self.totals.update({name: float(value) for name, value in values.items()})

    def metrics(self) -> dict[str, float]:
        """Means by the names of metrics.jsonl; a step without trained tokens has loss 0 and NaN means."""
        tokens, updates = self.totals["tokens"], len(self.norms)
        out = {key: self.totals[name] / max(updates, 1) for key, name in PER_UPDATE.items()}
        out |= {key: self.totals[name] / tokens if tokens else float("nan") for key, name in PER_TOKEN.items()}
        return out | {
            "loss/weight_advantage_sum": max(self.balances, key=abs, default=0.0),
            "policy/grad_norm": sum(self.norms) / max(updates, 1),
            "policy/engine_logprob_gap": self.engine_gap,
            "update/count": float(updates),
            "update/trained_tokens": float(tokens),
        }


def combine(parts: Sequence[Sums]) -> Sums:
    """The sums of all ranks as one."""
    totals: Counter[str] = Counter()
    for part in parts:
        totals.update(part.totals)  # `+` of counters would drop what is not positive
    return Sums(
        totals=totals,
        balances=[sum(values) for values in zip(*(part.balances for part in parts), strict=True)],
        norms=parts[0].norms,
        engine_gap=max(part.engine_gap for part in parts),
    )


def warmup(optimizer: torch.optim.Optimizer, updates: int) -> LambdaLR:
    """The learning rate of update n, from 0: lr * min(1, (n + 1) / updates); constant where updates is 0."""
    return LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / max(updates, 1)))


class Updater:
    """Runs the updates of a step on this rank.

    Args:
        policy: its parameters are changed in place.
        optimizer: steps once an update.
        reference: frozen policy of the KL term, or None.
        config: objective and clipping.
        here: this rank.
        scheduler: steps once an update, after the optimizer; None keeps the learning rate.
    """

    def __init__(
        self,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        reference: Policy | None,
        config: Config,
        here: World | None = None,
        scheduler: LRScheduler | None = None,
    ) -> None:
        self.policy, self.optimizer, self.reference = policy, optimizer, reference
        self.config, self.here, self.scheduler = config, here or World(), scheduler

    def step(self, updates: Sequence[Sequence[Packed | PackedTree]], version: int) -> Sums:
        """Run every update, `epochs` times over, and return what happened on all ranks.

        The ratio's denominator is the trainer's own logprob before the first update. With a single update that is this
        forward's value (ratio 1); with more, a pass without gradient comes first.

        Args:
            updates: this rank's packs of each update (`make_updates`); every rank has equally many of both.
            version: the policy version that the updates start from.
        Raises:
            Fault: a logprob, loss or gradient norm is not finite, on every rank and before that update's step.
        """
        sums = Sums()
        single = len(updates) * self.config.update.epochs == 1
        old = None if single else [[self._logprobs(p, version, sums) for p in packs] for packs in updates]
        if old is not None:
            self._check_old(updates, old)
        for _ in range(self.config.update.epochs):
            for index, packs in enumerate(updates):
                self._update(index, packs, old[index] if old else None, version, sums)
        return combine(self.here.gather(sums))

    def _score(self, policy: Policy, packed: Packed) -> Scored:
        bonus = self.config.loss.entropy_coef > 0
        temperature = self.config.policy.train_temperature
        return score(policy, packed, temperature, self.here.device, entropy_gradient=bonus)

    @torch.no_grad()
    def _logprobs(self, packed: Packed | PackedTree, version: int, sums: Sums) -> Tensor:
        logprobs = self._score(self.policy, packed).logprobs
        _note_gap(packed, logprobs, version, sums)
        return logprobs

    def _update(
        self, number: int, packs: Sequence[Packed | PackedTree], old: Sequence[Tensor] | None, version: int, sums: Sums
    ) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        balance, losses = 0.0, []
        for index, packed in enumerate(packs):
            scored = self._score(self.policy, packed)
            if old is None:
                _note_gap(packed, scored.logprobs, version, sums)
            loss, pack_balance = self._loss(packed, scored, old[index] if old else None, sums)
            balance += pack_balance
            losses.append(self._backward(loss))
        norm = float(whole(torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.config.update.grad_clip)))
        self._check(number, packs, old, losses, norm)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        sums.norms.append(norm)
        sums.balances.append(balance)

    def _backward(self, loss: Tensor) -> float:
        # FSDP averages gradients over ranks, our loss is a sum over them: this factor is the whole difference.
        (loss * self.here.size).backward()
        return loss.item()

    def _check_old(self, updates: Sequence[Sequence[Packed | PackedTree]], old: Sequence[Sequence[Tensor]]) -> None:
        """Stop before the first update where a logprob of any of them is not finite."""
        suspects = [
            Suspect(update=number, index=index, packed=packed, old=None)
            for number, packs in enumerate(updates)
            for index, packed in enumerate(packs)
            if not old[number][index].isfinite().all()
        ]
        if any(self.here.gather(bool(suspects))):
            raise trace("a logprob is not finite", suspects, self._finite, self.here)

    def _check(
        self,
        number: int,
        packs: Sequence[Packed | PackedTree],
        old: Sequence[Tensor] | None,
        losses: Sequence[float],
        norm: float,
    ) -> None:
        """Stop before the optimizer steps where a loss or the gradient norm is not finite."""
        total = sum(self.here.gather(sum(losses)))
        if math.isfinite(total) and math.isfinite(norm):
            return
        suspects = [
            Suspect(update=number, index=index, packed=packed, old=old[index] if old else None)
            for index, packed in enumerate(packs)
            if not math.isfinite(losses[index]) or math.isfinite(total)  # only a gradient: of any pack
        ]
        raise trace(f"loss {total}, gradient norm {norm}", suspects, self._finite, self.here)

    def _finite(self, packed: Packed | PackedTree, old: Tensor | None) -> bool:
        """Whether a pack alone has a finite loss and gradient norm; leaves no gradient. A collective."""
        self.optimizer.zero_grad(set_to_none=True)
        loss, _ = self._loss(packed, self._score(self.policy, packed), old, Sums())
        value = self._backward(loss)
        gradients = [p.grad for p in self.policy.parameters() if p.grad is not None]
        norm = float(whole(torch.nn.utils.get_total_norm(gradients)))
        self.optimizer.zero_grad(set_to_none=True)
        return math.isfinite(value) and math.isfinite(norm)

    def _loss(
        self, packed: Packed | PackedTree, scored: Scored, old: Tensor | None, sums: Sums
    ) -> tuple[Tensor, float]:
        """The pack's part of the update's loss, and its part of the sum of weight x advantage."""
        settings, at, device = self.config.loss, packed.scored, self.here.device
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
        sums.add(clipped=metrics["clipped"], tokens=len(at), pack_tokens=len(packed.token_ids), **importance)
        if settings.entropy_coef:
            loss = loss - settings.entropy_coef * weighted_sum(scored.entropy, weights)
        if self.reference is not None:
            with torch.no_grad():
                reference = self._score(self.reference, packed).logprobs
            kl = weighted_sum(kl_values(scored.logprobs, reference, settings.kl), weights)
            sums.add(kl=kl.detach())
            if settings.kl_coef:
                loss = loss + settings.kl_coef * kl
        return loss, float((weights * advantages).sum())


def _note_gap(packed: Packed | PackedTree, logprobs: Tensor, version: int, sums: Sums) -> None:
    """Compare the trainer's logprobs with the engine's, on tokens that the present version sampled."""
    at = packed.scored
    gap = np.abs(packed.logprobs[at] - logprobs.detach().cpu().numpy())[packed.policy_version[at] == version]
    if len(gap):
        sums.engine_gap = max(sums.engine_gap, float(gap.max()))
