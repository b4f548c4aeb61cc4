"""The fused head against the plain computation: forward, gradients, every shape of tile, and sharded."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harnessrl.train.head import head_logprobs
from tests.conftest import make_tiny_model


def plain(hidden, weight, labels, temperature, *, bias=None, entropy_gradient=False):
    logits = hidden @ weight.t() if bias is None else hidden @ weight.t() + bias
    logprobs = (logits / temperature).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, labels[:, None])[:, 0], entropy if entropy_gradient else entropy.detach()


def inputs(tokens=37, width=16, vocabulary=1300, dtype=torch.float32, spread=1.0, bias=False):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64) * spread * width**-0.5
    shift = torch.randn(vocabulary, generator=generator, dtype=torch.float64) if bias else None
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator)
    upstream = torch.randn(2, tokens, generator=generator, dtype=torch.float64)
    leaves = [None if x is None else x.to(dtype).requires_grad_() for x in (hidden, weight, shift)]
    return leaves, labels, upstream.to(dtype)


def outputs(head, leaves, labels, upstream, temperature, *, entropy_gradient, **keywords):
    """Logprobs, entropy, and the gradients of a random combination of them."""
    hidden, weight, bias = leaves
    logprobs, entropy = head(
        hidden, weight, labels, temperature, bias=bias, entropy_gradient=entropy_gradient, **keywords
    )
    loss = (logprobs * upstream[0]).sum() + ((entropy * upstream[1]).sum() if entropy_gradient else 0)
    gradients = torch.autograd.grad(loss, [leaf for leaf in leaves if leaf is not None])
    return [logprobs.detach(), entropy.detach(), *gradients]


def gap(found, expected):
    """The norm of the difference over the norm, the largest over all tensors."""
    pairs = zip(found, expected, strict=True)
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)


def test_by_hand():
    """Logits [0, ln 3] at temperature 1 and [0, ln 9] at one half: p = 1/4, 3/4 and 1/10, 9/10."""
    hidden, weight, labels = torch.tensor([[1.0]]), torch.tensor([[0.0], [math.log(3)]]), torch.tensor([1])
    logprob, entropy = head_logprobs(hidden, weight, labels, 1.0)
    assert logprob.item() == pytest.approx(math.log(3 / 4))
    assert entropy.item() == pytest.approx(-(math.log(1 / 4) / 4 + 3 * math.log(3 / 4) / 4))
    logprob, entropy = head_logprobs(hidden, weight, labels, 0.5)
    assert logprob.item() == pytest.approx(math.log(0.9))
    assert entropy.item() == pytest.approx(-(0.1 * math.log(0.1) + 0.9 * math.log(0.9)))


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("elements", "bound"), [(37, 3e-6), (1300, 3e-6), (4096, 1e-6), (5000, 1e-6), (2**20, 1e-6)])
def test_every_tiling_equals_the_plain_head_in_float32(elements, bound, temperature, entropy_gradient):
    """The first two have tiles of one row, whose products round differently."""
    data = inputs()
    expected = outputs(plain, *data, temperature, entropy_gradient=entropy_gradient)
    found = outputs(head_logprobs, *data, temperature, entropy_gradient=entropy_gradient, elements=elements)
    assert gap(found, expected) < bound


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize(("vocabulary", "tokens"), [(130, 400), (49_152, 8), (151_936, 3)])
def test_vocabularies_of_real_models_in_float64(vocabulary, tokens, entropy_gradient):
    data = inputs(tokens=tokens, vocabulary=vocabulary, dtype=torch.float64)
    expected = outputs(plain, *data, 0.7, entropy_gradient=entropy_gradient)
    found = outputs(head_logprobs, *data, 0.7, entropy_gradient=entropy_gradient, elements=4000)
    assert gap(found, expected) < 1e-12


def test_it_is_no_farther_from_the_truth_than_the_plain_head():
    """Logits far apart, where rounding is at its worst: both heads in float32 against the plain one in float64."""
    data = inputs(tokens=200, width=64, vocabulary=8192, spread=6.0)
    exact = inputs(tokens=200, width=64, vocabulary=8192, spread=6.0, dtype=torch.float64)
    truth = outputs(plain, *exact, 1.0, entropy_gradient=True)
    ours = outputs(head_logprobs, *data, 1.0, entropy_gradient=True, elements=2**16)
    theirs = outputs(plain, *data, 1.0, entropy_gradient=True)
    for found, other, expected in zip(ours, theirs, truth, strict=True):
        assert gap([found], [expected]) < max(2 * gap([other], [expected]), 1e-6)


def test_a_bias_is_part_of_the_logits():
    data = inputs(bias=True)
    expected = outputs(plain, *data, 0.7, entropy_gradient=True)
    found = outputs(head_logprobs, *data, 0.7, entropy_gradient=True, elements=3000)
    assert len(found) == 5 and gap(found, expected) < 1e-6


def test_a_certain_token_has_logprob_and_entropy_of_zero():
    """A logit 200 above the others: nothing overflows, and no logprob is above 0."""
    hidden = torch.tensor([[200.0]]).requires_grad_()
    weight = torch.tensor([[0.0]] * 1500 + [[1.0]] + [[-1.0]] * 1500)
    logprob, entropy = head_logprobs(hidden, weight, torch.tensor([1500]), 1.0, entropy_gradient=True, elements=1024)
    assert logprob.item() == 0 and entropy.item() == 0
    (gradient,) = torch.autograd.grad(logprob.sum() + entropy.sum(), hidden)
    assert gradient.item() == 0


def test_half_precision_sums_in_float32():
    """Products in bfloat16 are rounded; the sums over the vocabulary are not: a uniform row over 4096 shows it."""
    hidden, weight = torch.zeros(2, 8, dtype=torch.bfloat16), torch.randn(4096, 8).to(torch.bfloat16)
    logprob, entropy = head_logprobs(hidden, weight, torch.tensor([0, 4095]), 1.0, elements=1024)
    assert logprob.dtype == torch.float32
    assert logprob.tolist() == pytest.approx([-math.log(4096)] * 2, rel=1e-6)
    assert entropy.tolist() == pytest.approx([math.log(4096)] * 2, rel=1e-6)


def test_gradients_in_half_precision_are_those_of_float32_up_to_its_rounding():
    data, low = inputs(), inputs(dtype=torch.bfloat16)
    exact = [leaf.detach().float().requires_grad_() if leaf is not None else None for leaf in low[0]]
    expected = outputs(plain, exact, data[1], low[2].float(), 0.7, entropy_gradient=True)
    found = outputs(head_logprobs, low[0], data[1], low[2].float(), 0.7, entropy_gradient=True, elements=4096)
    assert found[2].dtype == torch.bfloat16
    assert 1e-6 < gap(found, expected) < 0.02


def test_no_tokens_give_empty_columns_and_zero_gradients():
    hidden, weight = torch.zeros(0, 4, requires_grad=True), torch.ones(9, 4, requires_grad=True)
    logprobs, entropy = head_logprobs(hidden, weight, torch.zeros(0, dtype=torch.int64), 1.0)
    assert logprobs.tolist() == entropy.tolist() == []
    logprobs.sum().backward()
    assert weight.grad.abs().sum() == 0 and hidden.grad.shape == (0, 4)


def test_entropy_has_no_gradient_unless_asked_and_frozen_weights_get_none():
    (hidden, weight, _), labels, _ = inputs()
    logprobs, entropy = head_logprobs(hidden, weight.detach(), labels, 1.0)
    assert not entropy.requires_grad
    logprobs.sum().backward()
    assert hidden.grad is not None and weight.grad is None


def test_tied_embeddings_get_the_gradient_of_both_uses():
    from harnessrl.attention import Documents, use_layouts
    from harnessrl.train.policy import Policy

    torch.set_num_threads(1)
    ids = torch.arange(20)[None] * 7 % 97
    gradients = []
    for ours in (True, False):
        model = make_tiny_model(seed=0).double()
        model.config.tie_word_embeddings = True
        model.tie_weights()
        assert model.lm_head.weight is model.model.embed_tokens.weight
        if ours:
            positions, source, labels = torch.arange(20)[None], torch.arange(19), ids[0, 1:]
            layout = Documents([0, 20])
            scored = Policy(use_layouts(model))(ids, positions, layout, source, labels, 0.7, False)
            loss = scored.logprobs.sum()
        else:
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
            loss = plain_logprobs(logits, ids[0, 1:])
        loss.backward()
        gradients.append(model.lm_head.weight.grad)
    assert (gradients[0] - gradients[1]).norm() / gradients[1].norm() < 1e-10


def plain_logprobs(logits, labels):
    return (logits / 0.7).log_softmax(-1).gather(-1, labels[:, None]).sum()


SHARDED = """
import sys
import torch
import torch.distributed as dist
from harnessrl.adapter import pack
from harnessrl.attention import use_layouts
from harnessrl.train.parallel import World, shard, whole
from harnessrl.train.policy import Policy, score
from tests.adapter.making import make_sample
from tests.conftest import make_tiny_model

