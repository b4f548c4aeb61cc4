"""The block mask of a GPU lets every token see what the dense mask does; its outputs and, on a GPU, its gradients too."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_mask

from harnessrl.adapter import ancestor_mask, pack_tree
from harnessrl.attention import Blocks, Documents, documents, trees
from tests.adapter.making import make_sample
from tests.masked import Masked


def forest(seed, samples=12, length=60):
    """Two rollouts whose samples leave a common stem at different tokens; blocks of 128 are met in part, whole and not."""
    rng = np.random.default_rng(seed)
    stem, made = rng.integers(0, 97, length).tolist(), []
    for index in range(samples):
        cut = int(rng.integers(1, length))
        ids = stem[:cut] + rng.integers(0, 97, int(rng.integers(1, length))).tolist()
        made.append(make_sample(ids, [(max(0, cut - 5), len(ids))], rollout=f"r{index % 2}", index=index))
    return pack_tree(made, range(len(made)))


def dense(blocks, size):
    """What the mask function says of every pair."""
    return create_mask(blocks.mask.mask_mod, None, None, size, size, device="cpu")[0, 0]


def reached(blocks, size):
    """bool [T, T], the pairs that lie in a block which is not skipped."""
    tiles = blocks.mask.to_dense()[0, 0].bool()
    return tiles.repeat_interleave(128, 0).repeat_interleave(128, 1)[:size, :size]


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10**6), st.integers(1, 12))
def test_of_trees_it_is_the_ancestors(seed, samples):
    packed = forest(seed, samples)
    size, expected = len(packed.token_ids), torch.from_numpy(ancestor_mask(packed))
    blocks = Blocks(packed.subtree_end, "cpu")
    assert torch.equal(dense(blocks, size), expected)
    assert not (expected & ~reached(blocks, size)).any()


def test_of_documents_it_is_what_comes_before_in_ones_own():
    cu_seqlens = np.array([0, 3, 3, 4, 260])
    blocks = Blocks(np.repeat(cu_seqlens[1:], np.diff(cu_seqlens)), "cpu")
    expected = torch.block_diag(*(torch.ones(n, n).tril() for n in (3, 1, 256))).bool()
    assert torch.equal(dense(blocks, 260), expected)
    assert not (expected & ~reached(blocks, 260)).any()


def test_blocks_that_nobody_sees_are_skipped():
    blocks = Blocks(np.repeat([128, 256, 384], 128), "cpu")
    assert blocks.mask.to_dense()[0, 0].tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]


def drawn(packed, device="cpu"):
    """Queries of four heads, keys and values of two, and what the outputs are weighted by."""
    rng = torch.Generator().manual_seed(0)
    shapes = [(1, heads, len(packed.token_ids), 16) for heads in (4, 2, 2, 4)]
    return [torch.randn(shape, generator=rng).to(device) for shape in shapes]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_outputs_equal_the_dense_mask():
    """On a CPU forward only: PyTorch 2.13 refuses the backward pass there."""
    packed = forest(0)
    *qkv, _ = drawn(packed)
    found = Blocks(packed.subtree_end, "cpu").attend(0, *qkv, 0.5)
    for other in (Masked(torch.from_numpy(ancestor_mask(packed))), trees(packed.parent, packed.subtree_end)):
        assert (found - other.attend(0, *qkv, 0.5)).abs().max() < 1e-5
        assert (found - other.attend(0, *qkv, None)).abs().max() > 0.1


def test_a_cpu_takes_strips():
    packed = forest(0)
    assert type(trees(packed.parent, packed.subtree_end)) is type(documents(np.array([0, 2]))) is Documents


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_outputs_and_gradients_equal_the_dense_mask():
    for seed in range(3):  # packs of other lengths, as in training
        packed, found = forest(seed), []
        layout = trees(packed.parent, packed.subtree_end, "cuda")
        assert isinstance(layout, Blocks)
        for way in (layout, Masked(torch.from_numpy(ancestor_mask(packed)).cuda())):
            *qkv, weight = drawn(packed, "cuda")
            leaves = [x.requires_grad_() for x in qkv]
            out = way.attend(0, *leaves, None)
            found.append([out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)])
        for ours, expected in zip(*found, strict=True):
            assert (ours - expected).norm() / expected.norm() < 1e-5
