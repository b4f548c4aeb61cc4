"""The experiment's measuring, on a tiny random model and a tokenizer of letters; and its tables, against each other."""

import csv
import json

import numpy as np
import pytest
import torch

from experiments.substitute_bias.measure import RESULTS, last_change, rows_of
from experiments.substitute_bias.tables import Tokens, binned, overall, sequences, survival
from harnessrl.adapter import Call, Rollout
from harnessrl.attention import Documents
from harnessrl.train.policy import Policy

TEXTS = {1: "<", 2: ">", 3: "a", 4: "b", 5: "ab", 6: "c", 7: "d"}


class Letters:
    def decode(self, token_ids, /):
        return "".join(TEXTS[index] for index in token_ids)


def call(name, prompt, response):
    return Call(call_id=name, prompt_ids=prompt, response_ids=response, logprobs=[-2.0] * len(response))


def logprob(model, prompt, response):
    """The obvious way: one sequence, one forward, every position's distribution."""
    ids = torch.tensor([prompt + response])
    layout = Documents(np.array([0, ids.shape[1]]))
    with torch.inference_mode():
        scores = model(input_ids=ids, position_ids=torch.arange(ids.shape[1])[None], layout=layout).logits[0]
    scores = scores.float().log_softmax(-1)
    return [scores[len(prompt) + at - 1, token].item() for at, token in enumerate(response)]


def test_both_prompts_are_scored(tiny_model):
    # 3 4 was sampled and came back as 5; the second answer was sampled behind 5, substitution puts it behind 3 4.
    calls = [call("x", [1, 6, 2], [3, 4]), call("y", [1, 6, 2, 5, 1, 7, 2], [6, 7])]
    rows = list(rows_of(Rollout(rollout_id="r", group_id="g", calls=calls), 8, Policy(tiny_model), Letters()))
    assert [(row.chat, row.turn, row.position, row.distance, row.changed) for row in rows] == [
        (8, 1, 0, 3, 2),
        (8, 1, 1, 4, 2),
    ]
    assert [row.true for row in rows] == pytest.approx(logprob(tiny_model, [1, 6, 2, 5, 1, 7, 2], [6, 7]), abs=1e-5)
    assert [row.substituted for row in rows] == pytest.approx(
        logprob(tiny_model, [1, 6, 2, 3, 4, 1, 7, 2], [6, 7]), abs=1e-5
    )
    assert [row.engine for row in rows] == [-2.0, -2.0]
    assert all(abs(row.true - row.substituted) > 1e-3 for row in rows)


def test_a_history_that_came_back_as_it_was_gives_no_rows(tiny_model):
    calls = [call("x", [1, 6, 2], [3, 4]), call("y", [1, 6, 2, 3, 4, 1, 7, 2], [6, 7])]
    assert not list(rows_of(Rollout(rollout_id="r", group_id="g", calls=calls), 0, Policy(tiny_model), Letters()))


@pytest.mark.parametrize(
    ("true", "substituted", "expected"),
    [
        ([1, 5, 9], [1, 3, 4, 9], (1, 2)),
        ([1, 5, 9, 5, 8, 8], [1, 3, 4, 9, 3, 4, 8, 8], (2, 4)),
        ([1, 3, 4, 9], [1, 5, 9], (1, 1)),
        ([7, 5], [7, 3, 4], (0, 2)),
    ],
)
def test_where_the_last_change_is(true, substituted, expected):
    assert last_change(np.array(true), np.array(substituted)) == expected


TOKENS = Tokens(
    chat=np.array([0, 0, 0, 1]),
    turn=np.array([1, 1, 2, 1]),
    position=np.array([0, 1, 0, 0]),
    distance=np.array([20, 21, 40, 40]),
    changed=np.array([1, 1, 1, 3]),
    true=np.array([-1.0, -2.0, -3.0, -4.0]),
    substituted=np.array([-1.25, -2.0, -2.0, -4.5]),
    engine=np.array([-1.0, -2.0, -3.0, -4.25]),
)


def test_statistics_by_hand():
    values = {(of, name): float(value) for of, name, value, _, _ in list(overall(TOKENS))[1:]}
    assert values["token", "mean"] == 0.0625  # (-0.25 + 0 + 1 - 0.5) / 4
    assert values["token", "abs_q50"] == 0.375  # of 0, 0.25, 0.5, 1
    assert values["token", "share_over_0.5"] == 0.25
    assert values["token", "share_outside_clip"] == 0.75  # -0.25 and -0.5 are below log 0.8, 1 is above log 1.2
    assert values["token, rounding only", "mean"] == -0.0625
    assert values["response, sum", "mean"] == pytest.approx(0.0833, abs=1e-4)  # (-0.25 + 1 - 0.5) / 3


def test_responses_and_bins_by_hand():
    chat, total, mean, about = sequences(TOKENS)
    assert (chat.tolist(), total.tolist(), mean.tolist()) == ([0, 0, 1], [-0.25, 1, -0.5], [-0.125, 1, -0.5])
    assert about == [(0, 1, 2, 20, 1), (0, 2, 1, 40, 1), (1, 1, 1, 40, 3)]
    rows = list(binned(TOKENS, TOKENS.distance, (0, 32, 64, 96)))
    assert [row[:4] for row in rows[1:]] == [(0, 32, 2, "-0.125"), (32, 64, 2, "0.25")]
    above = {float(threshold): (share, rounding) for threshold, share, rounding in list(survival(TOKENS))[1:]}
    assert above[0.1] == ("0.75", "0.25") and above[10.0] == ("0", "0")


def test_the_tables_kept_here_belong_together():
    manifest = json.loads((RESULTS / "manifest.json").read_text())
    tokens = manifest["tokens_behind_overwritten_history"]
    for name in ("by_distance", "by_position", "by_changed", "by_turn"):
        with (RESULTS / f"{name}.csv").open(newline="") as file:
            assert sum(int(row["tokens"]) for row in csv.DictReader(file)) == tokens, name
    with (RESULTS / "responses.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == manifest["later_calls_behind_overwritten_history"]
    assert sum(int(row["tokens"]) for row in rows) == tokens
    assert len({row["chat"] for row in rows}) == manifest["chats_with_overwritten_history"]
