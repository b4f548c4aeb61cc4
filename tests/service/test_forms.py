"""What the model routes accept and write: streams, completions, and the forms that real harnesses send."""

import json

from harnessrl.service.tokens import TextCodec
from tests.service.making import KEY, chat_path, over_engine


def test_a_stream_is_the_finished_answer_as_events(tmp_path, tokenizer, engine):
    async def events(client, **fields):
        body = {"messages": [{"role": "user", "content": "the key"}], "stream": True, **fields}
        headers = {"Authorization": f"Bearer {KEY}"}
        async with client.session.post(client.url + chat_path("r0"), json=body, headers=headers) as response:
            assert response.status == 200 and response.content_type == "text/event-stream"
            lines = (await response.text()).split("\n\n")
        assert lines[-1] == "" and lines[-2] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]

    async def test(client):
        _, whole = await client.chat("r0")
        chunks = await events(client)
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert "".join(delta.get("content", "") for delta in deltas) == whole["choices"][0]["message"]["content"]
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "stop"]
        assert not any("usage" in chunk for chunk in chunks)
        chunks = await events(client, stream_options={"include_usage": True})
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
        chunks = await events(client, n=2)
        assert [chunk["choices"][0]["index"] for chunk in chunks] == [0, 0, 0, 1, 1, 1]
        first, streamed, *_ = await client.calls("r0")
        assert streamed["response_token_ids"] == first["response_token_ids"] and streamed["delivered"]

    over_engine(tmp_path, tokenizer, engine, test)


def test_completions_take_text_or_ids(tmp_path, tokenizer, engine):
    codec = TextCodec(tokenizer)
    path = chat_path("r0").replace("chat/completions", "completions")

    async def test(client):
        status, body = await client.send("POST", path, {"prompt": "the door is", "logprobs": 0})
        assert status == 200 and body["object"] == "text_completion"
        ids = codec.encode("the door is").tolist()
        assert engine.requests[-1].prompt_ids.tolist() == ids
        assert body["choices"][0]["text"] == codec.decode(ids[-3:])
        logprobs = body["choices"][0]["logprobs"]
        assert logprobs["token_logprobs"] == [-0.5, -1.0, -1.5, -2.0]
        assert "".join(logprobs["tokens"]) == codec.decode(ids[-3:]) + "<|end|>"
        _, body = await client.send("POST", path, {"prompt": [5, 6, 7], "return_token_ids": True, "max_tokens": 2})
        choice = body["choices"][0]
        assert (choice["prompt_token_ids"], choice["token_ids"], choice["finish_reason"]) == (
            [5, 6, 7],
            [5, 6],
            "length",
        )
        for bad in (
            {"prompt": [5, 10**6]},
            {"prompt": []},
            {"prompt": ["a", "b"]},
            {"prompt": None},
            {"prompt": [True]},
        ):
            assert (await client.send("POST", path, bad))[0] == 422, bad
        assert [call["prompt_token_ids"] for call in await client.calls("r0")] == [ids, [5, 6, 7]]
        headers = {"x-api-key": KEY}
        body = {"prompt": [5, 6], "stream": True, "stream_options": {"include_usage": True}}
        async with client.session.post(client.url + path, json=body, headers=headers) as response:
            chunk, usage, done = (await response.text()).strip().split("\n\n")
        assert json.loads(chunk.removeprefix("data: "))["choices"][0]["text"] == codec.decode([5, 6])
        assert json.loads(usage.removeprefix("data: "))["usage"]["completion_tokens"] == 3 and done == "data: [DONE]"

    over_engine(tmp_path, tokenizer, engine, test)


def test_ids_and_logprobs_are_given_to_whom_asks(tmp_path, tokenizer, engine):
    async def test(client):
        _, body = await client.chat("r0", logprobs=True, return_token_ids=True)
        request = engine.requests[-1]
        assert body["prompt_token_ids"] == request.prompt_ids.tolist()
        assert body["choices"][0]["token_ids"][:3] == request.prompt_ids[-3:].tolist()
        content = body["choices"][0]["logprobs"]["content"]
        assert [item["logprob"] for item in content] == [-0.5, -1.0, -1.5, -2.0]
        assert content[-1]["token"] == "<|end|>" and bytes(content[-1]["bytes"]) == b"<|end|>"
        _, body = await client.chat("r0")
        assert body["choices"][0]["logprobs"] is None and "prompt_token_ids" not in body

    over_engine(tmp_path, tokenizer, engine, test)


def test_the_forms_that_real_harnesses_send(tmp_path, tokenizer, engine):
    codec = TextCodec(tokenizer)
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "input_text", "text": "short"}]},
        {"role": "user", "content": "look", "name": None, "cache_control": {"type": "ephemeral"}},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "a1", "type": "function", "function": {"name": "up", "arguments": '{"k":"x"}'}}],
        },
        {"role": "tool", "tool_call_id": "a1", "content": [{"type": "text", "text": "42"}]},
        {"role": "assistant"},
    ]
    call = {"id": "a1", "type": "function", "function": {"name": "up", "arguments": {"k": "x"}}}
    tool = {"type": "function", "function": {"name": "up", "parameters": {}}}
    expected = (
        "<|system|>be short<|end|><|user|>look<|end|>"
        f"<|assistant|>{json.dumps([call])}<|end|><|tool|>42<|end|><|assistant|><|end|>"
        f"<|system|>{json.dumps([tool])}<|end|><|assistant|>"
    )

    async def test(client):
        body = {
            "messages": messages,
            "tools": [tool, {"type": "web_search"}],
            "store": False,
            "reasoning_effort": "low",
        }
        status, answer = await client.send("POST", chat_path("r0") + "?beta=true", body)
        assert status == 200, answer
        assert engine.requests[-1].prompt_ids.tolist() == codec.encode(expected).tolist()

    over_engine(tmp_path, tokenizer, engine, test)


def test_two_agents_are_told_apart_by_a_header(tmp_path, tokenizer, engine):
    async def test(client):
        body = {"messages": [{"role": "user", "content": "x"}]}
        headers = {"x-api-key": KEY, "x-agent": "helper"}
        async with client.session.post(client.url + chat_path("r0"), json=body, headers=headers) as response:
            assert response.status == 200
        assert [call["agent"] for call in await client.calls("r0")] == ["helper"]

    over_engine(tmp_path, tokenizer, engine, test)
