"""The benchmark's data are what its table says, and a peer that fails does not stop it."""

from __future__ import annotations

import numpy as np
import pytest

from harnessrl.adapter.merge import merge_calls
from harnessrl.bench.adapter import Row, best_times, conversation


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


def test_a_peer_that_fails_is_left_out_and_ours_is_not():
    def fails():
        raise RuntimeError("broken")

    times = best_times({"ours": lambda: np.arange(10).sum(), "broken": fails, "absent": None}, seconds=0.001)
    assert set(times) == {"ours"} and 0 < times["ours"] < 1
    with pytest.raises(RuntimeError, match="broken"):
        best_times({"ours": fails}, seconds=0.001)


def test_the_ratio_is_taken_to_the_floor():
    assert Row(work="w", ours=3.0, floor=2.0).ratio == 1.5
    assert Row(work="w", ours=3.0).ratio is None
