"""The contract's management routes, keys, and bad input."""

import asyncio
import hashlib
import hmac

import pytest

from harnessrl.adapter.types import Call, Rollout
from harnessrl.service.keys import permitted, rollout_key
from tests.service.making import KEY, chat_path, service


def over(tmp_path, test, **settings):
    """Run an async test against a service without a model."""

    async def main():
        async with service(tmp_path, **settings) as client:
            await test(client)

    asyncio.run(main())


def test_creation_fills_defaults_and_is_idempotent(tmp_path):
    async def test(client):
        item = {"input": {"question": "?"}, "rollout_id": "a", "metadata": {"batch_idx": 3, "group_id": "g"}}
        status, (first, other) = await client.send("POST", "/api/rollouts", [item, {"input": [1], "is_train": False}])
        assert status == 201
        times = {name: first["status"].pop(name) for name in ("created_at", "updated_at")}
        assert first == {
            "rollout_id": "a",
            "input": {"question": "?"},
            "is_train": True,
            "config": {"timeout_seconds": 77.0, "local": None, "k8s": None},
            "metadata": {"batch_idx": 3, "sample_idx_in_batch": None, "group_id": "g"},
            "status": {
                "state": "queuing",
                "k8s_job_name": None,
                "last_attempt_id": None,
                "error_message": None,
                "version": 1,
            },
        }
        assert times["created_at"] == times["updated_at"]
        assert (other["input"], other["is_train"], len(other["rollout_id"])) == ([1], False, 32)
        await client.send("POST", "/api/rollouts/a/attempt/0/events", {"event_type": "note"})
        _, (again,) = await client.send("POST", "/api/rollouts", [{"input": "another", "rollout_id": "a"}])
        assert again["input"] == {"question": "?"}
        assert len(await client.get("/api/rollouts/a/events")) == 1
        assert await client.get("/api/rollouts/a") == {"rollout": again, "attempts": ["0"]}

    over(tmp_path, test, rollout_timeout=77.0)


def test_the_permitted_transitions_and_no_others(tmp_path):
    states = ("queuing", "running", "succeeded", "failed")
    allowed = {("queuing", "running"), ("queuing", "failed"), ("running", "succeeded"), ("running", "failed")}
    route = {"queuing": [], "running": ["running"], "succeeded": ["running", "succeeded"], "failed": ["failed"]}

    async def test(client):
        for before in states:
            for after in states:
                name = f"{before}-{after}"
                await client.create(name)
                for state in route[before]:
                    await client.send("PATCH", f"/api/rollouts/{name}", {"status": {"state": state}})
                version = len(route[before]) + 1
                status, body = await client.send("PATCH", f"/api/rollouts/{name}", {"status": {"state": after}})
                if before == after:  # a repeated patch changes nothing
                    assert (status, body["status"]["version"]) == (200, version)
                elif (before, after) in allowed:
                    assert (status, body["status"]["state"], body["status"]["version"]) == (200, after, version + 1)
                else:
                    assert (status, body["detail"]) == (409, f"rollout {name}: cannot go from {before} to {after}")

    over(tmp_path, test)


def test_a_patch_changes_what_it_names(tmp_path):
    async def test(client):
        await client.create("a")
        patch = {"state": "running", "k8s_job_name": "job", "last_attempt_id": "2", "error_message": "slow"}
        status, body = await client.send("PATCH", "/api/rollouts/a", {"status": patch})
        assert status == 200 and patch.items() <= body["status"].items()
        assert body["status"]["version"] == 2 and body["status"]["updated_at"] > body["status"]["created_at"]
        for bad in ({"status": {"owner": "me"}}, {"input": 1}, {"status": {"state": "done"}}, {"status": 3}, []):
            assert (await client.send("PATCH", "/api/rollouts/a", bad))[0] == 422, bad
        assert (await client.send("PATCH", "/api/rollouts/zzz", {"status": {"state": "running"}}))[0] == 404
        _, body = await client.send("PATCH", "/api/rollouts/a", {"status": {}})
        assert body["status"]["version"] == 2

    over(tmp_path, test)


