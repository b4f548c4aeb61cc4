"""The trainer's engine behind a socket, where the service asks for tokens."""

from __future__ import annotations

import time

import zmq

from harnessrl.engine.base import Engine
from harnessrl.errors import RunError
from harnessrl.service import wire


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
