"""Packed forms in a real transformer: logprobs and gradients equal the samples run one by one.

Run in float64, so that 1e-5 leaves no room for a wrong mask, position or source to hide behind rounding.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harnessrl.adapter.packer import pack, unpack
from harnessrl.adapter.tree import ancestor_mask, pack_tree, unpack_tree
from harnessrl.attention import Documents, use_layouts
from tests.adapter.making import make_sample
from tests.conftest import make_tiny_model
from tests.masked import Masked


def rollout_samples():
    """Two rollouts: a long chain with a sub-agent and a summary, tokens drawn twice, a token at the very start."""
    rng = np.random.default_rng(7)
    stem = rng.integers(0, 97, 40).tolist()
    twin = rng.integers(0, 97, 12).tolist()
    return [
        make_sample(stem, [(6, 9), (20, 31)], index=0),
        make_sample(stem[:31] + rng.integers(0, 97, 15).tolist(), [(35, 46)], index=1),
        make_sample(stem[:6] + stem[6:8] + rng.integers(0, 97, 5).tolist(), [(6, 10)], index=2),
        make_sample(rng.integers(0, 97, 9).tolist(), [(0, 1), (8, 9)], index=3),
        make_sample([*twin, 1, 2, 3], [(4, 8), (13, 15)], rollout="other", index=4),
        make_sample([*twin, 1, 5], [(4, 8), (13, 14)], rollout="other", index=5),
        make_sample([*twin, 1, 5, 6], [(14, 15)], rollout="other", index=6),
    ]


SAMPLES = rollout_samples()
RNG = np.random.default_rng(0)
WEIGHTS = RNG.random(len(SAMPLES))
ADVANTAGES = [RNG.normal(size=len(sample.token_ids)) for sample in SAMPLES]


def logprobs_at(model, hidden, source, token_ids):
    logits = model.lm_head(hidden[torch.from_numpy(source)])
    return torch.log_softmax(logits, -1).gather(1, torch.from_numpy(token_ids.astype(np.int64))[:, None])[:, 0]


def run_packed(model, packed, positions=None, source=None, **attention):
    """Logprobs of ``packed.scored`` and the gradient of sum(weight * advantage * logprob)."""
    ids, positions = (
        torch.from_numpy(np.asarray(column).astype(np.int64))[None]
        for column in (packed.token_ids, packed.position_ids if positions is None else positions)
    )
    hidden = model.base_model(input_ids=ids, position_ids=positions, use_cache=False, **attention).last_hidden_state[0]
    at = packed.scored
    found = logprobs_at(model, hidden, packed.source if source is None else source, packed.token_ids[at])
    return found, gradient(model, (torch.from_numpy(packed.weights[at] * packed.advantages[at]) * found).sum())


def gradient(model, loss):
    model.zero_grad()
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.fixture(scope="module")
def reference():
    """The samples one by one: logprobs of each sample's tokens after its first, and the gradient."""
    torch.set_num_threads(1)
    model = make_tiny_model(seed=0).double()
    logprobs, loss = [], torch.zeros((), dtype=torch.float64)
    for sample, weight, advantages in zip(SAMPLES, WEIGHTS, ADVANTAGES, strict=True):
        hidden = model.base_model(input_ids=torch.tensor(sample.token_ids.tolist())[None], use_cache=False)
        at = np.flatnonzero(sample.loss_mask & (np.arange(len(sample.token_ids)) > 0))
        found = logprobs_at(model, hidden.last_hidden_state[0], at - 1, sample.token_ids[at])
        loss = loss + (torch.from_numpy(weight * advantages[at]) * found).sum()
        logprobs.append(found.detach().numpy())
    return logprobs, gradient(model, loss)


def largest_difference(reference, packed, unpacked, found, grad):
    """Of logprobs, sample by sample, and of the gradient relative to its norm."""
    column = np.full(len(packed.token_ids), np.nan)
    column[packed.scored] = found.detach().numpy()
    gaps = []
    for sample, values, expected in zip(SAMPLES, unpacked(packed, column), reference[0], strict=True):
        at = np.flatnonzero(sample.loss_mask & (np.arange(len(sample.token_ids)) > 0))
        gaps.append(np.abs(values[at] - expected).max(initial=0.0))
    return max(gaps), float((grad - reference[1]).norm() / reference[1].norm())


def packed_tree():
    return pack_tree(SAMPLES, [4, 2, 0, 6, 3, 1, 5], weights=WEIGHTS, advantages=ADVANTAGES)


def test_the_trees_share_and_repeat():
    packed = packed_tree()
    assert packed.tokens_saved == 31 + (8 - 2) + (13 - 4) + 14
    prefixes = {(s.rollout_id, tuple(s.token_ids[: t + 1].tolist())) for s in SAMPLES for t in range(len(s.token_ids))}
    assert len(packed.token_ids) > len(prefixes)
    assert len(packed.unscored) == 1


def test_a_tree_equals_the_unpacked_run_under_the_models_own_attention(reference):
    model, packed = make_tiny_model(seed=0).double(), packed_tree()
    mask = torch.from_numpy(ancestor_mask(packed))[None, None]
    additive = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min)
    model.set_attn_implementation("eager")
    found = run_packed(model, packed, attention_mask=additive)
    logprob_gap, gradient_gap = largest_difference(reference, packed, unpack_tree, *found)
    assert logprob_gap < 1e-5 and gradient_gap < 1e-5


def test_a_tree_equals_the_unpacked_run_under_our_layout(reference):
    model, packed = use_layouts(make_tiny_model(seed=0).double()), packed_tree()
    found = run_packed(model, packed, layout=Masked(torch.from_numpy(ancestor_mask(packed))))
    logprob_gap, gradient_gap = largest_difference(reference, packed, unpack_tree, *found)
    assert logprob_gap < 1e-5 and gradient_gap < 1e-5


def test_flat_packs_equal_the_unpacked_run_also_at_their_edges(reference):
    """B21 by its values: responses of one token, and a response that opens its sample."""
    model = use_layouts(make_tiny_model(seed=0).double())
    packed = pack(SAMPLES, [4, 2, 0, 6, 3, 1, 5], weights=WEIGHTS, advantages=ADVANTAGES)
    found = run_packed(model, packed, layout=Documents(packed.cu_seqlens))
    logprob_gap, gradient_gap = largest_difference(reference, packed, unpack, *found)
    assert logprob_gap < 1e-5 and gradient_gap < 1e-5


@pytest.mark.parametrize("mistake", ["source", "position", "mask"])
def test_each_part_of_a_tree_matters(reference, mistake):
    """What a flat habit would do to a tree: score from t - 1, number the row, look at everything before."""
    model, packed = use_layouts(make_tiny_model(seed=0).double()), packed_tree()
    row = np.arange(len(packed.token_ids))
    mask = ancestor_mask(packed) if mistake != "mask" else row[None, :] <= row[:, None]
    found = run_packed(
        model,
        packed,
        positions=row if mistake == "position" else None,
        source=packed.scored - 1 if mistake == "source" else None,
        layout=Masked(torch.from_numpy(mask)),
    )
    logprob_gap, gradient_gap = largest_difference(reference, packed, unpack_tree, *found)
    assert logprob_gap > 0.1 and gradient_gap > 0.01
