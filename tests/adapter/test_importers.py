"""Other systems' records become rollouts: ids as they are, missing logprobs None, what has no ids refused by name."""

import copy
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harnessrl.adapter.importers import from_agent_lightning, from_vllm_chat, from_vllm_completions
from harnessrl.adapter.merge import merge_calls
from harnessrl.adapter.types import Call, Rollout

NAMES = {"rollout_id": "r0", "group_id": "g0"}


def request(prompt, response, logprobs, version=0, **more):
    data = {"prompt_token_ids": prompt, "response_token_ids": response, "response_log_probs": logprobs}
    server = {"server": {"model": "m", "version": version}, "http_status": 200, "status": "ok"}
    return {"event_type": "model_request", "rollout_id": "r0", "attempt_id": "0", "data": data | server | more}


def reward(value):
    return {"event_type": "reward", "rollout_id": "r0", "attempt_id": "0", "data": {"value": value}}


def lists(rollout):
    return [(c.call_id, c.prompt_ids.tolist(), c.response_ids.tolist(), c.policy_version) for c in rollout.calls]


def test_events_of_the_reference_system():
    other = {"event_type": "note", "rollout_id": "r0", "attempt_id": "0", "data": {"text": "hello"}}
    events = [request([1, 2], [3], [-0.5], version=4), other, reward(0.1), request([1, 2, 3], [4, 5], None), reward(1)]
    rollout = from_agent_lightning(events, **NAMES)
    assert lists(rollout) == [("event-0", [1, 2], [3], 4), ("event-3", [1, 2, 3], [4, 5], 0)]
    assert rollout.calls[0].logprobs.tolist() == [-0.5]
    assert rollout.calls[1].logprobs is None
    assert (rollout.rollout_id, rollout.group_id, rollout.reward) == ("r0", "g0", 1.0)
    assert [(s.call_id, s.reason) for s in merge_calls(rollout).skipped] == [("event-3", "missing_logprobs")]


def test_events_of_our_gateway_keep_what_they_add():
    more = {"call_id": "c9", "request_id": "q1", "delivered": False, "policy_version": 8, "agent": "sub"}
    call = from_agent_lightning([request([1], [2], [-1.0], **more, finish_reason="length")], **NAMES).calls[0]
    assert (call.call_id, call.request_id, call.delivered, call.policy_version) == ("c9", "q1", False, 8)
    assert (call.agent, call.finish_reason, call.constrained) == ("sub", "length", False)


def test_without_a_reward_event_a_rollout_is_unscored():
    assert from_agent_lightning([request([1], [2], [-1.0])], **NAMES).reward is None
    assert from_agent_lightning([], **NAMES).calls == ()


def test_a_failed_request_is_counted_not_dropped():
    events = [request([], [], None, status="error", http_status=500), request([1], [2], [-1.0])]
    merge = merge_calls(from_agent_lightning(events, **NAMES))
    assert len(merge.samples) == 1
    assert [(skip.call_id, skip.reason) for skip in merge.skipped] == [("event-0", "missing_ids")]


def test_two_calls_with_one_prompt_stay_two():
    rollout = from_agent_lightning([request([1], [2], [-1.0]), request([1], [3], [-1.0])], **NAMES)
    assert len(merge_calls(rollout).samples) == 2


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (request([], [2], [-1.0]), "event 1: field data.prompt_token_ids has no ids"),
        (request(None, [2], [-1.0]), "event 1: field data.prompt_token_ids has no ids"),
        (request([1], None, None), "event 1: field data.response_token_ids has no ids"),
        (request("text", [2], [-1.0]), "event 1: call 'event-1': prompt_ids must be a vector of integers"),
        (request([1], [2, 3], [-1.0]), "call 'event-1': logprobs has length 1, response_ids has length 2"),
        (request([1], [2], [None]), "event 1: call 'event-1': logprobs must be a vector of numbers"),
        (request([1], [2], [float("-inf")]), r"call 'event-1': logprobs\[0\] is -inf"),
        (request([1], [2], [-1.0]) | {"attempt_id": "1"}, "event 1: attempt_id is '1', event 0 has '0'"),
        (request([1], [2], [-1.0]) | {"rollout_id": "r5"}, "event 1: rollout_id is 'r5'"),
        (request([1], [2], [-1.0]) | {"data": None}, "event 1: data must be an object, got NoneType"),
        (request([1], [2], [-1.0], server="m"), "event 1: server must be an object, got str"),
        (reward("high"), "event 1: data.value must be a number, got 'high'"),
        (reward(True), "event 1: data.value must be a number, got True"),
        (reward(float("inf")), "event 1: data.value must be finite, got inf"),
        ("event", "event 1: expected an object, got str"),
    ],
)
def test_refused_events_are_named(event, said):
    with pytest.raises(ValueError, match=f"rollout 'r0', {said}"):
        from_agent_lightning([request([1], [2], [-1.0]), event], **NAMES)


