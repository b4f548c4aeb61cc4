"""In front of an OpenAI-compatible server: a toy one that answers as vLLM does, over real HTTP."""

import asyncio
import re
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from tests.service.making import chat_path, service


def vllm_choice(index, chat):
    logprobs = {"content": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1.5}]}
    if not chat:
        logprobs = {"token_logprobs": [-0.5, -1.5]}
    text = {"message": {"role": "assistant", "content": "ab", "tool_calls": []}} if chat else {"text": "ab"}
    more = {} if chat else {"prompt_token_ids": [1, 2, 3]}
    return {"index": index, **text, **more, "token_ids": [7, 8 + index], "logprobs": logprobs, "finish_reason": "stop"}


class Upstream:
    """Remembers bodies; `status` and `change` make it misbehave; `held` sets an event and waits for another."""

    def __init__(self):
        self.bodies, self.status, self.change, self.held = [], 200, lambda answer: answer, None

    async def handle(self, request):
        body = await request.json()
        self.bodies.append(body)
        if self.held:
            self.held[0].set()
            await self.held[1].wait()
        chat = request.path.endswith("chat/completions")
        answer = {"id": "x", "object": "o", "created": 1, "model": body["model"], "usage": {"prompt_tokens": 3}}
        answer["choices"] = [vllm_choice(index, chat) for index in range(body.get("n") or 1)]
        if chat:
            answer["prompt_token_ids"] = [1, 2, 3]
        return web.json_response(self.change(answer), status=self.status)

    @asynccontextmanager
    async def serving(self):
        app = web.Application()
        app.router.add_post("/v1/{path:.+}", self.handle)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        await runner.cleanup()


def over(tmp_path, test, **settings):
    """Run an async test against a service in front of a toy upstream."""

    async def main():
        upstream = Upstream()
        async with upstream.serving() as url, service(tmp_path, upstream=url, model="real", **settings) as client:
            await client.create("r0", "r1")
            await test(client, upstream, url)

    asyncio.run(main())


