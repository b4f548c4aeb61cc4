"""The model routes: one HTTP request in, one or more sampled calls recorded, one answer out.

    body -> Ask -> Turn -> [backend: prompt ids, gate, engine] -> Outcome -> store -> answer -> delivered

The answer is sent after its calls are committed, and they count as delivered after its last byte was written with the
connection open. A harness that goes away takes the work at the engine with it; what was sampled is kept, undelivered.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import orjson
from aiohttp import web

from harnessrl.service import answers
from harnessrl.service.dialects import Ask, read_chat, read_completion
from harnessrl.service.errors import ApiError, parse_json
from harnessrl.service.events import Events, Recorded
from harnessrl.service.store import TERMINAL, Store

READERS: dict[str, Callable[[Any], Ask]] = {"chat/completions": read_chat, "completions": read_completion}


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request of a harness, on its way to a backend."""

    rollout: int
    """The rollout's row."""
    rollout_id: str
    """Its public id."""
    attempt: str
    """The attempt, from the URL."""
    mode: str
    """train or val, from the URL."""
    ask: Ask
    """What is asked for."""
    raw: bytes
    """The body as it came."""
    agent: str
    """The x-agent header: which agent of the harness calls; "" where there is only one."""
    arrived: float
    """Unix time."""
    foreign: bool = False
    """A call in val mode of a rollout that is trained: it is not sampled as trained tokens are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a backend made of a turn."""

    calls: list[Recorded]
    """Sampled calls to record."""
    answer: dict[str, Any] | None
    """The API's answer; None where the harness went away meanwhile."""
    error: ApiError | None = None
    """Why there is no answer, where the harness is still there."""


class Backend(Protocol):
    """Where tokens come from: a token engine (engine_backend.py) or an OpenAI-compatible server (upstream.py)."""

    async def run(self, turn: Turn) -> Outcome:
        """Sample a turn's choices. Raises ApiError where nothing was sampled."""

    def models(self) -> list[str]:
        """Names of the models that can be asked for."""

    async def close(self) -> None:
        """End all connections."""


class Gateway:
    """Handlers of the model routes."""

    def __init__(self, store: Store, events: Events, backend: Backend) -> None:
        self._store = store
        self._events = events
        self._backend = backend

    async def call(self, request: web.Request) -> web.StreamResponse:
        """POST .../openai/v1/chat/completions and .../completions."""
        row = self._rollout(request)
        path = request.match_info["path"]
        if path not in READERS:
            raise ApiError(404, f"no model route {path!r}; there are {', '.join(READERS)} and models")
        if row["state"] in TERMINAL:
            raise ApiError(410, f"rollout {request.match_info['rollout_id']} is over ({row['state']})")
        arrived = time.time()
        raw = await request.read()
        turn = Turn(
            rollout=row["seq"],
            rollout_id=request.match_info["rollout_id"],
            attempt=request.match_info["attempt"],
            mode=request.match_info["mode"],
            foreign=request.match_info["mode"] == "val" and bool(row["is_train"]),
            ask=READERS[path](parse_json(raw)),
            raw=raw,
            agent=request.headers.get("x-agent", ""),
            arrived=arrived,
        )
        numbers, body = await self._record(turn)
        return await self._deliver(request, turn, body, numbers)

    async def models(self, request: web.Request) -> web.StreamResponse:
        """GET .../openai/v1/models."""
        self._rollout(request)
        data = [
            {"id": name, "object": "model", "created": 0, "owned_by": "harnessrl"} for name in self._backend.models()
        ]
        return web.json_response({"object": "list", "data": data})

    def _rollout(self, request: web.Request) -> sqlite3.Row:
        if request.match_info["mode"] not in ("train", "val"):
            raise ApiError(404, f"mode must be train or val, got {request.match_info['mode']!r}")
        row = self._store.find(request.match_info["rollout_id"])
        if row is None:
            raise ApiError(404, f"rollout not found: {request.match_info['rollout_id']}")
        return row

    async def _record(self, turn: Turn) -> tuple[list[int], bytes]:
        """Run a turn and commit its calls, or what went wrong; returns the calls' numbers and the answer."""
        try:
            outcome = await self._backend.run(turn)
        except ApiError as error:
            if error.code is not None or error.status >= 500:
                self._events.append(turn.rollout, turn.attempt, "model_request", _error_data(turn, error), None)
                await self._store.saved()
            raise
        numbers = [self._events.add_call(turn.rollout, turn.attempt, call) for call in outcome.calls]
        if outcome.error is not None:
            data = _error_data(turn, outcome.error)
            self._events.append(turn.rollout, turn.attempt, "model_request", data, None)
        if outcome.answer is None and outcome.error is None:  # the harness is gone: nobody waits for the commit
            raise asyncio.CancelledError
        body = self._body(turn.ask, outcome)
        await self._store.saved()
        if outcome.error is not None:
            raise outcome.error
        return numbers, body

    def _body(self, ask: Ask, outcome: Outcome) -> bytes:
        if outcome.answer is None:
            return b""
        if ask.stream:
            return answers.stream(outcome.answer, include_usage=ask.include_usage)
        if len(outcome.calls) == 1:
            return outcome.calls[0].response
        return orjson.dumps(outcome.answer)

    async def _deliver(self, request: web.Request, turn: Turn, body: bytes, numbers: list[int]) -> web.StreamResponse:
        kind = "text/event-stream" if turn.ask.stream else "application/json"
        response = web.Response(body=body, content_type=kind)
        transport = request.transport
        if transport is None:
            raise asyncio.CancelledError
        transport.set_write_buffer_limits(0)  # so that write_eof returns when the last byte has left
        await response.prepare(request)
        await response.write_eof()
        row = self._store.find(turn.rollout_id)
        over = (
            row is None or row["state"] in TERMINAL
        )  # its trace may have been read: what comes later stays undelivered
        if not transport.is_closing() and not over:
            for number in numbers:
                self._events.deliver(number)
        return response


def _error_data(turn: Turn, error: ApiError) -> dict[str, Any]:
    model = turn.ask.body.get("model")
    return {
        "model": model,
        "request": turn.ask.body,
        "response": error.openai(),
        "error": error.openai()["error"],
        "server": {"model": model, "endpoint": None, "version": None},
        "latency_ms": (time.time() - turn.arrived) * 1e3,
        "http_status": error.status,
        "status": "error",
        "retry_count": 0,
        "usage": None,
        "finish_reason": None,
    }
