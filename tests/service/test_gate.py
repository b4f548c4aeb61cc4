"""Pause and resume: no request slips through, none is lost, none is recorded empty."""

import asyncio

import pytest

from harnessrl.service.errors import ApiError
from harnessrl.service.gate import Gate
from tests.service.making import in_thread, service


def test_two_running_two_queued_one_new_all_complete_after_the_pause(tmp_path, tokenizer, engine):
    """The races of pausing: requests accepted but not at the engine yet, waiters never told, empty results."""

    async def main():
        async with service(tmp_path, engine=engine.address, tokenizer=tokenizer) as client:
            await client.create("r0")
            engine.hold()
            running = [asyncio.create_task(client.chat("r0", f"key {n}")) for n in range(2)]
            await in_thread(engine.wait, 2)
            _, state = await client.send("POST", "/proxy/pause", {"retry_after_seconds": 7, "reason": "update"})
            assert state == {"paused": True, "retry_after_seconds": 7, "reason": "update", "inflight": 2}
            queued = [asyncio.create_task(client.chat("r0", f"door {n}")) for n in range(2)]
            engine.release()
            assert [status for status, _ in await asyncio.gather(*running)] == [200, 200]
            while (await client.get("/proxy/state"))["inflight"]:  # the drain
                pass
            new = asyncio.create_task(client.chat("r0", "room"))
            assert (await client.get("/healthz"))["status"] == "ok"
            await client.send("POST", "/proxy/pause", {})  # twice is once
            assert len(engine.requests) == 2  # nothing reached the engine between drained and resume
            engine.version = 1
            _, state = await client.send("POST", "/proxy/resume")
            assert (state["paused"], state["reason"]) == (False, None)
            assert [status for status, _ in await asyncio.gather(*queued, new)] == [200] * 3
            await client.send("POST", "/proxy/resume")
            calls = await client.calls("r0")
            assert [call["policy_version"] for call in calls] == [0, 0, 1, 1, 1]
            assert all(call["response_token_ids"] and call["delivered"] for call in calls)

    asyncio.run(main())


def test_a_pause_that_lasts_too_long_is_a_503_with_retry_after(tmp_path, tokenizer, engine):
    async def main():
        async with service(tmp_path, engine=engine.address, tokenizer=tokenizer, hold_seconds=0.05) as client:
            await client.create("r0")
            await client.send("POST", "/proxy/pause", {"retry_after_seconds": 3, "reason": "update"})
            status, body = await client.chat("r0")
            assert (status, client.headers["Retry-After"]) == (503, "3")
            assert body["error"]["message"] == "paused (update) for more than 0.05 s"
            assert engine.requests == []
            assert [call["status"] for call in await client.calls("r0")] == ["error"]
            await client.send("POST", "/proxy/resume")
            assert (await client.chat("r0"))[0] == 200

    asyncio.run(main())


def test_a_held_request_whose_client_leaves_is_forgotten(tmp_path, tokenizer, engine):
    async def main():
        async with service(tmp_path, engine=engine.address, tokenizer=tokenizer) as client:
            await client.create("r0")
            await client.send("POST", "/proxy/pause", {})
            task = asyncio.create_task(client.chat("r0", "gone"))
            await client.get("/proxy/state")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await client.send("POST", "/proxy/resume")
            assert (await client.chat("r0", "here"))[0] == 200
            assert (await client.get("/proxy/state"))["inflight"] == 0
            assert all(call["delivered"] for call in await client.calls("r0"))

    asyncio.run(main())


def test_a_woken_request_waits_again_where_another_pause_begins_before_it_runs():
    async def main():
        gate = Gate(hold_seconds=5)
        gate.pause(5, None)
        waiter = asyncio.create_task(gate.enter(1))
        await asyncio.sleep(0)
        gate.resume()  # wakes the waiter ...
        gate.pause(5, None)  # ... which has not run yet
        for _ in range(3):
            await asyncio.sleep(0)
        assert gate.inflight == 0 and not waiter.done()
        gate.resume()
        await waiter
        assert gate.inflight == 1
        gate.leave(1)
        assert gate.state() == {"paused": False, "retry_after_seconds": 5, "reason": None, "inflight": 0}

    asyncio.run(main())


def test_no_waiting_at_all():
    async def main():
        gate = Gate(hold_seconds=0)
        gate.pause(2, None)
        with pytest.raises(ApiError, match="no reason given") as caught:
            await gate.enter(1)
        assert caught.value.retry_after == 2 and gate.inflight == 0

    asyncio.run(main())


@pytest.mark.parametrize("body", [{"retry_after_seconds": "soon"}, {"retry_after_seconds": -1}, {"reason": 3}, []])
def test_a_pause_of_the_wrong_shape_is_a_422(tmp_path, tokenizer, engine, body):
    async def main():
        async with service(tmp_path, engine=engine.address, tokenizer=tokenizer) as client:
            status, answer = await client.send("POST", "/proxy/pause", body)
            assert status == 422 and answer["detail"]
            assert (await client.get("/proxy/state"))["paused"] is False

    asyncio.run(main())
