"""What merging compares and holds: every token about once, whatever the length of the vectors, and little besides the samples."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from harnessrl.adapter import Call, Rollout, merge_calls, prefix
from harnessrl.adapter.prefix import common_prefix, equal_run


def call(name, prompt):
    return Call(call_id=name, prompt_ids=prompt, response_ids=[5] * 20, logprobs=[-1.0] * 20)


def merge(calls):
    return merge_calls(Rollout(rollout_id="r", group_id="g", calls=calls))


def conversation(agents, turns, drifts):
    """Agents take turns, each with 40 more tokens a call; where ``drifts``, the answer comes back with other ids."""
    contexts = [[agent, *range(200)] for agent in range(agents)]
    calls = []
    for turn in range(turns):
        for agent in range(agents):
            calls.append(call(f"{agent}.{turn}", contexts[agent]))
            contexts[agent] = contexts[agent] + ([6] if drifts else [5]) * 20 + [turn] * 20
    return calls


@pytest.mark.parametrize("agents", [1, 2, 10])
@pytest.mark.parametrize("drifts", [False, True])
def test_each_token_is_compared_at_most_once(agents, drifts, monkeypatch):
    compared = []

    def counting(x, y):
        compared.append(equal_run(x, y))
        return compared[-1]

    monkeypatch.setattr(prefix, "equal_run", counting)
    monkeypatch.setattr(prefix, "SHORT", 0)  # compare all of them there
    calls = conversation(agents, 100 // agents, drifts)
    merged = merge(calls)
    assert len(merged.samples) == (len(calls) if drifts else agents)
    assert sum(compared) <= sum(len(c.prompt_ids) + len(c.response_ids) for c in calls)
    assert len(compared) <= 6 * len(calls)  # and in few comparisons, however many samples are open


def slow_common_prefix(x, y):
    return next((at for at, (a, b) in enumerate(zip(x, y, strict=False)) if a != b), min(len(x), len(y)))


@pytest.mark.parametrize("short", [0, 5, 8192])
@pytest.mark.parametrize("block", [2, 65536])
def test_long_and_short_vectors_are_compared_alike(short, block, monkeypatch):
    monkeypatch.setattr(prefix, "SHORT", short)
    monkeypatch.setattr(prefix, "BLOCK", block)
    rng = np.random.default_rng(0)
    for _ in range(300):
        x, y = (rng.integers(0, 2, int(rng.integers(0, 12)), dtype=np.int32) for _ in range(2))
        if rng.random() < 0.5:
            y = np.concatenate([x, y])
        cut_x, cut_y = (int(rng.integers(0, len(vector) + 1)) for vector in (x, y))
        expected = slow_common_prefix(x.tolist(), y.tolist())
        known = int(rng.integers(0, expected + 1))
        assert common_prefix(x[:cut_x], x[cut_x:], y[:cut_y], y[cut_y:], known) == expected
        if len(x) == len(y):
            assert equal_run(x, y) == expected


def test_a_prompt_may_leave_before_the_first_branch():
    """The main line branches at 3 when [1, 9, 3, 9] comes, which differs from it there, but already at 1 too."""
    calls = [call("a", [1, 2, 3]), call("b", [1, 2, 3, 6]), call("c", [1, 9, 3, 9])]
    merged = merge(calls)
    assert [broken.position for broken in merged.breaks] == [3, 1]
    assert [broken.earlier.call_id for broken in merged.breaks] == ["a", "a"]


@pytest.mark.parametrize("drifts", [False, True])
def test_samples_and_breaks_do_not_depend_on_how_vectors_are_compared(drifts, monkeypatch):
    def found():
        merged = merge(conversation(3, 20, drifts))
        return [(s.token_ids.tolist(), s.spans) for s in merged.samples], [
            (b.call.call_id, b.earlier.call_id, b.position, b.joint) for b in merged.breaks
        ]

    expected = found()
    monkeypatch.setattr(prefix, "SHORT", 0)
    assert found() == expected


def test_memory_is_proportional_to_what_comes_out():
    calls = conversation(agents=2, turns=200, drifts=False)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        merged = merge(calls)
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    columns = ("token_ids", "loss_mask", "logprobs", "policy_version")
    out = sum(getattr(sample, name).nbytes for sample in merged.samples for name in columns)
    prompts = sum(c.prompt_ids.nbytes for c in calls)
    assert peak < 4 * out + 400 * 1000  # a few columns at a time, and under 1 kB a call for spans and the tree
    assert prompts > 4 * (4 * out)  # so no copy of the prompts could hide in there
