"""Hands rollouts to workers over ZeroMQ and decides how each one ended.

    worker -> controller   hello {worker, epoch, capacity}   beat {worker, epoch}   bye {worker}
                           done {worker, rollout_id, attempt, ok, failure, message}
    controller -> worker   welcome {epoch, heartbeat}   who {epoch}   cancel {rollout_id, attempt}
                           run {rollout_id, attempt, local, env, timeout, log}

All messages are JSON objects with "op". An unknown worker's beat is answered by who, upon which it stops what it
runs and says hello with the next epoch. The queue is the store itself, so nothing is lost with this process. A worker
that says bye, or nothing for five heartbeats, is lost: its rollouts run again elsewhere as a new attempt, and whatever
its old attempt still sends is ignored.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import zmq

from harnessrl.service import shapes
from harnessrl.service.events import Events
from harnessrl.service.keys import rollout_key
from harnessrl.service.settings import ServiceConfig
from harnessrl.service.sockets import Frames, Socket
from harnessrl.service.store import Store

log = logging.getLogger(__name__)

MISSED_BEATS = 5
"""Heartbeats after which a silent worker is lost."""
OVERDUE_SECONDS = 30.0
"""How long after its timeout a rollout may stay unreported before its worker counts as hung."""


@dataclass(slots=True)
class _Worker:
    identity: bytes
    capacity: int
    seen: float
    running: dict[str, tuple[str, float]] = field(default_factory=dict)
    """rollout_id -> (attempt, time at which it is overdue)"""


class Controller:
    """Runs the store's waiting rollouts on whatever workers are connected."""

    def __init__(self, config: ServiceConfig, store: Store, events: Events, url: str) -> None:
        """Listen for workers; `url` is where harnesses reach the gateway.

        Raises:
            ValueError: The address cannot be bound.
        """
        self._config, self._store, self._events, self._url = config, store, events, url
        self._loop = asyncio.get_running_loop()
        self._workers: dict[str, _Worker] = {}
        self._dispatch_soon = False
        self._context = zmq.Context()
        self._socket = Socket(self._context, zmq.ROUTER, self._on_message)
        self._socket.raw.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a worker that reconnects keeps its identity
        self.address = self._socket.bind(config.controller)
        for rollout_id in store.interrupted():  # the last service ended under them, through no fault of theirs
            store.requeue(rollout_id, loss=False)
        store.on_created.append(self._schedule)
        store.on_terminal.append(self._on_terminal)
        self._timer = self._loop.call_later(config.heartbeat_seconds, self._sweep)

    def close(self) -> None:
        """Stop dispatching; rollouts that run stay running in the store and are taken up by the next service."""
        self._timer.cancel()
        self._workers.clear()
        self._socket.close()
        self._context.destroy(linger=0)

    # -- messages -------------------------------------------------------------------------------------------------

    def _on_message(self, frames: Frames) -> None:
        identity = frames[0]
        try:
            message = orjson.loads(frames[-1])
            op, name = message["op"], message["worker"]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            log.warning("a message that no worker sends was ignored")
            return
        worker = self._workers.get(name)
        if op == "hello":
            self._on_hello(name, identity, message)
        elif op == "beat" and worker is None:  # it was given up, or this service is new: it starts over
            self._send(identity, {"op": "who", "epoch": message["epoch"]})
        elif worker is None:
            return  # what it did before it was given up
        elif op == "beat":
            worker.seen = self._loop.time()
        elif op == "done":
            self._on_done(worker, message)
        elif op == "bye":
            self._lose(name, "its worker shut down")

    def _send(self, identity: bytes, message: dict[str, Any]) -> None:
        self._socket.send([identity, orjson.dumps(message)])

    def _on_hello(self, name: str, identity: bytes, message: dict[str, Any]) -> None:
        if name in self._workers:
            self._lose(name, "its worker started over")
        self._workers[name] = _Worker(identity, int(message["capacity"]), self._loop.time())
        heartbeat = self._config.heartbeat_seconds
        self._send(identity, {"op": "welcome", "epoch": message["epoch"], "heartbeat": heartbeat})
        self._schedule()

    def _on_done(self, worker: _Worker, message: dict[str, Any]) -> None:
        rollout_id, attempt = message["rollout_id"], message["attempt"]
        worker.seen = self._loop.time()
        if worker.running.get(rollout_id, ("", 0.0))[0] != attempt:
            return  # an attempt that was given up reports late
        del worker.running[rollout_id]
        self._finish(rollout_id, attempt, message)
        self._schedule()

    # -- how an attempt ends --------------------------------------------------------------------------------------

    def _finish(self, rollout_id: str, attempt: str, message: dict[str, Any]) -> None:
        if message["ok"]:
            self._store.update(rollout_id, state="succeeded", error_message=None)
            return
        row = self._store.find(rollout_id)
        assert row is not None
        scored = self._events.reward(row["seq"], attempt) is not None
        failure = verdict(message["failure"], scored, self._events.errors(row["seq"], attempt))
        if failure == "lost":
            self._retry(rollout_id, message["message"])
        else:
            self._store.update(rollout_id, state="failed", failure=failure, error_message=message["message"])

    def _retry(self, rollout_id: str, why: str) -> None:
        if self._store.requeue(rollout_id, loss=True) >= self._config.attempts:
            message = f"lost in all of {self._config.attempts} attempts; last: {why}"
            self._store.update(rollout_id, state="failed", failure="lost", error_message=message)
        self._schedule()

    def _lose(self, name: str, why: str) -> None:
        worker = self._workers.pop(name)
        if worker.running:
            log.warning("worker %s is lost with %d rollouts: %s", name, len(worker.running), why)
        for rollout_id in worker.running:
            self._retry(rollout_id, why)

    def _on_terminal(self, rollout_id: str) -> None:
        """A rollout was ended or deleted, perhaps by a client while it runs: then its harness is stopped."""
        for worker in self._workers.values():
            if (run := worker.running.pop(rollout_id, None)) is not None:
                self._send(worker.identity, {"op": "cancel", "rollout_id": rollout_id, "attempt": run[0]})
                self._schedule()

    def _sweep(self) -> None:
        """Give up on workers that are silent and on runs that are overdue."""
        self._timer = self._loop.call_later(self._config.heartbeat_seconds, self._sweep)
        self._socket.drain()  # a beat that has arrived counts, however late this process reads it
        now = self._loop.time()
        for name, worker in list(self._workers.items()):
            if now - worker.seen > MISSED_BEATS * self._config.heartbeat_seconds:
                self._lose(name, "its worker fell silent")
                continue
            overdue = [(id_, attempt) for id_, (attempt, end) in worker.running.items() if now > end]
            for rollout_id, attempt in overdue:
                del worker.running[rollout_id]
                self._send(worker.identity, {"op": "cancel", "rollout_id": rollout_id, "attempt": attempt})
                self._retry(rollout_id, "its worker did not end it in time")

    # -- dispatch -------------------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        if not self._dispatch_soon:
            self._dispatch_soon = True
            self._loop.call_soon(self._dispatch)

    def _dispatch(self) -> None:
        """Fill the workers, each time the one with the most room, with the oldest rollouts."""
        self._dispatch_soon = False
        room = sum(worker.capacity - len(worker.running) for worker in self._workers.values())
        if room <= 0:
            return
        for rollout in self._store.waiting(room):
            worker = max(self._workers.values(), key=lambda item: item.capacity - len(item.running))
            attempt = self._store.start(rollout["rollout_id"])
            message = self._run_message(rollout, attempt)
            worker.running[rollout["rollout_id"]] = (attempt, self._loop.time() + message["timeout"] + OVERDUE_SECONDS)
            self._send(worker.identity, message)
        self._store.commit()  # a worker must not begin what a crash would forget

    def _run_message(self, rollout: dict[str, Any], attempt: str) -> dict[str, Any]:
        name, config = rollout["rollout_id"], rollout["config"]
        folder = self._config.run_folder
        output = None if folder is None else str(Path(folder).resolve() / "harness" / f"{name}-{attempt}.log")
        return {
            "op": "run",
            "rollout_id": name,
            "attempt": attempt,
            "local": config["local"],
            "env": self._environment(rollout, attempt),
            "timeout": config["timeout_seconds"],
            "log": output,
        }

    def _environment(self, rollout: dict[str, Any], attempt: str) -> dict[str, str]:
        name, key = rollout["rollout_id"], rollout_key(self._config.key, rollout["rollout_id"])
        mode = "train" if rollout["is_train"] else "val"
        base = f"{self._url}/proxy/rollout/{name}/attempt/{attempt}/mode/{mode}"
        return {
            "AGL_OPENAI_BASE_URL": f"{base}/openai/v1",
            "AGL_EVENT_URL": f"{self._url}/api/rollouts/{name}/attempt/{attempt}/events",
            "AGL_KEY": key,
            "OPENAI_BASE_URL": f"{base}/openai/v1",
            "OPENAI_API_KEY": key,
            **shapes.environment(rollout["input"], rollout["config"]["local"]["env_map"]),
        }


def verdict(failure: str, scored: bool, errors: list[dict[str, Any]]) -> str:
    """Why an attempt that did not end in order failed: "lost" where infrastructure did it, so that it runs again.

    Args:
        failure: What the worker saw: "timeout", "exit_code", or "lost" where the harness never ran.
        scored: The attempt posted a reward; then the worker's word stands.
        errors: The attempt's model requests in order; {} for one that succeeded, else {"http_status", "code"}.
    """
    if scored or not errors:
        return failure
    codes = {error.get("code") for error in errors}
    if "context_length_exceeded" in codes:
        return "context_overflow"
    if "call_limit_exceeded" in codes:
        return "call_bound"
    return "lost" if errors[-1].get("http_status", 200) >= 500 else failure
