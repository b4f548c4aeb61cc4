"""The management routes: rollouts, events, models, pause, and the trainer's traces."""

from __future__ import annotations

import asyncio
import sqlite3
from typing import Any

import orjson
from aiohttp import web

from harnessrl.service import shapes
from harnessrl.service.errors import ApiError, parse_json
from harnessrl.service.events import Events
from harnessrl.service.gate import Gate
from harnessrl.service.settings import ServiceConfig
from harnessrl.service.store import STATES, TERMINAL, Conflict, Store, as_rollout

LONGEST_WAIT = 600.0
_ONE = "/api/rollouts/{rollout_id}"
_POST_EVENT, _LIST_EVENTS = _ONE + "/attempt/{attempt}/events", _ONE + "/events"
EVENT_ROUTES = (_POST_EVENT, _LIST_EVENTS)
"""What a rollout's own key reaches besides the model routes."""


class Api:
    """Handlers of /api and /proxy/pause, resume, state. What they write is committed before the answer (server.py)."""

    def __init__(self, config: ServiceConfig, store: Store, events: Events, gate: Gate) -> None:
        self._config = config
        self._store = store
        self._events = events
        self._gate = gate
        self._finished = asyncio.Event()
        store.on_terminal.append(lambda _: self._finished.set())

    def routes(self) -> list[web.RouteDef]:
        """All routes."""
        return [
            web.get("/healthz", self.health),
            web.post("/api/rollouts", self.create),
            web.get("/api/rollouts", self.select),
            web.get("/api/rollouts/terminal", self.terminal),
            web.get("/api/traces", self.traces),
            web.get(_ONE, self.get),
            web.patch(_ONE, self.patch),
            web.delete(_ONE, self.delete),
            web.post(_POST_EVENT, self.post_event),
            web.get(_LIST_EVENTS, self.list_events),
            web.post("/api/models", self.add_models),
            web.get("/api/models", self.list_models),
            web.delete("/api/models", self.clear_models),
            web.post("/proxy/pause", self.pause),
            web.post("/proxy/resume", self.resume),
            web.get("/proxy/state", self.state),
        ]

    async def health(self, request: web.Request) -> web.Response:
        return _json({"status": "ok"})

    async def create(self, request: web.Request) -> web.Response:
        items = shapes.new_rollouts(await _body(request), self._config.rollout_timeout)
        return _json(self._store.create(items), status=201)

    async def select(self, request: web.Request) -> web.Response:
        states = request.query.getall("state_in", list(STATES))
        shapes.need(all(state in STATES for state in states), f"state_in must be of {', '.join(STATES)}")
        return _json(self._store.select(states, _integer(request, "limit", 500)))

    async def terminal(self, request: web.Request) -> web.Response:
        after = _integer(request, "after", 0)
        rows, total = self._store.terminal(after, _integer(request, "limit", 1000))
        items = [_projection(row) for row in rows]
        return _json({"items": items, "next_after": rows[-1]["place"] if rows else after, "total_terminal": total})

    async def get(self, request: web.Request) -> web.Response:
        rollout_id = request.match_info["rollout_id"]
        rollout, row = self._store.get(rollout_id), self._store.find(rollout_id)
        if rollout is None or row is None:
            raise _unknown(rollout_id)
        return _json({"rollout": rollout, "attempts": self._events.attempts(row["seq"])})

    async def patch(self, request: web.Request) -> web.Response:
        rollout_id, changes = request.match_info["rollout_id"], shapes.status_patch(await _body(request))
        known = self._store.find(rollout_id)
        if changes.get("state") == "failed" and known is not None and known["state"] != "failed":
            changes["failure"] = "exit_code"  # whoever runs it says only that it failed
        try:
            rollout = self._store.update(rollout_id, **changes)
        except Conflict as error:
            raise ApiError(409, str(error)) from None
        if rollout is None:
            raise _unknown(rollout_id)
        return _json(rollout)

    async def delete(self, request: web.Request) -> web.Response:
        self._store.delete(request.match_info["rollout_id"])
        return web.Response(status=204)

    async def post_event(self, request: web.Request) -> web.Response:
        event_type, data, event_id = shapes.new_event(await _body(request))
        rollout_id = request.match_info["rollout_id"]
        row = self._store.find(rollout_id)
        if row is None:
            raise _unknown(rollout_id)
        if row["state"] in TERMINAL:  # its trace may have been read
            raise ApiError(409, f"rollout {rollout_id} is over ({row['state']}): it takes no more events")
        attempt = request.match_info["attempt"]
        if event_type == "call_reward":
            call_id = self._events.call_named(row["seq"], attempt, data["call_id"])
            shapes.need(call_id is not None, f"data.call_id {data['call_id']!r} names no call of attempt {attempt}")
            data = data | {"call_id": call_id}
        number = self._events.append(row["seq"], attempt, event_type, data, event_id)
        return _json(self._events.one(number))

    async def list_events(self, request: web.Request) -> web.Response:
        rollout_id = request.match_info["rollout_id"]
        rollout, row = self._store.get(rollout_id), self._store.find(rollout_id)
        if rollout is None or row is None:
            raise _unknown(rollout_id)
        attempt = rollout["status"]["last_attempt_id"] or "0"
        triplet = request.query.get("format") == "triplet"
        return _json(self._events.of_attempt(row["seq"], attempt, request.query.get("event_type"), triplet=triplet))

    async def add_models(self, request: web.Request) -> web.Response:
        self._store.add_models(shapes.new_models(await _body(request)))
        return _json(self._store.models(), status=201)

    async def list_models(self, request: web.Request) -> web.Response:
        return _json(self._store.models())

    async def clear_models(self, request: web.Request) -> web.Response:
        self._store.clear_models()
        return _json({"status": "ok"})

    async def pause(self, request: web.Request) -> web.Response:
        self._gate.pause(*shapes.pause(await _body(request, empty={})))
        return _json(self._gate.state())

    async def resume(self, request: web.Request) -> web.Response:
        self._gate.resume()
        return _json(self._gate.state())

    async def state(self, request: web.Request) -> web.Response:
        return _json(self._gate.state())

    async def traces(self, request: web.Request) -> web.Response:
        """Finished rollouts with their calls, in order of completion; waits up to `wait` seconds for the first."""
        after, limit = _integer(request, "after", 0), _integer(request, "limit", 1000)
        deadline = asyncio.get_running_loop().time() + min(_seconds(request, "wait"), LONGEST_WAIT)
        while not (rows := self._store.terminal(after, limit)[0]):
            self._finished.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._finished.wait()
            except TimeoutError:
                break
        items = [self._trace(row) for row in rows]
        return _json({"items": items, "next_after": rows[-1]["place"] if rows else after})

    def _trace(self, row: sqlite3.Row) -> dict[str, Any]:
        rollout, attempt = as_rollout(row), row["last_attempt_id"] or "0"
        reward = self._events.reward(row["seq"], attempt)
        failure = "no_reward" if row["state"] == "succeeded" and reward is None else row["failure"]
        group = rollout["metadata"].get("group_id")
        if group is None:
            group = _data_id(rollout["input"]) or rollout["rollout_id"]
        return {
            "rollout_id": rollout["rollout_id"],
            "group_id": str(group),
            "reward": reward,
            "calls": self._events.calls(row["seq"], attempt),
            "call_rewards": self._events.call_rewards(row["seq"], attempt),
            "input": rollout["input"],
            "is_train": rollout["is_train"],
            "metadata": rollout["metadata"],
            "state": row["state"],
            "failure": failure,
            "attempt": attempt,
            "error_message": row["error_message"],
        }


