"""Strips let every token see itself and its ancestors, all of them and nothing else, whatever the shape of the trees."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harnessrl import strips
from harnessrl.adapter import pack_tree
from harnessrl.attention import Documents
from tests.adapter.making import make_sample
from tests.conftest import make_tiny_model
from tests.masked import Masked


def seen_by(batches):
    """Of each token the set of tokens that it sees, read from the batches cell by cell; and where each is at home."""
    seen, homes = {}, []
    for batch in batches:
        for strip in range(len(batch.queries)):
            homes += batch.keys[strip][batch.own[strip]].tolist()
            for row in np.flatnonzero(batch.real[strip]):
                columns = np.arange(row + 1) if batch.mask is None else np.flatnonzero(batch.mask[strip, row])
                assert batch.real_keys[strip][columns].all()
                keys = batch.keys[strip][columns].tolist()
                assert len(set(keys)) == len(keys) and batch.queries[strip, row] not in seen
                seen[int(batch.queries[strip, row])] = set(keys)
    return seen, sorted(homes)


def ancestors(parent):
    """Each node and the nodes above it, by climbing."""
    out = {}
    for node in range(len(parent)):
        out[node], at = set(), node
        while at >= 0:
            out[node].add(at)
            at = int(parent[at])
    return out


def test_documents_see_what_comes_before_in_their_own():
    seen, homes = seen_by(strips.documents(np.array([0, 3, 3, 4, 6])))
    assert seen == {0: {0}, 1: {0, 1}, 2: {0, 1, 2}, 3: {3}, 4: {4}, 5: {4, 5}}
    assert homes == [0, 1, 2, 3, 4, 5]


def test_the_trunk_takes_the_larger_child_and_the_branch_brings_its_path():
    trunk, branch = strips.trees(np.array([-1, 0, 1, 0, 3, 4]), np.array([6, 3, 3, 6, 6, 6]))
    assert trunk.mask is None and trunk.queries.tolist() == [[0, 3, 4, 5]]
    assert branch.queries.tolist() == [[1, 2]] and branch.keys.tolist() == [[0, 1, 2]]
    assert branch.mask.tolist() == [[[True, True, False], [True, True, True]]]
    assert branch.own.tolist() == [[False, True, True]]


def test_single_leaves_of_one_path_share_a_strip():
    """A response sampled twice from one prompt: 0 - 1 - 3 - 5 with the leaves 2 (under 1) and 4 (under 3)."""
    trunk, leaves = strips.trees(np.array([-1, 0, 1, 1, 3, 3]), np.array([6, 6, 3, 6, 5, 6]))
    assert trunk.queries.tolist() == [[0, 1, 3, 5]]
    assert leaves.queries.tolist() == [[2, 4]] and leaves.keys.tolist() == [[0, 1, 3, 2, 4]]
    assert leaves.mask[0].tolist() == [[True, True, False, True, False], [True, True, True, False, True]]


@st.composite
def packs(draw):
    """Trees that fork often, with tokens trained twice after the same prefix, a branch or a document being long at times."""
    samples = []
    for index in range(draw(st.integers(1, 7))):
        ids = draw(st.lists(st.integers(0, 1), min_size=1, max_size=8)) + [5] * draw(st.sampled_from([0, 0, 3, 40]))
        start = draw(st.integers(0, len(ids) - 1))
        rollout = f"r{draw(st.integers(0, 2))}"
        samples.append(make_sample(ids, [(start, len(ids))], rollout=rollout, index=index))
    return pack_tree(samples, range(len(samples)))


@settings(deadline=None)
@given(packs())
def test_trees_see_exactly_their_ancestors(packed):
    seen, homes = seen_by(strips.trees(packed.parent, packed.subtree_end))
    assert seen == ancestors(packed.parent)
    assert homes == list(range(len(packed.token_ids)))


def test_long_strips_are_padded_by_nothing():
    lengths = [300, 301, 302, 20, 21]
    batches = strips.documents(np.concatenate([[0], np.cumsum(lengths)]))
    assert sorted(batch.queries.shape for batch in batches) == [(1, 300), (1, 301), (1, 302), (2, 21)]


@pytest.mark.parametrize("seed", range(3))
def test_a_forward_over_strips_equals_the_dense_mask(seed):
    from harnessrl.attention import use_layouts

    torch.set_num_threads(1)
    rng = np.random.default_rng(seed)
    stem, samples = rng.integers(0, 97, 60).tolist(), []
    for index in range(9):
        cut = int(rng.integers(1, 60))
        ids = stem[:cut] + rng.integers(0, 97, int(rng.integers(1, 25))).tolist()
        samples.append(make_sample(ids, [(max(0, cut - 5), len(ids))], rollout=f"r{index % 2}", index=index))
    packed = pack_tree(samples, range(len(samples)))
    model = use_layouts(make_tiny_model(seed=0)).double()
    ids, positions = (torch.from_numpy(x.astype(np.int64))[None] for x in (packed.token_ids, packed.position_ids))
    weight = torch.from_numpy(rng.normal(size=(1, ids.shape[1], 32)))
    dense = np.array([[k in above for k in range(ids.shape[1])] for above in ancestors(packed.parent).values()])
    found = []
    for layout in (Masked(torch.from_numpy(dense)), Documents.trees(packed.parent, packed.subtree_end)):
        model.zero_grad()
        hidden = model.base_model(input_ids=ids, position_ids=positions, use_cache=False, layout=layout)
        (hidden.last_hidden_state * weight).sum().backward()
        found.append(
            (hidden.last_hidden_state.detach(), torch.cat([p.grad.flatten() for p in model.base_model.parameters()]))
        )
    (hidden, gradient), (ours, our_gradient) = found
    assert (hidden - ours).abs().max() < 1e-11
    assert (gradient - our_gradient).norm() / gradient.norm() < 1e-11
