"""Dynamic sampling: which groups are replaced, how often, and that no input is lost or used twice."""

import pytest

from harnessrl.config import Task
from harnessrl.train.resample import collect_groups, silent_groups

TASK = {"inputs": "a:b", "harness": "a:c", "groups": 3, "group_size": 2}


class Stream:
    """Groups of the next inputs: input n has the n-th rewards."""

    def __init__(self, *rewards):
        self.rewards, self.asked = iter(enumerate(rewards)), []

    def __call__(self, count, first):
        self.asked.append((count, first))
        return [
            {
                "rollout_id": f"{number}-{member}",
                "group_id": str(number),
                "calls": [],
                "reward": reward,
                "failure": None,
            }
            for _ in range(count)
            for number, rewards in [next(self.rewards)]
            for member, reward in enumerate(rewards)
        ]


def collected(stream, **task):
    """(groups to train, groups replaced), in order."""
    items = collect_groups(stream, Task(**TASK, **task))
    ids = list(dict.fromkeys(item["group_id"] for item in items))
    replaced = {item["group_id"] for item in items if item.get("resampled")}
    assert all(item.get("resampled", False) == (item["group_id"] in replaced) for item in items)
    return [name for name in ids if name not in replaced], [name for name in ids if name in replaced]


def test_without_it_groups_are_taken_as_they_come():
    stream = Stream((1, 1), (0, 0), (1, 0))
    assert collected(stream) == (["0", "1", "2"], []) and stream.asked == [(3, 0)]


def test_groups_of_equal_rewards_are_replaced_by_the_next_inputs():
    stream = Stream((1, 1), (1, 0), (0, 0), (0, 1), (1, 1), (0.5, 0))
    assert collected(stream, resample_zero_signal=True) == (["1", "3", "5"], ["0", "2", "4"])
    assert stream.asked == [(3, 0), (2, 3), (1, 5)]


def test_after_the_last_round_what_has_no_signal_stays():
    stream = Stream((1, 1), (1, 0), (0, 0), (0, 0), (0, 1), (1, 1))
    assert collected(stream, resample_zero_signal=True, max_resample=2) == (["1", "4", "5"], ["0", "2", "3"])
    assert stream.asked == [(3, 0), (2, 3), (1, 5)]
    stream = Stream((1, 1), (0, 0), (0, 0), (0, 0), (1, 1), (0, 0))
    assert collected(stream, resample_zero_signal=True, max_resample=1) == (["3", "4", "5"], ["0", "1", "2"])


@pytest.mark.parametrize(
    ("rewards", "silent"),
    [((0.1, 0.1), True), ((0.1, 0.1 + 1e-12), False), ((None, 1), True), ((None, None), True), ((0, 1), False)],
)
def test_a_signal_is_a_difference_between_scored_rollouts(rewards, silent):
    assert silent_groups(Stream(rewards)(1, 0), Task(**TASK)) == ({"0"} if silent else set())


def test_a_failure_of_its_own_has_its_reward_and_a_lost_rollout_has_none():
    items = Stream((None, 1))(1, 0)
    for failure, silent in (("timeout", set()), ("lost", {"0"})):
        assert silent_groups([items[0] | {"failure": failure}, items[1]], Task(**TASK)) == silent
    assert silent_groups([items[0] | {"failure": "timeout"}, items[1]], Task(**TASK, failure_reward=1.0)) == {"0"}


def test_overlong_rollouts_count_as_the_advantages_see_them():
    items = Stream((1, 0))(1, 0)
    long = {"call_id": "c", "prompt_ids": [1], "response_ids": [2] * 9, "logprobs": [-1.0] * 9}
    items[1]["calls"] = [long]
    assert silent_groups(items, Task(**TASK, overlong_tokens=8)) == {"0"}  # masked: one scored rollout is left
    penalised = Task(**TASK, overlong_tokens=8, overlong="penalise", overlong_penalty=-1.0)
    assert silent_groups(items, penalised) == {"0"}  # 0 + 1 equals 1
