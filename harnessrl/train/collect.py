"""Rollouts for the trainer: the service and its workers as child processes, and the engine that answers their calls."""

from __future__ import annotations

import http.client
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import zmq

from harnessrl.config import Config
from harnessrl.engine.base import Engine
from harnessrl.errors import RunError
from harnessrl.processes import Child
from harnessrl.service import wire

IDLE_SECONDS = 0.03
"""How long the engine waits for a request, and how often finished rollouts are asked for while it is idle."""
MOST_LOST = 10
"""Workers that may end during a run and are replaced."""
BUSY_SECONDS = 0.3
"""How often they are asked for while it works: each question waits for a service that is busy with calls."""


class EngineServer:
    """Answers the service's token requests from an engine, one step at a time, in the caller's thread.

    Whoever calls `pump` lends the engine time; while nobody does (an update runs), requests wait in the socket and the
    harness sees a slow answer.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.socket = zmq.Context.instance().socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.address = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.peers: dict[bytes, bytes] = {}
        self.served = 0

    def pump(self, idle_milliseconds: int) -> int:
        """Take every waiting request, advance the engine once, send what finished; wait for a request if idle.

        Returns:
            requests answered.
        """
        if not self.engine.open_requests:
            self.socket.poll(idle_milliseconds)
        while self.socket.poll(0):
            self._receive(self.socket.recv_multipart())
        replies = self.engine.step()
        for reply in replies:
            self._reply(reply)
        self.served += len(replies)
        return len(replies)

    def drain(self, seconds: float = 60.0) -> None:
        """Stop admitting and let what runs end (calls of rollouts that timed out, say); queued requests wait.

        Raises:
            RunError: requests still run after `seconds`, by their ids.
        """
        self.engine.drain()
        deadline = time.monotonic() + seconds
        while self.engine.running_requests:
            self.pump(0)
            if time.monotonic() > deadline:
                names = ", ".join(request.hex() for request in self.engine.running_requests[:5])
                raise RunError(f"requests still run after {seconds:.0f} s of draining: {names}")

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()

    def _receive(self, frames: list[bytes]) -> None:
        peer, *message = frames
        try:
            request = wire.decode_request(message)
        except ValueError as error:
            if message and len(message[0]) == wire.ID_BYTES:
                self.peers[message[0]] = peer
                self._refuse(message[0], error)
            return
        if request.op == "cancel":
            reply = self.engine.cancel(request.request_id)
            if reply is not None:
                self._reply(reply)
        elif request.op == "generate":
            assert request.sampling is not None
            self.peers[request.request_id] = peer
            try:
                self.engine.submit(request.request_id, request.prompt_ids, request.sampling)
            except ValueError as error:
                self._refuse(request.request_id, error)

    def _refuse(self, request_id: bytes, error: ValueError) -> None:
        empty = wire.Reply(
            request_id=request_id,
            ids=[],
            logprobs=[],
            finish_reason="error",
            policy_version=self.engine.version,
            error=str(error),
        )
        self._reply(empty)

    def _reply(self, reply: wire.Reply) -> None:
        frames = wire.encode_reply(
            reply.request_id,
            reply.ids,
            reply.logprobs,
            finish_reason=reply.finish_reason,
            policy_version=reply.policy_version,
            error=reply.error,
        )
        self.socket.send_multipart([self.peers.pop(reply.request_id), *frames])


class Services:
    """The service and its workers, started as children, and the trainer's HTTP client to them.

    Args:
        config: the run's configuration.
        folder: the policy's folder (its tokenizer).
        engine: address of the EngineServer.
        max_context: tokens of prompt and response together.
        start: first step of this run; each start has a store of its own.
        path: folders that the workers put on sys.path.
    """

    def __init__(
        self, config: Config, folder: Path, engine: str, max_context: int, start: int, path: Sequence[str]
    ) -> None:
        self.key = secrets.token_hex(16)
        self.cursor: int = 0
        self.children: list[Child] = []
        self.folder = config.folder / "service"
        self.lost_workers = 0
        store = config.folder / "service" / f"from-step-{start}.sqlite"
        store.parent.mkdir(parents=True, exist_ok=True)
        for old in store.parent.glob(store.name + "*"):
            old.unlink()
        settings = {
            "host": config.service.host,
            "port": config.service.port,
            "store": str(store),
            "key": self.key,
            "engine": engine,
            "model": config.policy.name,
            "tokenizer": str(folder),
            "train_temperature": config.policy.train_temperature,
            "val_temperature": config.policy.val_temperature,
            "hold_seconds": config.service.hold_seconds,
            "max_context": max_context,
            "max_response": config.policy.max_response,
            "max_calls": config.policy.max_calls,
            "rollout_timeout": config.task.timeout,
            "attempts": config.service.attempts,
            "seed": config.seed,
            "run_folder": str(config.folder),
        }
        try:
            service = self._start("harnessrl.service.main", settings, "service.log")
            ready = service.ready()
            self.url = ready["url"]
            self.http = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=60.0)
            worker = {"controller": ready["controller"], "capacity": config.service.capacity, "path": list(path)}
            self.start_worker = lambda: self._start("harnessrl.service.worker", worker, "worker.log")
            for child in [self.start_worker() for _ in range(config.service.workers)]:
                child.ready()
        except BaseException:
            self.close()
            raise

    def _start(self, module: str, settings: Mapping[str, Any], log: str) -> Child:
        self.children.append(Child(module, settings, self.folder / log))
        return self.children[-1]

    def create(self, rollouts: Sequence[Mapping[str, Any]]) -> None:
        """Queue rollouts; known ids are left as they are."""
        self._call("POST", "/api/rollouts", list(rollouts))

    def finished(self) -> list[dict[str, Any]]:
        """Rollouts that became terminal since the last call, each with its calls and reward."""
        page = self._call("GET", f"/api/traces?after={self.cursor}&limit=1000&wait=0")
        self.cursor = page["next_after"]
        return page["items"]  # type: ignore[no-any-return]

    def check(self) -> None:
        """Replace workers that have ended: the controller gives their rollouts to others, as new attempts.

        Raises:
            ChildError: the service has ended, or more than `MOST_LOST` workers have.
        """
        service, *workers = self.children
        service.check()
        for worker in workers:
            if worker.process.poll() is not None:
                self.lost_workers += 1
                if self.lost_workers > MOST_LOST:
                    worker.check()
                self.children.remove(worker)
                worker.stop()
                self.start_worker().ready()

    def close(self) -> None:
        """Stop workers first, then the service."""
        for child in reversed(self.children):
            child.stop()

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        payload = None if body is None else orjson.dumps(body)
        try:
            response = self._request(method, path, payload, headers)
        except (http.client.HTTPException, ConnectionError):  # an idle connection was closed; all calls are idempotent
            self.children[0].check()
            self.http.close()
            response = self._request(method, path, payload, headers)
        data = response.read()
        if response.status >= 400:
            raise RunError(
                f"the service refused {method} {path.partition('?')[0]}: {response.status} {data.decode()[:500]}"
            )
        return orjson.loads(data)

    def _request(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> http.client.HTTPResponse:
        self.http.request(method, path, body, headers)
        return self.http.getresponse()


def rollout_specs(inputs: Sequence[Any], config: Config, step: int, train: bool = True) -> list[dict[str, Any]]:
    """Requests for one step's rollouts: `group_size` for each input, with ids derived from the seed."""
    task = config.task
    agent = {"agent_class": task.harness} if task.harness else {"command": list(task.command)}
    specs = []
    for index, item in enumerate(inputs):
        group = f"{'train' if train else 'val'}-{config.seed}-{step:05d}-{index:04d}"
        for member in range(task.group_size if train else 1):
            specs.append(
                {
                    "rollout_id": f"{group}-{member:03d}",
                    "input": item,
                    "is_train": train,
                    "config": {"timeout_seconds": task.timeout, "local": agent | {"env_map": dict(task.env_map)}},
                    "metadata": {"group_id": group, "step": step, "sample_idx_in_batch": member},
                }
            )
    return specs