def test_listing_and_the_terminal_cursor(tmp_path):
    async def test(client):
        await client.create("a", "b", "c", "d", input={"data_id": "x7"})
        for name in ("c", "a"):  # order of completion, not of creation
            await client.send("PATCH", f"/api/rollouts/{name}", {"status": {"state": "running"}})
            await client.send("PATCH", f"/api/rollouts/{name}", {"status": {"state": "succeeded"}})
        names = lambda rollouts: [rollout["rollout_id"] for rollout in rollouts]  # noqa: E731
        assert names(await client.get("/api/rollouts?state_in=queuing&state_in=succeeded")) == ["a", "b", "c", "d"]
        assert names(await client.get("/api/rollouts?state_in=queuing&limit=1")) == ["b"]
        page = await client.get("/api/rollouts/terminal?after=0&limit=1")
        assert page["items"] == [{"rollout_id": "c", "state": "succeeded", "data_id": "x7", "is_train": True}]
        assert page["total_terminal"] == 2
        page = await client.get(f"/api/rollouts/terminal?after={page['next_after']}")
        assert names(page["items"]) == ["a"]
        cursor = page["next_after"]
        assert (await client.send("DELETE", "/api/rollouts/a"))[0] == 204  # the newest place is not given again
        await client.send("PATCH", "/api/rollouts/d", {"status": {"state": "failed"}})
        page = await client.get(f"/api/rollouts/terminal?after={cursor}")
        assert names(page["items"]) == ["d"] and page["total_terminal"] == 2
        assert (await client.send("DELETE", "/api/rollouts/a"))[0] == 204
        assert (await client.send("GET", "/api/rollouts/a"))[0] == 404
        assert (await client.send("GET", "/api/rollouts?state_in=done"))[0] == 422
        assert (await client.send("GET", "/api/rollouts/terminal?after=-1"))[0] == 422

    over(tmp_path, test)


def test_events_belong_to_attempts_and_repeat_by_id(tmp_path):
    async def test(client):
        await client.create("a")
        base = "/api/rollouts/a/attempt"
        reward = {"event_type": "reward", "data": {"value": 1, "source": "agent", "more": 5}, "event_id": "e1"}
        status, event = await client.send("POST", f"{base}/0/events", reward)
        assert status == 200
        assert (event["event_type"], event["rollout_id"], event["attempt_id"]) == ("reward", "a", "0")
        assert event["data"] == reward["data"] and event["timestamp"] > 1e9
        assert (await client.send("POST", f"{base}/0/events", reward))[1] == event
        await client.send("POST", f"{base}/1/events", {"event_type": "note", "data": {"x": 1}})
        (only,) = await client.get("/api/rollouts/a/events")
        assert only == event
        (trimmed,) = await client.get("/api/rollouts/a/events?format=triplet")
        assert trimmed["data"] == {"value": 1, "source": "agent"}
        await client.send("PATCH", "/api/rollouts/a", {"status": {"last_attempt_id": "1"}})
        assert [item["event_type"] for item in await client.get("/api/rollouts/a/events")] == ["note"]
        assert await client.get("/api/rollouts/a/events?event_type=reward") == []
        assert (await client.get("/api/rollouts/a"))["attempts"] == ["0", "1"]
        assert (await client.send("POST", "/api/rollouts/zzz/attempt/0/events", reward))[0] == 404
        huge = {"event_type": "reward", "data": {"value": 1e308}}  # groups of such have no finite spread
        for bad in ({}, {"event_type": 3}, {"event_type": "reward", "data": {}}, {"event_type": "x", "data": []}, huge):
            assert (await client.send("POST", f"{base}/0/events", bad))[0] == 422, bad
        assert (await client.send("POST", f"{base}/0/events", {"event_type": "model_request"}))[0] == 422

    over(tmp_path, test)


