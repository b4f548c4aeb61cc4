"""The seven promises of plan_updates, each checked from the plan alone, and the bin packing under them."""

from __future__ import annotations

import numpy as np
import pytest

from harnessrl.adapter.bins import first_fit_decreasing, spread
from harnessrl.adapter.planner import plan_updates


def packs_of(update):
    return [pack.tolist() for rank in update.ranks for pack in rank]


def step_time(update, cost):
    """Sum over k of the slowest rank, as it would be measured."""
    return sum(max(cost(rank[k]) for rank in update.ranks) for k in range(len(update.ranks[0])))


def slow_first_fit_decreasing(lengths, room):
    """Every bin is tried in turn."""
    left, bin_of = [], [0] * len(lengths)
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        for number, space in enumerate(left):
            if lengths[index] <= space and lengths[index] <= room:
                left[number], bin_of[index] = space - lengths[index], number
                break
        else:
            left.append(room - lengths[index] if lengths[index] <= room else -1)
            bin_of[index] = len(left) - 1
    return bin_of


def assert_promises(plan, lengths, rollouts, *, world_size, max_tokens, groups=None, per_update=None, num_updates=None):
    """Promises 1 to 5, in their order."""
    planned = [index for update in plan.updates for pack in packs_of(update) for index in pack]
    assert sorted(planned) == list(range(len(lengths)))
    update_of = {index: u for u, update in enumerate(plan.updates) for pack in packs_of(update) for index in pack}
    for together in (rollouts, groups) if groups is not None else (rollouts,):
        homes = {}
        for index, name in enumerate(together):
            assert homes.setdefault(name, update_of[index]) == update_of[index]
    counts = [len({rollouts[index] for pack in packs_of(update) for index in pack}) for update in plan.updates]
    assert sum(counts) == len(set(rollouts)) and min(counts, default=1) > 0
    if per_update is not None and groups is None:
        assert counts[:-1] == [per_update] * (len(counts) - 1) and all(count <= per_update for count in counts)
    if num_updates is not None:
        assert len(counts) == min(num_updates, len(set(rollouts if groups is None else groups)))
        assert groups is not None or max(counts, default=0) - min(counts, default=0) <= 1
    for update in plan.updates:
        assert len(update.ranks) == world_size
        assert len({len(rank) for rank in update.ranks}) == 1
        for pack in packs_of(update):
            assert sum(lengths[index] for index in pack) <= max_tokens or len(pack) == 1


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("counted", [{"rollouts_per_update": 8}, {"rollouts_per_update": 5}, {"num_updates": 3}])
@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_promises_on_random_batches(seed, grouped, counted, world_size):
    rng = np.random.default_rng(seed)
    rollouts = np.repeat(rng.permutation(40), rng.integers(1, 6, 40))
    lengths = rng.integers(0, 130, len(rollouts))
    groups = rollouts // 4 if grouped else None
    arguments = {"world_size": world_size, "max_tokens": 100, "group_index": groups, "oversize": "alone", "seed": seed}
    plan = plan_updates(lengths, rollouts, **counted, **arguments)
    assert_promises(
        plan,
        lengths.tolist(),
        rollouts.tolist(),
        world_size=world_size,
        max_tokens=100,
        groups=None if groups is None else groups.tolist(),
        per_update=counted.get("rollouts_per_update"),
        num_updates=counted.get("num_updates"),
    )


def test_the_check_of_promises_can_fail():
    plan = plan_updates([1, 1, 1, 1], [0, 0, 1, 1], num_updates=2, world_size=1, max_tokens=9)
    assert_promises(plan, [1, 1, 1, 1], [0, 0, 1, 1], world_size=1, max_tokens=9)
    for lengths, rollouts, keywords in (
        ([1, 1, 1, 1, 1], [0, 0, 1, 1, 1], {"max_tokens": 9}),  # a sample that was not planned
        ([1, 1, 1, 1], [0, 1, 0, 1], {"max_tokens": 9}),  # rollouts torn apart
        ([5, 5, 5, 5], [0, 0, 1, 1], {"max_tokens": 9}),  # packs too long
    ):
        with pytest.raises((AssertionError, KeyError)):
            assert_promises(plan, lengths, rollouts, world_size=1, **keywords)


# Counting in rollouts


def test_updates_are_counted_in_rollouts_and_the_last_may_be_smaller():
    rollouts = [0, 0, 0, 0, 0, 1, 2, 3, 4]
    plan = plan_updates([1] * 9, rollouts, rollouts_per_update=2, world_size=1, max_tokens=9)
    counts = [len({rollouts[index] for index in update.samples}) for update in plan.updates]
    assert counts == [2, 2, 1]


