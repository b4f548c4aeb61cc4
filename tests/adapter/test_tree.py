"""Prefix trees: what is shared, what is not, and that every sample comes back from them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from harnessrl.adapter.packer import Origin, pack, unpack
from harnessrl.adapter.planner import plan_updates
from harnessrl.adapter.tree import ancestor_mask, pack_tree, tree_items, unpack_tree
from tests.adapter.making import make_sample


def random_samples(seed, rollouts=3, alphabet=3, longest=14):
    """Few token ids, so that prefixes meet, trained and not, in every way."""
    rng = np.random.default_rng(seed)
    samples = []
    for rollout in range(rollouts):
        stem = rng.integers(0, alphabet, longest)
        for index in range(int(rng.integers(1, 6))):
            kept = int(rng.integers(0, longest + 1))
            ids = np.concatenate([stem[:kept], rng.integers(0, alphabet, int(rng.integers(0, longest - kept + 1)))])
            cuts = np.sort(rng.integers(0, len(ids) + 1, 4)).tolist()
            spans = [(start, stop) for start, stop in (cuts[:2], cuts[2:]) if start < stop]
            samples.append(make_sample(ids.tolist(), spans, rollout=f"r{rollout}", index=index))
    return samples


def slow_mask(parent):
    """Walk from every node to its root."""
    mask = np.zeros((len(parent), len(parent)), dtype=bool)
    for node in range(len(parent)):
        at = node
        while at >= 0:
            mask[node, at] = True
            at = parent[at]
    return mask


def fewest_nodes(samples):
    """Distinct prefixes of each rollout, plus one for each further training of the same token after the same prefix."""
    prefixes, trained = set(), Counter()
    for sample in samples:
        for at in range(len(sample.token_ids)):
            prefix = (sample.rollout_id, tuple(sample.token_ids[: at + 1].tolist()))
            prefixes.add(prefix)
            trained[prefix] += bool(sample.loss_mask[at])
    return len(prefixes) + sum(max(count - 1, 0) for count in trained.values())


def path_to(packed, node):
    tokens = []
    while node >= 0:
        tokens.append(int(packed.token_ids[node]))
        node = packed.parent[node]
    return tokens[::-1]


# Worked examples


def test_a_chain_is_stored_once():
    """The example of the module: [1, 2, 3] trains 3, [1, 2, 3, 4, 5] trains 5 and has 3 as context."""
    packed = pack_tree(
        [make_sample([1, 2, 3], [(2, 3)]), make_sample([1, 2, 3, 4, 5], [(4, 5)], index=1)],
        [0, 1],
        weights=[0.5, 0.25],
        advantages=[1.0, -1.0],
    )
    assert packed.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert packed.parent.tolist() == [-1, 0, 1, 2, 3]
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 4]
    assert packed.loss_mask.tolist() == [False, False, True, False, True]
    assert packed.weights.tolist() == [0, 0, 0.5, 0, 0.25]
    assert packed.advantages.tolist() == [0, 0, 1.0, 0, -1.0]
    assert packed.policy_version.tolist() == [-1, -1, 1, -1, 2]
    assert packed.scored.tolist() == [2, 4] and packed.source.tolist() == [1, 3]
    assert (packed.flat_tokens, packed.tokens_saved) == (8, 3)


def test_two_branches_are_scored_from_the_token_they_share():
    packed = pack_tree([make_sample([1, 2, 3], [(2, 3)]), make_sample([1, 2, 4, 5], [(2, 4)], index=1)], [0, 1])
    assert packed.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert packed.parent.tolist() == [-1, 0, 1, 1, 3]
    assert packed.position_ids.tolist() == [0, 1, 2, 2, 3]
    assert packed.source.tolist() == [1, 1, 3]
    assert ancestor_mask(packed).astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 1, 1],
    ]


def test_equal_tokens_trained_twice_keep_a_node_each_and_share_what_follows():
    """Two calls drew the same 3 after the same prompt, and both went on with observation 4."""
    samples = [
        make_sample([1, 3, 4, 5], [(1, 2), (3, 4)]),
        make_sample([1, 3, 4, 6], [(1, 2), (3, 4)], index=1),
    ]
    packed = pack_tree(samples, [0, 1], weights=[0.5, 0.25])
    assert packed.token_ids.tolist() == [1, 3, 3, 4, 5, 6]
    assert packed.parent.tolist() == [-1, 0, 0, 2, 3, 3]
    assert packed.loss_mask.tolist() == [False, True, True, False, True, True]
    assert packed.weights.tolist() == [0, 0.25, 0.5, 0, 0.5, 0.25]
    assert packed.origin(1) == Origin(rollout_id="r", sample=1, call_id="1.1", position=1)
    assert packed.origin(2) == Origin(rollout_id="r", sample=0, call_id="0.1", position=1)
    assert packed.origin(3).call_id is None


def test_identical_samples_keep_all_their_trained_tokens():
    samples = [make_sample([1, 2, 3], [(1, 3)], index=index) for index in range(3)]
    packed = pack_tree(samples, [0, 1, 2], weights=[1.0, 2.0, 4.0])
    assert len(packed.token_ids) == 1 + 3 * 2
    assert packed.weights.sum() == 2 * (1.0 + 2.0 + 4.0)


def test_context_that_another_sample_trains_is_one_node():
    """Trained for the shorter or for the longer sample, whichever: one node, one owner."""
    for spans in ([[(1, 2)], []], [[], [(1, 2)]]):
        samples = [make_sample([1, 2], spans[0]), make_sample([1, 2, 3], spans[1], index=1)]
        packed = pack_tree(samples, [0, 1])
        assert packed.token_ids.tolist() == [1, 2, 3]
        assert packed.loss_mask.tolist() == [False, True, False]
        assert [found.tolist() for found in unpack_tree(packed, "loss_mask")] == [
            sample.loss_mask.tolist() for sample in samples
        ]


def test_rollouts_share_nothing():
    samples = [make_sample([1, 2], [(1, 2)], rollout="a"), make_sample([1, 2], [(1, 2)], rollout="b")]
    packed = pack_tree(samples, [1, 0])
    assert packed.parent.tolist() == [-1, 0, -1, 2]
    assert packed.tokens_saved == 0
    assert not ancestor_mask(packed)[2:, :2].any()
    assert packed.origin(0).rollout_id == "b"


def test_a_token_without_a_parent_is_not_scored_and_is_reported():
    packed = pack_tree([make_sample([1, 2], [(0, 2)]), make_sample([1, 3], [(0, 2)], index=1)], [0, 1])
    assert packed.token_ids.tolist() == [1, 1, 2, 3]
    assert packed.unscored.tolist() == [0, 1]
    assert packed.scored.tolist() == [2, 3] and packed.source.tolist() == [1, 1]


def test_a_tree_of_nothing():
    for samples, order in (([], []), ([make_sample([], [])], [0])):
        packed = pack_tree(samples, order)
        assert packed.flat_tokens == packed.tokens_saved == len(packed.parent) == 0
        assert ancestor_mask(packed).shape == (0, 0)
        assert [found.tolist() for found in unpack_tree(packed, "token_ids")] == [[]] * len(order)


# Laws on random samples


@pytest.mark.parametrize("seed", range(30))
def test_laws_of_the_tree(seed):
    samples = random_samples(seed)
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(samples))
    weights, advantages = rng.random(len(samples)), [rng.normal(size=len(sample.token_ids)) for sample in samples]
    packed = pack_tree(samples, order, weights=weights, advantages=advantages)
    assert len(packed.token_ids) == fewest_nodes(samples)
    assert (packed.parent < np.arange(len(packed.parent))).all()
    assert np.array_equal(ancestor_mask(packed), slow_mask(packed.parent))
    assert np.array_equal(ancestor_mask(packed).sum(1) - 1, packed.position_ids)
    for place, index in enumerate(order):
        sample, nodes = samples[index], packed.nodes[place]
        for at, node in enumerate(nodes):
            assert path_to(packed, node) == sample.token_ids[: at + 1].tolist()
    flat = pack(samples, order, weights=weights, advantages=advantages)
    for name in ("token_ids", "position_ids", "loss_mask", "logprobs", "policy_version", "weights", "advantages"):
        for left, right in zip(unpack(flat, name), unpack_tree(packed, name), strict=True):
            assert left.tolist() == right.tolist()
    for name in ("loss_mask", "weights", "logprobs"):  # a trained node belongs to exactly one sample
        assert getattr(packed, name).sum() == pytest.approx(getattr(flat, name).sum())
    for node in np.flatnonzero(packed.loss_mask):
        origin = packed.origin(node)
        sample = samples[origin.sample]
        (span,) = [span for span in sample.spans if span.call_id == origin.call_id]
        assert span.start <= origin.position < span.stop
        assert sample.token_ids[origin.position] == packed.token_ids[node]


def test_the_random_samples_reach_every_case():
    """Else the laws above hold for want of a case: sharing, tokens trained twice, ownerless and rootless tokens."""
    saved = twice = opened = 0
    for seed in range(30):
        samples = random_samples(seed)
        packed = pack_tree(samples, range(len(samples)))
        saved += packed.tokens_saved > 0
        twice += len(packed.token_ids) > len({(s.rollout_id, tuple(s.token_ids[: t + 1].tolist())) for s in samples for t in range(len(s.token_ids))})  # fmt: skip
        opened += len(packed.unscored) > 0
    assert saved > 20 and twice > 15 and opened > 15


@pytest.mark.parametrize("seed", range(10))
def test_the_tree_does_not_depend_on_the_order_of_samples(seed):
    samples = random_samples(seed, rollouts=1)
    first = pack_tree(samples, range(len(samples)))
    for shuffle in range(3):
        order = np.random.default_rng(shuffle).permutation(len(samples))
        again = pack_tree(samples, order)
        assert again.token_ids.tolist() == first.token_ids.tolist()
        assert again.parent.tolist() == first.parent.tolist()


# The plan takes trees


def test_trees_are_planned_as_items():
    samples = random_samples(5, rollouts=6)
    lengths, members = tree_items(samples)
    assert np.concatenate(members).tolist() == list(range(len(samples)))
    largest = int(lengths.max())
    plan = plan_updates(lengths, np.arange(len(lengths)), num_updates=1, world_size=2, max_tokens=largest)
    trained = 0
    for rank in plan.updates[0].ranks:
        for items in rank:
            order = np.concatenate([members[item] for item in items]) if len(items) else []
            packed = pack_tree(samples, order)
            assert len(packed.token_ids) == lengths[items].sum() <= largest
            trained += packed.loss_mask.sum()
    assert trained == sum(sample.loss_mask.sum() for sample in samples)


def test_bad_columns_are_named():
    packed = pack_tree([make_sample([1, 2], [(1, 2)])], [0])
    with pytest.raises(ValueError, match="column 'labels' is unknown; allowed: token_ids, position_ids, loss_mask"):
        unpack_tree(packed, "labels")
    with pytest.raises(ValueError, match=r"column has shape \(3,\), the trees have 2 nodes"):
        unpack_tree(packed, np.zeros(3))
    with pytest.raises(ValueError, match="weights has length 2, there are 1 samples"):
        pack_tree([make_sample([1, 2], [(1, 2)])], [0], weights=[1.0, 1.0])
