"""The task: deterministic, disjoint splits, and no way to the reward but the tool."""

from collections import Counter, defaultdict
from itertools import islice

import pytest

from experiments.lookup.task import KEYS, SPLITS, TABLE_SIZE, answer, episode, inputs


def test_a_literal_table_is_followed_by_hand() -> None:
    task = {"table": {"abc": "cde", "cde": "eab", "eab": "abc"}, "start": "abc", "hops": 2}
    assert answer(task) == "eab"
    assert answer({**task, "hops": 1}) == "cde"
    assert answer({**task, "start": "eab", "hops": 3}) == "eab"


def test_a_table_is_one_ring_so_every_value_can_be_looked_up_and_no_chain_comes_back() -> None:
    for seed in range(200):
        task = episode(seed)
        seen, key = [], task["start"]
        for _ in range(TABLE_SIZE):
            seen.append(key)
            key = task["table"][key]
        assert key == task["start"]
        assert set(seen) == set(task["table"]) and len(seen) == TABLE_SIZE
        assert task["hops"] in (2, 3)


def test_a_stream_repeats_and_another_seed_is_another_stream() -> None:
    first, again, other = (list(islice(inputs(seed), 50)) for seed in (3, 3, 4))
    assert first == again
    assert not {task["seed"] for task in first} & {task["seed"] for task in other}
    assert len({task["data_id"] for task in first}) == 50


def test_splits_are_disjoint_by_construction() -> None:
    for index, split in enumerate(SPLITS):
        for seed in range(5):
            assert {task["seed"] % len(SPLITS) for task in islice(inputs(seed, split), 100)} == {index}


def test_seeds_survive_a_json_reader_with_doubles() -> None:
    assert all(task["seed"] < 2**53 for task in islice(inputs(0, "warm"), 1000))


def test_an_unknown_split_says_what_is_allowed() -> None:
    with pytest.raises(ValueError, match=r"'test'.*train, val, warm"):
        next(inputs(0, "test"))


def test_memory_cannot_solve_it() -> None:
    """The best guess that 20,000 solved episodes give for a first prompt is right no more often than a blind one."""
    answers: dict[tuple[str, int], Counter[str]] = defaultdict(Counter)
    for task in islice(inputs(0), 20_000):
        answers[task["start"], task["hops"]][answer(task)] += 1
    guesses = {prompt: counter.most_common(1)[0][0] for prompt, counter in answers.items()}
    assert len(guesses) == 2 * len(KEYS)
    right = [guesses[task["start"], task["hops"]] == answer(task) for task in islice(inputs(1), 20_000)]
    assert 0.004 < sum(right) / len(right) < 0.012  # blind: 1 in 124 = 0.0081
