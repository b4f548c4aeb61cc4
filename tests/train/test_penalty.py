"""KL in the reward: summed by rollout, whatever the packs; taken before advantages; the unscored stay unscored."""

import dataclasses
import math

import pytest

from harnessrl.adapter import Call, Rollout
from harnessrl.attention import use_layouts
from harnessrl.config import Advantage, Loss
from harnessrl.errors import RunError
from harnessrl.train.batch import Finished, make_batch, make_updates
from harnessrl.train.parallel import World
from harnessrl.train.penalty import penalised, reference_packs, rollout_kl
from harnessrl.train.policy import Policy
from tests.conftest import make_tiny_model
from tests.train.test_update import TEMPERATURE, config, plain_logprobs, rollouts


def finished(rollout_id, reward, *responses):
    calls = [
        Call(call_id=f"c{index}", prompt_ids=[index], response_ids=ids, logprobs=[-1.0] * len(ids))
        for index, ids in enumerate(responses)
    ]
    rollout = Rollout(rollout_id=rollout_id, group_id="g", calls=calls, reward=reward)
    return Finished(rollout=rollout, failure=None if reward is not None else "lost", input=None)


def settings(estimator, coef=0.1, **update):
    loss = Loss(kl_coef=coef, kl_in="reward")
    return dataclasses.replace(config(**update), loss=loss, advantage=Advantage(estimator=estimator, eps=1e-12))


def test_rewards_by_hand():
    """a: 1 - 0.1 * 2 = 0.8 over two samples, b: 0 + 0.1 = 0.1, c is unscored, d sampled nothing and keeps 0.6."""
    items = [
        finished("a", 1.0, [5, 6, 7], [8]),
        finished("b", 0.0, [5, 6]),
        finished("c", None, [5]),
        finished("d", 0.6),
    ]
    kl = {"a": 2.0, "b": -1.0, "c": 100.0}
    batch, metrics = penalised(make_batch(items, settings("dr_grpo")), kl, settings("dr_grpo"))
    assert batch.rewards.tolist() == pytest.approx([0.8, 0.1, math.nan, 0.6], nan_ok=True)
    assert batch.advantages.tolist() == pytest.approx([0.3, -0.4, 0, 0.1])  # less their mean, 0.5
    assert [float(value) for value in batch.credit] == pytest.approx([0.3, 0.3, -0.4, 0])
    assert metrics == pytest.approx({"loss/kl": (2 / 4 - 1 / 2 + 0) / 3, "reward/kl_penalty": (0.2 - 0.1 + 0) / 3})
    assert [item.rollout.reward for item in batch.finished] == [1.0, 0.0, None, 0.6]  # the record keeps what was given
    packs = make_updates(batch, settings("dr_grpo"), seed=0)[0][0][0]
    assert {rollout for packed in packs for rollout in packed.rollout_ids} == {"a", "b"}


def test_reinforce_pp_normalises_what_is_left():
    """Rewards 0.9 and 0.1 have mean 0.5 and spread 0.4: advantages 1 and -1. Before, 0.4 and 0.4 had none."""
    items = [finished("a", 0.4, [5]), finished("b", 0.4, [6])]
    chosen = settings("reinforce_pp", coef=0.5)
    plain = make_batch(items, chosen)
    assert plain.advantages.tolist() == pytest.approx([0, 0])
    batch, _ = penalised(plain, {"a": -1.0, "b": 0.6}, chosen)
    assert batch.rewards.tolist() == pytest.approx([0.9, 0.1])
    assert batch.advantages.tolist() == pytest.approx([1, -1])


def test_nothing_scored_has_no_metrics():
    batch, metrics = penalised(make_batch([finished("a", None, [5])], settings("rloo")), {}, settings("rloo"))
    assert math.isnan(batch.rewards[0]) and batch.advantages.tolist() == [0] and metrics == {}


@pytest.mark.parametrize(
    "update", [{}, {"max_tokens": 64}, {"strategy": "per_call"}, {"tree": True, "max_tokens": 100}]
)
def test_the_sum_is_each_rollout_s_own_whatever_the_packs(update):
    """The reference is another model: every token of every call, against one plain forward a call."""
    items, other = rollouts(), make_tiny_model(seed=5)
    lost = dataclasses.replace(items[3].rollout, reward=None)
    items[3] = dataclasses.replace(items[3], rollout=lost)
    expected = {}
    for item in items:
        gaps = [
            c.logprobs - plain_logprobs(other, c.prompt_ids, c.response_ids).detach().numpy()
            for c in item.rollout.calls
        ]
        expected[item.rollout.rollout_id] = sum(float(gap.astype(float).sum()) for gap in gaps)
    del expected[lost.rollout_id]
    chosen = settings("grpo", rollouts_per_update=4, max_updates=1, **update)
    (packs,) = reference_packs(make_batch(items, chosen), chosen, 1)
    assert (len(packs) > 1) == ("max_tokens" in update)
    found = rollout_kl(Policy(use_layouts(other)), packs, TEMPERATURE, World())
    assert found == pytest.approx(expected, abs=1e-4)
    assert max(map(abs, found.values())) > 1


def test_a_sum_that_is_not_finite_stops_the_run():
    items, other = rollouts(groups=1), make_tiny_model(seed=5)
    other.model.norm.weight.data[0] = math.nan
    (packs,) = reference_packs(make_batch(items, settings("grpo")), settings("grpo"), 1)
    with pytest.raises(RunError, match=r"rollout g0-0: its KL to the reference is nan"):
        rollout_kl(Policy(use_layouts(other)), packs, TEMPERATURE, World())