@pytest.mark.parametrize("state", ["failed", "succeeded"])
def test_a_rollout_that_is_over_takes_no_events(tmp_path, state):
    async def test(client):
        await client.create("a")
        note = {"event_type": "note", "event_id": "n"}
        assert (await client.send("POST", "/api/rollouts/a/attempt/0/events", note))[0] == 200
        await client.send("PATCH", "/api/rollouts/a", {"status": {"state": "running"}})
        await client.send("PATCH", "/api/rollouts/a", {"status": {"state": state}})
        before = await client.get("/api/traces"), await client.get("/api/rollouts/a/events")
        reward = {"event_type": "reward", "data": {"value": 1.0}}
        for event in (reward, {"event_type": "note"}):
            for key in (KEY, rollout_key(KEY, "a")):
                answer = await client.send("POST", "/api/rollouts/a/attempt/0/events", event, key=key)
                assert answer == (409, {"detail": f"rollout a is over ({state}): it takes no more events"})
        assert (await client.get("/api/traces"), await client.get("/api/rollouts/a/events")) == before
        assert before[0]["items"][0]["reward"] is None and len(before[1]) == 1

    over(tmp_path, test)


def test_models_are_upserted_by_name_and_endpoint(tmp_path):
    async def test(client):
        one = {"model": "m", "endpoint": "http://h:1/v1"}
        assert await client.send("POST", "/api/models", [one]) == (201, [{**one, "version": 0}])
        two = {"model": "m", "endpoint": "http://h:2/v1", "version": 3}
        status, models = await client.send("POST", "/api/models", [{**one, "version": 2}, two])
        assert models == [{**one, "version": 2}, two]
        assert (await client.send("POST", "/api/models", [{"model": "m", "endpoint": "http://h:1"}]))[0] == 422
        assert await client.send("DELETE", "/api/models") == (200, {"status": "ok"})
        await client.create("a")
        status, body = await client.chat("a")
        assert status == 503 and body["error"]["message"] == "no model is registered"

    over(tmp_path, test)


def test_a_trace_is_a_rollout_of_the_adapter(tmp_path, tokenizer, engine):
    async def test(client):
        await client.create("a", "b", input={"instance_id": "i9"}, metadata={"k": 1})
        await client.create("c", input={"data_id": "d"}, is_train=False, metadata={"group_id": 0})
        await client.chat("a", "first")
        await client.chat("a", "second", max_tokens=1)
        reward = {"event_type": "reward", "data": {"value": 0.25}}
        for value in (0.5, 0.25):
            await client.send(
                "POST", "/api/rollouts/a/attempt/0/events", {"event_type": "reward", "data": {"value": value}}
            )
        waiting = asyncio.create_task(client.get("/api/traces?wait=30"))
        for name, state in (("a", "succeeded"), ("b", "succeeded"), ("c", "failed")):
            await client.send("PATCH", f"/api/rollouts/{name}", {"status": {"state": "running"}})
            await client.send("PATCH", f"/api/rollouts/{name}", {"status": {"state": state, "error_message": name}})
        page = await waiting  # it waited for the first to finish
        assert [item["rollout_id"] for item in page["items"]] == ["a"]
        page = await client.get("/api/traces")
        a, b, c = page["items"]
        assert (a["group_id"], a["reward"], a["failure"], a["attempt"]) == ("i9", reward["data"]["value"], None, "0")
        assert (a["input"], a["is_train"], a["state"]) == ({"instance_id": "i9"}, True, "succeeded")
        assert a["metadata"] == {"batch_idx": None, "sample_idx_in_batch": None, "k": 1}
        assert (b["reward"], b["failure"], b["calls"]) == (None, "no_reward", [])
        assert (c["group_id"], c["failure"], c["error_message"], c["is_train"]) == ("0", "exit_code", "c", False)
        assert [Call.from_dict(call).to_dict() for call in a["calls"]] == a["calls"]
        rollout = Rollout.from_dict(a)
        assert [call.response_ids.tolist() for call in rollout.calls] == [
            call["response_token_ids"] for call in await client.calls("a")
        ]
        assert rollout.calls[1].finish_reason == "length" and rollout.calls[1].logprobs.tolist() == [-0.5]
        assert await client.get(f"/api/traces?after={page['next_after']}") == {
            "items": [],
            "next_after": page["next_after"],
        }
        assert (await client.send("GET", "/api/traces?wait=-1"))[0] == 422
        status, body = await client.chat("a")
        assert (status, body["error"]["message"]) == (410, "rollout a is over (succeeded)")

    over(tmp_path, test, engine=engine.address, tokenizer=tokenizer)


