"""The service's side of the engine wire: many requests in flight over one ZeroMQ DEALER (frames in wire.py)."""

from __future__ import annotations

import asyncio
import logging

import numpy as np
import zmq
from numpy.typing import NDArray
from zmq.utils.monitor import parse_monitor_message

from harnessrl.service import wire
from harnessrl.service.sockets import Frames, Socket

log = logging.getLogger(__name__)


class EngineLost(Exception):
    """The engine cannot be reached, or the connection broke with requests in flight."""


class EngineClient:
    """Sends prompts to a token engine and resolves a future a reply."""

    def __init__(self, address: str) -> None:
        """Connect to the engine that binds `address`; it may come up later."""
        self._context = zmq.Context()
        self._socket = Socket(self._context, zmq.DEALER, self._on_reply)
        self._pending: dict[bytes, asyncio.Future[wire.Reply]] = {}
        self._ids: dict[asyncio.Future[wire.Reply], bytes] = {}
        self._connected = asyncio.Event()
        self._monitor = self._socket.raw.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        asyncio.get_running_loop().add_reader(self._monitor.getsockopt(zmq.FD), self._on_monitor)
        self._socket.raw.connect(address)
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

    def submit(self, prompt_ids: NDArray[np.int32], sampling: wire.Sampling) -> asyncio.Future[wire.Reply]:
        """Send one request. The future ends with its reply, or with EngineLost."""
        request_id = wire.new_request_id()
        future: asyncio.Future[wire.Reply] = asyncio.get_running_loop().create_future()
        self._pending[request_id], self._ids[future] = future, request_id
        self._socket.send(wire.encode_request(request_id, prompt_ids, sampling))
        return future

    def cancel(self, future: asyncio.Future[wire.Reply]) -> None:
        """Ask the engine to stop working on a request; its future still ends with what was sampled so far."""
        if (request_id := self._ids.get(future)) is not None:
            self._socket.send(wire.encode_cancel(request_id))

    def forget(self, future: asyncio.Future[wire.Reply]) -> None:
        """Stop waiting for a reply."""
        self._pending.pop(self._ids.pop(future, b""), None)

    def close(self) -> None:
        """Close the connection; requests in flight end with EngineLost."""
        asyncio.get_running_loop().remove_reader(self._monitor.getsockopt(zmq.FD))
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
        future = self._pending.pop(reply.request_id, None)
        if future is not None:
            del self._ids[future]
            if not future.done():
                future.set_result(reply)

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
        for future in self._pending.values():
            if not future.done():
                future.set_exception(EngineLost(message))
        self._pending.clear()
        self._ids.clear()
