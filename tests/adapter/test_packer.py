"""Packing: labels that cross no boundary, columns that come back, and an origin for every token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from harnessrl.adapter.packer import COLUMNS, Origin, pack, unpack
from tests.adapter.making import make_sample

A = make_sample([10, 11, 12], [(1, 3)], rollout="ra")
B = make_sample([20, 21], [(1, 2)], rollout="rb", index=1)
TURNS = make_sample([1, 2, 3, 4, 5, 6, 7], [(2, 4), (6, 7)], rollout="rc", index=2)
EMPTY = make_sample([], [], rollout="rd")
CONTEXT = make_sample([30], [], rollout="re")
SAMPLED = make_sample([40], [(0, 1)], rollout="rf")
NO_PROMPT = make_sample([50, 51], [(0, 2)], rollout="rg")
ALL = [A, B, TURNS, EMPTY, CONTEXT, SAMPLED, NO_PROMPT]


def slow_labels(samples, order):
    """Token by token, inside one sample at a time."""
    out = []
    for index in order:
        ids, mask = samples[index].token_ids, samples[index].loss_mask
        for t in range(len(ids)):
            follows = t + 1 < len(ids) and mask[t + 1]
            out.append(int(ids[t + 1]) if follows else -100)
    return out


# B21: a token scored against the next sequence


def test_b21_by_its_values():
    assert pack([A, B], [0, 1]).labels.tolist() == [11, 12, -100, 21, -100]
    assert pack([A, B], [1, 0]).labels.tolist() == [21, -100, 11, 12, -100]


@pytest.mark.parametrize("seed", range(8))
def test_no_label_crosses_a_sample_whatever_lies_side_by_side(seed):
    """Every kind of edge: responses of one token, samples of 0 and 1 tokens, a response that opens its sample."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(ALL))[: int(rng.integers(1, len(ALL) + 1))].tolist()
    packed = pack(ALL, order)
    assert packed.labels.tolist() == slow_labels(ALL, order)
    predicted = np.flatnonzero(packed.labels != -100)
    assert (packed.sample_index[predicted] == packed.sample_index[predicted + 1]).all()
    assert packed.source.tolist() == predicted.tolist()
    assert (packed.token_ids[packed.scored] == packed.labels[packed.source]).all()


def test_observations_between_turns_are_not_labels():
    assert pack([TURNS], [0]).labels.tolist() == [-100, 3, 4, -100, -100, 7, -100]


def test_a_token_without_a_predecessor_is_not_scored_and_is_reported():
    packed = pack([A, NO_PROMPT, SAMPLED], [0, 1, 2])
    assert packed.labels.tolist() == [11, 12, -100, 51, -100, -100]
    assert packed.unscored.tolist() == [3, 5]
    assert packed.scored.tolist() == [1, 2, 4]
    assert sorted([*packed.scored, *packed.unscored]) == np.flatnonzero(packed.loss_mask).tolist()
    assert pack([A], [0]).unscored.tolist() == []


# Columns


def test_columns_by_hand():
    packed = pack([A, EMPTY, B], [2, 1, 0], weights=[0.5, 9.0, 0.25], advantages=[-1.0, 9.0, 2.0])
    assert packed.token_ids.tolist() == [20, 21, 10, 11, 12]
    assert packed.position_ids.tolist() == [0, 1, 0, 1, 2]
    assert packed.cu_seqlens.tolist() == [0, 2, 2, 5]
    assert packed.loss_mask.tolist() == [False, True, False, True, True]
    assert packed.logprobs.tolist() == [0.0, -0.25, 0.0, -0.25, -0.375]
    assert packed.policy_version.tolist() == [-1, 2, -1, 1, 1]
    assert packed.weights.tolist() == [0.0, 0.25, 0.0, 0.5, 0.5]
    assert packed.advantages.tolist() == [0.0, 2.0, 0.0, -1.0, -1.0]
    assert packed.sample_index.tolist() == [2, 2, 0, 0, 0]
    assert packed.call_index.tolist() == [-1, 0, -1, 1, 1]
    assert packed.call_ids == ("1.1", "0.1")
    assert packed.rollout_ids == ("rb", "rd", "ra")


def test_weights_and_advantages_of_each_token():
    """Credit inside a rollout gives a sample's tokens different advantages; context has none whatever it was given."""
    packed = pack(
        [TURNS, A],
        [0, 1],
        weights=[0.1, np.array([7.0, 0.2, 0.3])],
        advantages=[np.array([0, 0, 1.0, 1.0, 9.0, 0, -2.0]), 0.5],
    )
    assert packed.weights.tolist() == [0, 0, 0.1, 0.1, 0, 0, 0.1, 0, 0.2, 0.3]
    assert packed.advantages.tolist() == [0, 0, 1, 1, 0, 0, -2, 0, 0.5, 0.5]


def test_what_was_not_given_is_not_a_number():
    packed = pack([A], [0])
    for column in (packed.weights, packed.advantages):
        assert np.isnan(column).tolist() == [False, True, True] and column[0] == 0.0


