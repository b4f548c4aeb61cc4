"""A worker: takes rollouts from the controller and runs their harnesses. `python -m harnessrl.service.worker`

It reads one JSON line (WorkerConfig) from stdin and prints {"worker": id} when the controller knows it. Heartbeats come
from a thread with a socket of its own: a harness that keeps this process busy is not mistaken for a dead machine.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import orjson
import zmq

from harnessrl.service import child, harness
from harnessrl.service.settings import WorkerConfig, read_settings
from harnessrl.service.sockets import Frames, Socket

log = logging.getLogger(__name__)


class Worker:
    """Runs whatever the controller sends until it is closed."""

    def __init__(self, config: WorkerConfig) -> None:
        """Connect to the controller.

        Raises:
            ValueError: Its address is none.
        """
        self.name = f"{os.uname().nodename}-{os.getpid()}-{os.urandom(4).hex()}"
        self.welcome = asyncio.Event()
        self._epoch = 0
        self._welcomed: int | None = None
        """The epoch that the controller has welcomed; None until it has."""
        self.stuck = 0
        """Harnesses that did not stop when the worker closed."""
        self._config = config
        self._runs: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._context = zmq.Context()
        self._socket = Socket(self._context, zmq.DEALER, self._on_message)
        self._socket.raw.setsockopt(zmq.IDENTITY, self.name.encode())  # the same again after a broken connection
        self._socket.connect(config.controller)
        self._guard = harness.Guard()
        self._beats: threading.Thread | None = None
        self._closed = threading.Event()
        self._hello()

    async def close(self) -> None:
        """Stop every harness, tell the controller, and disconnect."""
        self._forget_all()
        if self._runs:
            await asyncio.wait(self._runs.values(), timeout=harness.GRACE_SECONDS + 2)
        self.stuck = len(self._runs)
        self._guard.close()
        self._send(op="bye")
        self._closed.set()
        if self._beats is not None:
            self._beats.join()
        self._socket.close(linger=500)
        self._context.term()

    def _send(self, **message: Any) -> None:
        self._socket.send([orjson.dumps({"worker": self.name, **message})])

    def _hello(self) -> None:
        self._send(op="hello", epoch=self._epoch, capacity=self._config.capacity)

    def _on_message(self, frames: Frames) -> None:
        message = orjson.loads(frames[-1])
        if message["op"] == "welcome":
            self._welcomed = message["epoch"]
            self.welcome.set()
            if self._beats is None:
                arguments = (asyncio.get_running_loop().call_soon_threadsafe, float(message["heartbeat"]))
                self._beats = threading.Thread(target=self._beat, args=arguments, name="heartbeat", daemon=True)
                self._beats.start()
        elif message["op"] == "run":
            key = (message["rollout_id"], message["attempt"])
            task = asyncio.get_running_loop().create_task(self._run(message))
            self._runs[key] = task
            task.add_done_callback(lambda _: self._runs.pop(key, None))
        elif message["op"] == "cancel":
            task_or_none = self._runs.get((message["rollout_id"], message["attempt"]))
            if task_or_none is not None:
                task_or_none.cancel()

    def _beat(self, call: Callable[..., Any], seconds: float) -> None:
        """In its own thread: report until closed; start over where the controller no longer knows this worker."""
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.connect(self._config.controller)
        while not self._closed.wait(seconds):
            if (epoch := self._welcomed) is not None:
                socket.send(orjson.dumps({"op": "beat", "worker": self.name, "epoch": epoch}))
            while socket.poll(0):
                call(self._start_over, orjson.loads(socket.recv())["epoch"])
        socket.close()

    def _start_over(self, epoch: int) -> None:
        """The controller did not know this worker at a beat of `epoch`: stop everything and introduce it again."""
        if epoch != self._welcomed:
            return  # that was before the last introduction
        log.warning("the controller no longer knows this worker: stopping %d harnesses", len(self._runs))
        self._welcomed = None  # no beats until the controller has answered
        self._epoch += 1
        self._forget_all()
        self._hello()

    def _forget_all(self) -> None:
        for task in self._runs.values():
            task.cancel()

    async def _run(self, message: dict[str, Any]) -> None:
        local, env, timeout, output = (message[name] for name in ("local", "env", "timeout", "log"))
        try:
            if local.get("command"):
                ending = await harness.run_command(local["command"], env, timeout, output, self._guard)
            else:
                ending = await harness.run_function(local["agent_class"], env, timeout, output)
        except asyncio.CancelledError:
            return  # whoever cancelled it has given the attempt up
        except Exception as error:  # not the harness's fault: the attempt may run elsewhere
            log.exception("rollout %s could not be run", message["rollout_id"])
            ending = harness.Ending(ok=False, failure="lost", message=f"the worker failed: {error}")
        self._send(
            op="done",
            rollout_id=message["rollout_id"],
            attempt=message["attempt"],
            ok=ending.ok,
            failure=ending.failure,
            message=ending.message,
        )


async def _main(config: WorkerConfig, follow_stdin: bool) -> None:
    stop = child.stop_event(follow_stdin=follow_stdin)
    try:
        worker = Worker(config)
    except ValueError as error:
        child.refuse(str(error))
    welcomed = asyncio.ensure_future(worker.welcome.wait())
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait((welcomed, stopped), return_when=asyncio.FIRST_COMPLETED)
    if worker.welcome.is_set():
        child.announce({"worker": worker.name})
    await stopped
    welcomed.cancel()
    await worker.close()
    if worker.stuck:
        os._exit(1)  # a task that ignores its cancellation would keep the process alive


def main() -> None:
    """Run one worker until its parent goes, or SIGTERM or SIGINT."""
    serve(child.read_line(), follow_stdin=True)


def serve(line: bytes | str, *, follow_stdin: bool) -> None:
    """Run the worker that a JSON line of WorkerConfig describes."""
    logging.basicConfig(level=logging.INFO, format="worker: %(message)s")
    try:
        config = read_settings(WorkerConfig, line)
    except ValueError as error:
        child.refuse(str(error))
    sys.path[:0] = config.path
    asyncio.run(_main(config, follow_stdin))


if __name__ == "__main__":
    main()
