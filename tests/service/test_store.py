"""The store alone: shared transactions, failures, and counts."""

import asyncio
import contextlib
import sqlite3
import subprocess
import sys

import numpy as np
import pytest

from harnessrl.service.dialects import read_chat
from harnessrl.service.events import Events, Recorded, prompt_key
from harnessrl.service.gateway import Gateway, Outcome, Turn
from harnessrl.service.store import Store
from tests.service.making import ROOT


def committed(path, sql):
    """What another process would see."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        return db.execute(sql).fetchone()[0]


def new(name):
    config = {"timeout_seconds": 1, "local": None, "k8s": None}
    return {"rollout_id": name, "input": 1, "is_train": True, "config": config, "metadata": {}}


def recorded(prompt, occurrence, call_id):
    ids = np.array(prompt, np.int32)
    logprobs = np.zeros(1, np.float32)
    return Recorded(
        call_id=call_id,
        arrived=1.0,
        prompt_ids=ids,
        key=prompt_key(ids),
        response_ids=ids[:1],
        logprobs=logprobs,
        occurrence=occurrence,
        policy_version=0,
        finish_reason="stop",
    )


def over(tmp_path, test):
    async def main():
        path = str(tmp_path / "s.sqlite")
        with contextlib.closing(Store(path)) as store:
            await test(store, path)

    asyncio.run(main())


def test_the_writes_of_one_turn_share_a_commit_and_saved_waits_for_it(tmp_path):
    async def test(store, path):
        commits = []
        store.db.set_trace_callback(lambda sql: commits.append(sql) if sql == "COMMIT" else None)

        async def create(name):
            store.create([new(name)])
            assert committed(path, f"SELECT COUNT(*) FROM rollouts WHERE rollout_id = '{name}'") == 0
            await store.saved()
            assert committed(path, f"SELECT COUNT(*) FROM rollouts WHERE rollout_id = '{name}'") == 1

        await asyncio.gather(*(create(f"r{n}") for n in range(10)))
        assert len(commits) == 1
        await store.saved()  # nothing to wait for

    over(tmp_path, test)


def test_a_lazy_write_is_committed_with_the_next_one_or_soon(tmp_path):
    async def test(store, path):
        events = Events(store)
        events.deliver(1)
        assert committed(path, "SELECT COUNT(*) FROM deliveries") == 0
        store.create([new("a")])
        await store.saved()
        assert committed(path, "SELECT COUNT(*) FROM deliveries") == 1
        events.deliver(2)
        async with asyncio.timeout(5):
            while committed(path, "SELECT COUNT(*) FROM deliveries") == 1:
                await asyncio.sleep(0)

    over(tmp_path, test)


FAILURES = {
    "at the commit": """
    store.db.execute("CREATE TABLE child (of INTEGER REFERENCES rollouts (seq) DEFERRABLE INITIALLY DEFERRED)")
    store.db.execute("PRAGMA foreign_keys=ON")
    store.create([new("b")])
    store.write("INSERT INTO child VALUES (999)")
""",
    "at the write": """
    store.db.execute("PRAGMA max_page_count = 1")  # SQLite takes the size that the file has
    store.create([{**new("b"), "input": "x" * 100_000}])
""",
}


@pytest.mark.parametrize(
    ("when", "reason"),
    [("at the commit", "FOREIGN KEY constraint failed"), ("at the write", "database or disk is full")],
)
def test_a_store_that_cannot_be_written_ends_the_process(tmp_path, when, reason):
    path = str(tmp_path / "s.sqlite")
    script = f"""
import asyncio
from harnessrl.service.store import Store
from tests.service.test_store import new

async def main():
    store = Store({path!r})
    store.create([new("a")])
    await store.saved()
{FAILURES[when]}
    await store.saved()
    print("it went on")

asyncio.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == f"store {path!r} cannot be written: {reason}\n"
    assert committed(path, "SELECT group_concat(rollout_id) FROM rollouts") == "a"


def test_calls_and_occurrences_are_counted_by_attempt(tmp_path):
    async def test(store, path):
        events = Events(store)
        store.create([new("a"), new("b")])
        one, two = (store.find(name)["seq"] for name in "ab")
        events.add_call(one, "0", recorded([1, 2], 0, "x"))
        events.add_call(one, "0", recorded([1, 2], 3, "y"))
        events.add_call(one, "0", recorded([3], 0, "z"))
        events.add_call(one, "1", recorded([1, 2], 0, "x"))
        events.append(one, "0", "reward", {"value": 1}, None)
        key = prompt_key(np.array([1, 2], np.int32))
        assert events.counts(one, "0", key) == (3, 4)
        assert events.counts(one, "1", key) == (1, 1)
        assert events.counts(two, "0", key) == (0, 0)
        assert events.counts(one, "0", key + 1) == (3, 0)
        assert [call["call_id"] for call in events.calls(one, "0")] == ["x", "y", "z"]

    over(tmp_path, test)


def test_a_call_is_committed_before_its_answer_can_be_sent(tmp_path):
    class OneCall:
        async def run(self, turn):
            return Outcome(calls=[recorded([1, 2], 0, "x")], answer={"choices": []})

    async def test(store, path):
        (rollout,) = store.create([new("a")])
        seq = store.find(rollout["rollout_id"])["seq"]
        ask = read_chat({"messages": [{"role": "user", "content": "x"}]})
        turn = Turn(rollout=seq, rollout_id="a", attempt="0", mode="train", ask=ask, raw=b"{}", agent="", arrived=1.0)
        await Gateway(store, Events(store), OneCall())._record(turn)
        assert committed(path, "SELECT COUNT(*) FROM events") == 1
        assert committed(path, "SELECT COUNT(*) FROM deliveries") == 0

    over(tmp_path, test)


def test_opening_the_store_of_another_is_refused(tmp_path):
    async def test(store, path):
        with pytest.raises(ValueError, match="in use by another service"):
            Store(path)

    over(tmp_path, test)
