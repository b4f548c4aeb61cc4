"""The model routes over real sockets, a real store and a toy engine that echoes the prompt's last three ids."""

import asyncio
import json
import socket

import pytest

from harnessrl.service.engine_backend import noise_key
from harnessrl.service.tokens import TextCodec
from tests.service.making import KEY, chat_path, in_thread, over_engine, service


def test_a_call_is_answered_and_recorded_with_exact_ids(tmp_path, tokenizer, engine):
    codec = TextCodec(tokenizer)
    prompt = codec.encode("<|user|>the key<|end|><|assistant|>").tolist()
    (end,) = codec.stop_ids
    engine.version = 4

    async def test(client):
        status, body = await client.chat("r0", max_tokens=9)
        assert status == 200
        assert body["model"] == "policy" and body["object"] == "chat.completion"
        text = codec.decode(prompt[-3:])  # special tokens and the stop token are not text
        assert body["choices"][0]["message"] == {"role": "assistant", "content": text}
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["usage"] == {
            "prompt_tokens": len(prompt),
            "completion_tokens": 4,
            "total_tokens": len(prompt) + 4,
        }
        (call,) = await client.calls("r0")
        assert call["prompt_token_ids"] == prompt
        assert call["response_token_ids"] == [*prompt[-3:], end]
        assert call["response_log_probs"] == [-0.5, -1.0, -1.5, -2.0]
        assert (call["policy_version"], call["finish_reason"], call["delivered"]) == (4, "stop", True)
        assert call["server"] == {"model": "policy", "version": 4}
        assert (call["http_status"], call["status"], call["agent"]) == (200, "ok", "")
        assert await client.calls("r1") == []

    over_engine(tmp_path, tokenizer, engine, test)


