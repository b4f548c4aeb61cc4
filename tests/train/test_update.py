"""The update on a real (tiny) transformer: exact logprobs, a loss that no split changes, and the balance of weights."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
import torch

from harnessrl.adapter import Call, Rollout, pack
from harnessrl.attention import use_layouts
from harnessrl.config import Advantage, Config, Loss, Policy, Task
from harnessrl.config import Update as UpdateConfig
from harnessrl.train import policy
from harnessrl.train.batch import Finished, make_batch, make_updates
from harnessrl.train.parallel import recompute_blocks
from harnessrl.train.policy import Policy as Scorer
from harnessrl.train.summary import batch_metrics
from harnessrl.train.update import Updater
from tests.conftest import make_tiny_model

TEMPERATURE = 0.7


def config(normalizer="rollout_mean", unit="rollout", **update):
    return Config(
        task=Task(inputs="a:b", harness="a:c", group_size=4),
        policy=Policy(source="x", train_temperature=TEMPERATURE),
        advantage=Advantage(unit=unit),
        loss=Loss(normalizer=normalizer),
        update=UpdateConfig(**({"lr": 1e-2, "max_tokens": 10_000, "grad_clip": 1e9} | update)),
    )


def plain_logprobs(model, prompt, ids):
    logits = model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0] / TEMPERATURE
    return logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(-1, torch.tensor(ids)[:, None].long())[:, 0]


def rollouts(groups=3, members=4, seed=0):
    """Chains that break now and then; logprobs are the tiny model's own."""
    rng = np.random.default_rng(seed)
    model = make_tiny_model(seed=0)
    out = []
    for group in range(groups):
        for member in range(members):
            prompt, calls = rng.integers(0, 97, 4).tolist(), []
            for index in range(int(rng.integers(1, 5))):
                ids = rng.integers(0, 97, int(rng.integers(1, 9))).tolist()
                with torch.no_grad():
                    logprobs = plain_logprobs(model, prompt, ids).numpy()
                calls.append(Call(call_id=f"c{index}", prompt_ids=prompt, response_ids=ids, logprobs=logprobs))
                prompt = [*prompt, *ids, int(rng.integers(0, 97))]
                if rng.random() < 0.4:
                    prompt[int(rng.integers(0, len(prompt)))] = int(rng.integers(0, 97))
            out.append(
                Rollout(
                    rollout_id=f"g{group}-{member}", group_id=f"g{group}", calls=calls, reward=float(rng.random() < 0.5)
                )
            )
    return [Finished(rollout=rollout, failure=None, input=None) for rollout in out]


def run(settings, finished=None, seed=0):
    model = Scorer(use_layouts(make_tiny_model(seed=0)))
    if settings.update.recompute:
        recompute_blocks(model.model)
    batch = make_batch(finished or rollouts(), settings)
    packs = [ranks[0] for ranks in make_updates(batch, settings, seed=seed)[0]]
    sums = Updater(model, torch.optim.SGD(model.parameters(), 1e-2), None, settings).step(packs, version=0)
    return sums, torch.cat([p.detach().flatten() for p in model.parameters()]), packs


def test_scores_equal_the_plain_forward(monkeypatch):
    finished = rollouts()
    samples = make_batch(finished, config()).samples
    packed = pack(samples, range(len(samples)))
    calls = {(f.rollout.rollout_id, c.call_id): c for f in finished for c in f.rollout.calls}
    expected = torch.cat(
        [plain_logprobs(make_tiny_model(seed=0), c.prompt_ids, c.response_ids) for s in samples
         for c in (calls[s.rollout_id, span.call_id] for span in s.spans)]
    )  # fmt: skip
    model = Scorer(use_layouts(make_tiny_model(seed=0)))
    whole = policy.score(model, packed, TEMPERATURE)
    assert len(samples) > 12 and len(whole.logprobs) == len(expected)
    assert (whole.logprobs - expected).abs().max() < 1e-5
    monkeypatch.setattr(policy, "HEAD_ELEMENTS", 97 * 5)  # five tokens at a time
    chunked = policy.score(model, packed, TEMPERATURE)
    assert torch.allclose(chunked.logprobs, whole.logprobs, atol=1e-6)
    assert torch.allclose(chunked.entropy, whole.entropy, atol=1e-6)
    gradients = []
    for scored in (whole, chunked):
        model.zero_grad()
        scored.logprobs.sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert (gradients[0] - gradients[1]).norm() / gradients[0].norm() < 1e-5


