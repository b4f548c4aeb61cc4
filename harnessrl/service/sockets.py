"""A ZeroMQ socket on the running event loop, without the future that zmq.asyncio makes for every message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import zmq

_NOW = int(zmq.NOBLOCK)
Frames = list[bytes]


def descriptor(socket: zmq.Socket[bytes]) -> int:
    """The file descriptor that signals a socket's events."""
    return int(socket.getsockopt(zmq.FD))


class Socket:
    """Sends at once and hands every received message to a callback. Closing drops what is unsent."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], kind: int, on_message: Callable[[Frames], None]
    ) -> None:
        self.raw = context.socket(kind)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self.raw.setsockopt(option, 0)
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._drain_soon = False
        self._descriptor = descriptor(self.raw)
        self._loop.add_reader(self._descriptor, self.drain)

    def connect(self, address: str) -> None:
        """Connect to an address, which may be bound later.

        Raises:
            ValueError: It is no address.
        """
        try:
            self.raw.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise ValueError(f"{address!r} cannot be connected to: {error}") from None

    def bind(self, address: str) -> str:
        """Listen at an address; returns it with its port filled in.

        Raises:
            ValueError: It is taken, or no address.
        """
        try:
            self.raw.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise ValueError(f"{address!r} cannot be listened at: {error}") from None
        endpoint: bytes = self.raw.last_endpoint  # type: ignore[assignment]
        return endpoint.decode()

    def send(self, frames: Sequence[bytes]) -> None:
        """Queue one message (queues are unbounded: what is in flight is bounded by the callers)."""
        self.raw.send_multipart(frames, _NOW)
        if not self._drain_soon:  # sending may consume the file descriptor's only signal for an arrived message
            self._drain_soon = True
            self._loop.call_soon(self.drain)

    def drain(self) -> None:
        """Handle every message that has arrived."""
        self._drain_soon = False
        while not self.raw.closed:
            try:
                frames = self.raw.recv_multipart(_NOW)
            except zmq.Again:
                return
            try:
                self._on_message(frames)
            except Exception:
                self._loop.call_soon(self.drain)  # the messages behind a bad one are not lost
                raise

    def close(self, linger: int = 0) -> None:
        """Stop listening and close, giving what is unsent `linger` milliseconds; may be called twice."""
        if not self.raw.closed:
            self._loop.remove_reader(self._descriptor)
            self.raw.close(linger=linger)
