"""A token engine for tests: real ZeroMQ, no model. It echoes the end of the prompt, deterministically."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import zmq

from harnessrl.service import wire

Answer = tuple[list[int], list[float], str]


def echo(request: wire.Request) -> Answer:
    """The prompt's last three ids, then the first stop id; logprobs -0.5, -1.0, ...; cut at max_tokens."""
    assert request.sampling is not None
    ids = [*request.prompt_ids[-3:].tolist(), *request.sampling.stop_ids[:1]][: request.sampling.max_tokens]
    stopped = ids[-1] in request.sampling.stop_ids
    return ids, [-(index + 1) / 2 for index in range(len(ids))], "stop" if stopped else "length"


class ToyEngine:
    """Binds a ROUTER in a thread. `hold()` keeps requests unanswered until `release()`; cancelling one aborts it."""

    def __init__(self, answer: Callable[[wire.Request], Answer] = echo, address: str = "tcp://127.0.0.1:*") -> None:
        self.answer = answer
        self.version = 0
        self.requests: list[wire.Request] = []
        """Every generate request, in order of arrival."""
        self.cancelled: list[bytes] = []
        self.partial: list[int] = []
        """What a cancelled request had sampled before."""
        self._held: dict[bytes, tuple[bytes, wire.Request]] = {}
        self._holding = False
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(address)
        self.address: str = self._socket.last_endpoint.decode()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> ToyEngine:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def hold(self) -> None:
        """Keep what arrives from now on."""
        self._holding = True

    def release(self) -> None:
        """Answer what is held, and what arrives from now on."""
        self._holding = False

    def wait(self, count: int, *, cancelled: bool = False, seconds: float = 10.0) -> None:
        """Block until `count` requests (or cancels) have arrived in all."""
        with self._changed:
            done = self._changed.wait_for(lambda: len(self.cancelled if cancelled else self.requests) >= count, seconds)
        assert done, f"{len(self.requests)} requests and {len(self.cancelled)} cancels in {seconds} s"

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._socket.poll(2):
                self._handle(self._socket.recv_multipart())
            if not self._holding:
                for identity, request in list(self._held.values()):
                    self._reply(identity, request, *self.answer(request))

    def _handle(self, frames: list[bytes]) -> None:
        identity, request = frames[0], wire.decode_request(frames[1:])
        with self._changed:
            if request.op == "generate":
                self.requests.append(request)
                self._held[request.request_id] = (identity, request)
            elif request.op == "cancel":
                self.cancelled.append(request.request_id)
            self._changed.notify_all()
        if request.op == "generate" and not self._holding:
            self._reply(identity, request, *self.answer(request))
        elif request.op == "cancel" and request.request_id in self._held:
            _, held = self._held[request.request_id]
            self._reply(identity, held, self.partial, [-0.25] * len(self.partial), "abort")

    def _reply(
        self, identity: bytes, request: wire.Request, ids: list[int], logprobs: list[float], finish: str
    ) -> None:
        del self._held[request.request_id]
        error = "the toy engine failed" if finish == "error" else None
        frames = wire.encode_reply(
            request.request_id,
            np.array(ids, np.int32),
            np.array(logprobs, np.float32),
            finish_reason=finish,
            policy_version=self.version,
            error=error,
        )
        self._socket.send_multipart([identity, *frames])