@pytest.mark.parametrize("normalizer", ["token_mean", "seq_mean", "rollout_mean"])
def test_no_split_into_packs_changes_the_update(normalizer):
    whole, reference, packs = run(config(normalizer))
    assert len(packs) == 1 and len(packs[0]) == 1
    before = torch.cat([p.flatten() for p in make_tiny_model(seed=0).parameters()])
    for max_tokens in (40, 64, 150):
        sums, parameters, packs = run(config(normalizer, max_tokens=max_tokens))
        assert len(packs[0]) > 1
        assert sums.metrics()["loss/policy"] == pytest.approx(whole.metrics()["loss/policy"], abs=1e-6)
        assert sums.metrics()["policy/grad_norm"] == pytest.approx(whole.metrics()["policy/grad_norm"], rel=1e-5)
        assert (parameters - reference).norm() / (reference - before).norm() < 1e-4


@pytest.mark.parametrize("max_tokens", [100, 10_000])
def test_trees_compute_fewer_tokens_and_the_same_update(max_tokens):
    settings = config(strategy="per_call")  # a sample a call: much to share
    flat, reference, _ = run(settings)
    tree, parameters, packs = run(config(strategy="per_call", tree=True, max_tokens=max_tokens))
    before = torch.cat([p.flatten() for p in make_tiny_model(seed=0).parameters()])
    assert (len(packs[0]) > 1) == (max_tokens == 100)
    assert tree.totals["pack_tokens"] < 0.7 * flat.totals["pack_tokens"]
    assert tree.totals["tokens"] == flat.totals["tokens"]
    for key in ("loss/policy", "policy/grad_norm", "policy/entropy"):
        assert tree.metrics()[key] == pytest.approx(flat.metrics()[key], rel=1e-5, abs=1e-6)
    assert tree.engine_gap < 1e-4
    assert (parameters - reference).norm() / (reference - before).norm() < 1e-4


def test_recomputed_activations_change_nothing(monkeypatch):
    calls = []
    block = type(make_tiny_model(seed=0).model.layers[0])
    forward = block.forward
    monkeypatch.setattr(
        block, "forward", lambda self, *args, **kwargs: calls.append(1) or forward(self, *args, **kwargs)
    )
    plain, reference, _ = run(config())
    count = len(calls)
    again, parameters, _ = run(config(recompute=True))
    assert len(calls) - count == count + 2  # the two blocks of the one pack ran once more
    assert torch.equal(parameters, reference)
    assert again.metrics()["policy/grad_norm"] == plain.metrics()["policy/grad_norm"]


def test_merging_strategies_change_no_loss_but_seq_mean():
    one, a, _ = run(config(strategy="per_call"))
    two, b, _ = run(config(strategy="best_effort"))
    before = torch.cat([p.flatten() for p in make_tiny_model(seed=0).parameters()])
    assert one.totals["pack_tokens"] > two.totals["pack_tokens"]
    assert (a - b).norm() / (b - before).norm() < 1e-4
    assert one.metrics()["loss/policy"] == pytest.approx(two.metrics()["loss/policy"], abs=1e-6)


def test_the_order_of_arrival_changes_nothing():
    finished = rollouts()
    _, a, _ = run(config(), finished)
    shuffled = [dataclasses.replace(f) for f in finished[::-1]]
    _, b, _ = run(config(), shuffled)
    assert torch.equal(a, b)


def test_engine_gap_sees_a_wrong_logprob_and_old_versions_are_left_out():
    finished = rollouts()
    sums, _, _ = run(config(), finished)
    assert 0 < sums.engine_gap < 1e-4
    first = finished[0].rollout
    call = dataclasses.replace(first.calls[0], logprobs=first.calls[0].logprobs + np.float32(0.25))
    wrong = dataclasses.replace(first, calls=[call, *first.calls[1:]])
    sums, _, _ = run(config(), [dataclasses.replace(finished[0], rollout=wrong), *finished[1:]])
    assert sums.engine_gap == pytest.approx(0.25, abs=1e-4)
    stale = dataclasses.replace(first, calls=[dataclasses.replace(call, policy_version=-1 + 1 + 7), *first.calls[1:]])
    sums, _, _ = run(config(), [dataclasses.replace(finished[0], rollout=stale), *finished[1:]])
    assert sums.engine_gap < 1e-4


def test_several_updates_and_epochs_compare_with_the_policy_before_the_first():
    sums, _, packs = run(config(rollouts_per_update=4, epochs=2))
    assert len(packs) == 3 and len(sums.norms) == 6
    assert 0 < sums.engine_gap < 1e-4  # taken before any update moved the policy
    ratio = sums.metrics()["policy/ratio_mean"]
    assert ratio != 1 and abs(ratio - 1) < 0.2
    single, _, _ = run(config())
    assert single.metrics()["policy/ratio_mean"] == pytest.approx(1, abs=1e-6)


