"""Which rollouts a step trains: selected agents, zero-signal groups, bounded updates, overlong rollouts."""

import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from harnessrl.adapter import Call, Rollout
from harnessrl.config import Advantage, Config, Policy, Task, Update, from_mapping
from harnessrl.errors import ConfigError
from harnessrl.train.batch import Finished, batch_metrics, make_batch, make_updates


def config(task=None, agents=None, **update):
    return Config(
        task=Task(inputs="a:b", harness="a:c", group_size=2, **(task or {})),
        policy=Policy(source="x"),
        advantage=Advantage(estimator="dr_grpo"),  # reward minus the group's mean: literal numbers
        update=Update(**update),
        train_agents=agents,
    )


def call(name, prompt, response, agent=""):
    return Call(call_id=name, prompt_ids=prompt, response_ids=response, logprobs=[-1.0] * len(response), agent=agent)


def finished(name, reward, *calls):
    rollout = Rollout(rollout_id=name, group_id=name.partition("-")[0], calls=calls, reward=reward)
    return Finished(rollout=rollout, failure=None, input=None)


def rollouts(rewards, lengths=None):
    """Groups a, b, ... of as many rollouts as their rewards: a-0, a-1, ..., one call each of `lengths` tokens."""
    lengths = lengths or {}
    out = []
    for group, values in rewards.items():
        for member, value in enumerate(values):
            name = f"{group}-{member}"
            out.append(finished(name, value, call("c", [1, 2], [5] * lengths.get(name, 3))))
    return out


def trained(updates):
    """Rollout ids of each update."""
    return [sorted({name for packed in ranks[0] for name in packed.rollout_ids}) for ranks in updates]


def three_agents():
    return [
        finished(
            name,
            reward,
            call("plan", [1, 2], [10, 11], "planner"),
            call("write", [1, 2, 10, 11, 3], [20], "writer"),
            call("check", [1, 2, 10, 11, 3, 20, 4], [30, 31, 32], "checker"),
        )
        for name, reward in (("a-0", 1.0), ("a-1", 0.0))
    ]


def test_calls_of_other_agents_are_context_only():
    batch = make_batch(three_agents(), config(agents=["writer", "checker"]))
    assert len(batch.samples) == 2
    for sample in batch.samples:
        assert sample.token_ids.tolist() == [1, 2, 10, 11, 3, 20, 4, 30, 31, 32]
        assert sample.loss_mask.tolist() == [False] * 5 + [True] + [False] + [True] * 3
        assert [span.call_id for span in sample.spans] == ["write", "check"]
    metrics = batch_metrics(batch, Counter())
    assert metrics["merge/skipped_not_trainable"] == 2
    assert metrics["rollout/trained_token_share"] == pytest.approx(4 / 6)
    everything = make_batch(three_agents(), config())
    assert [sample.loss_mask.sum() for sample in everything.samples] == [6, 6]
    assert "merge/skipped_not_trainable" not in batch_metrics(everything, Counter())


def test_an_agent_that_nobody_names_trains_nothing():
    batch = make_batch(three_agents(), config(agents=["reviewer"]))
    assert batch.samples == [] and batch_metrics(batch, Counter())["merge/skipped_not_trainable"] == 6
    assert make_updates(batch, config(agents=["reviewer"]), seed=0)[0] == []


def test_what_the_harness_marked_stays_untrained():
    item = three_agents()[0]
    calls = [dataclasses.replace(c, trainable=c.agent != "writer") for c in item.rollout.calls]
    item = dataclasses.replace(item, rollout=dataclasses.replace(item.rollout, calls=calls))
    batch = make_batch([item], config(agents=["writer", "checker"]))
    assert [span.call_id for sample in batch.samples for span in sample.spans] == ["check"]


REWARDS = {"a": [1.0, 0.0], "b": [1.0, 1.0], "c": [0.0, 1.0], "d": [0.5], "e": [None, None]}


def test_groups_without_signal_can_be_left_out():
    batch = make_batch(rollouts(REWARDS), config())
    assert batch.advantages.tolist() == [0.5, -0.5, 0, 0, -0.5, 0.5, 0, 0, 0]
    updates, metrics = make_updates(batch, config(), seed=0)
    assert trained(updates) == [["a-0", "a-1", "b-0", "b-1", "c-0", "c-1", "d-0"]]
    assert metrics["update/filtered_groups"] == 0
    updates, metrics = make_updates(batch, config(filter_zero_signal=True), seed=0)
    assert trained(updates) == [["a-0", "a-1", "c-0", "c-1"]]
    assert metrics["update/filtered_groups"] == 2  # b and d; e was never scored
    (packed,) = updates[0][0]
    assert packed.weights[packed.loss_mask].tolist() == pytest.approx([1 / 12] * 12)  # of 4 rollouts, 3 tokens each
    assert batch_metrics(batch, Counter())["advantage/zero_signal_groups"] == 3


