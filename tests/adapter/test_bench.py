"""The adapter's benchmark: its data are what the table says, its floors do the work, its ratios and goals are kept apart."""

from __future__ import annotations

import json
from typing import ClassVar

import numpy as np
import pytest

from harnessrl.adapter import rollout_advantages
from harnessrl.adapter.merge import merge_calls
from harnessrl.bench import bench
from harnessrl.bench.adapter import Row, grows, measure, median_ratio, rounds, show
from harnessrl.bench.cases import Case, cases, compare, compare_joined, conversation, lognormal, two_pass
from harnessrl.bench.peers import first_fit_decreasing


@pytest.mark.parametrize(
    ("keywords", "samples"),
    [({}, 1), ({"break_every": 20}, 3), ({"agents": 2}, 2), ({"agents": 2, "break_every": 20}, 4)],
)
def test_conversations_break_where_they_should(keywords, samples):
    rollout = conversation(60, 10, **keywords)
    merged = merge_calls(rollout)
    assert len(merged.samples) == samples
    assert sum(int(sample.loss_mask.sum()) for sample in merged.samples) == 60 * 4
    assert len(rollout.calls[-1].prompt_ids) + 4 == 60 * 10 // keywords.get("agents", 1)


class Seen(np.ndarray):
    """A vector that notes how many elements it is compared with."""

    compared: ClassVar[list[int]] = []

    def __eq__(self, other):
        self.compared.append(len(other))
        return np.asarray(self) == np.asarray(other)


@pytest.mark.parametrize("agents", [1, 2])
def test_the_floor_of_merging_compares_all_that_a_prompt_repeats(agents, monkeypatch):
    """Every prompt repeats its agent's previous prompt and response, but for each agent's first call."""
    rollout = conversation(6, 10, agents=agents)
    for call in rollout.calls:
        for name in ("prompt_ids", "response_ids"):
            object.__setattr__(call, name, getattr(call, name).view(Seen))
    repeated = [len(old.prompt_ids) + 4 for old in rollout.calls[:-agents]]
    monkeypatch.setattr(Seen, "compared", [])
    compare([rollout], agents)()
    assert len(Seen.compared) == 2 * len(repeated) and sum(Seen.compared) == sum(repeated)
    Seen.compared.clear()
    compare_joined([rollout], agents)()
    assert Seen.compared == repeated


def test_the_other_floors_do_the_work():
    rewards, groups = np.array([1.0, 0.0, 0.0, 3.0, 1.0, 2.0]), ["b", "a", "b", "a", "a", "b"]
    np.testing.assert_allclose(two_pass(rewards, groups), rollout_advantages(rewards, groups), rtol=1e-12)
    assert first_fit_decreasing([3, 6, 4, 7], 10) == [[3, 0], [1, 2]]
    assert lognormal(4096).min() == 64 and lognormal(4096).max() == 32768


def test_a_peer_that_fails_is_left_out_and_ours_is_not(capsys):
    def fails():
        raise RuntimeError("broken")

    times = rounds({"ours": lambda: np.arange(10).sum(), "broken": fails, "absent": None}, seconds=0.001)
    assert set(times) == {"ours"} and len(times["ours"]) >= 5
    assert capsys.readouterr().err == "broken is left out: RuntimeError('broken')\n"
    with pytest.raises(RuntimeError, match="broken"):
        rounds({"ours": fails}, seconds=0.001)


def test_calls_are_timed_in_turn():
    order = []
    rounds({"ours": lambda: order.append("ours"), "floor": lambda: order.append("floor")}, seconds=1e-9)
    assert order == ["ours", "floor"] * 6  # one round that is not counted, five that are


def test_a_ratio_is_the_median_of_the_rounds_and_growth_the_exponent_of_size():
    assert median_ratio([2.0, 9.0, 6.0], [1.0, 1.0, 2.0]) == 3.0
    assert grows({10: 1.0, 20: 5.0, 40: 4.0}) == pytest.approx(1.0)
    assert grows({10: 1.0, 20: 5.0, 40: 16.0}) == pytest.approx(2.0)


def count_up(count):
    """Work of a size that no cache or call overhead hides."""
    return sum(range(count))


@pytest.mark.parametrize(
    ("goal", "holds", "sizes", "met"),
    [
        (0.9, True, (1, 2, 4), True),  # half the work of the floor, and linear
        (0.1, True, (1, 2, 4), False),  # too slow
        (0.9, False, (1, 2, 4), False),  # fast enough, but not what the goal says besides
        (0.9, True, (1, 4, 16), False),  # four times the work at twice the size
        (None, True, (1, 2, 4), None),
    ],
)
def test_a_goal_is_met_by_time_growth_and_what_else_it_says(goal, holds, sizes, met):
    case = Case(
        work="w",
        calls={"ours": lambda: count_up(20_000), "floor": lambda: count_up(40_000)},
        goal=goal,
        holds=holds,
        growth=[(unit, lambda work=work: count_up(20_000 * work)) for unit, work in zip((1, 2, 4), sizes, strict=True)],
    )
    assert measure(case, seconds=0.02).met is met


def test_every_case_names_what_it_is_measured_against():
    made = list(cases())
    for case in made:
        assert ("floor" in case.calls) == bool(case.floor)
        assert case.goal is None or (case.floor and case.holds)
        assert len(case.growth) == 3 and sorted(size for size, _ in case.growth) == [size for size, _ in case.growth]
    assert [case.goal for case in made if case.goal] == [2.0] * 6 + [1.0]


ROWS = [
    Row(work="first", ours=0.003, floor=0.002, ratio=1.5, goal=2.0, met=True, growth=1.0, unit_ns={10: 5.0}),
    Row(work="second", ours=0.003, ratio=None, growth=0.8, unit_ns={10: 5.0}, peers={"other": 0.004}, note="a note"),
]


def test_the_table_shows_ratios_goals_and_peers(capsys):
    show([*ROWS, Row(work="third", ours=1.0, floor=0.1, ratio=10.0, goal=2.0, met=False, growth=2.0, unit_ns={})])
    printed = capsys.readouterr().out
    for text in ("1.50", "2 met", "2 MISSED", "other 4.0", "a note"):
        assert text in printed


def test_rows_are_printed_as_json(monkeypatch, capsys):
    case = Case(work="w", calls={"ours": lambda: None}, growth=[(n, lambda n=n: count_up(1000 * n)) for n in (1, 2, 4)])
    monkeypatch.setattr("harnessrl.bench.adapter.cases", lambda: [case])
    assert bench("adapter", ["seconds=0.001", "json=true"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["work"] == "w" and row["ratio"] is None and row["unit_ns"].keys() == {"1", "2", "4"}
