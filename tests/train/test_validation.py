"""Validation: when it is due, what it asks for, and its metrics by hand."""

import itertools

import pytest

from harnessrl.config import Config, Policy, Task, Validation
from harnessrl.errors import ConfigError
from harnessrl.train.validation import Validation as Validator


def inputs(seed, split):
    return ({"split": split, "number": 10 * seed + n} for n in itertools.count())


def validator(given=inputs, **settings):
    task = Task(inputs="a:b", harness="a:c", failure_reward=-1.0)
    return Validator(
        Config(seed=3, steps=10, task=task, policy=Policy(source="x"), validation=Validation(**settings)), given
    )


@pytest.mark.parametrize(("every", "steps"), [(1, list(range(11))), (4, [0, 4, 8, 10]), (5, [0, 5, 10]), (99, [0, 10])])
def test_it_runs_before_the_first_step_every_so_many_and_after_the_last(every, steps):
    assert [step for step in range(11) if validator(every=every).due(step)] == steps


def test_it_asks_for_the_same_rollouts_each_time():
    specs = validator(every=1, inputs=2, rollouts=2).specs
    names = ["val-3-0000-000", "val-3-0000-001", "val-3-0001-000", "val-3-0001-001"]
    assert [spec["rollout_id"] for spec in specs] == names
    assert [spec["input"] for spec in specs] == [{"split": "val", "number": n} for n in (30, 30, 31, 31)]
    assert [spec["metadata"]["group_id"] for spec in specs] == [name[:-4] for name in names]
    assert not any(spec["is_train"] for spec in specs)


def call(name, prompt, response):
    return {"call_id": name, "prompt_ids": prompt, "response_ids": response, "logprobs": [-1.0] * len(response)}


def test_metrics_by_hand():
    merged = [call("x", [1], [2, 3]), call("y", [1, 2, 3, 9], [4])]
    broken = [call("x", [1], [2, 3]), call("y", [7], [4, 4])]
    items = [
        {"rollout_id": "d", "reward": None, "failure": "lost", "calls": []},
        {"rollout_id": "a", "reward": 1.0, "failure": None, "calls": merged},
        {"rollout_id": "c", "reward": None, "failure": "timeout", "calls": []},
        {"rollout_id": "b", "reward": 0.5, "failure": None, "calls": broken},
    ]
    asked = []
    lines, metrics = validator(every=1, inputs=4).run(
        lambda specs: asked.extend(specs) or [item | {"group_id": item["rollout_id"]} for item in items]
    )
    assert len(asked) == 4 and [line["rollout_id"] for line in lines] == ["a", "b", "c", "d"]
    assert metrics == {
        "val/reward_mean": pytest.approx((1.0 + 0.5 - 1.0) / 3),  # the failure of its own counts, the lost one does not
        "val/count": 4,
        "val/samples_mean": 1.5,
        "val/tokens_mean": 3.5,
        "val/failed_lost": 1,
        "val/failed_timeout": 1,
    }


def test_a_split_that_is_too_short_is_refused():
    with pytest.raises(ConfigError, match=r"validation.inputs: 5, but a:b has 2 of the split 'val'"):
        validator(lambda seed, split: iter([1, 2]), every=1, inputs=5)