def test_where_no_group_has_signal_there_is_no_update():
    batch = make_batch(rollouts({"b": [1.0, 1.0]}), config())
    updates, metrics = make_updates(batch, config(filter_zero_signal=True), seed=0)
    assert updates == [] and metrics["update/filtered_groups"] == 1 and metrics["perf/rank_balance"] == 1


@pytest.mark.parametrize(("limit", "made"), [(None, 3), (2, 2), (1, 1), (5, 3)])
def test_updates_of_a_step_are_bounded_and_counted(limit, made):
    settings = config(rollouts_per_update=2, max_updates=limit)
    batch = make_batch(rollouts({"a": [1, 0], "b": [0, 1], "c": [1, 0]}), settings)
    updates, metrics = make_updates(batch, settings, seed=3)
    assert len(updates) == made and metrics["update/skipped_updates"] == 3 - made
    unbounded = make_updates(batch, config(rollouts_per_update=2), seed=3)[0]
    assert trained(updates) == trained(unbounded)[:made]


LENGTHS = {"a-0": 8, "a-1": 7, "a-2": 9}


def test_overlong_rollouts_are_masked_before_advantages():
    batch = make_batch(rollouts({"a": [1, 0, 1, 0.5]}, LENGTHS), config({"overlong_tokens": 8}))
    assert batch.overlong.tolist() == [False, False, True, False]
    assert batch.rewards[[0, 1, 3]].tolist() == [1, 0, 0.5] and np.isnan(batch.rewards[2])
    assert batch.advantages.tolist() == [0.5, -0.5, 0, 0]
    assert trained(make_updates(batch, config({"overlong_tokens": 8}), seed=0)[0]) == [["a-0", "a-1", "a-3"]]
    metrics = batch_metrics(batch, Counter())
    assert metrics["rollout/overlong"] == 1 and metrics["reward/mean"] == 0.625  # of all four, as they were earned


def test_overlong_rollouts_are_penalised_before_advantages():
    task = {"overlong_tokens": 7, "overlong": "penalise", "overlong_penalty": 0.5}
    batch = make_batch(rollouts({"a": [1, 0, 1, 0.5]}, LENGTHS), config(task))
    assert batch.rewards.tolist() == [0.5, 0, 0.5, 0.5]
    assert batch.advantages.tolist() == [0.125, -0.375, 0.125, 0.125]
    assert trained(make_updates(batch, config(task), seed=0)[0]) == [["a-0", "a-1", "a-2", "a-3"]]
    metrics = batch_metrics(batch, Counter())
    assert metrics["rollout/overlong"] == 2 and metrics["reward/mean"] == 0.625


def test_length_counts_every_sampled_token_of_a_rollout():
    calls = [call("one", [1], [5, 6]), call("two", [1, 9, 9, 9, 9], [7, 8, 9])]
    item = finished("a-0", 1.0, *calls)
    assert make_batch([item], config({"overlong_tokens": 5})).overlong.tolist() == [False]
    assert make_batch([item], config({"overlong_tokens": 4})).overlong.tolist() == [True]
    assert make_batch([item], config()).overlong.tolist() == [False]


GOOD = {"task": {"inputs": "a:b", "harness": "a:c"}, "policy": {"source": "x"}}


def test_the_choices_are_configuration():
    overrides = ["train_agents=[writer,checker]", "task.overlong_tokens=9", "task.overlong=penalise"]
    overrides += [
        "update.max_updates=2",
        "update.filter_zero_signal=true",
        "update.warmup_steps=3",
        "checkpoint_keep=1",
    ]
    settings = from_mapping(GOOD, overrides, Path("some.yaml"))
    assert settings.train_agents == ["writer", "checker"] and settings.task.overlong_tokens == 9
    assert (settings.update.max_updates, settings.update.filter_zero_signal) == (2, True)
    assert from_mapping(GOOD, [], Path("some.yaml")).train_agents is None


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train_agents=[]", ["train_agents", "at least one"]),
        ("update.max_updates=0", ["update.max_updates", "larger than 0"]),
        ("update.warmup_steps=-1", ["update.warmup_steps", "negative"]),
        ("task.overlong_tokens=0", ["task.overlong_tokens", "larger than 0"]),
        ("task.overlong=drop", ["task.overlong", "mask", "penalise"]),
        ("task.overlong_penalty=-0.5", ["task.overlong_penalty", "negative"]),
        ("checkpoint_keep=0", ["checkpoint_keep", "larger than 0"]),
    ],
)
def test_impossible_choices_are_refused(override, words):
    with pytest.raises(ConfigError) as error:
        from_mapping(GOOD, [override], Path("some.yaml"))
    assert all(word in str(error.value) for word in words), str(error.value)
