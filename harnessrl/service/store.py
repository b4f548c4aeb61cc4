"""The one truth of the service: SQLite in WAL mode, one writer, every acknowledged write committed.

All writes of one turn of the event loop share a transaction (`saved` waits for its commit), so that a busy service
commits once for many calls and nobody is answered before. The file survives kill -9 of any process. A write or commit
that fails (disk full) ends the process: it would go on with a memory that disagrees with the file.
"""

from __future__ import annotations

import asyncio
import fcntl
import sqlite3
import time
import uuid
from collections.abc import Callable, Sequence
from typing import IO, Any, NoReturn

import orjson

from harnessrl.service import child

STATES = ("queuing", "running", "succeeded", "failed")
TERMINAL = ("succeeded", "failed")
TRANSITIONS = {"queuing": ("running", "failed"), "running": TERMINAL, "succeeded": (), "failed": ()}

_SCHEMA = """
CREATE TABLE IF NOT EXISTS rollouts (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, rollout_id TEXT NOT NULL UNIQUE, state TEXT NOT NULL,
    is_train INTEGER NOT NULL, input BLOB NOT NULL, config BLOB NOT NULL, metadata BLOB NOT NULL,
    local INTEGER NOT NULL,             -- 1 where the controller runs it, 0 where somebody else does
    executions INTEGER NOT NULL DEFAULT 0, losses INTEGER NOT NULL DEFAULT 0,
    k8s_job_name TEXT, last_attempt_id TEXT, error_message TEXT, failure TEXT,
    version INTEGER NOT NULL DEFAULT 1, created_at REAL NOT NULL, updated_at REAL NOT NULL);
CREATE INDEX IF NOT EXISTS rollouts_waiting ON rollouts (seq) WHERE state = 'queuing' AND local = 1;
CREATE INDEX IF NOT EXISTS rollouts_by_state ON rollouts (state);
CREATE TABLE IF NOT EXISTS completions (        -- AUTOINCREMENT: a place is never given twice, so cursors stay valid
    place INTEGER PRIMARY KEY AUTOINCREMENT, rollout INTEGER NOT NULL UNIQUE);
CREATE TABLE IF NOT EXISTS events (             -- a model call is an event whose ids are not null
    seq INTEGER PRIMARY KEY AUTOINCREMENT, rollout INTEGER NOT NULL, attempt TEXT NOT NULL, event_type TEXT NOT NULL,
    timestamp REAL NOT NULL, arrived REAL NOT NULL, event_id TEXT, data BLOB NOT NULL,
    call_id TEXT, prompt_key INTEGER, occurrence INTEGER, policy_version INTEGER, finish_reason TEXT, agent TEXT,
    constrained INTEGER, prompt_ids BLOB, response_ids BLOB, logprobs BLOB, request BLOB, response BLOB);
CREATE INDEX IF NOT EXISTS events_of_attempt ON events (rollout, attempt, prompt_key, occurrence);
CREATE UNIQUE INDEX IF NOT EXISTS events_given ON events (rollout, attempt, event_id) WHERE event_id IS NOT NULL;
CREATE TABLE IF NOT EXISTS deliveries (event INTEGER PRIMARY KEY);
CREATE TABLE IF NOT EXISTS models (
    model TEXT NOT NULL, endpoint TEXT NOT NULL, version INTEGER NOT NULL, PRIMARY KEY (model, endpoint));
"""

LAZY_SECONDS = 0.01
"""How long a write that nobody waits for may stay uncommitted."""


class Conflict(Exception):
    """A state transition that the contract forbids."""