def sizes_of_updates(sizes, per_update, seed=0):
    """Rollouts in each update, and its groups, for groups of these sizes."""
    groups = np.repeat(np.arange(len(sizes)), sizes)
    arguments = {"rollouts_per_update": per_update, "world_size": 1, "max_tokens": 99, "group_index": groups}
    plan = plan_updates(np.ones(len(groups), int), np.arange(len(groups)), **arguments, seed=seed)
    return [len(u.samples) for u in plan.updates], [sorted(set(groups[u.samples].tolist())) for u in plan.updates]


@pytest.mark.parametrize("seed", range(5))
def test_groups_of_unequal_sizes_fill_their_updates(seed):
    assert sizes_of_updates([1, 8] * 4, 8, seed)[0] == [8, 8, 8, 8, 4]
    assert sizes_of_updates([5, 3, 9, 4, 2, 4], 8, seed)[0] == [9, 8, 8, 2]


def test_equal_groups_meet_in_the_order_of_the_shuffle():
    for seed, sizes, per_update in ((0, [2] * 7, 4), (1, [3] * 8, 8), (2, [1] * 10, 3)):
        order = np.random.default_rng(seed).permutation(len(sizes)).tolist()
        step = per_update // sizes[0]
        expected = [sorted(order[at : at + step]) for at in range(0, len(order), step)]
        assert sizes_of_updates(sizes, per_update, seed)[1] == expected


def test_num_updates_spreads_rollouts_evenly():
    plan = plan_updates([1] * 8, range(8), num_updates=3, world_size=1, max_tokens=9)
    assert sorted(len(update.samples) for update in plan.updates) == [2, 3, 3]
    assert len(plan_updates([1, 1], [0, 1], num_updates=5, world_size=1, max_tokens=9).updates) == 2


def test_groups_stay_whole_even_where_the_count_does_not_divide():
    """Groups of 3 in updates of up to 4 rollouts: one group each, never 4 rollouts of two groups."""
    plan = plan_updates(
        [1] * 9, range(9), rollouts_per_update=4, world_size=1, max_tokens=9, group_index=[7, 7, 7, 2, 2, 2, 5, 5, 5]
    )
    assert sorted(update.samples.tolist() for update in plan.updates) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    plan = plan_updates([1] * 3, range(3), rollouts_per_update=2, world_size=1, max_tokens=9, group_index=[0, 0, 0])
    assert [update.samples.tolist() for update in plan.updates] == [[0, 1, 2]]


def test_a_seed_decides_which_groups_meet_and_repeats():
    def plan(seed):
        found = plan_updates([3, 1, 2, 4] * 8, range(32), rollouts_per_update=4, world_size=2, max_tokens=8, seed=seed)
        return [packs_of(update) for update in found.updates]

    assert plan(3) == plan(3)
    assert plan(3) != plan(4)


def test_no_samples_no_updates():
    for counted in ({"num_updates": 2}, {"rollouts_per_update": 2}):
        assert plan_updates([], [], **counted, world_size=2, max_tokens=5).updates == ()
        assert plan_updates([], [], **counted, world_size=2, max_tokens=5, group_index=[]).updates == ()


# Ranks and packs


def test_b33_all_ranks_run_the_same_number_of_packs():
    (update,) = plan_updates([5, 5, 5], [0, 1, 2], num_updates=1, world_size=2, max_tokens=5).updates
    assert [len(rank) for rank in update.ranks] == [2, 2]
    assert sorted(packs_of(update)) == [[], [0], [1], [2]]


def test_fewer_samples_than_ranks_leaves_empty_packs():
    (update,) = plan_updates([5], [0], num_updates=1, world_size=4, max_tokens=9).updates
    assert sorted(packs_of(update)) == [[], [], [], [0]]
    assert update.balance == 0.25


def test_samples_that_fit_one_pack_are_spread_over_the_ranks():
    """First-fit would put all four into one pack and let three ranks wait."""
    (update,) = plan_updates([5, 5, 5, 5], range(4), num_updates=1, world_size=4, max_tokens=20).updates
    assert sorted(packs_of(update)) == [[0], [1], [2], [3]]
    assert update.balance == 1.0


