"""LoRA: only adapters move, and what they amount to is one plain model, in the trainer, the engine and the exported folder."""

import json
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from harnessrl.adapter import pack
from harnessrl.attention import use_layouts
from harnessrl.config import Lora
from harnessrl.engine.torch_engine import TorchEngine
from harnessrl.errors import ConfigError
from harnessrl.train import checkpoint
from harnessrl.train.batch import make_batch, make_updates
from harnessrl.train.checkpoint import Checkpoints, Position
from harnessrl.train.export import copy_description, export
from harnessrl.train.loading import load_policy
from harnessrl.train.lora import ADAPTER, adapted, copy_weights
from harnessrl.train.parallel import World
from harnessrl.train.policy import Policy, load_model, score
from harnessrl.train.update import Updater, warmup
from tests.conftest import make_tiny_model
from tests.train.test_precision import gap
from tests.train.test_update import TEMPERATURE, config, rollouts

pytest.importorskip("peft", reason="needs the extra harnessrl[lora]")
LORA = Lora(rank=4, alpha=8.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_model(seed=0).save_pretrained(folder)
    return folder


def load(folder, lora=LORA, seed=0):
    return load_policy(folder, World(), lora=lora, seed=seed)


def trained(policy):
    return {name: p for name, p in policy.named_parameters() if p.requires_grad}


def train(policy, updates=2, **settings):
    """Updates on all packs by plain gradient descent; with the first one only B moves."""
    settings = config(**settings)
    (packs,) = (ranks[0] for ranks in make_updates(make_batch(rollouts(), settings), settings, seed=0)[0])
    optimizer = torch.optim.SGD(trained(policy).values(), 0.3)
    metrics = Updater(policy, optimizer, None, settings).step([packs] * updates, version=0).metrics()
    return packs, metrics


def everything(finished):
    samples = make_batch(finished, config()).samples
    return pack(samples, range(len(samples)))


def test_it_starts_as_the_plain_model_and_only_adapters_move(folder):
    policy, plain = load(folder), Policy(load_model(folder))
    packed = everything(rollouts())
    assert torch.equal(score(policy, packed, TEMPERATURE).logprobs, score(plain, packed, TEMPERATURE).logprobs)
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    train(policy)
    names = set(trained(policy))
    assert len(names) == 2 * 2 * 7 and all(ADAPTER in name for name in names)  # A and B, blocks, linear layers of each
    for name, value in policy.named_parameters():
        assert torch.equal(value, before[name]) == (name not in names), name


def test_a_step_equals_the_model_merged_by_hand(folder):
    policy, by_hand = load(folder), make_tiny_model(seed=0)
    train(policy)
    state = dict(policy.model.named_parameters())
    for name, module in by_hand.named_modules():
        if name.rpartition(".")[2] in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
            a, b = (state[f"{name}.lora_{part}.default.weight"].detach() for part in "AB")
            module.weight.data += 8.0 / 4 * b @ a
    packed = everything(rollouts())
    ours = score(policy, packed, TEMPERATURE).logprobs
    assert (ours - score(Policy(use_layouts(by_hand)), packed, TEMPERATURE).logprobs).abs().max() < 2e-5
    assert (ours - score(load(folder), packed, TEMPERATURE).logprobs).abs().max() > 1e-2  # it has moved
    target = load_model(folder)
    copy_weights(policy.model, target)
    for (name, ours), theirs in zip(target.named_parameters(), by_hand.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-7), name


@pytest.mark.parametrize("changes", [{"max_tokens": 64}, {"max_tokens": 100, "tree": True}, {"recompute": True}])
def test_no_split_into_packs_changes_the_update(folder, changes):
    whole, split = load(folder), load_policy(folder, World(), lora=LORA, recompute=changes.get("recompute", False))
    start = {name: p.detach().clone() for name, p in trained(whole).items()}
    packs, wanted = train(whole)
    more, found = train(split, **changes)
    assert len(packs) == 1 and (len(more) > 1) == ("max_tokens" in changes)
    assert found["policy/grad_norm"] == pytest.approx(wanted["policy/grad_norm"], rel=1e-5)
    moved = {name: p.detach() - start[name] for name, p in trained(whole).items()}
    apart = sum((trained(split)[name] - p).norm() ** 2 for name, p in trained(whole).items())
    assert apart**0.5 < 1e-4 * sum(p.norm() ** 2 for p in moved.values()) ** 0.5


def test_the_engine_samples_from_the_policy_that_is_trained(folder):
    policy, model = load(folder), load_model(folder)
    train(policy)
    engine = TorchEngine(model)
    assert gap(engine, policy)[1] > 1e-2
    copy_weights(policy.model, model)
    assert gap(TorchEngine(model), policy)[1] < 1e-4


def test_the_start_is_fixed_by_the_seed(folder):
    one, same, other = (trained(load(folder, seed=seed)) for seed in (1, 1, 2))
    for name, value in one.items():
        assert torch.equal(value, same[name])
        assert torch.equal(value, other[name]) == (".lora_B." in name)
        if ".lora_A." in name:  # uniform below 1 / sqrt(in) = 0.177 of 32, 0.125 of 64
            bound = value.shape[1] ** -0.5
            assert 0.9 * bound < value.abs().max() < bound and value.detach().std().item() == pytest.approx(
                bound / 3**0.5, rel=0.2
            )


def test_targets_are_linear_layers_of_blocks(folder):
    policy = load(folder, Lora(rank=2, targets=["q_proj", "layers.1.mlp.down_proj"]))
    assert [name.removeprefix("layers.") for name, _ in adapted(policy.model.model)] == [
        "0.self_attn.q_proj", "1.self_attn.q_proj", "1.mlp.down_proj"
    ]  # fmt: skip
    refused = {
        "lm_head": "lm_head is not a linear",
        "embed_tokens": "embed_tokens is not",
        "norm": "Norm",
        "none": "none",
    }
    for target, words in refused.items():
        with pytest.raises(ConfigError, match=rf"policy\.lora\.targets: .*{words}"):
            load(folder, Lora(rank=2, targets=[target]))


def test_without_peft_the_extra_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"needs peft.*harnessrl\[lora\]"):
        load(folder)
    assert load(folder, Lora()).model.config.vocab_size == 97  # and nothing else asks for it


