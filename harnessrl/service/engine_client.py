"""The service's side of the engine wire: many requests in flight over one ZeroMQ DEALER (frames in wire.py)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence

import numpy as np
import zmq
from numpy.typing import NDArray
from zmq.utils.monitor import parse_monitor_message

from harnessrl.service import wire
from harnessrl.service.sockets import Frames, Socket, descriptor

log = logging.getLogger(__name__)


class EngineLost(Exception):
    """The engine cannot be reached, or the connection broke with requests in flight."""


class Batch:
    """Some requests in flight that are waited for together."""

    __slots__ = ("_missing", "_waiter", "ids", "results")

    def __init__(self, count: int) -> None:
        self.ids: list[bytes] = []
        """One request id each."""
        self.results: list[wire.Reply | EngineLost | None] = [None] * count
        """What became of each request; None while it is in flight."""
        self._missing = count
        self._waiter: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Wait until every request has its result. May be cancelled and called again: results still come in."""
        if self._missing:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def end(self, index: int, result: wire.Reply | EngineLost) -> None:
        """Note the result of one request."""
        self.results[index] = result
        self._missing -= 1
        if not self._missing and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineClient:
    """Sends prompts to a token engine and collects its replies."""

    def __init__(self, address: str) -> None:
        """Connect to the engine that binds `address`; it may come up later.

        Raises:
            ValueError: It is no address.
        """
        self._context = zmq.Context()
        self._socket = Socket(self._context, zmq.DEALER, self._on_reply)
        self._pending: dict[bytes, tuple[Batch, int]] = {}
        self._connected = asyncio.Event()
        self._monitor = self._socket.raw.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._socket.connect(address)
        asyncio.get_running_loop().add_reader(descriptor(self._monitor), self._on_monitor)
        self._socket.send(wire.encode_hello())
        self._on_monitor()

    async def ready(self, seconds: float) -> None:
        """Wait until the engine is connected.

        Raises:
            EngineLost: It was not, within `seconds`.
        """
        if self._connected.is_set():
            return
        try:
            await asyncio.wait_for(self._connected.wait(), seconds)
        except TimeoutError:
            raise EngineLost(f"no engine within {seconds:g} s") from None

    def submit(self, prompt_ids: NDArray[np.int32], samplings: Sequence[wire.Sampling]) -> Batch:
        """Send a prompt once for each sampling."""
        batch = Batch(len(samplings))
        for index, sampling in enumerate(samplings):
            request_id = wire.new_request_id()
            batch.ids.append(request_id)
            self._pending[request_id] = (batch, index)
            self._socket.send(wire.encode_request(request_id, prompt_ids, sampling))
        return batch

    async def cancel(self, batch: Batch, seconds: float) -> None:
        """Have the engine stop working on a batch, and wait a while for what it had sampled."""
        for request_id in batch.ids:
            if request_id in self._pending:
                self._socket.send(wire.encode_cancel(request_id))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(batch.wait(), seconds)
        for request_id in batch.ids:
            self._pending.pop(request_id, None)

    def close(self) -> None:
        """Close the connection; requests in flight end with EngineLost."""
        asyncio.get_running_loop().remove_reader(descriptor(self._monitor))
        self._socket.raw.disable_monitor()
        self._socket.close()
        self._fail("the service is closing")
        self._context.destroy(linger=0)

    def _on_reply(self, frames: Frames) -> None:
        try:
            reply = wire.decode_reply(frames)
        except ValueError as error:
            log.error("engine sent a malformed reply: %s", error)
            request_id = frames[0] if frames else b""
            reply = wire.Reply(
                request_id=request_id,
                ids=np.empty(0, np.int32),
                logprobs=np.empty(0, np.float32),
                finish_reason="error",
                policy_version=0,
                error=f"malformed reply: {error}",
            )
        batch, index = self._pending.pop(reply.request_id, (None, 0))
        if batch is not None:
            batch.end(index, reply)

    def _on_monitor(self) -> None:
        while True:
            try:
                message = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            if message["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected.set()
            elif message["event"] == zmq.EVENT_DISCONNECTED:
                self._connected.clear()
                self._fail("the connection to the engine broke")

    def _fail(self, message: str) -> None:
        pending, self._pending = self._pending, {}
        for batch, index in pending.values():
            batch.end(index, EngineLost(message))
