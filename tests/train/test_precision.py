"""bfloat16: forward and backward in it, everything that adds up in float32, an engine that computes alike."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from harnessrl.adapter import Call, Rollout, merge_calls, pack
from harnessrl.config import Lora
from harnessrl.engine.torch_engine import TorchEngine
from harnessrl.service.wire import Sampling
from harnessrl.train.batch import make_batch, make_updates
from harnessrl.train.loading import load_policy
from harnessrl.train.lora import add_adapters, copy_weights
from harnessrl.train.parallel import World, whole, world
from harnessrl.train.policy import load_model, score
from harnessrl.train.update import Updater
from tests.conftest import make_tiny_model
from tests.train.test_update import config, rollouts

HALF = torch.bfloat16


@pytest.fixture(scope="module")
def here():
    with world(dtype=HALF) as here:
        assert here.size == 1 and dist.is_initialized()
        yield here


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_model(seed=0).save_pretrained(folder)
    return folder


def updates_of(ranks):
    """[updates][ranks][packs] of three groups, in packs of 100 tokens."""
    settings = config(max_tokens=100)
    return make_updates(make_batch(rollouts(), settings), settings, seed=0, world_size=ranks)[0]


def numbers(policy):
    return torch.cat([whole(p.detach()).flatten() for p in policy.parameters()])


def step(policy, packs, here, lr=1e-2):
    """The change of all weights in one update by plain gradient descent, and its metrics."""
    before = numbers(policy)
    updater = Updater(policy, torch.optim.SGD(policy.parameters(), lr), None, config(max_tokens=100), here)
    metrics = updater.step([packs], version=0).metrics()
    return numbers(policy) - before, metrics


def test_loss_and_gradient_are_close_to_those_of_float32(folder, here):
    ((packs,),) = updates_of(1)
    assert len(packs) > 1
    full, wanted = step(load_policy(folder, World()), packs, World())
    for recompute in (False, True):
        half, found = step(load_policy(folder, here, recompute=recompute, dtype=HALF), packs, here)
        assert 1e-4 < (half - full).norm() / full.norm() < 0.02  # the first: it is not float32
        assert found["loss/policy"] == pytest.approx(wanted["loss/policy"], abs=1e-6)  # ratios are 1 in either
        assert found["policy/entropy"] == pytest.approx(wanted["policy/entropy"], rel=2e-3)
        assert found["policy/grad_norm"] == pytest.approx(wanted["policy/grad_norm"], rel=5e-3)


def test_weights_gradients_and_optimizer_states_are_float32(folder, here):
    policy = load_policy(folder, here, dtype=HALF)
    optimizer = torch.optim.AdamW(policy.parameters(), 1e-3)
    (packs,) = updates_of(1)
    scored = score(policy, packs[0][0], 1.0)
    assert scored.logprobs.dtype == scored.entropy.dtype == torch.float32
    scored.logprobs.sum().backward()
    assert {p.dtype for p in policy.parameters()} == {p.grad.dtype for p in policy.parameters()} == {torch.float32}
    optimizer.step()
    states = {value.dtype for state in optimizer.state.values() for value in state.values() if value.ndim}
    assert states == {torch.float32}


def test_updates_below_the_resolution_of_bfloat16_are_not_lost(folder, here):
    """Below 1 bfloat16 has steps of 1/256: an update of 2.5e-4 rounds away there, twenty of them are more than one step."""
    policy = load_policy(folder, here, dtype=HALF)
    optimizer = torch.optim.SGD(policy.parameters(), 2.5e-4)
    name, weight = next((name, p) for name, p in policy.named_parameters() if name.endswith("model.norm.weight"))
    for count in range(1, 21):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        if count == 1:
            assert (whole(weight) < 1).all() and (whole(weight.detach()).to(HALF) == 1).all(), name
    assert torch.allclose(whole(weight.detach()), torch.tensor(1 - 20 * 2.5e-4), atol=1e-6)
    copy = make_tiny_model(seed=0).to(HALF)
    copy_weights(policy.model, copy)
    assert (copy.model.norm.weight == 1 - 1 / 256).all()


def gap(engine, policy):
    """Mean and largest |engine logprob - trainer logprob| over 16 responses of 24 tokens."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 97, 12).tolist() for _ in range(16)]
    replies = engine.generate(prompts, [Sampling(max_tokens=24, noise=index) for index in range(16)])
    calls = [
        Call(call_id="c", prompt_ids=prompt, response_ids=reply.ids, logprobs=reply.logprobs)
        for prompt, reply in zip(prompts, replies, strict=True)
    ]
    samples = [s for call in calls for s in merge_calls(Rollout(rollout_id="r", group_id="g", calls=[call])).samples]
    packed = pack(samples, range(16))
    with torch.no_grad():
        difference = score(policy, packed, 1.0).logprobs.numpy() - packed.logprobs[packed.scored]
    return np.abs(difference).mean(), np.abs(difference).max()


def test_adapters_are_not_merged_into_an_engine_in_bfloat16(folder, here):
    """Merged, their part of each weight is rounded to steps of the weight's own size."""
    pytest.importorskip("peft", reason="needs the extra harnessrl[lora]")
    lora, engines = Lora(rank=4), (load_model(folder, dtype=HALF), load_model(folder, dtype=HALF))
    policy = load_policy(folder, here, dtype=HALF, lora=lora)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in policy.named_parameters():
        if ".lora_B." in name:
            parameter.data.to_local().normal_(std=0.01, generator=generator)
    add_adapters(engines[0], lora)
    for engine, merge in zip(engines, (False, True), strict=True):
        copy_weights(policy.model, engine, merge=merge)
    near, far = (gap(TorchEngine(engine), policy) for engine in engines)
    assert near[0] < 0.5 * far[0]


def test_an_engine_in_bfloat16_is_nearer_to_the_trainer_than_one_in_float32(folder, here):
    policy = load_policy(folder, here, dtype=HALF)
    near, far = (gap(TorchEngine(load_model(folder, dtype=dtype)), policy) for dtype in (HALF, torch.float32))
    assert near[0] < 0.5 * far[0] and near[1] < far[1]
    assert gap(TorchEngine(load_model(folder)), load_policy(folder, World()))[1] < 1e-4  # float32 in both