def test_weight_advantage_sum_is_zero_only_where_units_agree():
    exact, _, _ = run(config("rollout_mean"))
    assert abs(exact.metrics()["loss/weight_advantage_sum"]) < 1e-12
    for normalizer, unit in (("token_mean", "rollout"), ("seq_mean", "rollout"), ("rollout_mean", "sample")):
        sums, _, _ = run(config(normalizer, unit))
        assert abs(sums.metrics()["loss/weight_advantage_sum"]) > 1e-3


def test_updates_hold_whole_groups():
    settings = config(rollouts_per_update=5)
    batch = make_batch(rollouts(groups=4), settings)
    seen = []
    for ranks in make_updates(batch, settings, seed=1)[0]:
        groups = {rollout.partition("-")[0] for packed in ranks[0] for rollout in packed.rollout_ids}
        assert len(groups) == 1
        seen += groups
    assert sorted(seen) == ["g0", "g1", "g2", "g3"]


def test_unscored_rollouts_are_not_trained_but_counted():
    finished = rollouts()
    lost = dataclasses.replace(finished[0].rollout, reward=None)
    finished[0] = Finished(rollout=lost, failure="lost", input=None)
    settings = config()
    batch = make_batch(finished, settings)
    (ranks,) = make_updates(batch, settings, seed=0)[0]
    assert lost.rollout_id not in {rollout for packed in ranks[0] for rollout in packed.rollout_ids}
    weight = sum(float(packed.weights.sum()) for packed in ranks[0])
    assert weight == pytest.approx(1.0)
    metrics = batch_metrics(batch, kinds=Counter())
    assert metrics["rollout/failed_lost"] == 1


def test_nothing_to_train_is_a_step_of_loss_zero():
    finished = [
        Finished(rollout=dataclasses.replace(f.rollout, calls=[], reward=0.0), failure="timeout", input=None)
        for f in rollouts()
    ]
    sums, parameters, packs = run(config(), finished)
    before = torch.cat([p.flatten() for p in make_tiny_model(seed=0).parameters()])
    assert packs == [] and sums.metrics()["loss/policy"] == 0 and torch.equal(parameters, before)


def test_own_failures_earn_the_failure_reward_and_lost_ones_nothing():
    line = {"rollout_id": "r", "group_id": "g", "reward": None, "calls": []}
    rewards = {
        reason: Finished.from_trace(line | {"failure": reason}, failure_reward=-1.0).rollout.reward
        for reason in ("timeout", "call_bound", "context_overflow", "exit_code", "lost", "no_reward")
    }
    assert rewards == {
        "timeout": -1, "call_bound": -1, "context_overflow": -1, "exit_code": -1, "lost": None, "no_reward": None
    }  # fmt: skip


def test_the_entropy_bonus_adds_its_gradient():
    """Gradient descent by 1e-2: with the bonus the weights move by 1e-2 * 0.1 * d/dw sum_t weight_t * entropy_t more."""
    settings = dataclasses.replace(config(), loss=Loss(entropy_coef=0.1))
    (_, plain, [[packed]]), (sums, bonus, _) = run(config()), run(settings)
    model = Scorer(use_layouts(make_tiny_model(seed=0)))
    scored = policy.score(model, packed, TEMPERATURE, entropy_gradient=True)
    (torch.from_numpy(packed.weights[packed.scored]) * scored.entropy).sum().backward()
    expected = 1e-2 * 0.1 * torch.cat([p.grad.flatten() for p in model.parameters()])
    assert ((bonus - plain) - expected).norm() < 1e-3 * expected.norm()
    assert sums.metrics()["policy/entropy"] == pytest.approx(scored.entropy.mean().item(), rel=1e-5)


def test_kl_to_a_reference_starts_at_zero_and_pulls_back():
    settings = dataclasses.replace(config(), loss=Loss(kl_coef=0.5))
    model, reference = Scorer(use_layouts(make_tiny_model(seed=0))), Scorer(use_layouts(make_tiny_model(seed=0)))
    batch = make_batch(rollouts(), settings)
    packs = [ranks[0] for ranks in make_updates(batch, settings, seed=0)[0]]
    updater = Updater(model, torch.optim.SGD(model.parameters(), 1e-2), reference, settings)
    assert updater.step(packs, 0).metrics()["loss/kl"] == pytest.approx(0, abs=1e-6)
    assert updater.step(packs, 0).metrics()["loss/kl"] > 1e-5


def test_a_reference_without_a_coefficient_is_measured_and_changes_nothing():
    _, plain, packs = run(config())
    model, reference = Scorer(use_layouts(make_tiny_model(seed=0))), Scorer(use_layouts(make_tiny_model(seed=1)))
    sums = Updater(model, torch.optim.SGD(model.parameters(), 1e-2), reference, config()).step(packs, version=0)
    assert torch.equal(torch.cat([p.detach().flatten() for p in model.parameters()]), plain)
    assert sums.metrics()["loss/kl"] > 1e-3  # k3 of another random model
