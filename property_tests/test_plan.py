"""plan_updates keeps its promises for any lengths, rollouts and groups."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harnessrl.adapter import plan_updates


@st.composite
def work(draw):
    """Arguments of plan_updates: samples of rollouts of groups, ranks, a token limit, and one way to count updates."""
    rollouts = draw(st.lists(st.integers(0, 3), min_size=1, max_size=8))  # the group of each rollout
    owners = draw(st.lists(st.integers(0, len(rollouts) - 1), max_size=16))
    lengths = draw(st.lists(st.integers(1, 40), min_size=len(owners), max_size=len(owners)))
    counted = draw(st.sampled_from(["rollouts_per_update", "num_updates"]))
    return {
        "lengths": lengths,
        "rollout_index": owners,
        "group_index": draw(st.sampled_from([None, [rollouts[owner] for owner in owners]])),
        "world_size": draw(st.integers(1, 4)),
        "max_tokens": draw(st.integers(10, 80)),
        "oversize": "alone",
        "seed": draw(st.integers(0, 3)),
        counted: draw(st.integers(1, 4)),
    }


def members(update):
    return [int(sample) for rank in update.ranks for pack in rank for sample in pack]


def first_fit_decreasing(sizes: list[int], room: int) -> list[int]:
    """How full the bins are, fullest first; every bin is tried in turn."""
    bins: list[int] = []
    for size in sorted(sizes, reverse=True):
        fits = [i for i, filled in enumerate(bins) if filled + size <= room]
        if fits:
            bins[fits[0]] += size
        else:
            bins.append(size)
    return sorted(bins, reverse=True)


@given(work())
def test_every_sample_is_planned_exactly_once(args):
    plan = plan_updates(**args)
    planned = Counter(sample for update in plan.updates for sample in members(update))
    assert planned == Counter(range(len(args["lengths"])))


@given(work())
def test_rollouts_and_groups_are_not_torn_apart(args):
    for column in ("rollout_index", "group_index"):
        owners = args[column]
        homes: dict[int, set[int]] = {}
        for number, update in enumerate(plan_updates(**args).updates):
            for sample in members(update) if owners is not None else []:
                homes.setdefault(owners[sample], set()).add(number)
        assert all(len(home) == 1 for home in homes.values())


@given(work())
def test_updates_are_counted_in_rollouts(args):
    plan = plan_updates(**args)
    owners, groups = args["rollout_index"], args["group_index"]
    units = owners if groups is None else groups
    sizes = {unit: len({o for o, u in zip(owners, units, strict=True) if u == unit}) for unit in units}
    counts = [len({owners[sample] for sample in members(update)}) for update in plan.updates]
    assert all(counts)
    if "num_updates" in args:
        assert len(counts) == min(args["num_updates"], len(sizes))
        if counts:
            assert max(counts) - min(counts) <= max(sizes.values())
    else:
        assert counts == first_fit_decreasing(list(sizes.values()), args["rollouts_per_update"])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 12), st.integers(0, 3))
def test_no_two_updates_could_be_one(sizes, per_update, seed):
    groups = [group for group, size in enumerate(sizes) for _ in range(size)]
    plan = plan_updates(
        [1] * len(groups),
        range(len(groups)),
        group_index=groups,
        rollouts_per_update=per_update,
        world_size=1,
        max_tokens=99,
        seed=seed,
    )
    counts = [len(members(update)) for update in plan.updates]
    assert counts == first_fit_decreasing(sizes, per_update)
    assert len(counts) < 2 or sum(counts[-2:]) > per_update


@given(work())
def test_ranks_run_the_same_number_of_packs_within_the_limit(args):
    for update in plan_updates(**args).updates:
        assert len(update.ranks) == args["world_size"]
        assert len({len(rank) for rank in update.ranks}) == 1
        for pack in (pack for rank in update.ranks for pack in rank):
            tokens = sum(args["lengths"][sample] for sample in pack)
            assert tokens <= args["max_tokens"] or len(pack) == 1


@given(work())
def test_no_more_packs_than_first_fit_decreasing_needs(args):
    for update in plan_updates(**args).updates:
        bins = first_fit_decreasing([args["lengths"][sample] for sample in members(update)], args["max_tokens"])
        assert len(update.ranks[0]) == -(-len(bins) // args["world_size"])


@given(work())
def test_the_same_arguments_give_the_same_plan(args):
    first, second = plan_updates(**args), plan_updates(**args)
    assert [_told(update) for update in first.updates] == [_told(update) for update in second.updates]


def _told(update):
    return [[pack.tolist() for pack in rank] for rank in update.ranks]


@given(work())
def test_a_sample_over_the_limit_is_refused_unless_it_may_stand_alone(args):
    args = {**args, "oversize": "raise"}
    if max(args["lengths"], default=0) > args["max_tokens"]:
        with pytest.raises(ValueError, match="max_tokens"):
            plan_updates(**args)
    else:
        assert sum(len(members(update)) for update in plan_updates(**args).updates) == len(args["lengths"])


def test_many_lognormal_samples_are_balanced_within_three_percent():
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(7.6, 1.0, 4096)), 64, 32768).astype(int)

    def cost(part):
        return float((part + part**2 / 32768).sum())

    (update,) = plan_updates(lengths, np.arange(4096), num_updates=1, world_size=8, max_tokens=32768, cost=cost).updates
    packs = np.array([[cost(lengths[pack]) for pack in rank] for rank in update.ranks])
    assert packs.max(axis=0).sum() <= 1.03 * cost(lengths) / 8
