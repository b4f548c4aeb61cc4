"""Ways to take one training step on the same samples: ours, floors and peers. All leave the same gradient behind.

A method is made once, for a model and samples, and returns the step to time. The loss is the sum over trained tokens of
-weight * advantage * logprob; ours has all that an update has besides: ratios, clipping, metrics, the optimizer's step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from harnessrl.adapter import Packed, PackedTree, Sample, pack, pack_tree, plan_updates, tree_items
from harnessrl.attention import Documents, use_layouts
from harnessrl.config import Config, Update
from harnessrl.train.policy import Policy
from harnessrl.train.update import Updater

Step = Callable[[], Any]


@dataclass(frozen=True)
class Work:
    """What is trained. S samples."""

    model: PreTrainedModel
    """Its parameters take the gradient; a method may change how it attends, so each has its own."""
    samples: Sequence[Sample]
    max_tokens: int
    """Tokens of a pack, or of a padded batch with its padding."""
    seed: int = 0

    @property
    def advantages(self) -> np.ndarray:
        """float64 [S]"""
        return np.random.default_rng(self.seed).normal(size=len(self.samples))

    @property
    def weights(self) -> np.ndarray:
        """float64 [S], equal for all trained tokens."""
        return np.full(len(self.samples), 1 / sum(int(sample.loss_mask.sum()) for sample in self.samples))


def ours(work: Work) -> Step:
    """harnessrl's update on flat packs."""
    return _update(work, packs(work))


def tree(work: Work) -> Step:
    """harnessrl's update on packs of prefix trees."""
    return _update(work, packs(work, tree=True))


def packs(work: Work, tree: bool = False) -> list[Packed | PackedTree]:
    """The planned packs of all samples."""
    lengths = np.array([len(sample.token_ids) for sample in work.samples])
    members = [np.array([index]) for index in range(len(lengths))]
    if tree:
        lengths, members = tree_items(work.samples)
    owner = np.arange(len(lengths))
    limits = {"num_updates": 1, "world_size": 1, "max_tokens": work.max_tokens, "oversize": "alone"}
    plan = plan_updates(lengths, owner, **limits, seed=work.seed).updates[0].ranks[0]  # type: ignore[arg-type]
    orders = [np.concatenate([members[item] for item in items]) for items in plan]
    columns = {"weights": work.weights, "advantages": work.advantages}
    return [(pack_tree if tree else pack)(work.samples, order, **columns) for order in orders]


def _update(work: Work, packed: Sequence[Packed | PackedTree]) -> Step:
    policy = Policy(use_layouts(work.model))
    optimizer = torch.optim.AdamW(policy.parameters(), 1e-12, weight_decay=0.0)
    updater = Updater(policy, optimizer, None, Config(update=Update(grad_clip=1e9)))
    return lambda: updater.step([packed], version=0)


def floor(work: Work) -> Step:
    """Bare forward and backward of the same packs: the same attention, the head at trained tokens, torch's cross-entropy."""
    model, inputs = use_layouts(work.model), []
    for packed in packs(work):
        at = packed.scored
        columns = (packed.token_ids, packed.position_ids, packed.source, packed.token_ids[at])
        ids, positions, source, labels = (torch.from_numpy(np.asarray(x, np.int64)) for x in columns)
        factors = torch.from_numpy((packed.weights[at] * packed.advantages[at]).astype(np.float32))
        inputs.append((ids[None], positions[None], source, labels, factors, packed.cu_seqlens))

    def step() -> None:
        model.zero_grad()
        for ids, positions, source, labels, factors, cu_seqlens in inputs:
            layout = Documents(cu_seqlens)
            output = model.base_model(input_ids=ids, position_ids=positions, use_cache=False, layout=layout)
            _cross_entropy(model, output.last_hidden_state[0], source, labels, factors).backward()

    return step


def padded(work: Work) -> Step:
    """Right-padded batches of samples as they come, transformers' own attention, the head at trained tokens only."""
    return _padded(work, np.random.default_rng(work.seed).permutation(len(work.samples)))


def padded_sorted(work: Work) -> Step:
    """The same with batches of like length."""
    return _padded(work, np.argsort([len(sample.token_ids) for sample in work.samples], kind="stable"))


def _padded(work: Work, order: np.ndarray) -> Step:
    model, inputs, factors = work.model, [], work.weights * work.advantages
    for rows in batches(work, order):
        batch = [work.samples[row] for row in rows]
        width = max(len(sample.token_ids) for sample in batch)
        ids, mask = torch.zeros(len(batch), width, dtype=torch.int64), torch.zeros(len(batch), width, dtype=torch.int64)
        for row, sample in enumerate(batch):
            ids[row, : len(sample.token_ids)] = torch.from_numpy(sample.token_ids.astype(np.int64))
            mask[row, : len(sample.token_ids)] = 1
        trained = [(row, at) for row, sample in enumerate(batch) for at in np.flatnonzero(sample.loss_mask) if at]
        row, at = torch.tensor(trained).T
        inputs.append((ids, mask, row * width + at - 1, ids[row, at], torch.from_numpy(factors[rows])[row].float()))

    def step() -> None:
        model.zero_grad()
        for ids, mask, source, labels, scale in inputs:
            output = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False)
            _cross_entropy(model, output.last_hidden_state.flatten(0, 1), source, labels, scale).backward()

    return step


def batches(work: Work, order: np.ndarray) -> Iterator[np.ndarray]:
    """Consecutive samples whose padded size is at most `max_tokens`; a longer sample alone."""
    batch: list[int] = []
    for index in order:
        width = max(len(work.samples[i].token_ids) for i in [*batch, index])
        if batch and width * (len(batch) + 1) > work.max_tokens:
            yield np.array(batch)
            batch = []
        batch.append(int(index))
    yield np.array(batch)


def _cross_entropy(model: PreTrainedModel, hidden: Tensor, source: Tensor, labels: Tensor, factors: Tensor) -> Tensor:
    logits = model.get_output_embeddings()(hidden.index_select(0, source))
    return (F.cross_entropy(logits, labels, reduction="none") * factors).sum()