def test_a_rollouts_key_reaches_that_rollout_and_nothing_else(tmp_path, tokenizer, engine):
    own = hmac.new(KEY.encode(), b"rollout\0a", hashlib.sha256).hexdigest()
    assert rollout_key(KEY, "a") == own
    body = {"messages": [{"role": "user", "content": "x"}]}
    event = {"event_type": "reward", "data": {"value": 1}}

    async def test(client):
        await client.create("a", "b")
        status = {}
        for name in ("a", "b"):
            status[name] = [
                (await client.send("POST", chat_path(name), body, key=own))[0],
                (await client.send("GET", chat_path(name).replace("chat/completions", "models"), key=own))[0],
                (await client.send("POST", f"/api/rollouts/{name}/attempt/0/events", event, key=own))[0],
                (await client.send("GET", f"/api/rollouts/{name}/events", key=own))[0],
            ]
        assert status == {"a": [200, 200, 200, 200], "b": [401, 401, 401, 401]}
        for method, path in [
            ("GET", "/api/rollouts/a"),
            ("PATCH", "/api/rollouts/a"),
            ("DELETE", "/api/rollouts/a"),
            ("GET", "/api/rollouts"),
            ("GET", "/api/traces"),
            ("POST", "/proxy/pause"),
            ("POST", "/api/models"),
        ]:
            assert (await client.send(method, path, key=own))[0] == 401, path

    over(tmp_path, test, engine=engine.address, tokenizer=tokenizer)


def test_an_id_opens_no_route_to_the_key_of_its_rollout(tmp_path):
    async def test(client):
        await client.create("events", "attempt")
        for name in ("events", "attempt"):
            own, path = rollout_key(KEY, name), f"/api/rollouts/{name}"
            for method in ("GET", "PATCH", "DELETE"):
                assert (await client.send(method, path, {"status": {}}, key=own))[0] == 401, (method, name)
            assert (await client.send("GET", f"{path}/events", key=own)) == (200, [])
            assert (await client.send("GET", f"/api/rollouts/{name}/other/events", key=own))[0] == 401
        status, body = await client.send("POST", "/api/rollouts", [{"input": 1, "rollout_id": "terminal"}])
        text = "[0].rollout_id must not be 'terminal': /api/rollouts/terminal is a route of its own"
        assert (status, body) == (422, {"detail": text})

    over(tmp_path, test)


def test_an_unknown_model_route_is_404_to_the_rollouts_own_key(tmp_path):
    async def test(client):
        await client.create("a")
        own = rollout_key(KEY, "a")
        mode = "/proxy/rollout/{}/attempt/0/mode/train"
        for method, path, expected in [
            ("POST", mode + "/anthropic/v1/messages", 404),
            ("POST", mode + "/openai/v1/embeddings", 404),
            ("POST", "/proxy/rollout/{}/other", 404),
            ("POST", "/proxy/rollout/{}", 404),
            ("GET", mode + "/openai/v1/chat/completions", 405),
        ]:
            status, body = await client.send(method, path.format("a"), {}, key=own)
            assert (status, set(body["error"])) == (expected, {"message", "type", "param", "code"}), path
            assert (await client.send(method, path.format("b"), {}, key=own))[0] == 401, path

    over(tmp_path, test)


def test_every_route_but_health_needs_a_key(tmp_path):
    async def test(client):
        for key in (None, "", "wrong", KEY + "x", "schlüssel"):
            status, body = await client.send("GET", "/proxy/state", key=key)
            assert status == 401 and "Bearer" in body["detail"]
            status, body = await client.send("POST", chat_path("a"), {}, key=key)
            assert status == 401 and body["error"]["type"] == "authentication_error"
        assert (await client.send("GET", "/healthz", key=None)) == (200, {"status": "ok"})
        async with client.session.get(client.url + "/proxy/state", headers={"x-api-key": KEY}) as response:
            assert response.status == 200

    over(tmp_path, test)