torch.set_num_threads(1)
rank = int(sys.argv[1])
samples = [make_sample([i, *range(3, 20 + i)], [(2, 15)], rollout=f"r{i}") for i in range(4)]


def model(tied):
    made = make_tiny_model(seed=0)
    if tied:
        made.config.tie_word_embeddings = True
        made.tie_weights()
    return use_layouts(made)


def gradients(policy, packs):
    for packed in packs:
        scored = score(policy, packed, 0.7, entropy_gradient=True)
        (scored.logprobs.sum() + scored.entropy.sum()).backward()
    return {name: whole(p.grad) for name, p in policy.named_parameters()}


dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
halves = [[pack(samples, [0]), pack(samples, [1])], [pack(samples, [2, 3]), pack(samples, [])]]
for tied in (True, False):
    policy = Policy(model(tied))
    shard(policy, policy.model, World(rank=rank, size=2))
    ours = gradients(policy, halves[rank])
    plain = gradients(Policy(model(tied)), halves[0] + halves[1])
    assert ours.keys() == plain.keys() and ("model.lm_head.weight" in ours) != tied
    for name, expected in plain.items():
        gap = (2 * ours[name] - expected).norm() / expected.norm()  # FSDP averages over the two ranks
        assert gap < 1e-5, (name, gap)
dist.destroy_process_group()
"""


def test_two_ranks_with_sharded_weights_get_the_gradient_of_one(tmp_path):
    """Tied embeddings and not; one of the packs is empty, and its rank still takes part in every collective."""
    command = [sys.executable, "-c", SHARDED]
    root = Path(__file__).parents[2]
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path / "meet")], cwd=root) for rank in (0, 1)]
    try:
        assert [rank.wait(timeout=100) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
