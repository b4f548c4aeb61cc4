"""Packed attention equals the unpacked run, forward and backward, whatever else lies in the pack."""

import numpy as np
import pytest
import torch

from harnessrl.attention import Documents, use_layouts
from tests.conftest import make_tiny_model
from tests.masked import Masked

LENGTHS = [1, 7, 30, 2, 64, 7, 1, 33, 5]


def documents(seed=0):
    rng = np.random.default_rng(seed)
    return [torch.from_numpy(rng.integers(0, 97, n)) for n in LENGTHS]


def packed_hidden(model, docs):
    cu = np.concatenate([[0], np.cumsum([len(d) for d in docs])])
    positions = torch.cat([torch.arange(len(d)) for d in docs])
    return model.base_model(
        input_ids=torch.cat(docs)[None], position_ids=positions[None], use_cache=False, layout=Documents(cu)
    ).last_hidden_state[0].split([len(d) for d in docs])  # fmt: skip


def plain_hidden(model, docs):
    return [model.base_model(input_ids=d[None], use_cache=False).last_hidden_state[0] for d in docs]


def gradients(model, outputs):
    model.zero_grad()
    sum((h * torch.sin(torch.arange(h.numel()).reshape(h.shape))).sum() for h in outputs).backward()
    return torch.cat([p.grad.flatten() for p in model.base_model.parameters()])


def test_packed_equals_unpacked_forward_and_backward():
    docs = documents()
    packed, plain = use_layouts(make_tiny_model(seed=0)), make_tiny_model(seed=0)
    ours, theirs = packed_hidden(packed, docs), plain_hidden(plain, docs)
    assert max((a - b).abs().max() for a, b in zip(ours, theirs, strict=True)) < 1e-5
    a, b = gradients(packed, ours), gradients(plain, theirs)
    assert (a - b).norm() / b.norm() < 1e-5


def test_documents_do_not_see_each_other(tiny_model):
    docs = documents()
    with torch.no_grad():
        before = packed_hidden(tiny_model, docs)
        docs[4] = (docs[4] + 1) % 97
        after = packed_hidden(tiny_model, docs)
    changed = [bool((a != b).any()) for a, b in zip(before, after, strict=True)]
    assert changed == [i == 4 for i in range(len(LENGTHS))]


def test_a_causal_mask_equals_one_document(tiny_model):
    (doc,) = documents()[4:5]
    with torch.no_grad():
        (expected,) = packed_hidden(tiny_model, [doc])
        mask = torch.ones(len(doc), len(doc), dtype=torch.bool).tril()
        got = tiny_model.base_model(
            input_ids=doc[None], position_ids=torch.arange(len(doc))[None], use_cache=False, layout=Masked(mask)
        )
    assert (got.last_hidden_state[0] - expected).abs().max() < 1e-5


def test_a_forward_without_a_layout_is_refused(tiny_model):
    with pytest.raises(ValueError, match="layout"):
        tiny_model(input_ids=torch.tensor([[1, 2]]))