def test_the_full_event_keeps_request_response_and_sampling(tmp_path, tokenizer, engine):
    async def test(client):
        _, body = await client.chat("r0", temperature=0, top_p=0.5, custom={"x": 1})
        (event,) = await client.get("/api/rollouts/r0/events")
        data = event["data"]
        assert data["request"]["custom"] == {"x": 1}
        assert data["response"] == body
        assert data["sampling"] == {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
        assert data["overrides"] == {
            "temperature": {"asked": 0, "used": 1.0},
            "top_p": {"asked": 0.5, "used": 1.0},
        }
        assert (data["model_version"], data["retry_count"], data["after_stop"]) == (0, 0, 0)
        assert data["usage"] == body["usage"] and data["latency_ms"] > 0

    over_engine(tmp_path, tokenizer, engine, test)


def test_train_mode_pins_all_sampling_and_val_mode_the_temperature(tmp_path, tokenizer, engine):
    masks = {
        "response_format": {"type": "json_object"},
        "tool_choice": "required",
        "min_tokens": 5,
        "guided_regex": "a+",
        "presence_penalty": 1.5,
        "logit_bias": {"5": 100},
    }

    async def test(client):
        for mode in ("train", "val"):
            status, _ = await client.chat("r0", mode=mode, temperature=0.1, top_p=0.5, top_k=7, **masks)
            assert status == 200
        (train, val) = [request.sampling for request in engine.requests]
        assert (train.temperature, train.top_p, train.top_k) == (1.25, 1.0, 0)
        assert (val.temperature, val.top_p, val.top_k) == (0.5, 0.5, 7)
        assert (await client.chat("r1", mode="val", top_p=0, top_k=-1))[0] == 200
        assert (engine.requests[-1].sampling.top_p, engine.requests[-1].sampling.top_k) == (1e-6, 0)
        assert (await client.chat("r1", mode="val", top_p=1.5))[0] == 422
        events = await client.get("/api/rollouts/r0/events")
        for event, foreign in zip(events, (False, True), strict=True):
            removed = {name: item["asked"] for name, item in event["data"]["overrides"].items() if item["used"] is None}
            assert removed == masks
            assert event["data"]["constrained"] is foreign  # val mode samples otherwise than what is trained

    over_engine(tmp_path, tokenizer, engine, test, train_temperature=1.25, val_temperature=0.5)


def test_calls_in_val_mode_are_only_the_policys_own_in_a_rollout_that_is_not_trained(tmp_path, tokenizer, engine):
    async def test(client):
        await client.create("held-out", is_train=False)
        for rollout in ("r0", "held-out"):
            await client.chat(rollout, mode="val")
        assert [(await client.calls(rollout))[0]["constrained"] for rollout in ("r0", "held-out")] == [True, False]

    over_engine(tmp_path, tokenizer, engine, test)


def test_what_masks_nothing_is_no_override(tmp_path, tokenizer, engine):
    async def test(client):
        harmless = {
            "tool_choice": "auto",
            "response_format": {"type": "text"},
            "min_tokens": 0,
            "top_k": -1,
            "logit_bias": {},
        }
        await client.chat("r0", temperature=1, frequency_penalty=0, **harmless)
        (event,) = await client.get("/api/rollouts/r0/events")
        assert event["data"]["overrides"] == {}

    over_engine(tmp_path, tokenizer, engine, test)


def test_max_tokens_is_clamped_to_the_service_and_to_the_context(tmp_path, tokenizer, engine):
    codec = TextCodec(tokenizer)
    prompt = len(codec.encode("<|user|>the key<|end|><|assistant|>"))

    async def test(client):
        for asked, used in ((None, 20), (64_000, 20), (3, 3)):
            await client.chat("r0", max_tokens=asked)
            assert engine.requests[-1].sampling.max_tokens == used
        await client.chat("r0", max_completion_tokens=2, max_tokens=9)
        assert engine.requests[-1].sampling.max_tokens == 2
        longer = "the key of the door"
        await client.chat("r0", longer)
        room = prompt + 25 - len(codec.encode(f"<|user|>{longer}<|end|><|assistant|>"))
        assert 0 < room < 25 and engine.requests[-1].sampling.max_tokens == min(room, 20)

    over_engine(tmp_path, tokenizer, engine, test, max_response=20, max_context=prompt + 25)


def test_a_prompt_that_fills_the_context_is_a_400_with_its_code(tmp_path, tokenizer, engine):
    async def test(client):
        status, body = await client.chat("r0", "the key " * 20)
        assert status == 400
        assert body["error"]["code"] == "context_length_exceeded"
        assert "maximum context length is 16 tokens" in body["error"]["message"]
        (event,) = await client.calls("r0")
        assert (event["http_status"], event["status"], event["prompt_token_ids"]) == (400, "error", [])
        assert engine.requests == []

    over_engine(tmp_path, tokenizer, engine, test, max_context=16)


def test_the_call_bound_counts_choices_and_calls_in_flight(tmp_path, tokenizer, engine):
    async def test(client):
        assert (await client.chat("r0", n=2))[0] == 200
        engine.hold()
        third = asyncio.create_task(client.chat("r0"))
        await in_thread(engine.wait, 3)
        status, body = await client.chat("r0")
        assert (status, body["error"]["code"]) == (400, "call_limit_exceeded")
        engine.release()
        assert (await third)[0] == 200
        assert (await client.chat("r0"))[0] == 400
        assert (await client.chat("r1"))[0] == 200  # another rollout has its own bound
        assert (await client.chat("r0", attempt="1"))[0] == 200  # and so has another attempt
        assert [call["http_status"] for call in await client.calls("r0")] == [200, 200, 400, 200, 400]

    over_engine(tmp_path, tokenizer, engine, test, max_calls=3)


def test_stop_strings_end_the_call_at_the_token_that_completes_them(tmp_path, tokenizer, engine):
    codec = TextCodec(tokenizer)
    said = codec.encode("value 42, no more").tolist()
    engine.answer = lambda request: (said, [-0.1] * len(said), "length")
    kept = next(n for n in range(len(said)) if "42" in codec.decode(said[:n]))

    async def test(client):
        _, body = await client.chat("r0", stop=["42"])
        assert body["choices"][0]["message"]["content"] == "value "
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["usage"]["completion_tokens"] == kept
        (event,) = await client.get("/api/rollouts/r0/events")
        assert event["data"]["response_token_ids"] == said[:kept]
        assert len(event["data"]["response_log_probs"]) == kept
        assert event["data"]["after_stop"] == len(said) - kept > 0
        engine.answer = lambda request: (said[:3], [-0.1] * 3, "stop")
        _, body = await client.chat("r0", stop_token_ids=[said[2]])  # the id that ended it is trained, and no text
        assert body["choices"][0]["message"]["content"] == codec.decode(said[:2])
        assert (await client.calls("r0"))[-1]["response_token_ids"] == said[:3]
        await client.chat("r0", stop="<|user|>")  # a special token's text is a stop id
        assert engine.requests[-1].sampling.stop_ids == tuple(sorted((*codec.stop_ids, codec.special_id("<|user|>"))))

    over_engine(tmp_path, tokenizer, engine, test)


def test_each_choice_is_a_call_of_its_own_with_its_own_noise(tmp_path, tokenizer, engine):
    async def test(client):
        status, body = await client.chat("r0", n=3)
        assert status == 200
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
        prompt = engine.requests[0].prompt_ids
        expected = [noise_key(11, "r0", "0", prompt, occurrence) for occurrence in range(3)]
        assert [request.sampling.noise for request in engine.requests] == expected
        calls = await client.calls("r0")
        assert [call["call_id"] for call in calls] == [f"{key:016x}" for key in expected]
        assert len({call["request_id"] for call in calls}) == 3 and all(call["delivered"] for call in calls)
        assert body["usage"]["completion_tokens"] == 12
        await client.chat("r0")  # the same prompt again: the next occurrence
        assert engine.requests[-1].sampling.noise == noise_key(11, "r0", "0", prompt, 3)
        await client.chat("r0", attempt="1")
        assert engine.requests[-1].sampling.noise == noise_key(11, "r0", "1", prompt, 0)

    over_engine(tmp_path, tokenizer, engine, test, seed=11)


def test_noise_depends_on_everything_it_should():
    import numpy as np

    ids = np.array([1, 2], np.int32)
    keys = [
        noise_key(0, "r", "0", ids, 0),
        noise_key(1, "r", "0", ids, 0),
        noise_key(0, "q", "0", ids, 0),
        noise_key(0, "r", "1", ids, 0),
        noise_key(0, "r", "0", ids[:1], 0),
        noise_key(0, "r", "0", ids, 1),
    ]
    assert len(set(keys)) == 6 and all(0 <= key < 2**64 for key in keys)
    assert keys[0] == noise_key(0, "r", "0", ids.copy(), 0)


def test_concurrent_equal_requests_have_distinct_noise_even_if_one_fails(tmp_path, tokenizer, engine):
    async def test(client):
        engine.hold()
        tasks = [asyncio.create_task(client.chat("r0")) for _ in range(4)]
        await in_thread(engine.wait, 4)
        failing = engine.requests[0].request_id
        normal = engine.answer
        engine.answer = lambda request: ([], [], "error") if request.request_id == failing else normal(request)
        engine.release()
        statuses = sorted([status for status, _ in await asyncio.gather(*tasks)])
        assert statuses == [200, 200, 200, 503]
        assert len({request.sampling.noise for request in engine.requests}) == 4
        assert len([call for call in await client.calls("r0") if call["status"] == "ok"]) == 3

    over_engine(tmp_path, tokenizer, engine, test)


@pytest.mark.parametrize(("finish", "ids"), [("error", []), ("abort", [5, 6]), ("stop", [])])
def test_an_engine_that_fails_is_a_503_and_never_a_call(tmp_path, tokenizer, engine, finish, ids):
    engine.answer = lambda request: (ids, [-0.5] * len(ids), finish)

    async def test(client):
        status, body = await client.chat("r0")
        assert status == 503 and client.headers["Retry-After"] == "5"
        assert body["error"]["type"] == "server_error"
        (event,) = await client.get("/api/rollouts/r0/events")
        assert (event["data"]["status"], event["data"]["http_status"]) == ("error", 503)
        assert "call_id" not in event["data"]

    over_engine(tmp_path, tokenizer, engine, test)


def test_where_one_choice_fails_the_others_are_kept_undelivered(tmp_path, tokenizer, engine):
    def second_fails(request):
        return ([5, 6], [-0.5, -0.5], "length") if len(engine.requests) != 2 else ([], [], "error")

    engine.answer = second_fails

    async def test(client):
        status, _ = await client.chat("r0", n=2)
        assert status == 503
        call, error = await client.calls("r0")
        assert (call["response_token_ids"], call["delivered"], error["status"]) == ([5, 6], False, "error")

    over_engine(tmp_path, tokenizer, engine, test)


def test_a_harness_that_goes_away_cancels_the_work_and_leaves_an_undelivered_call(tmp_path, tokenizer, engine):
    engine.partial = [7, 8]

    async def test(client):
        engine.hold()
        for _ in range(2):
            task = asyncio.create_task(client.chat("r0"))
            await in_thread(engine.wait, len(engine.requests) + 1)
            task.cancel()
            await in_thread(engine.wait, len(engine.requests), cancelled=True)
            engine.partial = []  # the second had sampled nothing: it leaves no call
        assert engine.cancelled == [request.request_id for request in engine.requests]
        while (await client.get("/proxy/state"))["inflight"]:
            pass
        (call,) = await client.calls("r0")
        assert call["response_token_ids"] == [7, 8] and call["response_log_probs"] == [-0.25, -0.25]
        assert (call["finish_reason"], call["delivered"]) == ("abort", False)

    over_engine(tmp_path, tokenizer, engine, test)


def test_an_answer_whose_reader_is_gone_is_not_delivered(tmp_path, tokenizer, engine):
    """The client hangs up without reading megabytes of answer: the last byte is never written."""
    long = [5] * 80_000
    engine.answer = lambda request: (long, [-0.5] * len(long), "length")

    async def test(client):
        host, port = client.url.removeprefix("http://").split(":")
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.setblocking(False)
        await asyncio.get_running_loop().sock_connect(raw, (host, int(port)))
        reader, writer = await asyncio.open_connection(sock=raw, limit=2**10)
        body = json.dumps({"messages": [{"role": "user", "content": "x"}], "logprobs": True}).encode()
        head = f"POST {chat_path('r0')} HTTP/1.1\r\nHost: x\r\nx-api-key: {KEY}\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        assert (await reader.readexactly(15)) == b"HTTP/1.1 200 OK"
        (call,) = await client.calls("r0")  # recorded before the first byte, and not yet delivered
        assert (len(call["response_token_ids"]), call["delivered"]) == (80_000, False)
        writer.transport.abort()
        engine.answer = lambda request: ([5], [-0.5], "length")
        assert (await client.chat("r0", "after it"))[0] == 200
        assert [call["delivered"] for call in await client.calls("r0")] == [False, True]

    over_engine(tmp_path, tokenizer, engine, test, max_response=80_000)


def test_an_engine_that_goes_away_is_a_503_and_its_successor_serves(tmp_path, tokenizer, engine):
    from tests.service.toy_engine import ToyEngine

    async def main():
        first = ToyEngine()
        address = first.address
        async with service(tmp_path, engine=address, tokenizer=tokenizer, hold_seconds=20) as client:
            await client.create("r0")
            with first:
                first.hold()
                task = asyncio.create_task(client.chat("r0"))
                await in_thread(first.wait, 1)
            status, body = await task  # not a hang: the broken connection ends what was in flight
            assert status == 503 and "connection to the engine broke" in body["error"]["message"]
            waiting = asyncio.create_task(client.chat("r0"))
            with ToyEngine(address=address):
                assert (await waiting)[0] == 200

    asyncio.run(main())


def test_without_an_engine_a_request_waits_for_a_while(tmp_path, tokenizer):
    async def main():
        async with service(tmp_path, engine="tcp://127.0.0.1:9", tokenizer=tokenizer, hold_seconds=0.05) as client:
            await client.create("r0")
            status, body = await client.chat("r0")
            assert status == 503 and "no engine within 0.05 s" in body["error"]["message"]

    asyncio.run(main())
