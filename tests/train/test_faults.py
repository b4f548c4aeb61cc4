"""A loss or gradient that is not finite: stopped before it reaches a weight, traced to its rollout, kept for a look."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from harnessrl.adapter import PackedTree
from harnessrl.attention import use_layouts
from harnessrl.train.batch import make_batch, make_updates
from harnessrl.train.faults import Fault, cut, record
from harnessrl.train.parallel import World
from harnessrl.train.policy import Policy, score
from harnessrl.train.update import Updater, warmup
from tests.conftest import make_tiny_model
from tests.train.test_update import TEMPERATURE, config, rollouts


def packs_of(settings, finished=None):
    batch = make_batch(finished or rollouts(), settings)
    return [ranks[0] for ranks in make_updates(batch, settings, seed=0)[0]]


def rare_token(finished):
    """A token that the calls of one rollout alone read, and that rollout."""
    readers = {}
    for item in finished:
        for call in item.rollout.calls:
            for token in [*call.prompt_ids, *call.response_ids[:-1]]:
                readers.setdefault(int(token), set()).add(item.rollout.rollout_id)
    for token, names in sorted(readers.items()):
        if len(names) == 1 and token != 0:  # 0 is what an empty pack reads
            return token, *names
    raise AssertionError("every token is common")


def broken(token):
    """The tiny model with one token's embedding set to NaN; its output head is another matrix."""
    model = make_tiny_model(seed=0)
    with torch.no_grad():
        model.get_input_embeddings().weight[token] = float("nan")
    return Policy(use_layouts(model))


def failing(policy, settings, packs):
    """The fault of a step, after checking that no weight and no optimizer state came of it."""
    before = [p.detach().clone() for p in policy.parameters()]
    optimizer = torch.optim.AdamW(policy.parameters(), 1e-2)
    with pytest.raises(Fault) as error:
        Updater(policy, optimizer, None, settings).step(packs, 0)
    for parameter, value in zip(policy.parameters(), before, strict=True):
        assert torch.allclose(parameter, value, rtol=0, atol=0, equal_nan=True)
        assert parameter.grad is None
    assert not optimizer.state
    return error.value


@pytest.mark.parametrize("tree", [False, True])
def test_a_rollout_cut_from_a_pack_scores_as_in_it(tree):
    settings = config(strategy="per_call", tree=tree)
    ((packed,),) = packs_of(settings)
    model = Policy(use_layouts(make_tiny_model(seed=0)))
    with torch.no_grad():
        whole = score(model, packed, TEMPERATURE).logprobs
        seen = 0
        for rollout in sorted(set(packed.rollout_ids)):
            part, old = cut(packed, whole, rollout)
            assert set(part.rollout_ids) == {rollout} and len(old) == len(part.scored) > 0
            assert torch.allclose(score(model, part, TEMPERATURE).logprobs, old, atol=1e-6)
            for place in np.flatnonzero(part.loss_mask)[:3]:
                assert part.origin(place).rollout_id == rollout
            seen += len(old)
    assert seen == len(whole) and isinstance(part, PackedTree) == tree


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("max_tokens", [100, 10_000])
def test_a_nan_is_traced_to_the_one_rollout_that_reads_it(tree, max_tokens):
    finished = rollouts()
    token, rollout = rare_token(finished)
    settings = config(tree=tree, max_tokens=max_tokens)
    packs = packs_of(settings, finished)
    fault = failing(broken(token), settings, packs)
    assert fault.rollouts == [rollout]
    assert "nan" in fault.what
    assert all(rollout in suspect.packed.rollout_ids for suspect in fault.packs) and fault.packs
    if max_tokens == 100:
        assert 0 < len(fault.packs) < len(packs[0])


def test_with_several_updates_none_is_made(tmp_path):
    finished = rollouts()
    token, rollout = rare_token(finished)
    settings = config(rollouts_per_update=4)
    packs = packs_of(settings, finished)
    assert len(packs) == 3
    fault = failing(broken(token), settings, packs)
    assert fault.rollouts == [rollout] and fault.what == "a logprob is not finite"
    (suspect,) = fault.packs
    assert rollout in {name for packed in packs[suspect.update] for name in packed.rollout_ids}


def test_a_gradient_alone_is_traced_too():
    """A weight so large that the loss still fits float32 and its gradient does not."""
    settings = config(max_tokens=100)
    (packs,) = packs_of(settings)
    packed = packs[1]
    at = packed.scored[0]
    weights, advantages = packed.weights.copy(), packed.advantages.copy()
    weights[at], advantages[at] = 3e38, 1.0
    packs = [packs[0], dataclasses.replace(packed, weights=weights, advantages=advantages), *packs[2:]]
    fault = failing(Policy(use_layouts(make_tiny_model(seed=0))), settings, [packs])
    assert fault.what.startswith("loss -3.0") and fault.what.endswith("gradient norm nan")
    assert fault.rollouts == [packed.origin(int(at)).rollout_id]
    assert [suspect.index for suspect in fault.packs] == [1]


def test_healthy_updates_pass_and_each_moves_the_learning_rate():
    settings = config(rollouts_per_update=4, epochs=2)
    policy = Policy(use_layouts(make_tiny_model(seed=0)))
    optimizer = torch.optim.SGD(policy.parameters(), 0.01)
    updater = Updater(policy, optimizer, None, settings, scheduler=warmup(optimizer, 10))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)
    sums = updater.step(packs_of(settings), 0)
    assert len(sums.norms) == 6 and np.isfinite(sums.norms).all()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.007)  # of the seventh update


def test_the_pack_is_kept_with_its_provenance(tmp_path):
    finished = rollouts()
    token, rollout = rare_token(finished)
    settings = config()
    ((packed,),) = packs_of(settings, finished)
    error = record(failing(broken(token), settings, [[packed]]), tmp_path / "faults", step=7, version=7, here=World())
    assert rollout in str(error) and "step 7" in str(error) and str(tmp_path / "faults" / "step-7") in str(error)
    assert len(str(error).splitlines()) == 1
    folder = tmp_path / "faults" / "step-7"
    assert sorted(path.name for path in folder.iterdir()) == [
        "rank-0-update-0-pack-0.json", "rank-0-update-0-pack-0.npz"
    ]  # fmt: skip
    about = json.loads((folder / "rank-0-update-0-pack-0.json").read_text())
    assert about["at_fault"] == [rollout] and about["step"] == 7 and about["policy_version"] == 7
    columns = np.load(folder / "rank-0-update-0-pack-0.npz")
    for name in ("token_ids", "logprobs", "advantages", "weights", "loss_mask", "cu_seqlens"):
        assert np.array_equal(columns[name], getattr(packed, name))
    lines = {item.rollout.rollout_id: item.rollout for item in finished}
    for place, sample in enumerate(about["samples"]):
        start, stop = columns["cu_seqlens"][place : place + 2]
        calls = {call.call_id: call for call in lines[sample["rollout_id"]].calls}
        last = calls[sample["call_ids"][-1]]
        assert columns["token_ids"][start:stop].tolist() == [*last.prompt_ids, *last.response_ids]
        assert columns["loss_mask"][start:stop].sum() == sum(len(calls[c].response_ids) for c in sample["call_ids"])
