"""Rollouts for the trainer: the service and its workers as child processes, asked over HTTP while the engine works."""

from __future__ import annotations

import http.client
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from harnessrl.config import Config
from harnessrl.errors import RunError
from harnessrl.processes import Child
from harnessrl.train.engine_server import EngineServer

IDLE_SECONDS = 0.03
"""How long the engine waits for a request, and how often finished rollouts are asked for while it is idle."""
MOST_LOST = 10
"""Workers that may end during a run and are replaced."""
ENDING_SECONDS = 5.0
"""How long a service that stopped answering may take to end, and so to be what is told of."""
BUSY_SECONDS = 0.3
"""How often they are asked for while it works: each question waits for a service that is busy with calls."""


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

    def forget(self, rollout_ids: Sequence[str]) -> None:
        """Remove rollouts with all that the service has of them, so that their ids can be used again."""
        for rollout_id in rollout_ids:
            self._call("DELETE", f"/api/rollouts/{rollout_id}")

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
            status, data = self._request(method, path, payload, headers)
        except (http.client.HTTPException, OSError):  # an idle connection was closed; all calls are idempotent
            self.children[0].check()
            self.http.close()
            try:
                status, data = self._request(method, path, payload, headers)
            except (http.client.HTTPException, OSError) as error:
                self.children[0].check(ENDING_SECONDS)
                raise RunError(f"the service at {self.url} does not answer: {error!r}") from error
        if status >= 400:
            raise RunError(f"the service refused {method} {path.partition('?')[0]}: {status} {data.decode()[:500]}")
        return orjson.loads(data) if data else None

    def _request(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
        self.http.request(method, path, body, headers)
        response = self.http.getresponse()
        return response.status, response.read()


def rollout_specs(
    inputs: Sequence[Any], config: Config, prefix: str, size: int, first: int = 0, *, train: bool = True
) -> list[dict[str, Any]]:
    """Requests for rollouts: one group of `size` for each input, with ids derived from the seed.

    Args:
        inputs: one a group.
        config: the harness and its timeout.
        prefix: begins every id; no other request of the run may share it with the numbers of groups below.
        size: rollouts of a group.
        first: number of the first group.
        train: whether calls are sampled as in training, or in `val` mode.
    """
    task = config.task
    agent = {"agent_class": task.harness} if task.harness else {"command": list(task.command)}
    specs = []
    for index, item in enumerate(inputs, first):
        group = f"{prefix}-{index:04d}"
        for member in range(size):
            specs.append(
                {
                    "rollout_id": f"{group}-{member:03d}",
                    "input": item,
                    "is_train": train,
                    "config": {"timeout_seconds": task.timeout, "local": agent | {"env_map": dict(task.env_map)}},
                    "metadata": {"group_id": group, "sample_idx_in_batch": member},
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