class Store:
    """Rollouts, their events (see events.py) and models. Lives on one running event loop."""

    def __init__(self, path: str) -> None:
        """Open or create the store at `path`.

        Raises:
            ValueError: The file cannot be opened, is no store, or another service holds it.
        """
        self.path = path
        self.on_terminal: list[Callable[[str], None]] = []
        self.on_created: list[Callable[[], None]] = []
        self._waiters: list[asyncio.Future[None]] = []
        self._open = self._due = False
        self._timer: asyncio.TimerHandle | None = None
        self._lock = _locked(path)
        try:
            self.db = sqlite3.connect(path, isolation_level=None, cached_statements=512)
            self.db.row_factory = sqlite3.Row
            self.db.execute("PRAGMA journal_mode=WAL")
            self.db.execute("PRAGMA synchronous=NORMAL")
            self.db.execute("PRAGMA wal_autocheckpoint=4000")
            self.db.executescript(_SCHEMA)
        except sqlite3.Error as error:
            self._lock.close()
            raise ValueError(f"store {path!r} cannot be opened: {error}") from None

    def close(self) -> None:
        """Commit what is open and release the file."""
        self.commit()
        self.db.close()
        self._lock.close()

    # -- transactions ---------------------------------------------------------------------------------------------

    def write(self, sql: str, values: Sequence[Any] = (), *, lazy: bool = False) -> sqlite3.Cursor:
        """Execute one writing statement in this turn's transaction; a lazy one may wait for the next that writes."""
        if not (self._due or lazy):
            self._due = True
            asyncio.get_running_loop().call_soon(self.commit)
        elif lazy and not self._due and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LAZY_SECONDS, self.commit)
        try:
            if not self._open:
                self.db.execute("BEGIN")
                self._open = True
            return self.db.execute(sql, values)
        except sqlite3.Error as error:
            self._broken(error)

    def commit(self) -> None:
        """Commit the open transaction, if any, and release everyone who waits for it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._open:
            return
        self._open = self._due = False
        waiters, self._waiters = self._waiters, []
        try:
            self.db.execute("COMMIT")
        except sqlite3.Error as error:
            self._broken(error)
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _broken(self, error: sqlite3.Error) -> NoReturn:
        child.die(f"store {self.path!r} cannot be written: {error}")

    async def saved(self) -> None:
        """Wait until everything written so far is committed."""
        if self._due:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    # -- rollouts -------------------------------------------------------------------------------------------------

    def create(self, items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Insert rollouts (already checked); a known rollout_id returns the existing one untouched."""
        out = []
        for item in items:
            rollout_id = item.get("rollout_id") or uuid.uuid4().hex
            if (known := self.get(rollout_id)) is None:
                now, local = time.time(), item["config"]["local"]
                runs = local is not None and bool(local.get("agent_class") or local.get("command"))
                values = [orjson.dumps(item[key]) for key in ("input", "config", "metadata")]
                self.write(
                    "INSERT INTO rollouts"
                    " (rollout_id, state, is_train, input, config, metadata, local, created_at, updated_at)"
                    " VALUES (?, 'queuing', ?, ?, ?, ?, ?, ?, ?)",
                    (rollout_id, item["is_train"], *values, runs, now, now),
                )
                known = self.get(rollout_id)
                assert known is not None
            out.append(known)
        for callback in self.on_created:
            callback()
        return out

    def find(self, rollout_id: str) -> sqlite3.Row | None:
        """The few columns that a model call needs: seq, state, is_train."""
        cursor = self.db.execute("SELECT seq, state, is_train FROM rollouts WHERE rollout_id = ?", (rollout_id,))
        row: sqlite3.Row | None = cursor.fetchone()
        return row

    def get(self, rollout_id: str) -> dict[str, Any] | None:
        """One rollout in the contract's form."""
        row = self.db.execute("SELECT * FROM rollouts WHERE rollout_id = ?", (rollout_id,)).fetchone()
        return None if row is None else as_rollout(row)

    def select(self, states: Sequence[str], limit: int) -> list[dict[str, Any]]:
        """Rollouts in any of these states, in order of creation."""
        marks = ",".join("?" * len(states))
        sql = f"SELECT * FROM rollouts WHERE state IN ({marks}) ORDER BY seq LIMIT ?"
        return [as_rollout(row) for row in self.db.execute(sql, (*states, limit))]

    def terminal(self, after: int, limit: int) -> tuple[list[sqlite3.Row], int]:
        """Finished rollouts in order of completion, from behind cursor `after`; and how many there are in all."""
        sql = (
            "SELECT place, rollouts.* FROM completions JOIN rollouts ON rollout = seq"
            " WHERE place > ? ORDER BY place LIMIT ?"
        )
        rows = self.db.execute(sql, (after, limit)).fetchall()
        return rows, self.db.execute("SELECT COUNT(*) FROM completions").fetchone()[0]

    def update(self, rollout_id: str, **changes: Any) -> dict[str, Any] | None:
        """Change columns of a rollout, its state by permitted transitions only; None where there is no such rollout.

        A repeated update changes nothing and is no error.

        Raises:
            Conflict: The transition is forbidden.
        """
        row = self.db.execute("SELECT * FROM rollouts WHERE rollout_id = ?", (rollout_id,)).fetchone()
        if row is None:
            return None
        changes = {name: value for name, value in changes.items() if row[name] != value}
        state = changes.get("state", row["state"])
        if "state" in changes and state not in TRANSITIONS[row["state"]]:
            raise Conflict(f"rollout {rollout_id}: cannot go from {row['state']} to {state}")
        if changes:
            columns = ", ".join(f"{name} = ?" for name in changes)
            sql = f"UPDATE rollouts SET {columns}, version = version + 1, updated_at = ? WHERE seq = ?"
            self.write(sql, (*changes.values(), time.time(), row["seq"]))
        if "state" in changes and state in TERMINAL:
            self.write("INSERT INTO completions (rollout) VALUES (?)", (row["seq"],))
            for callback in self.on_terminal:
                callback(rollout_id)
        return self.get(rollout_id)

    def delete(self, rollout_id: str) -> None:
        """Remove a rollout with everything recorded for it; an unknown one is no error."""
        row = self.find(rollout_id)
        if row is None:
            return
        self.write("DELETE FROM deliveries WHERE event IN (SELECT seq FROM events WHERE rollout = ?)", (row["seq"],))
        self.write("DELETE FROM events WHERE rollout = ?", (row["seq"],))
        self.write("DELETE FROM completions WHERE rollout = ?", (row["seq"],))
        self.write("DELETE FROM rollouts WHERE seq = ?", (row["seq"],))
        for callback in self.on_terminal:
            callback(rollout_id)

    # -- what the controller does ---------------------------------------------------------------------------------

    def waiting(self, limit: int) -> list[dict[str, Any]]:
        """Rollouts that wait for a worker of ours, oldest first."""
        sql = "SELECT * FROM rollouts WHERE state = 'queuing' AND local = 1 ORDER BY seq LIMIT ?"
        return [as_rollout(row) for row in self.db.execute(sql, (limit,))]

    def start(self, rollout_id: str) -> str:
        """Begin the next attempt of a waiting rollout; returns the attempt's id, "0" for the first."""
        (attempt,) = self.db.execute("SELECT executions FROM rollouts WHERE rollout_id = ?", (rollout_id,)).fetchone()
        self.update(rollout_id, state="running", executions=attempt + 1, last_attempt_id=str(attempt))
        return str(attempt)

    def requeue(self, rollout_id: str, *, loss: bool) -> int:
        """Put a running rollout back into the queue (no transition that a client may make); returns its losses."""
        sql = "UPDATE rollouts SET state = 'queuing', losses = losses + ?, version = version + 1, updated_at = ?"
        self.write(sql + " WHERE rollout_id = ? AND state = 'running'", (int(loss), time.time(), rollout_id))
        sql = "SELECT losses FROM rollouts WHERE rollout_id = ?"
        return int(self.db.execute(sql, (rollout_id,)).fetchone()[0])

    def interrupted(self) -> list[str]:
        """Rollouts that a worker of ours was running when the service ended."""
        sql = "SELECT rollout_id FROM rollouts WHERE state = 'running' AND executions > 0 ORDER BY seq"
        return [row[0] for row in self.db.execute(sql)]

    # -- models ---------------------------------------------------------------------------------------------------

    def add_models(self, items: Sequence[dict[str, Any]]) -> None:
        """Insert or update models by (model, endpoint)."""
        sql = (
            "INSERT INTO models VALUES (?, ?, ?) ON CONFLICT (model, endpoint) DO UPDATE SET version = excluded.version"
        )
        for item in items:
            self.write(sql, (item["model"], item["endpoint"], item["version"]))

    def models(self) -> list[dict[str, Any]]:
        """All models, in a stable order."""
        return [dict(row) for row in self.db.execute("SELECT * FROM models ORDER BY model, endpoint")]

    def clear_models(self) -> None:
        """Forget all models."""
        self.write("DELETE FROM models")


def _locked(path: str) -> IO[str]:
    """A file beside the store whose lock says that a service holds it; the lock ends with the process."""
    try:
        lock = open(path + ".lock", "w")  # noqa: SIM115 (held as long as the store is)
    except OSError as error:
        raise ValueError(f"store {path!r} cannot be opened: {error}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ValueError(f"store {path!r} is in use by another service") from None
    return lock


def as_rollout(row: sqlite3.Row) -> dict[str, Any]:
    """A row of the table in the contract's form."""
    names = ("state", "k8s_job_name", "last_attempt_id", "error_message", "version", "created_at", "updated_at")
    return {
        "rollout_id": row["rollout_id"],
        "input": orjson.loads(row["input"]),
        "is_train": bool(row["is_train"]),
        "config": orjson.loads(row["config"]),
        "metadata": orjson.loads(row["metadata"]),
        "status": {name: row[name] for name in names},
    }
