"""pack_tree stores a rollout's common prefixes once, and every sample still finds exactly its own tokens."""

from __future__ import annotations

from collections import Counter

from hypothesis import given

from harnessrl.adapter import ancestor_mask, pack, pack_tree, tree_items, unpack, unpack_tree
from property_tests import reference
from property_tests.strategies import forests

COLUMNS = ("token_ids", "position_ids", "loss_mask", "logprobs", "policy_version", "weights", "advantages")


def packed_tree(drawn):
    return pack_tree(drawn.samples, drawn.order, weights=drawn.weights, advantages=drawn.advantages)


@given(forests())
def test_the_path_to_every_token_spells_what_stands_before_it(drawn):
    packed = packed_tree(drawn)
    for index, nodes in zip(drawn.order, packed.nodes, strict=True):
        ids = drawn.samples[index].token_ids.tolist()
        for at, node in enumerate(nodes):
            assert packed.token_ids[reference.path(packed, node)].tolist() == ids[: at + 1]


@given(forests())
def test_every_trained_token_has_one_node_with_its_own_numbers(drawn):
    packed = packed_tree(drawn)
    expected: Counter[tuple] = Counter()
    for index in drawn.order:
        sample = drawn.samples[index]
        for span in sample.spans:
            for at in range(span.start, span.stop):
                numbers = (float(sample.logprobs[at]), drawn.weights[index], drawn.advantages[index])
                expected[index, span.call_id, at, int(sample.token_ids[at]), *numbers] += 1
    found: Counter[tuple] = Counter()
    for node in packed.loss_mask.nonzero()[0].tolist():
        origin = packed.origin(node)
        numbers = (packed.logprobs[node], packed.weights[node], packed.advantages[node])
        found[origin.sample, origin.call_id, origin.position, int(packed.token_ids[node]), *map(float, numbers)] += 1
    assert found == expected
    assert not packed.weights[~packed.loss_mask].any() and not packed.advantages[~packed.loss_mask].any()


@given(forests())
def test_samples_share_a_node_only_as_context(drawn):
    """Of the samples that have a node, one at most trains it; to the others it is context."""
    packed = packed_tree(drawn)
    trained: Counter[int] = Counter()
    for index, nodes in zip(drawn.order, packed.nodes, strict=True):
        trained.update(nodes[drawn.samples[index].loss_mask].tolist())
    assert set(trained.values()) <= {1}
    assert sorted(trained) == packed.loss_mask.nonzero()[0].tolist()


@given(forests())
def test_no_prefix_is_stored_twice(drawn):
    packed = packed_tree(drawn)
    assert len(packed.token_ids) == reference.tree_nodes([drawn.samples[index] for index in drawn.order])
    assert packed.tokens_saved == len(pack(drawn.samples, drawn.order).token_ids) - len(packed.token_ids)


@given(forests())
def test_a_token_sees_itself_and_its_ancestors(drawn):
    """The dense mask, and the rule that a block mask is made from: q sees k where k <= q < subtree_end[k]."""
    packed = packed_tree(drawn)
    mask, size = ancestor_mask(packed), len(packed.token_ids)
    for query in range(size):
        path = reference.path(packed, query)
        assert mask[query].nonzero()[0].tolist() == path
        assert [key for key in range(query + 1) if query < packed.subtree_end[key]] == path
        assert packed.position_ids[query] == len(path) - 1


@given(forests())
def test_unpacking_gives_back_what_a_flat_pack_does(drawn):
    flat = pack(drawn.samples, drawn.order, weights=drawn.weights, advantages=drawn.advantages)
    for name in COLUMNS:
        found = [column.tolist() for column in unpack_tree(packed_tree(drawn), name)]
        assert found == [column.tolist() for column in unpack(flat, name)]
        if name in ("token_ids", "loss_mask", "logprobs", "policy_version"):
            assert found == [getattr(drawn.samples[index], name).tolist() for index in sorted(drawn.order)]


@given(forests())
def test_the_plan_is_given_one_item_a_rollout(drawn):
    samples = drawn.samples
    lengths, members = tree_items(samples)
    assert [{samples[index].rollout_id for index in item} for item in members] == [
        {name} for name in dict.fromkeys(sample.rollout_id for sample in samples)
    ]
    assert sorted(index for item in members for index in item) == list(range(len(samples)))
    assert lengths.tolist() == [len(pack_tree(samples, item).token_ids) for item in members]