def test_a_chat_call_is_pinned_forwarded_and_recorded(tmp_path):
    async def test(client, upstream, url):
        await client.send("POST", "/api/models", [{"model": "real", "endpoint": url, "version": 6}])
        asked = {"temperature": 0, "top_p": 0.1, "stream": True, "max_tokens": 9999, "min_tokens": 3, "seed": 1}
        asked["tool_choice"] = "required"
        async with client.session.post(
            client.url + chat_path("r0"),
            json={"model": "gpt", "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], **asked},
            headers={"x-api-key": "master-key"},
        ) as response:
            assert response.content_type == "text/event-stream" and "[DONE]" in await response.text()
        (body,) = upstream.bodies
        assert body == {
            "model": "real",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
            "max_tokens": 1024,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "logprobs": True,
            "top_logprobs": 0,
            "return_token_ids": True,
        }
        (call,) = await client.calls("r0")
        assert (call["prompt_token_ids"], call["response_token_ids"]) == ([1, 2, 3], [7, 8])
        assert (call["response_log_probs"], call["policy_version"], call["delivered"]) == ([-0.5, -1.5], 6, True)
        assert call["constrained"] is False and call["server"] == {"model": "real", "version": 6}

    over(tmp_path, test)


def test_train_mode_passes_on_what_leaves_the_sampling_alone_and_records_the_rest(tmp_path):
    async def test(client, upstream, url):
        passed = {"stop": ["x"], "user": "u", "chat_template_kwargs": {"enable_thinking": False}}
        removed = {
            "seed": 7,
            "use_beam_search": True,
            "thinking_token_budget": 5,
            "logits_processors": ["x"],
            "anew": 1,
        }
        await client.chat("r0", **passed, **removed, max_completion_tokens=5, presence_penalty=0)
        (event,) = await client.get("/api/rollouts/r0/events")
        assert event["data"]["overrides"] == {name: {"asked": value, "used": None} for name, value in removed.items()}
        body = upstream.bodies[0]
        assert {name: body[name] for name in passed} == passed
        assert body.keys() - passed.keys() == {
            "model", "messages", "max_tokens", "temperature", "top_p", "top_k", "logprobs", "top_logprobs", "return_token_ids"
        }  # fmt: skip
        await client.chat("r1", mode="val", seed=7)
        assert upstream.bodies[1]["seed"] == 7

    over(tmp_path, test)


def test_a_call_held_at_a_pause_has_the_version_that_answers_it(tmp_path):
    async def test(client, upstream, url):
        await client.send("POST", "/api/models", [{"model": "real", "endpoint": url, "version": 6}])
        await client.send("POST", "/proxy/pause", {})
        held = asyncio.create_task(client.chat("r0"))
        rollouts = [{"model": "real", "endpoint": url, "version": 7}]
        assert not (await asyncio.wait([held], timeout=0.2))[0] and not upstream.bodies
        await client.send("POST", "/api/models", rollouts)
        await client.send("POST", "/proxy/resume", {})
        assert (await held)[0] == 200
        assert [call["policy_version"] for call in await client.calls("r0")] == [7]

    over(tmp_path, test)


def test_an_answer_after_the_rollouts_end_is_not_delivered(tmp_path):
    """The trace may have been read already: whether it holds the call must not hang on the moment."""

    async def test(client, upstream, url):
        reached, go_on = asyncio.Event(), asyncio.Event()
        await client.chat("r0")
        upstream.held = (reached, go_on)
        late = asyncio.create_task(client.chat("r0", "another"))
        await reached.wait()
        await client.send("PATCH", "/api/rollouts/r0", {"status": {"state": "running"}})
        await client.send("PATCH", "/api/rollouts/r0", {"status": {"state": "succeeded"}})
        go_on.set()
        assert (await late)[0] == 200
        assert [call["delivered"] for call in await client.calls("r0")] == [True, False]

    over(tmp_path, test)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"choices": {"0": 1}}, "choices must be a list of objects"),
        ({"choices": ["ab"]}, "choices must be a list of objects"),
        ({"choices": [vllm_choice(0, True), vllm_choice(1, True)]}, r"1 choice\(s\) were asked for, 2 came"),
        ({"choices": [vllm_choice(0, True) | {"token_ids": [7, -1]}]}, "token_ids must be a list of ids"),
        ({"choices": [vllm_choice(0, True) | {"token_ids": [7, 1.5]}]}, "token_ids must be a list of ids"),
        ({"prompt_token_ids": "abc"}, "prompt_token_ids must be a list of ids"),
        ({"choices": [vllm_choice(0, True) | {"finish_reason": 3}]}, "finish_reason must be a string"),
        ({"choices": [vllm_choice(0, True) | {"logprobs": [1]}]}, "logprobs.content must be"),
        ({"choices": [vllm_choice(0, True) | {"logprobs": {"content": ["a", "b"]}}]}, "logprobs.content must be"),
        ({"choices": [vllm_choice(0, True) | {"logprobs": {"token_logprobs": ["a"]}}]}, "logprobs must be numbers"),
    ],
)
def test_an_answer_of_another_shape_is_refused_and_nothing_recorded(tmp_path, change, words):
    async def test(client, upstream, url):
        upstream.change = lambda answer: answer | change
        status, body = await client.chat("r0")
        assert status == 503 and re.search(words, body["error"]["message"])
        assert [call.get("response_token_ids") for call in await client.calls("r0")] == [[]]

    over(tmp_path, test)


def test_a_val_call_of_a_trained_rollout_is_not_the_policys_own(tmp_path):
    async def test(client, upstream, url):
        await client.create("held-out", is_train=False)
        for rollout in ("r0", "held-out"):
            await client.chat(rollout, mode="val", top_p=0.5)
        assert [(await client.calls(rollout))[0]["constrained"] for rollout in ("r0", "held-out")] == [True, False]

    over(tmp_path, test)


def test_val_mode_lets_masks_stand_and_marks_the_call(tmp_path):
    async def test(client, upstream, url):
        await client.chat("r0", mode="val", min_tokens=3, presence_penalty=1)
        assert upstream.bodies[0]["min_tokens"] == 3 and upstream.bodies[0]["presence_penalty"] == 1
        assert upstream.bodies[0]["temperature"] == 0.7
        (event,) = await client.get("/api/rollouts/r0/events")
        assert event["data"]["constrained"] is True and event["data"]["overrides"] == {}

    over(tmp_path, test)


