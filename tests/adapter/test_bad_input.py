"""Whatever is handed to the adapter in place of what it takes is refused by name, never cast, cut or padded.

One table a kind of thing: what is called, with what, and the words that the message must hold.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from harnessrl.adapter import (
    Call,
    Rollout,
    Sample,
    Span,
    assign_credit,
    from_agent_lightning,
    from_vllm_chat,
    from_vllm_completions,
    pack,
    pack_tree,
    rollout_advantages,
    token_advantages,
    token_weights,
    tree_items,
    unpack,
    unpack_tree,
    zero_signal_groups,
)
from tests.adapter.making import make_sample

NAN, INF = math.nan, math.inf
SAMPLE = make_sample([1, 2, 3], [(1, 3)], rollout="r7")


def call(**fields):
    return Call(**{"call_id": "c0", "prompt_ids": [1, 2], "response_ids": [3, 4], "logprobs": [-0.5, -1.0]} | fields)


def rollout(**fields):
    return Rollout(**{"rollout_id": "r7", "group_id": "g", "calls": [call()]} | fields)


def sample(**fields):
    return replace(SAMPLE, **fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"call_id": None}, "call None: call_id must be a string, got None"),
        ({"call_id": 3}, "call 3: call_id must be a string, got 3 of type int"),
        ({"agent": None}, "call 'c0': agent must be a string, got None"),
        ({"finish_reason": 1}, "call 'c0': finish_reason must be a string, got 1"),
        ({"request_id": 1}, "call 'c0': request_id must be a string, got 1"),
        ({"delivered": "false"}, "call 'c0': delivered must be True or False, got 'false'"),
        ({"trainable": 1}, "call 'c0': trainable must be True or False, got 1"),
        ({"constrained": None}, "call 'c0': constrained must be True or False, got None"),
        ({"prompt_ids": None}, r"call 'c0': prompt_ids must be a vector of integers, got shape \(\) of object"),
        ({"prompt_ids": "12"}, "call 'c0': prompt_ids must be a vector of integers"),
        ({"prompt_ids": [[1], [2, 3]]}, "call 'c0': prompt_ids cannot be read as an array"),
        ({"response_ids": [None, 1]}, "call 'c0': response_ids must be a vector of integers"),
        ({"response_ids": [2**70]}, "call 'c0': response_ids must be a vector of integers"),
        ({"logprobs": [-0.5, None]}, "call 'c0': logprobs must be a vector of numbers"),
        ({"logprobs": -0.5}, r"call 'c0': logprobs must be a vector of numbers, got shape \(\)"),
        ({"logprobs": torch.zeros(2, requires_grad=True)}, "call 'c0': logprobs cannot be read as an array: .*grad"),
        ({"logprobs": torch.zeros(2, dtype=torch.bfloat16)}, "call 'c0': logprobs cannot be read as an array: .*BFloat16"),
        ({"policy_version": True}, "call 'c0': policy_version must be a vector of integers, got .* bool"),
        ({"policy_version": 1.0}, "call 'c0': policy_version must be a vector of integers, got .* float64"),
        ({"policy_version": None}, "call 'c0': policy_version must be a vector of integers, got .* object"),
        ({"policy_version": "1"}, "call 'c0': policy_version must be a vector of integers"),
    ],
)  # fmt: skip
def test_a_call(fields, said):
    with pytest.raises(ValueError, match=said):
        call(**fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rollout_id": 7}, "rollout 7: rollout_id must be a string, got 7 of type int"),
        ({"rollout_id": None}, "rollout None: rollout_id must be a string"),
        ({"group_id": None}, "rollout 'r7': group_id must be a string, got None"),
        ({"group_id": ("a", 1)}, "rollout 'r7': group_id must be a string"),
        ({"reward": "1"}, "rollout 'r7': reward must be a number, got '1' of type str"),
        ({"reward": True}, "rollout 'r7': reward must be a number, got True of type bool"),
        ({"reward": INF}, "rollout 'r7': reward must be finite, got inf"),
        ({"reward": np.float32("-inf")}, "rollout 'r7': reward must be finite, got -inf"),
        ({"reward": [1.0, 0.0]}, "rollout 'r7': reward must be a number, got .* of type list"),
        ({"reward": np.array([1.0, 0.0])}, "rollout 'r7': reward must be a number, got .* of type ndarray"),
        ({"calls": None}, "rollout 'r7': calls must be a list of Call, got NoneType"),
        ({"calls": [{"call_id": "c0"}]}, r"rollout 'r7': calls\[0\] must be a Call, got dict"),
        ({"calls": [call(), call()]}, "rollout 'r7', call 'c0': call_id appears twice"),
        ({"calls": [call(policy_version=-1)]}, r"rollout 'r7', call 'c0': policy_version\[0\] is -1 .* negative"),
        ({"calls": [call(policy_version=[0, -3])]}, r"rollout 'r7', call 'c0': policy_version\[1\] is -3 \(length 2\)"),
        ({"calls": [call(logprobs=[-0.5, 0.25])]}, r"rollout 'r7', call 'c0': logprobs\[1\] is 0.25 .* at most 0"),
        ({"calls": [call(logprobs=[-1e300, 0.0])]}, r"rollout 'r7', call 'c0': logprobs\[0\] is -inf"),
    ],
)  # fmt: skip
def test_a_rollout(fields, said):
    with pytest.raises(ValueError, match=said):
        rollout(**fields)


LINE = {"rollout_id": "r7", "group_id": "g", "calls": [{"call_id": "c0"}]}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rollout_id": None}, "rollout None: field 'rollout_id' is missing"),
        ({"group_id": 1.5}, "rollout 'r7': group_id must be a string, got 1.5"),
        ({"calls": {"call_id": "c0"}}, "rollout 'r7': calls must be a list, got dict"),
        ({"calls": "c0"}, "rollout 'r7', call 0: field 'call_id' is missing"),
        ({"calls": [None]}, "rollout 'r7', call 0: field 'call_id' is missing"),
        ({"calls": [{"call_id": None}]}, "rollout 'r7', call 0: field 'call_id' is missing"),
        ({"calls": [{"call_id": True}]}, "rollout 'r7', call True: call_id must be a string"),
        ({"calls": [{"call_id": "c0", "delivered": 0}]}, "rollout 'r7', call 'c0': delivered must be True or False"),
        ({"reward": "high"}, "rollout 'r7': reward must be a number, got 'high'"),
        ({"reward": INF}, "rollout 'r7': reward must be finite, got inf"),
    ],
)
def test_a_trace_line(fields, said):
    with pytest.raises(ValueError, match=said):
        Rollout.from_dict(LINE | fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rollout_id": 7}, "rollout 7, sample 0: rollout_id must be a string"),
        ({"group_id": None}, "rollout 'r7', sample 0: group_id must be a string"),
        ({"faithful": 1}, "rollout 'r7', sample 0: faithful must be True or False, got 1"),
        ({"loss_mask": [0, 2, 1]}, "rollout 'r7', sample 0: loss_mask must hold True or False"),
        ({"loss_mask": ["no", "yes", "yes"]}, "rollout 'r7', sample 0: loss_mask must hold True or False"),
        ({"loss_mask": [1, 1]}, r"rollout 'r7', sample 0: loss_mask has shape \(2,\), token_ids has length 3"),
        ({"spans": [Span(call_id="c", start=1, stop=4)]}, r"sample 0: span 1..4 of call 'c' is not within 0..3"),
        ({"spans": [Span(call_id="c", start=-1, stop=2)]}, r"span -1..2 of call 'c' is not within 0..3"),
        ({"spans": [Span(call_id="c", start=0, stop=2), Span(call_id="d", start=1, stop=3)]}, "'d' is not within 2..3"),
    ],
)  # fmt: skip
def test_a_sample(fields, said):
    with pytest.raises(ValueError, match=said):
        sample(**fields)


@pytest.mark.parametrize(
    ("rewards", "groups", "options", "said"),
    [
        (["1", "0"], ["a", "a"], {}, "rewards must be a vector of numbers"),
        ([None, "0"], ["a", "a"], {}, "rewards must be a vector of numbers"),
        ([True, False], ["a", "a"], {}, "rewards must be a vector of numbers, got .* bool"),
        ([[1.0], [1.0, 2.0]], ["a", "a"], {}, "rewards cannot be read as an array"),
        (1.0, ["a"], {}, r"rewards must be a vector of numbers, got shape \(\)"),
        ([1.0, INF], ["a", "a"], {}, r"rewards\[1\] is inf; rewards lie within"),
        ([-INF, 1.0], ["a", "a"], {}, r"rewards\[0\] is -inf"),
        ([1.0, 1e301], ["a", "a"], {}, r"rewards\[1\] is 1e\+301; rewards lie within \+-1e\+300"),
        ([1.0, 0.0], ["a"], {}, "rewards has length 2, group_ids has length 1"),
        ([1.0], ["a", "a"], {}, "rewards has length 1, group_ids has length 2"),
        ([1.0], None, {}, "group_ids must be a list of ids that can be hashed"),
        ([1.0], [["a"]], {}, "group_ids must be a list of ids that can be hashed: .*list"),
        ([1.0], ["a"], {"eps": NAN}, "eps must be finite, got nan"),
        ([1.0], ["a"], {"eps": INF}, "eps must be finite, got inf"),
        ([1.0], ["a"], {"eps": None}, "eps must be a number, got None"),
        ([1.0], ["a"], {"eps": "0"}, "eps must be a number, got '0'"),
        ([1.0], ["a"], {"estimator": None}, "estimator None is unknown; allowed: grpo"),
        ([1.0], ["a"], {"unit": "sample", "samples_per_rollout": [NAN]}, "samples_per_rollout must be a vector of int"),
        ([1.0], ["a"], {"unit": "sample", "samples_per_rollout": 1}, "samples_per_rollout must be a vector of integers"),
        ([1.0, 0.0], ["a", "a"], {"unit": "sample", "samples_per_rollout": [1]}, "rewards has length 2, .* length 1"),
    ],
)  # fmt: skip
def test_advantages(rewards, groups, options, said):
    with pytest.raises(ValueError, match=said):
        rollout_advantages(rewards, groups, **options)
    if not options:
        with pytest.raises(ValueError, match=said):
            zero_signal_groups(rewards, groups)


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        ((NAN, [0.0]), {}, "advantage must be finite, got nan"),
        (("1", [0.0]), {}, "advantage must be a number, got '1'"),
        ((None, [0.0]), {}, "advantage must be a number, got None"),
        ((1.0, 0.0), {}, "call_rewards must be a vector of numbers"),
        ((1.0, ["x"]), {}, "call_rewards must be a vector of numbers"),
        ((1.0, [None]), {}, r"call_rewards\[0\] is nan; use 0.0"),
        ((1.0, [0.0, -INF]), {}, r"call_rewards\[1\] is -inf"),
        ((1.0, [0.0]), {"gamma": -0.1}, r"gamma must lie in 0\.\.1, got -0.1"),
        ((1.0, [0.0]), {"gamma": 1.01}, r"gamma must lie in 0\.\.1, got 1.01"),
        ((1.0, [0.0]), {"gamma": NAN}, "gamma must be finite, got nan"),
        ((1.0, [0.0]), {"gamma": None}, "gamma must be a number, got None"),
        ((1.0, [0.0]), {"call_tokens": [1.5]}, "call_tokens must be a vector of integers"),
        ((1.0, [0.0]), {"call_tokens": [1, 1]}, "call_tokens has length 2, call_rewards has length 1"),
        ((1.0, [0.0], None), {}, "scheme None is unknown; allowed: identical"),
    ],
)
def test_credit(arguments, options, said):
    with pytest.raises(ValueError, match=said):
        assign_credit(*arguments, **options)


@pytest.mark.parametrize(
    ("credit", "said"),
    [
        ({}, "rollout 'r7', call '0.1': no credit was given"),
        ({"0.1": NAN}, "rollout 'r7', call '0.1': credit must be finite, got nan"),
        ({"0.1": "1"}, "rollout 'r7', call '0.1': credit must be a number, got '1'"),
    ],
)
def test_credit_of_tokens(credit, said):
    with pytest.raises(ValueError, match=said):
        token_advantages(SAMPLE, credit)


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        (([1], [0]), {"num_rollouts": 0}, "num_rollouts must be positive where there are trained tokens, got 0"),
        (([1], [0]), {"num_rollouts": -1}, r"num_rollouts\[0\] is -1; it cannot be negative"),
        (([0], [0]), {"num_rollouts": -1}, r"num_rollouts\[0\] is -1; it cannot be negative"),
        (([1], [0]), {"num_rollouts": NAN}, "num_rollouts must be a vector of integers, got .* float64"),
        (([1], [0]), {"num_rollouts": 1.5}, "num_rollouts must be a vector of integers, got .* float64"),
        (([1], [0]), {"num_rollouts": "1"}, "num_rollouts must be a vector of integers"),
        (([1], [0], "constant"), {"scale": NAN}, "scale must be finite, got nan"),
        (([1], [0], "constant"), {"scale": INF}, "scale must be finite, got inf"),
        (([1], [0], "constant"), {"scale": -1}, "scale must be finite and positive, got -1"),
        (([1], [0]), {"scale": "x"}, "scale must be a number, got 'x'"),
        (([1.0], [0]), {}, "lengths must be a vector of integers, got .* float64"),
        (([NAN], [0]), {}, "lengths must be a vector of integers, got .* float64"),
        (([True], [0]), {}, "lengths must be a vector of integers, got .* bool"),
        ((1, [0]), {}, r"lengths must be a vector of integers, got shape \(\)"),
        (([2**63], [0]), {}, r"lengths\[0\] is 9223372036854775808; it cannot be .* beyond int64"),
        (([1], [None]), {}, "rollout_index must be a vector of integers"),
        (([1], [0], None), {}, "mode None is unknown; allowed: token_mean"),
    ],
)
def test_weights(arguments, options, said):
    with pytest.raises(ValueError, match=said):
        token_weights(*arguments, **options)


@pytest.mark.parametrize("make", [pack, pack_tree])
@pytest.mark.parametrize(
    ("samples", "order", "options", "said"),
    [
        ([SAMPLE, {"token_ids": [1]}], [0], {}, r"samples\[1\] must be a Sample, got dict"),
        ([SAMPLE], None, {}, "order must be a vector of integers"),
        ([SAMPLE], 0, {}, r"order must be a vector of integers, got shape \(\)"),
        ([SAMPLE], [True], {}, "order must be a vector of integers, got .* bool"),
        ([SAMPLE], [[0], [0, 1]], {}, "order cannot be read as an array"),
        ([SAMPLE], [0], {"weights": 0.5}, "weights must have one entry a sample, got 0.5"),
        ([SAMPLE], [0], {"weights": "1"}, "weights must have one entry a sample, got '1'"),
        ([SAMPLE], [0], {"weights": iter([1.0])}, "weights must have one entry a sample"),
        ([SAMPLE], [0], {"weights": ["1"]}, "rollout 'r7', sample 0: weights must be a number or a vector of numbers"),
        ([SAMPLE], [0], {"advantages": [None]}, "rollout 'r7', sample 0: advantages must be a number or a vector"),
        ([SAMPLE], [0], {"advantages": [NAN]}, "rollout 'r7', sample 0: advantages is nan on a trained token"),
        ([SAMPLE], [0], {"weights": [[0, 1, INF]]}, "rollout 'r7', sample 0: weights is inf on a trained token"),
        ([SAMPLE], [0], {"weights": [[1.0, 1.0]]}, r"rollout 'r7', sample 0: weights has shape \(2,\), .* length 3"),
    ],
)
def test_packs(make, samples, order, options, said):
    with pytest.raises(ValueError, match=said):
        make(samples, order, **options)


def test_what_context_holds_is_nobodys_business():
    (weights,) = unpack(pack([SAMPLE], [0], weights=[[NAN, 1.0, 2.0]]), "weights")
    assert weights.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("at", [-1, 3, 1.0, None])
def test_origins(at):
    for packed, what in ((pack([SAMPLE], [0]), "token"), (pack_tree([SAMPLE], [0]), "node")):
        with pytest.raises(ValueError, match=rf"{what} is {at}, expected one of 0..2"):
            packed.origin(at)


@pytest.mark.parametrize("column", [None, 0, [1.0], "rollout_ids", "labels_T"])
def test_columns(column):
    for read, make in ((unpack, pack), (unpack_tree, pack_tree)):
        with pytest.raises(ValueError, match=r"column (has shape .*|'.*' is unknown; allowed: token_ids)"):
            read(make([SAMPLE], [0]), column)


def test_items():
    with pytest.raises(ValueError, match=r"samples\[0\] must be a Sample, got Call"):
        tree_items([call()])


EVENT = {"event_type": "model_request", "data": {"prompt_token_ids": [1], "response_token_ids": [2]}}


@pytest.mark.parametrize("read", [from_agent_lightning, from_vllm_chat, from_vllm_completions])
@pytest.mark.parametrize(
    ("records", "options", "said"),
    [
        (None, {}, "rollout 'r7': expected a list of .* objects, got NoneType"),
        ("text", {}, "rollout 'r7': expected a list of .* objects, got str"),
        ([None], {}, "rollout 'r7', .* 0: expected an object, got NoneType"),
        ([], {"rollout_id": None}, "rollout None: rollout_id must be a string"),
        ([], {"group_id": 3}, "rollout 'r7': group_id must be a string, got 3"),
    ],
)
def test_records(read, records, options, said):
    with pytest.raises(ValueError, match=said):
        read(records, **{"rollout_id": "r7", "group_id": "g"} | options)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"delivered": "no"}, "rollout 'r7', event 0: call 'event-0': delivered must be True or False, got 'no'"),
        ({"constrained": 1}, "rollout 'r7', event 0: call 'event-0': constrained must be True or False, got 1"),
        ({"policy_version": -2}, r"rollout 'r7', call 'event-0': policy_version\[0\] is -2"),
        ({"response_log_probs": [0.75]}, r"rollout 'r7', call 'event-0': logprobs\[0\] is 0.75 .* at most 0"),
    ],
)
def test_events(fields, said):
    event = EVENT | {"data": EVENT["data"] | fields}
    with pytest.raises(ValueError, match=said):
        from_agent_lightning([event], rollout_id="r7", group_id="g")


@pytest.mark.parametrize("read", [from_vllm_chat, from_vllm_completions])
@pytest.mark.parametrize("reward", ["1", True, INF])
def test_rewards_of_responses(read, reward):
    with pytest.raises(ValueError, match=r"rollout 'r7': reward must be (a number|finite), got"):
        read([], rollout_id="r7", group_id="g", reward=reward)


def test_a_sample_is_not_made_by_position():
    with pytest.raises(TypeError):
        Sample("r7", "g")
