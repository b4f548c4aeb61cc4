"""What the gateway must know about the attempts that have requests in flight, and nothing about the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from harnessrl.service.errors import ApiError
from harnessrl.service.events import Events


class Live:
    """One attempt with requests in flight."""

    __slots__ = ("_events", "_key", "_next", "in_flight")

    def __init__(self, events: Events, key: tuple[int, str]) -> None:
        self.in_flight = 0
        self._events = events
        self._key = key
        self._next: dict[int, int] = {}

    def recorded(self) -> int:
        """Calls of this attempt that are in the store."""
        return self._events.counts(*self._key, 0)[0]

    def take(self, prompt_key: int, count: int) -> int:
        """Number `count` requests with this prompt: the occurrence of the first; no number is given twice."""
        first = max(self._next.get(prompt_key, 0), self._events.counts(*self._key, prompt_key)[1])
        self._next[prompt_key] = first + count
        return first


class Attempts:
    """The attempts in flight, by (rollout, attempt)."""

    def __init__(self, events: Events, max_calls: int) -> None:
        self._events = events
        self._max_calls = max_calls
        self._live: dict[tuple[int, str], Live] = {}

    @contextmanager
    def enter(self, rollout: int, attempt: str, count: int) -> Iterator[Live]:
        """Count `count` calls as in flight. On the way out nothing may be awaited before they are recorded.

        Raises:
            ApiError: 400 call_limit_exceeded, they would be more than an attempt may make.
        """
        key = (rollout, attempt)
        live = self._live.get(key) or Live(self._events, key)
        if self._max_calls and live.recorded() + live.in_flight + count > self._max_calls:
            message = f"this rollout may make {self._max_calls} model calls and has made them"
            raise ApiError(400, message, code="call_limit_exceeded")
        self._live[key] = live
        live.in_flight += count
        try:
            yield live
        finally:
            live.in_flight -= count
            if not live.in_flight:
                del self._live[key]
