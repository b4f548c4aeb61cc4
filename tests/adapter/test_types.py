"""What the adapter's nouns accept, refuse, and never change."""

import dataclasses
import json
from array import array

import numpy as np
import pytest

from harnessrl.adapter import Break, Call, Merge, Rollout, Sample, Skip, Span


def call(**fields):
    return Call(**{"call_id": "c0", "prompt_ids": [1, 2], "response_ids": [3, 4], "logprobs": [-0.5, -1.0]} | fields)


def rollout(*calls):
    return Rollout(rollout_id="r7", group_id="g", calls=calls)


def test_lists_become_int32_and_float32_once():
    made = call()
    assert made.prompt_ids.dtype == made.response_ids.dtype == np.int32
    assert made.logprobs.dtype == np.float32
    assert made.prompt_ids.tolist() == [1, 2] and made.logprobs.tolist() == [-0.5, -1.0]


def test_a_callers_buffer_cannot_change_a_call_afterwards():
    ids, logprobs = np.array([1, 2], dtype=np.int32), np.array([-0.5, -1.0], dtype=np.float32)
    made = call(prompt_ids=ids, logprobs=logprobs)
    ids[0], logprobs[0] = 7, -9.0
    assert made.prompt_ids.tolist() == [1, 2] and made.logprobs.tolist() == [-0.5, -1.0]
    with pytest.raises(ValueError, match="read-only"):
        made.prompt_ids[0] = 9


def test_nor_can_a_buffer_that_numpy_would_only_borrow():
    """As it does a tensor's: numpy.asarray makes an array of it that shares the memory."""
    ids, logprobs = array("i", [1, 2]), array("f", [-0.5, -1.0])
    made = call(prompt_ids=ids, logprobs=logprobs)
    ids[0], logprobs[0] = 7, -9.0
    assert made.prompt_ids.tolist() == [1, 2] and made.logprobs.tolist() == [-0.5, -1.0]


def test_read_only_arrays_are_shared():
    ids = np.array([1, 2], dtype=np.int32)
    ids.flags.writeable = False
    assert np.shares_memory(call(prompt_ids=ids).prompt_ids, ids)
    made = call(prompt_ids=[1, 2, 3])
    again = dataclasses.replace(made, response_ids=made.prompt_ids[1:])
    assert np.shares_memory(again.prompt_ids, made.prompt_ids)
    assert np.shares_memory(again.response_ids, made.prompt_ids)


def test_bytes_are_shared():
    ids = np.frombuffer(np.array([1, 2], dtype=np.int32).tobytes(), np.int32)
    assert np.shares_memory(call(prompt_ids=ids).prompt_ids, ids)


def test_a_read_only_view_of_what_can_be_written_is_copied():
    ids = np.array([1, 2], dtype=np.int32)
    view = ids[:]
    view.flags.writeable = False
    made = call(prompt_ids=view)
    ids[0] = 7
    assert made.prompt_ids.tolist() == [1, 2]


def test_so_is_what_another_library_lends():
    class Lender:
        def __init__(self):
            self.ids = np.array([1, 2], dtype=np.int32)

        def __array__(self, dtype=None, copy=None):
            return self.ids

    lender = Lender()
    made = call(prompt_ids=lender)
    lender.ids[0] = 7
    assert made.prompt_ids.tolist() == [1, 2] and lender.ids.flags.writeable


def test_a_version_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="policy_version is 1099511627776"):
        call(policy_version=2**40)


@pytest.mark.parametrize("kind", [Call, Rollout, Span, Sample, Skip, Break, Merge])
def test_types_are_frozen_slotted_and_keyword_only(kind):
    assert kind.__dataclass_params__.frozen
    assert not hasattr(kind, "__dict__") or "__slots__" in vars(kind)
    assert all(field.kw_only for field in dataclasses.fields(kind))
    with pytest.raises(TypeError):
        kind(1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logprobs": [-1.0]}, r"rollout 'r7', call 'c0': logprobs has length 1, response_ids has length 2"),
        ({"logprobs": []}, r"rollout 'r7', call 'c0': logprobs has length 0, response_ids has length 2"),
        ({"policy_version": [1, 2, 3]}, r"rollout 'r7', call 'c0': policy_version has length 3, response_ids .* 2"),
        ({"logprobs": [-1.0, float("nan")]}, r"rollout 'r7', call 'c0': logprobs\[1\] is nan .* length 2, .* length 2"),
        ({"logprobs": [-np.inf, 0.0]}, r"rollout 'r7', call 'c0': logprobs\[0\] is -inf .* use logprobs=None"),
        ({"prompt_ids": [1, -5]}, r"rollout 'r7', call 'c0': prompt_ids\[1\] is -5"),
        ({"response_ids": [-100, 1]}, r"rollout 'r7', call 'c0': response_ids\[0\] is -100"),
    ],
)
def test_what_does_not_fit_together_is_named(fields, message):
    with pytest.raises(ValueError, match=message):
        rollout(call(**fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_ids": [1.5]}, r"call 'c0': prompt_ids must be a vector of integers"),
        ({"prompt_ids": [[1], [2]]}, r"call 'c0': prompt_ids must be a vector of integers, got shape \(2, 1\)"),
        ({"response_ids": [True, False]}, r"call 'c0': response_ids must be a vector of integers"),
        ({"prompt_ids": [2**31]}, r"call 'c0': prompt_ids holds a value that does not fit int32"),
        ({"logprobs": ["a", "b"]}, r"call 'c0': logprobs must be a vector of numbers"),
    ],
)
def test_what_a_cast_would_change_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        call(**fields)


