"""What happened in a rollout: model calls with their ids, rewards, and whatever else a harness reports.

A call's ids and logprobs are stored as raw int32 / float32 columns. It is written before its answer is sent; that the
answer arrived is a row of its own (`deliver`), so that marking it never rewrites a long call.
"""

from __future__ import annotations

import sqlite3
import time
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from harnessrl.service.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One model call, about to be written. Example: see gateway.py."""

    call_id: str
    """Unique in its attempt; also its request_id, until retries are joined."""
    arrived: float
    """Unix time at which the request arrived: calls are ordered by it."""
    prompt_ids: NDArray[np.int32]
    """int32 [P]"""
    key: int
    """The prompt's `prompt_key`."""
    response_ids: NDArray[np.int32]
    """int32 [A], without what was sampled beyond a stop string."""
    logprobs: NDArray[np.float32] | None
    """float32 [A]; None where the server gave none."""
    occurrence: int
    """How many earlier requests of this attempt had the same prompt."""
    policy_version: int
    """Version of the weights that sampled."""
    finish_reason: str | None
    """stop, length, abort (the harness went away) or as the upstream server said."""
    agent: str = ""
    """Which agent of the harness called."""
    constrained: bool = False
    """Sampled under a mask of the logits, or in val mode in a rollout that is trained."""
    request: bytes = b""
    """The body as it came."""
    response: bytes = b""
    """The answer with this choice, as JSON."""
    meta: dict[str, Any] = field(default_factory=dict)
    """The rest of the event: model, server, latency_ms, http_status, status, usage, sampling, overrides, after_stop."""


def prompt_key(prompt_ids: NDArray[np.int32]) -> int:
    """A signed 64-bit digest of a prompt: equal prompts of an attempt are counted by it."""
    return int.from_bytes(blake2b(prompt_ids.tobytes(), digest_size=8).digest(), "little", signed=True)


class Events:
    """Reads and writes the events of a store's rollouts; `rollout` is always a row's seq."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def append(self, rollout: int, attempt: str, event_type: str, data: dict[str, Any], event_id: str | None) -> int:
        """Write an event; one with an event_id that is known already is left as it is. Returns its number."""
        if event_id is not None:
            sql = "SELECT seq FROM events WHERE rollout = ? AND attempt = ? AND event_id = ?"
            known = self._store.db.execute(sql, (rollout, attempt, event_id)).fetchone()
            if known is not None:
                return int(known[0])
        sql = (
            "INSERT INTO events (rollout, attempt, event_type, timestamp, arrived, event_id, data)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)"
        )
        now = time.time()
        cursor = self._store.write(sql, (rollout, attempt, event_type, now, now, event_id, orjson.dumps(data)))
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def add_call(self, rollout: int, attempt: str, call: Recorded) -> int:
        """Write a model call, undelivered; returns its number for `deliver`."""
        logprobs = None if call.logprobs is None else call.logprobs.tobytes()
        cursor = self._store.write(
            "INSERT INTO events VALUES"
            " (NULL, ?, ?, 'model_request', ?, ?, NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(rollout, attempt, time.time(), call.arrived, orjson.dumps(call.meta)),
                *(call.call_id, call.key, call.occurrence, call.policy_version, call.finish_reason),
                *(call.agent, call.constrained, call.prompt_ids.tobytes(), call.response_ids.tobytes(), logprobs),
                *(call.request, call.response),
            ),
        )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def deliver(self, event: int) -> None:
        """Note that the harness received a call's answer, to the last byte; committed with whatever is written next."""
        self._store.write("INSERT OR IGNORE INTO deliveries VALUES (?)", (event,), lazy=True)

    def counts(self, rollout: int, attempt: str, key: int) -> tuple[int, int]:
        """Calls recorded in an attempt, and the next occurrence of the prompt with this key."""
        sql = (
            "SELECT COUNT(prompt_key), COALESCE(MAX(CASE WHEN prompt_key = ? THEN occurrence END), -1) + 1"
            " FROM events WHERE rollout = ? AND attempt = ?"
        )
        calls, occurrence = self._store.db.execute(sql, (key, rollout, attempt)).fetchone()
        return calls, occurrence

    def attempts(self, rollout: int) -> list[str]:
        """Attempts that have events, by the time of their first."""
        sql = "SELECT attempt FROM events WHERE rollout = ? GROUP BY attempt ORDER BY MIN(seq)"
        return [row[0] for row in self._store.db.execute(sql, (rollout,))]

    def one(self, event: int) -> dict[str, Any]:
        """One event in the contract's form."""
        return self._documents("events.seq = ?", (event,), triplet=False)[0]

    def of_attempt(self, rollout: int, attempt: str, event_type: str | None, *, triplet: bool) -> list[dict[str, Any]]:
        """The events of an attempt, in order."""
        where, values = "rollout = ? AND attempt = ?", [rollout, attempt]
        if event_type is not None:
            where, values = where + " AND event_type = ?", [*values, event_type]
        return self._documents(where, values, triplet=triplet)

    def _documents(self, where: str, values: Any, *, triplet: bool) -> list[dict[str, Any]]:
        sql = (
            "SELECT events.*, rollout_id, event IS NOT NULL AS delivered FROM events"
            " JOIN rollouts ON rollouts.seq = rollout LEFT JOIN deliveries ON event = events.seq"
            f" WHERE {where} ORDER BY events.seq"
        )
        return [_document(row, triplet) for row in self._store.db.execute(sql, values)]

    def reward(self, rollout: int, attempt: str) -> float | None:
        """The last reward of an attempt; None where none was posted."""
        sql = (
            "SELECT data FROM events WHERE rollout = ? AND attempt = ? AND event_type = 'reward'"
            " ORDER BY seq DESC LIMIT 1"
        )
        row = self._store.db.execute(sql, (rollout, attempt)).fetchone()
        return None if row is None else float(orjson.loads(row[0])["value"])

    def call_named(self, rollout: int, attempt: str, name: str) -> str | None:
        """The call with this id, or the one whose answer has it and no other choice; None where there is none."""
        answer = "json_extract(CAST(response AS TEXT), '$.id') = ?"
        alone = "COALESCE(json_extract(CAST(request AS TEXT), '$.n'), 1) = 1"
        sql = (
            "SELECT call_id FROM events WHERE rollout = ? AND attempt = ? AND call_id IS NOT NULL"
            f" AND (call_id = ? OR ({answer} AND {alone})) ORDER BY call_id = ? DESC"
        )
        row = self._store.db.execute(sql, (rollout, attempt, name, name, name)).fetchone()
        return None if row is None else str(row[0])

    def call_rewards(self, rollout: int, attempt: str) -> dict[str, float]:
        """The last reward of each call of an attempt that was given one, by call_id."""
        sql = "SELECT data FROM events WHERE rollout = ? AND attempt = ? AND event_type = 'call_reward' ORDER BY seq"
        rows = [orjson.loads(row[0]) for row in self._store.db.execute(sql, (rollout, attempt))]
        return {data["call_id"]: float(data["value"]) for data in rows}

    def errors(self, rollout: int, attempt: str) -> list[dict[str, Any]]:
        """How an attempt's model requests failed, in order: {"http_status", "code"}; {} for one that succeeded."""
        sql = (
            "SELECT data, call_id FROM events WHERE rollout = ? AND attempt = ? AND event_type = 'model_request'"
            " ORDER BY seq"
        )
        out: list[dict[str, Any]] = []
        for row in self._store.db.execute(sql, (rollout, attempt)):
            data = {} if row["call_id"] is not None else orjson.loads(row["data"])
            out.append({"http_status": data["http_status"], "code": data["error"]["code"]} if data else {})
        return out

    def calls(self, rollout: int, attempt: str) -> list[dict[str, Any]]:
        """The calls of an attempt in order of arrival, with the fields of adapter.types.Call; columns are arrays."""
        sql = (
            "SELECT call_id, policy_version, finish_reason, agent, constrained, prompt_ids, response_ids, logprobs,"
            " event IS NOT NULL AS delivered FROM events LEFT JOIN deliveries ON event = seq"
            " WHERE rollout = ? AND attempt = ? AND call_id IS NOT NULL ORDER BY arrived, seq"
        )
        return [_call(row) for row in self._store.db.execute(sql, (rollout, attempt))]


