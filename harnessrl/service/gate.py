"""The gate in front of the model: pause, resume, and how many requests are behind it."""

from __future__ import annotations

import asyncio
from typing import Any

from harnessrl.service.errors import ApiError


class Gate:
    """Counts what is in flight, and holds what arrives during a pause (bounded).

    The check of `paused` and the count are one step of the event loop: after `pause`, `inflight` only falls.
    """

    def __init__(self, hold_seconds: float) -> None:
        self.inflight = 0
        self.paused = False
        self.reason: str | None = None
        self.retry_after_seconds = 5
        self._hold_seconds = hold_seconds
        self._resumed = asyncio.Event()

    def pause(self, retry_after_seconds: int, reason: str | None) -> None:
        """Admit nothing more; what is in flight goes on. Pausing twice changes only the reason."""
        self.paused, self.reason, self.retry_after_seconds = True, reason, retry_after_seconds
        self._resumed.clear()

    def resume(self) -> None:
        """Admit again, first of all what was held; resuming twice is no error."""
        self.paused, self.reason = False, None
        self._resumed.set()

    def state(self) -> dict[str, Any]:
        """The gate in the contract's form."""
        names = ("paused", "retry_after_seconds", "reason", "inflight")
        return {name: getattr(self, name) for name in names}

    async def enter(self, count: int) -> None:
        """Count `count` requests in, as soon as there is no pause; each `enter` needs its `leave`.

        Raises:
            ApiError: 503 with Retry-After, the pause lasted longer than hold_seconds.
        """
        if self.paused:
            try:
                async with asyncio.timeout(self._hold_seconds):
                    while self.paused:  # another pause may begin before a woken request runs
                        await self._resumed.wait()
            except TimeoutError:
                message = f"paused ({self.reason or 'no reason given'}) for more than {self._hold_seconds:g} s"
                raise ApiError(503, message, retry_after=self.retry_after_seconds) from None
        self.inflight += count

    def leave(self, count: int) -> None:
        """Count `count` requests out."""
        self.inflight -= count
        assert self.inflight >= 0