def collect(
    services: Services,
    server: EngineServer,
    specs: Sequence[Mapping[str, Any]],
    stall_seconds: float,
    report: Callable[[int, int], None],
) -> list[dict[str, Any]]:
    """Create rollouts and serve the engine until all of them are terminal.

    Args:
        report: called with (finished, requested) now and then.
    Raises:
        ChildError: the service or a worker ended.
        RunError: nothing happened for `stall_seconds`.
    """
    services.create(specs)
    wanted = {spec["rollout_id"] for spec in specs}
    items: list[dict[str, Any]] = []
    last_event = next_poll = time.monotonic()
    while len(items) < len(wanted):
        answered = server.pump(int(IDLE_SECONDS * 1000))
        now = time.monotonic()
        if now >= next_poll or (not server.engine.open_requests and now >= next_poll - BUSY_SECONDS + IDLE_SECONDS):
            fresh = [item for item in services.finished() if item["rollout_id"] in wanted]
            items += fresh
            services.check()
            report(len(items), len(wanted))
            next_poll = time.monotonic() + BUSY_SECONDS
            answered += len(fresh)
        if answered:
            last_event = now
        elif now - last_event > stall_seconds:
            missing = sorted(wanted - {item["rollout_id"] for item in items})
            raise RunError(f"no call and no rollout completed for {stall_seconds:.0f} s; open: {missing[:5]}")
    return items