def _call(row: sqlite3.Row) -> dict[str, Any]:
    return {
        "call_id": row["call_id"],
        "prompt_ids": np.frombuffer(row["prompt_ids"], np.int32),
        "response_ids": np.frombuffer(row["response_ids"], np.int32),
        "logprobs": None if row["logprobs"] is None else np.frombuffer(row["logprobs"], np.float32),
        "policy_version": row["policy_version"],
        "finish_reason": row["finish_reason"],
        "agent": row["agent"],
        "trainable": True,
        "delivered": bool(row["delivered"]),
        "constrained": bool(row["constrained"]),
        "request_id": row["call_id"],
    }


def _document(row: sqlite3.Row, triplet: bool) -> dict[str, Any]:
    data = orjson.loads(row["data"])
    if row["call_id"] is not None:
        data = _call_data(row, data, triplet)
    elif triplet and row["event_type"] == "model_request":
        names = ("server", "http_status", "status", "error")
        data = {"prompt_token_ids": [], "response_token_ids": [], "response_log_probs": None} | {
            name: data[name] for name in names if name in data
        }
    elif triplet and row["event_type"] == "reward":
        data = {"value": data.get("value")} | {name: data[name] for name in ("source", "reason") if name in data}
    return {
        "event_type": row["event_type"],
        "rollout_id": row["rollout_id"],
        "attempt_id": row["attempt"],
        "timestamp": row["timestamp"],
        "data": data,
    }


def _call_data(row: sqlite3.Row, meta: dict[str, Any], triplet: bool) -> dict[str, Any]:
    """The data of a model call's event: what was asked and answered, or with `triplet` only what a trainer reads."""
    logprobs = None if row["logprobs"] is None else np.frombuffer(row["logprobs"], np.float32).tolist()
    identity = {
        "call_id": row["call_id"],
        "request_id": row["call_id"],
        "delivered": bool(row["delivered"]),
        "policy_version": row["policy_version"],
        "finish_reason": row["finish_reason"],
        "agent": row["agent"],
        "constrained": bool(row["constrained"]),
        "prompt_token_ids": np.frombuffer(row["prompt_ids"], np.int32).tolist(),
        "response_token_ids": np.frombuffer(row["response_ids"], np.int32).tolist(),
        "response_log_probs": logprobs,
    }
    if triplet:
        server = {"model": meta["server"]["model"], "version": row["policy_version"]}
        return identity | {"server": server, "http_status": meta["http_status"], "status": meta["status"]}
    bodies = {name: orjson.loads(row[name]) if row[name] else None for name in ("request", "response")}
    return meta | bodies | {"model_version": row["policy_version"], "retry_count": 0} | identity