def test_a_loss_is_the_same_in_any_packs():
    rng = np.random.default_rng(0)
    token_loss = {int(token): rng.normal() for sample in ALL for token in sample.token_ids}
    weights, advantages = rng.random(len(ALL)), rng.normal(size=len(ALL))

    def loss(packs):
        total = 0.0
        for order in packs:
            packed = pack(ALL, order, weights=weights, advantages=advantages)
            for at in packed.scored:
                total += packed.weights[at] * packed.advantages[at] * token_loss[int(packed.token_ids[at])]
        return total

    whole = loss([range(7)])
    assert abs(whole) > 0.01
    for packs in ([[3, 1, 0, 2, 4, 6, 5]], [[0], [1], [2], [3], [4], [5], [6], []], [[6, 2], [], [5, 1, 0, 3, 4]]):
        assert loss(packs) == pytest.approx(whole, abs=1e-12)


def test_arguments_are_left_alone_and_not_shared():
    order, weights = np.array([1, 0]), np.array([0.5, 0.25])
    packed = pack([A, B], order, weights=weights)
    packed.token_ids[:] = 0
    packed.weights[:] = 0
    packed.order[:] = 0
    assert A.token_ids.tolist() == [10, 11, 12] and weights.tolist() == [0.5, 0.25] and order.tolist() == [1, 0]
    single = pack([A], [0])
    single.token_ids[:] = 0
    assert A.token_ids.tolist() == [10, 11, 12]


# Unpacking


@pytest.mark.parametrize("seed", range(8))
def test_unpacking_gives_back_the_samples_own(seed):
    order = np.random.default_rng(seed).permutation(len(ALL))
    packed = pack(ALL, order)
    for name in ("token_ids", "loss_mask", "logprobs", "policy_version"):
        for sample, found in zip(ALL, unpack(packed, name), strict=True):
            assert found.dtype == getattr(sample, name).dtype
            assert found.tolist() == getattr(sample, name).tolist()
    for sample, found in zip(ALL, unpack(packed, "position_ids"), strict=True):
        assert found.tolist() == list(range(len(sample.token_ids)))


def test_unpacking_a_part_follows_the_order_of_samples():
    packed = pack(ALL, [6, 0, 3])
    assert [found.tolist() for found in unpack(packed, "token_ids")] == [[10, 11, 12], [], [50, 51]]


def test_unpacking_what_was_computed_on_the_pack():
    packed = pack([A, B], [1, 0])
    found = unpack(packed, np.arange(10).reshape(5, 2))
    assert [piece.tolist() for piece in found] == [[[4, 5], [6, 7], [8, 9]], [[0, 1], [2, 3]]]
    with pytest.raises(ValueError, match=r"column has shape \(4,\), the pack has 5 tokens"):
        unpack(packed, np.zeros(4))


def test_a_logprob_that_was_not_recorded_stays_not_a_number():
    sample = replace(make_sample([1, 2, 3], [(1, 3)]), logprobs=np.array([0.0, np.nan, np.nan], dtype=np.float32))
    (found,) = unpack(pack([sample], [0]), "logprobs")
    assert np.array_equal(found, np.array([0.0, np.nan, np.nan], dtype=np.float32), equal_nan=True)


def test_a_pack_of_nothing():
    for samples, order in (([A, B], []), ([], []), ([EMPTY], [0])):
        packed = pack(samples, order, weights=[1.0] * len(samples))
        assert packed.cu_seqlens.tolist() == [0] * (len(order) + 1)
        assert all(getattr(packed, name).shape == (0,) for name in COLUMNS)
        assert len(packed.scored) == len(packed.unscored) == 0
        assert len(unpack(packed, "labels")) == len(order)


# Provenance


def test_every_token_tells_where_it_came_from():
    packed = pack(ALL, [3, 2, 5, 0])
    for token in range(len(packed.token_ids)):
        origin = packed.origin(token)
        sample = ALL[origin.sample]
        assert origin.rollout_id == sample.rollout_id
        assert sample.token_ids[origin.position] == packed.token_ids[token]
        calls = [span.call_id for span in sample.spans if span.start <= origin.position < span.stop]
        assert [origin.call_id] == (calls or [None])
    assert packed.origin(6) == Origin(rollout_id="rc", sample=2, call_id="2.6", position=6)


@pytest.mark.parametrize(
    ("arguments", "keywords", "message"),
    [
        (([A], [1]), {}, r"order\[0\] is 1, there are 1 samples"),
        (([A], [-1]), {}, r"order\[0\] is -1"),
        (([A, B], [1, 0, 1]), {}, "names sample 1 more than once"),
        (([A, B], [0.0, 1.0]), {}, "order must be a vector of integers"),
        (([A, B], [0]), {"weights": [1.0]}, "weights has length 1, there are 2 samples"),
        (([A, B], [0]), {"advantages": [[1.0, 2.0], 0.0]}, r"rollout 'ra', sample 0: advantages has shape \(2,\), token_ids has length 3"),
    ],
)  # fmt: skip
def test_bad_input_is_named(arguments, keywords, message):
    with pytest.raises(ValueError, match=message):
        pack(*arguments, **keywords)


def test_an_unknown_column_is_named():
    with pytest.raises(ValueError, match="column 'weight' is unknown; allowed: token_ids, position_ids, labels"):
        unpack(pack([A], [0]), "weight")
