"""The engine wire: literal bytes, and refusals that name what is wrong."""

import json

import numpy as np
import pytest

from harnessrl.service import wire

ID = bytes(range(16))


def test_a_request_is_three_frames_with_little_endian_ids():
    frames = wire.encode_request(ID, [1, 258], wire.Sampling(max_tokens=4, stop_ids=(2,), noise=2**64 - 1))
    assert frames[0] == ID
    assert json.loads(frames[1]) == {
        "op": "generate",
        "max_tokens": 4,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "stop_ids": [2],
        "noise": 18446744073709551615,
    }
    assert frames[2] == b"\x01\x00\x00\x00\x02\x01\x00\x00"
    request = wire.decode_request(frames)
    assert (request.op, request.prompt_ids.tolist(), request.sampling.noise) == ("generate", [1, 258], 2**64 - 1)
    assert request.sampling.stop_ids == (2,)


def test_a_reply_carries_ids_and_float32_logprobs():
    frames = wire.encode_reply(ID, [7, 2], [-0.5, -1.25], finish_reason="stop", policy_version=3)
    assert frames[2] == b"\x07\x00\x00\x00\x02\x00\x00\x00"
    assert frames[3] == np.array([-0.5, -1.25], "<f4").tobytes()
    reply = wire.decode_reply(frames)
    assert (reply.ids.tolist(), reply.logprobs.tolist(), reply.policy_version) == ([7, 2], [-0.5, -1.25], 3)
    assert reply.error is None


def test_cancel_and_hello_carry_no_ids():
    assert wire.decode_request(wire.encode_cancel(ID)).op == "cancel"
    assert wire.decode_request(wire.encode_cancel(ID)).request_id == ID
    assert wire.decode_request(wire.encode_hello()).sampling is None


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([ID], "2 or 3 frames"),
        ([b"short", b"{}"], "16 bytes"),
        ([ID, b"no json"], "not JSON"),
        ([ID, b"[]"], "an object"),
        ([ID, b'{"op": "train"}'], "op must be"),
        ([ID, b'{"op": "generate", "max_tokens": 1}'], "3 frames"),
        ([ID, b'{"op": "generate", "max_tokens": 1}', b"123"], "3 bytes"),
        ([ID, b'{"op": "generate", "top_z": 1}', b""], "top_z"),
    ],
)
def test_a_bad_request_is_refused_by_name(frames, message):
    with pytest.raises(ValueError, match=message):
        wire.decode_request(frames)


def test_a_reply_with_one_logprob_too_few_is_refused():
    frames = wire.encode_reply(ID, [7, 2], [-0.5, -1.25], finish_reason="stop", policy_version=0)
    with pytest.raises(ValueError, match="2 ids and 1 logprobs"):
        wire.decode_reply([*frames[:3], frames[3][:4]])
    with pytest.raises(ValueError, match="finish_reason"):
        wire.decode_reply([ID, b'{"finish_reason": "tired"}', b"", b""])