def test_a_long_sample_is_refused_or_has_a_pack_of_its_own():
    arguments = {"num_updates": 1, "world_size": 1, "max_tokens": 10}
    with pytest.raises(ValueError, match=r"sample 1 has 11 tokens, max_tokens is 10 \(2 samples are longer\)"):
        plan_updates([3, 11, 12, 0], range(4), **arguments)
    (update,) = plan_updates([3, 11, 12, 0], range(4), **arguments, oversize="alone").updates
    assert sorted(packs_of(update)) == [[0, 3], [1], [2]]
    (update,) = plan_updates([11] * 4, range(4), num_updates=1, world_size=2, max_tokens=10, oversize="alone").updates
    assert sorted(packs_of(update)) == [[0], [1], [2], [3]]


def test_reported_times_are_those_of_the_plan():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 100, 60)

    def dense(pack):
        return float(lengths[pack].sum()) ** 2

    (update,) = plan_updates(
        lengths, range(60), num_updates=1, world_size=3, max_tokens=200, cost=lambda part: float(part.sum()) ** 2
    ).updates
    assert update.step_time == pytest.approx(step_time(update, dense))
    assert update.total_cost == pytest.approx(sum(dense(pack) for rank in update.ranks for pack in rank))
    assert update.balance == pytest.approx(update.total_cost / 3 / update.step_time)


def test_a_cost_a_sample_is_summed():
    lengths = np.random.default_rng(1).integers(1, 100, 60)
    arguments = {"num_updates": 1, "world_size": 3, "max_tokens": 200}
    by_sample = plan_updates(lengths, range(60), **arguments, cost=lambda part: part + part**2 / 32768)
    default = plan_updates(lengths, range(60), **arguments)
    assert [packs_of(update) for update in by_sample.updates] == [packs_of(update) for update in default.updates]


def test_the_cost_of_the_backend_decides_which_packs_run_side_by_side():
    """Packs 8 | 4, 4 | 6, 2 | 5, 3 hold 8 tokens each; under the sum of squares, 64 and 40 pair, 34 and 32 pair."""
    lengths = np.array([8, 4, 4, 6, 2, 5, 3])
    (update,) = plan_updates(
        lengths, range(7), num_updates=1, world_size=2, max_tokens=8, cost=lambda part: part.astype(float) ** 2
    ).updates
    rows = [{tuple(sorted(lengths[rank[k]].tolist())) for rank in update.ranks} for k in range(2)]
    assert rows == [{(8,), (2, 6)}, {(3, 5), (4, 4)}]
    assert update.step_time == 64 + 34


def lognormal(size, seed):
    return np.clip(np.random.default_rng(seed).lognormal(np.log(3000), 1.0, size), 64, 32768).astype(np.int64)