IDS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6)


@st.composite
def calls(draw, number):
    response = draw(IDS)
    logprobs = st.lists(st.floats(-50, 0, width=32), min_size=len(response), max_size=len(response))
    return Call(
        call_id=f"c{number}",
        prompt_ids=draw(IDS),
        response_ids=response,
        logprobs=draw(st.none() | logprobs),
        policy_version=draw(st.integers(0, 9)),
        finish_reason=draw(st.sampled_from(["stop", "length", None])),
        agent=draw(st.sampled_from(["", "sub"])),
        delivered=draw(st.booleans()),
        constrained=draw(st.booleans()),
        request_id=draw(st.sampled_from([None, "q"])),
    )


@given(st.data())
def test_a_rollout_survives_events_and_json(data):
    drawn = [data.draw(calls(number)) for number in range(data.draw(st.integers(0, 3)))]
    rollout = Rollout(rollout_id="r0", group_id="g0", calls=drawn, reward=data.draw(st.none() | st.floats(-1, 1)))
    keys = {"prompt_ids": "prompt_token_ids", "response_ids": "response_token_ids", "logprobs": "response_log_probs"}
    events = [
        {"event_type": "model_request", "data": {keys.get(k, k): v for k, v in call.to_dict().items()}}
        for call in drawn
    ]
    events += [] if rollout.reward is None else [reward(rollout.reward) | {"attempt_id": None}]
    assert from_agent_lightning(json.loads(json.dumps(events)), **NAMES).to_dict() == rollout.to_dict()
    assert Rollout.from_dict(json.loads(json.dumps(rollout.to_dict()))).to_dict() == rollout.to_dict()


CHAT = {
    "id": "chatcmpl-1",
    "prompt_token_ids": [1, 2],
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "message": {"content": "hi"},
            "token_ids": [3, 4],
            "logprobs": {"content": [{"token": "h", "logprob": -0.5}, {"token": "i", "logprob": -0.25}]},
        }
    ],
}
COMPLETION = {
    "id": "cmpl-1",
    "choices": [
        {
            "index": 0,
            "finish_reason": "length",
            "text": "hi",
            "prompt_token_ids": [1, 2],
            "token_ids": [3, 4],
            "logprobs": {"token_logprobs": [-0.5, -0.25], "tokens": ["h", "i"]},
        }
    ],
}


@pytest.mark.parametrize(("read", "response"), [(from_vllm_chat, CHAT), (from_vllm_completions, COMPLETION)])
def test_a_vllm_response(read, response):
    rollout = read([response], **NAMES, reward=0.5)
    assert lists(rollout) == [(f"{response['id']}/0", [1, 2], [3, 4], 0)]
    call = rollout.calls[0]
    assert call.logprobs.tolist() == [-0.5, -0.25]
    assert (call.finish_reason, call.delivered) == (response["choices"][0]["finish_reason"], True)
    assert rollout.reward == 0.5 and read([response], **NAMES).reward is None


def test_a_logprob_that_says_unknown_makes_all_of_the_call_unrecorded():
    """vLLM's chat answers carry -9999.0 where they carry nothing; as a value it would be trained."""
    chat = changed(CHAT, (*FIRST, "logprobs", "content", 1, "logprob"), -9999.0)
    completion = changed(COMPLETION, (*FIRST, "logprobs", "token_logprobs"), [-9999, -0.25])
    events = [request([1, 2], [3, 4], [-0.5, -9999.0])]
    for rollout in (
        from_vllm_chat([chat], **NAMES),
        from_vllm_completions([completion], **NAMES),
        from_agent_lightning(events, **NAMES),
    ):
        assert rollout.calls[0].logprobs is None
        assert [skip.reason for skip in merge_calls(rollout).skipped] == ["missing_logprobs"]
    near = changed(CHAT, (*FIRST, "logprobs", "content", 1, "logprob"), -9998.0)
    assert from_vllm_chat([near], **NAMES).calls[0].logprobs.tolist() == [-0.5, -9998.0]