def test_a_call_id_names_one_call():
    with pytest.raises(ValueError, match=r"rollout 'r7', call 'c0': call_id appears twice"):
        rollout(call(), call())


def test_a_reward_is_a_float_or_none():
    for given, kept in (
        (1, 1.0),
        (np.float32(0.5), 0.5),
        (None, None),
        (float("nan"), None),
        (np.float64("nan"), None),
    ):
        reward = Rollout(rollout_id="r", group_id="g", calls=[], reward=given).reward
        assert reward == kept and type(reward) in (float, type(None))


def test_a_logprob_may_lie_above_zero_by_rounding_only():
    assert rollout(call(logprobs=[9e-4, 0.0])).calls[0].logprobs.tolist() == [np.float32(9e-4), 0.0]
    with pytest.raises(
        ValueError, match=r"logprobs\[1\] is 0.75 .* length 2, .* length 2\); a logprob is .* at most 0"
    ):
        rollout(call(logprobs=[-0.5, 0.75]))


def test_versions_are_one_or_one_a_token():
    assert call(policy_version=3).policy_version == 3
    assert type(call(policy_version=np.int64(3)).policy_version) is int
    assert call(policy_version=[3, 4]).policy_version.tolist() == [3, 4]


def test_a_trace_line_comes_back_as_it_went():
    calls = [call(), call(call_id="c1", logprobs=None, policy_version=[1, 2], agent="b", request_id="q")]
    line = json.loads(json.dumps(Rollout(rollout_id="r", group_id="g", calls=calls, reward=0.5).to_dict()))
    assert Rollout.from_dict(line).to_dict() == line
    assert line["calls"][1]["logprobs"] is None


def test_a_trace_line_may_number_its_ids_and_say_null_for_what_it_does_not_know():
    line = {"rollout_id": 7, "group_id": 0, "reward": None, "calls": [{"call_id": 1, "agent": None, "delivered": None}]}
    read = Rollout.from_dict(line)
    assert (read.rollout_id, read.group_id, read.calls[0].call_id) == ("7", "0", "1")
    assert (read.calls[0].agent, read.calls[0].delivered) == ("", True)


def test_a_trace_line_may_leave_out_what_was_not_recorded():
    line = {"rollout_id": "r", "group_id": "g", "reward": float("nan"), "step": 3, "calls": [{"call_id": "c"}]}
    read = Rollout.from_dict(line)
    assert read.reward is None
    assert read.calls[0].prompt_ids.tolist() == [] and read.calls[0].logprobs is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"rollout_id": "r", "calls": []}, r"rollout 'r': field 'group_id' is missing"),
        ({"rollout_id": "r", "group_id": "g", "calls": [{}]}, r"rollout 'r', call 0: field 'call_id' is missing"),
        (
            {"rollout_id": "r", "group_id": "g", "calls": [{"call_id": "c", "prompt_ids": ["x"]}]},
            r"rollout 'r', call 'c': prompt_ids must be a vector of integers",
        ),
    ],
)
def test_a_bad_trace_line_names_the_field(line, message):
    with pytest.raises(ValueError, match=message):
        Rollout.from_dict(line)


def sample(**fields):
    columns = {"token_ids": [1, 2], "loss_mask": [0, 1], "logprobs": [0, -1], "policy_version": [-1, 0]}
    spans = [Span(call_id="c", start=1, stop=2)]
    return Sample(**{"rollout_id": "r", "group_id": "g", "index": 2, "spans": spans} | columns | fields)


def test_a_sample_takes_lists_too():
    made = sample()
    assert (made.token_ids.dtype, made.loss_mask.dtype, made.logprobs.dtype) == (np.int32, np.bool_, np.float32)
    assert made.loss_mask.tolist() == [False, True] and made.spans == (Span(call_id="c", start=1, stop=2),)
    assert made.faithful


@pytest.mark.parametrize("name", ["loss_mask", "logprobs", "policy_version"])
def test_a_samples_columns_have_one_length(name):
    with pytest.raises(ValueError, match=rf"rollout 'r', sample 2: {name} has shape \(3,\), token_ids has length 2"):
        sample(**{name: [0, 0, 0]})
