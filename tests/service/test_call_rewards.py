"""Rewards of single calls: posted as events, carried in the trace."""

from tests.service.making import over_engine


def test_calls_take_rewards_of_their_own_by_the_id_of_the_call_or_of_its_answer(tmp_path, tokenizer, engine):
    async def test(client):
        async def post(**data):
            path = "/api/rollouts/r0/attempt/0/events"
            return await client.send("POST", path, {"event_type": "call_reward", "data": data})

        _, first = await client.chat("r0", "first")
        await client.chat("r0", "second")
        _, both = await client.chat("r0", "third", n=2)
        names = [call["call_id"] for call in await client.calls("r0")]
        for call_id, value in ((first["id"], 9.0), (names[1], -0.5), (first["id"], 0.25), (names[3], 2)):
            status, event = await post(call_id=call_id, value=value)
            assert status == 200 and event["data"]["call_id"] in names
        for data, words in (
            ({"call_id": both["id"], "value": 1.0}, "names no call of attempt 0"),  # whose choice?
            ({"call_id": "nobody", "value": 1.0}, "'nobody' names no call"),
            ({"value": 1.0}, "call_id must name a call"),
            ({"call_id": names[0], "value": "1"}, "finite number"),
        ):
            status, body = await post(**data)
            assert status == 422 and words in body["detail"], body
        await client.send("POST", "/api/rollouts/r0/attempt/0/events", {"event_type": "reward", "data": {"value": 1}})
        for name in ("r0", "r1"):
            for state in ("running", "succeeded"):
                await client.send("PATCH", f"/api/rollouts/{name}", {"status": {"state": state}})
        a, b = await client.traces(2)
        assert a["call_rewards"] == {names[0]: 0.25, names[1]: -0.5, names[3]: 2.0} and a["reward"] == 1
        assert b["call_rewards"] == {}

    over_engine(tmp_path, tokenizer, engine, test)
