"""What the service's tests share: a service in this process or in its own, and a client for it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from harnessrl.service.main import running
from harnessrl.service.settings import ServiceConfig

KEY = "master-key"
ROOT = str(Path(__file__).resolve().parents[2])


class Client:
    """An HTTP client of one service."""

    def __init__(self, url: str, session: aiohttp.ClientSession, controller: str = "") -> None:
        self.url, self.session, self.controller = url, session, controller

    async def send(
        self, method: str, path: str, body: Any = None, key: str | None = KEY, **more: Any
    ) -> tuple[int, Any]:
        """One request; status and JSON body (None where there is none)."""
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        async with self.session.request(method, self.url + path, data=data, headers=headers, **more) as response:
            raw = await response.read()
            self.headers = response.headers
            return response.status, json.loads(raw) if raw else None

    async def get(self, path: str, **more: Any) -> Any:
        """GET that must succeed."""
        status, body = await self.send("GET", path, **more)
        assert status == 200, (status, body)
        return body

    async def create(self, *ids: str, **fields: Any) -> None:
        """Create rollouts that no controller runs, unless config says so."""
        items = [{"input": {}, "rollout_id": name, **fields} for name in ids]
        status, body = await self.send("POST", "/api/rollouts", items)
        assert status == 201, body

    async def chat(
        self, rollout: str, text: str = "the key", mode: str = "train", attempt: str = "0", **fields: Any
    ) -> tuple[int, Any]:
        """One chat call of one user message."""
        body = {"model": "any", "messages": [{"role": "user", "content": text}], **fields}
        return await self.send("POST", chat_path(rollout, mode, attempt), body)

    async def calls(self, rollout: str) -> list[dict[str, Any]]:
        """The data of the rollout's model_request events, as a trainer reads them."""
        events = await self.get(f"/api/rollouts/{rollout}/events?event_type=model_request&format=triplet")
        return [event["data"] for event in events]

    async def traces(self, count: int, wait: float = 20.0) -> list[dict[str, Any]]:
        """The first `count` finished rollouts."""
        items: list[dict[str, Any]] = []
        after = 0
        while len(items) < count:
            page = await self.get(f"/api/traces?after={after}&wait={wait}")
            assert page["items"], f"{len(items)} of {count} rollouts finished in {wait} s"
            items += page["items"]
            after = page["next_after"]
        return items


def chat_path(rollout: str, mode: str = "train", attempt: str = "0") -> str:
    """The chat route of a rollout."""
    return f"/proxy/rollout/{rollout}/attempt/{attempt}/mode/{mode}/openai/v1/chat/completions"


@asynccontextmanager
async def service(folder: Path, **settings: Any) -> AsyncIterator[Client]:
    """A service on this event loop, with its store in `folder`."""
    values = {"store": str(folder / "store.sqlite"), "key": KEY, "run_folder": str(folder), **settings}
    async with running(ServiceConfig(**values)) as where, aiohttp.ClientSession() as session:
        yield Client(where.url, session, where.controller)


def over_engine(tmp_path: Path, tokenizer: str, engine: Any, test: Any, **settings: Any) -> None:
    """Run an async test against a service on the engine, with rollouts r0 and r1."""

    async def main() -> None:
        async with service(tmp_path, engine=engine.address, tokenizer=tokenizer, **settings) as client:
            await client.create("r0", "r1")
            await test(client)

    asyncio.run(main())


class Child:
    """A child process that was told its configuration and is ready."""

    def __init__(self, module: str, config: dict[str, Any], **more: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            **more,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(config).encode() + b"\n")
        self.process.stdin.flush()
        self.line = self.process.stdout.readline()

    @property
    def ready(self) -> dict[str, Any]:
        """The ready line."""
        assert self.line, self.end()[1]
        return json.loads(self.line)

    def end(self) -> tuple[int, str]:
        """Close its stdin, wait; exit code and stderr."""
        _, errors = self.process.communicate(timeout=20)
        return self.process.returncode, errors.decode()

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.communicate(timeout=20)


@contextmanager
def child(module: str, config: dict[str, Any], **more: Any) -> Iterator[Child]:
    """A child process that is gone after the block."""
    started = Child(module, config, **more)
    try:
        yield started
    finally:
        if started.process.returncode is None:
            started.end()


def service_child(folder: Path, **settings: Any) -> Any:
    """The service as a process of its own."""
    config = {"store": str(folder / "store.sqlite"), "key": KEY, "run_folder": str(folder), **settings}
    return child("harnessrl.service.main", config)


def worker_child(controller: str, capacity: int = 8) -> Any:
    """A worker as a process of its own, which can import the tests' harnesses."""
    return child("harnessrl.service.worker", {"controller": controller, "capacity": capacity, "path": [ROOT]})


async def in_thread(function: Any, *args: Any, **more: Any) -> Any:
    """Wait for something that blocks."""
    return await asyncio.to_thread(function, *args, **more)