def test_permission_without_a_rollout_is_for_the_master_key_alone():
    own = rollout_key("m", "a")
    assert permitted("m", "m", None) and permitted("m", "m", "a") and permitted(own, "m", "a")
    assert not permitted(own, "m", None) and not permitted(own, "m", "b") and not permitted(None, "m", "a")


@pytest.mark.parametrize(
    ("path", "body", "status", "part"),
    [
        ("chat", b"{", 400, "not JSON"),
        ("chat", b"[1]", 400, "JSON object"),
        ("chat", b'{"messages": []}', 422, "messages"),
        ("chat", b'{"messages": [{"content": "x"}]}', 422, "messages[0]"),
        ("chat", b'{"messages": [{"role": "user", "content": 3}]}', 422, "messages[0].content"),
        ("chat", b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', 400, "'image_url'"),
        ("chat", b'{"messages": [{"role": "user", "content": "x"}], "n": 0}', 422, "n must be"),
        ("chat", b'{"messages": [{"role": "user", "content": "x"}], "n": 1000}', 422, "128"),
        ("chat", b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": "9"}', 422, "max_tokens"),
        ("chat", b'{"messages": [{"role": "user", "content": "x"}], "stop": 3}', 422, "stop"),
        ("chat", b'{"messages": [{"role": "user", "content": "x"}], "tools": {}}', 422, "tools"),
        ("/api/rollouts", b"{", 400, "not JSON"),
        ("/api/rollouts", b"{}", 422, "list"),
        ("/api/rollouts", b"[{}]", 422, "[0]"),
        ("/api/rollouts", b'[{"input": 1, "rollout_id": "../x"}]', 422, "rollout_id"),
        ("/api/rollouts", b'[{"input": 1, "config": {"timeout_seconds": 0}}]', 422, "timeout_seconds"),
        ("/api/rollouts", b'[{"input": 1, "config": {"local": {"command": "ls"}}}]', 422, "command"),
        (
            "/api/rollouts",
            b'[{"input": {}, "config": {"local": {"env_map": {"Q": "input.q"}}}}]',
            422,
            "Q: the input has no",
        ),
    ],
)
def test_bad_bodies_are_refused_in_the_form_of_the_api(tmp_path, tokenizer, engine, path, body, status, part):
    async def test(client):
        await client.create("a")
        model_route = path == "chat"
        got, answer = await client.send("POST", chat_path("a") if model_route else path, body)
        message = answer["error"]["message"] if model_route else answer["detail"]
        assert got == status and part in message, answer
        assert engine.requests == []
        assert (await client.chat("a"))[0] == 200  # the server is untouched

    over(tmp_path, test, engine=engine.address, tokenizer=tokenizer)


def test_bodies_beyond_the_limit_and_unknown_routes(tmp_path):
    async def test(client):
        await client.create("a")
        status, body = await client.send("POST", chat_path("a"), b"x" * 2001)
        assert (status, body["error"]["message"]) == (413, "the body is larger than 2000 bytes")
        status, body = await client.send("POST", "/api/rollouts", b"x" * 2001)
        assert (status, body["detail"]) == (413, "the body is larger than 2000 bytes")
        for method, path, expected in [
            ("POST", chat_path("a", mode="test"), 404),
            ("POST", chat_path("zzz"), 404),
            ("POST", chat_path("a").replace("chat/completions", "embeddings"), 404),
            ("GET", chat_path("a"), 405),
            ("POST", "/proxy/rollout/a/other", 404),
        ]:
            status, body = await client.send(method, path, {})
            assert (status, set(body["error"])) == (expected, {"message", "type", "param", "code"}), path
        assert (await client.send("GET", "/api/nothing"))[1] == {"detail": "Not Found"}

    over(tmp_path, test, max_body=2000)