def _json(data: Any, status: int = 200) -> web.Response:
    return web.Response(
        body=orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY), status=status, content_type="application/json"
    )


async def _body(request: web.Request, empty: Any = None) -> Any:
    raw = await request.read()
    return empty if empty is not None and not raw else parse_json(raw)


def _unknown(rollout_id: str) -> ApiError:
    return ApiError(404, f"rollout not found: {rollout_id}")


def _integer(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name, str(default))
    shapes.need(text.isdecimal() and len(text) < 19, f"{name} must be an integer of 0 or more, got {text!r}")
    return int(text)


def _seconds(request: web.Request, name: str) -> float:
    try:
        value = float(request.query.get(name, "0"))
    except ValueError:
        value = -1.0
    shapes.need(value >= 0, f"{name} must be a number of seconds, 0 or more")
    return value


def _data_id(task: Any) -> str:
    """What names a rollout's input: its data_id, else its instance_id, else nothing."""
    return str(task.get("data_id") or task.get("instance_id") or "") if isinstance(task, dict) else ""


def _projection(row: sqlite3.Row) -> dict[str, Any]:
    rollout = as_rollout(row)
    return {
        "rollout_id": row["rollout_id"],
        "state": row["state"],
        "data_id": _data_id(rollout["input"]),
        "is_train": rollout["is_train"],
    }