def test_ids_may_be_arrays():
    ids = np.array([1, 2])
    chat = changed(CHAT, ("prompt_token_ids",), ids)
    completion = changed(COMPLETION, (*FIRST, "prompt_token_ids"), ids)
    events = [request(ids, np.array([3, 4]), np.array([-0.5, -0.25]))]
    for rollout in (
        from_vllm_chat([chat], **NAMES),
        from_vllm_completions([completion], **NAMES),
        from_agent_lightning(events, **NAMES),
    ):
        assert rollout.calls[0].prompt_ids.tolist() == [1, 2] and rollout.calls[0].response_ids.tolist() == [3, 4]
    with pytest.raises(ValueError, match="field prompt_token_ids has no ids"):
        from_vllm_chat([changed(CHAT, ("prompt_token_ids",), np.array([], int))], **NAMES)


@pytest.mark.parametrize(("read", "response"), [(from_vllm_chat, CHAT), (from_vllm_completions, COMPLETION)])
def test_each_choice_is_a_call_and_an_abort_is_undelivered(read, response):
    response = copy.deepcopy(response)
    second = copy.deepcopy(response["choices"][0]) | {"index": 1, "token_ids": [5], "finish_reason": "abort"}
    second["logprobs"] = None
    response["choices"].append(second)
    rollout = read([response], **NAMES)
    assert [(c.call_id, c.response_ids.tolist(), c.delivered) for c in rollout.calls] == [
        (f"{response['id']}/0", [3, 4], True),
        (f"{response['id']}/1", [5], False),
    ]
    assert rollout.calls[1].logprobs is None
    assert [skip.reason for skip in merge_calls(rollout).skipped] == ["undelivered"]


def test_a_response_without_id_is_named_by_its_place():
    response = {key: value for key, value in CHAT.items() if key != "id"}
    assert [call.call_id for call in from_vllm_chat([response, response], **NAMES).calls] == [
        "response-0/0",
        "response-1/0",
    ]
    with pytest.raises(ValueError, match="call_id appears twice"):
        from_vllm_chat([CHAT, CHAT], **NAMES)


def changed(response, path, value):
    response = copy.deepcopy(response)
    *parents, last = path
    target = response
    for key in parents:
        target = target[key]
    target[last] = value
    return response


FIRST = ("choices", 0)


@pytest.mark.parametrize(
    ("read", "response", "said"),
    [
        (from_vllm_chat, changed(CHAT, ("prompt_token_ids",), None), "field prompt_token_ids has no ids"),
        (from_vllm_chat, changed(CHAT, ("prompt_token_ids",), []), "field prompt_token_ids has no ids"),
        (from_vllm_chat, changed(CHAT, (*FIRST, "token_ids"), None), r"field choices\[0\].token_ids has no ids"),
        (
            from_vllm_chat,
            changed(CHAT, (*FIRST, "logprobs", "content", 1, "logprob"), None),
            r"choices\[0\].logprobs.content\[1\].logprob must be a number, got None",
        ),
        (
            from_vllm_completions,
            changed(COMPLETION, (*FIRST, "prompt_token_ids"), None),
            r"field choices\[0\].prompt_token_ids has no ids",
        ),
        (
            from_vllm_completions,
            changed(COMPLETION, (*FIRST, "logprobs", "token_logprobs"), [None, -0.5]),
            r"choices\[0\].logprobs.token_logprobs\[0\] must be a number, got None",
        ),
        (from_vllm_chat, {"error": {"message": "no"}}, "expected a list of choice objects, got NoneType"),
    ],
)
def test_refused_responses_are_named(read, response, said):
    good = changed(CHAT if read is from_vllm_chat else COMPLETION, ("id",), "good")
    with pytest.raises(ValueError, match=f"rollout 'r0', response 1: {said}"):
        read([good, response], **NAMES)


def test_echoed_logprobs_are_refused_by_both_lengths():
    response = changed(COMPLETION, (*FIRST, "logprobs", "token_logprobs"), [-9.0, -9.0, -0.5, -0.25])
    with pytest.raises(ValueError, match="call 'cmpl-1/0': logprobs has length 4, response_ids has length 2"):
        from_vllm_completions([response], **NAMES)


def test_one_response_is_no_list():
    with pytest.raises(ValueError, match="rollout 'r0': expected a list of response objects, got dict"):
        from_vllm_chat(CHAT, **NAMES)