@pytest.mark.parametrize(
    "cost", [None, lambda part: part, lambda part: part + part**2 / 8192], ids=["default", "linear", "long"]
)
def test_lognormal_lengths_are_balanced_at_the_bin_count_of_first_fit_decreasing(cost):
    lengths = lognormal(4096, seed=0)
    (update,) = plan_updates(
        lengths, np.arange(4096) // 3, num_updates=1, world_size=8, max_tokens=32768, cost=cost
    ).updates
    bins = max(slow_first_fit_decreasing(lengths.tolist(), 32768)) + 1
    assert sum(len(pack) > 0 for pack in packs_of(update)) <= bins
    assert len(update.ranks[0]) == -(-bins // 8)

    def measured(pack):
        return float(np.sum((cost or (lambda part: part + part**2 / 32768))(lengths[pack])))

    ideal = sum(measured(pack) for rank in update.ranks for pack in rank) / 8
    assert step_time(update, measured) <= 1.03 * ideal
    totals = [sum(measured(pack) for pack in rank) for rank in update.ranks]
    assert max(totals) <= 1.01 * ideal  # also where ranks only meet at the end of the update


def test_small_updates_stay_balanced_where_first_fit_is_not():
    """On 8 ranks, 64 samples by first-fit alone are 40% off, with an even share of every slot 20%."""

    def mean_ratio(size, cost):
        plans = [
            plan_updates(
                lognormal(size, seed), range(size), num_updates=1, world_size=8, max_tokens=32768, cost=cost
            ).updates[0]
            for seed in range(10)
        ]
        return np.mean([1 / update.balance for update in plans])

    assert mean_ratio(64, lambda part: part) < 1.05
    assert mean_ratio(1024, None) < 1.02


# Bins


def test_first_fit_decreasing_by_hand():
    assert first_fit_decreasing(np.array([3, 6, 4, 7]), 10).tolist() == [0, 1, 1, 0]
    assert first_fit_decreasing(np.array([11, 0, 10, 12]), 10).tolist() == [1, 2, 2, 0]  # a length of 0 fits a full bin
    assert first_fit_decreasing(np.array([], dtype=np.int64), 10).tolist() == []


@pytest.mark.parametrize("seed", range(20))
def test_first_fit_decreasing_equals_the_search_over_bins(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, rng.integers(2, 60), int(rng.integers(0, 80)))
    found = first_fit_decreasing(lengths, 40)
    expected = np.array(slow_first_fit_decreasing(lengths.tolist(), 40), dtype=np.int64)
    assert {frozenset(np.flatnonzero(found == name)) for name in found.tolist()} == {
        frozenset(np.flatnonzero(expected == name)) for name in expected.tolist()
    }


def test_spread_by_hand():
    def by_length(lengths, room, rows, width):
        found = spread(np.array(lengths), np.array(lengths, dtype=float), room, rows, width)
        return None if found is None else found.tolist()

    assert by_length([8, 2, 2, 2, 1, 1], 10, 2, 2) == [0, 1, 1, 1, 1, 1]
    assert by_length([4, 3, 3, 2], 10, 1, 2) == [0, 1, 1, 0]
    assert by_length([6, 6, 6], 10, 1, 2) is None
    # by squares 16 | 4 4 4 balances within the room of 7: 4 | 2 2 2
    assert spread(np.array([4, 2, 2, 2]), np.array([16.0, 4, 4, 4]), 7, 1, 2).tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize("seed", range(20))
def test_spread_fills_no_slot_over_its_room(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 50, int(rng.integers(0, 60)))
    rows, width = int(rng.integers(1, 5)), int(rng.integers(1, 5))
    slots = spread(lengths, lengths.astype(float) ** 2, 40, rows, width)
    if slots is not None and len(lengths):
        filled = np.bincount(slots, weights=lengths, minlength=rows * width)
        members = np.bincount(slots[lengths > 0], minlength=rows * width)
        assert len(filled) == rows * width
        assert ((filled <= 40) | (members == 1)).all()


@pytest.mark.parametrize(
    ("arguments", "keywords", "message"),
    [
        (([1, 2], [0]), {}, "lengths has length 2, rollout_index has length 1"),
        (([1, -2], [0, 0]), {}, r"lengths\[1\] is -2"),
        (([1.5], [0]), {}, "lengths must be a vector of integers"),
        (([1], [0]), {"num_updates": None}, "exactly one of rollouts_per_update and num_updates"),
        (([1], [0]), {"rollouts_per_update": 1}, "exactly one of rollouts_per_update and num_updates"),
        (([1], [0]), {"num_updates": 0}, "num_updates is 0; allowed: 1 or more"),
        (([1], [0]), {"num_updates": None, "rollouts_per_update": 0}, "rollouts_per_update is 0; allowed: 1 or more"),
        (([1], [0]), {"world_size": 0}, "world_size is 0; allowed: 1 or more"),
        (([1], [0]), {"max_tokens": 0}, "max_tokens is 0; allowed: 1 or more"),
        (([1], [0]), {"max_tokens": float("nan")}, "max_tokens must be a whole number, got nan of type float"),
        (([1], [0]), {"max_tokens": float("inf")}, "max_tokens must be a whole number, got inf of type float"),
        (([1], [0]), {"max_tokens": None}, "max_tokens must be a whole number, got None"),
        (([1], [0]), {"world_size": 2.0}, "world_size must be a whole number, got 2.0 of type float"),
        (([1], [0]), {"num_updates": True}, "num_updates must be a whole number, got True of type bool"),
        (([float("nan")], [0]), {}, "lengths must be a vector of integers"),
        (([1], [0]), {"cost": lambda part: np.nan}, r"cost of lengths \[1\] is nan; it must be finite"),
        (([1], [0]), {"oversize": "cut"}, 'oversize \'cut\' is unknown; allowed: "raise", "alone"'),
        (([1, 1], [0, 1]), {"group_index": [0]}, "group_index has length 1, rollout_index has length 2"),
        (([1, 1], [4, 4]), {"group_index": [0, 1]}, "rollout 4 is in group 0 and, by sample 1, in 1"),
    ],
)
def test_bad_input_is_named(arguments, keywords, message):
    with pytest.raises(ValueError, match=message):
        plan_updates(*arguments, **{"num_updates": 1, "world_size": 1, "max_tokens": 10, **keywords})