def optimized(folder):
    policy = load(folder)
    optimizer = torch.optim.AdamW(trained(policy).values(), 1e-2)
    return policy, optimizer, warmup(optimizer, 0)


def advance(policy, optimizer, scheduler, steps):
    for step in steps:
        optimizer.zero_grad()
        (-score(policy, everything(rollouts(groups=1, members=2, seed=step)), 1.0).logprobs.mean()).backward()
        optimizer.step()
        scheduler.step()


def test_a_run_resumes_and_is_exported_as_a_plain_folder(folder, tmp_path):
    first = optimized(folder)
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", *first)
    advance(*first, range(3))
    copy_description(folder, checkpoints.folder)
    with checkpoints:
        checkpoints.save(Position(step=3, version=3, inputs=3))
    second = optimized(folder)
    checkpoint.load(tmp_path / "run" / "checkpoints" / "step-00003", *second)
    advance(*second, range(3, 5))
    packed = everything(rollouts())
    (tmp_path / "run" / "manifest.json").write_text(
        json.dumps({"config": {"policy": {"lora": {"rank": 4, "alpha": 8.0, "targets": []}}}})
    )
    export(tmp_path / "run", tmp_path / "out")
    assert not list((tmp_path / "out").glob("adapter*"))
    plain = Policy(use_layouts(AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()))
    wanted = score(first[0], packed, 1.0).logprobs
    assert (score(plain, packed, 1.0).logprobs - wanted).abs().max() < 2e-5
    advance(*first, range(3, 5))
    assert (score(first[0], packed, 1.0).logprobs - wanted).abs().max() > 1e-2
    for (name, one), two in zip(first[0].named_parameters(), second[0].parameters(), strict=True):
        assert torch.equal(one, two), name