def test_completions_and_several_choices(tmp_path):
    async def test(client, upstream, url):
        path = chat_path("r0").replace("chat/completions", "completions")
        status, body = await client.send("POST", path, {"prompt": "x", "n": 2})
        assert status == 200 and upstream.bodies[0]["logprobs"] == 0
        assert [set(choice) for choice in body["choices"]] == [{"index", "text", "finish_reason"}] * 2
        calls = await client.calls("r0")
        assert [call["response_token_ids"] for call in calls] == [[7, 8], [7, 9]]
        assert [call["prompt_token_ids"] for call in calls] == [[1, 2, 3]] * 2
        assert len({call["call_id"] for call in calls}) == 2

    over(tmp_path, test)


def test_missing_ids_or_logprobs_are_recorded_as_missing(tmp_path):
    async def test(client, upstream, url):
        upstream.change = lambda answer: {name: value for name, value in answer.items() if name != "prompt_token_ids"}
        await client.chat("r0")

        def one_short(answer):
            answer["choices"][0]["logprobs"]["content"].pop()
            return answer

        def positive(answer):
            answer["choices"][0]["logprobs"]["content"][0]["logprob"] = 0.5
            return answer

        def unknown(answer):
            answer["choices"][0]["logprobs"]["content"][1]["logprob"] = -9999.0
            return answer

        for change in (one_short, positive, unknown):
            upstream.change = change
            await client.chat("r0")
        without_ids, *without_logprobs = await client.calls("r0")
        assert without_ids["prompt_token_ids"] == [] and without_ids["response_token_ids"] == [7, 8]
        for call in without_logprobs:
            assert call["prompt_token_ids"] == [1, 2, 3] and call["response_log_probs"] is None

    over(tmp_path, test)


@pytest.mark.parametrize(
    ("status", "answer", "expected", "code"),
    [
        (500, {"error": {"message": "boom"}}, 503, None),
        (429, {"error": {"message": "slow down"}}, 503, None),
        (
            400,
            {"error": {"message": "maximum context length is 8 tokens", "code": 400}},
            400,
            "context_length_exceeded",
        ),
        (400, {"error": {"message": "bad field"}}, 400, None),
        (200, {"choices": []}, 503, None),
        (200, {"choices": [{"finish_reason": "abort", "token_ids": [1]}]}, 503, None),
        (200, ["no", "object"], 503, None),
    ],
)
def test_refusals_and_nonsense_are_worded_and_never_recorded_as_calls(tmp_path, status, answer, expected, code):
    async def test(client, upstream, url):
        upstream.status, upstream.change = status, lambda _: answer
        got, body = await client.chat("r0")
        assert (got, body["error"]["code"]) == (expected, code)
        assert ("Retry-After" in client.headers) == (expected == 503)
        assert all(call["status"] == "error" for call in await client.calls("r0"))
        assert (await client.get("/proxy/state"))["inflight"] == 0

    over(tmp_path, test)


def test_rollouts_stay_on_one_of_several_servers(tmp_path):
    async def main():
        one, two = Upstream(), Upstream()
        async with one.serving() as first, two.serving() as second, service(tmp_path) as client:
            await client.send("POST", "/api/models", [{"model": "m", "endpoint": url} for url in (first, second)])
            names = [f"r{n}" for n in range(12)]
            await client.create(*names)
            for _ in range(2):
                for name in names:
                    assert (await client.chat(name, name))[0] == 200
            said = [{body["messages"][0]["content"] for body in server.bodies} for server in (one, two)]
            assert not said[0] & said[1] and said[0] | said[1] == set(names) and all(said)
            models = await client.get(chat_path("r0").replace("chat/completions", "models"))
            assert [item["id"] for item in models["data"]] == ["m"]

    asyncio.run(main())


def test_a_server_that_is_not_there_is_a_503(tmp_path):
    async def main():
        async with service(tmp_path, upstream="http://127.0.0.1:9/v1") as client:
            await client.create("a")
            status, body = await client.chat("a")
            assert status == 503 and "cannot be reached" in body["error"]["message"]

    asyncio.run(main())
