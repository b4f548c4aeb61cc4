"""What every token engine does: ids in, ids and their exact logprobs out, and an orderly change of weights."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

import numpy as np

from harnessrl.service.wire import Reply, Sampling


class Phase(Enum):
    """Where an engine stands between two policy versions: SERVING -> DRAINING -> ASLEEP -> LOADING -> SERVING."""

    SERVING = "serving"
    DRAINING = "draining"
    ASLEEP = "asleep"
    LOADING = "loading"


NEXT = {
    Phase.SERVING: (Phase.DRAINING,),
    Phase.DRAINING: (Phase.ASLEEP, Phase.SERVING),  # back to SERVING: the update was called off
    Phase.ASLEEP: (Phase.LOADING, Phase.SERVING),
    Phase.LOADING: (Phase.SERVING,),
}


class Engine(Protocol):
    """Token engine. Phases change only along `NEXT`; a wrong order is a programming error and asserts."""

    phase: Phase
    version: int

    def submit(self, request_id: bytes, prompt_ids: Sequence[int] | np.ndarray, sampling: Sampling) -> None:
        """Queue a request; ValueError for an empty prompt or one that leaves no room for a token."""
        ...

    def cancel(self, request_id: bytes) -> Reply | None:
        """Stop a request; returns what it had sampled, None for an unknown id."""
        ...

    def step(self) -> list[Reply]:
        """Advance every open request; returns those that finished."""
        ...

    @property
    def open_requests(self) -> int:
        """Requests queued or running."""
        ...

    @property
    def running_requests(self) -> list[bytes]:
        """Ids of the requests that hold cached state: a drain waits for these."""
        ...

    def drain(self) -> None:
        """Stop admitting: what runs may finish, what is queued waits for the next version."""
        ...

    def sleep(self, level: int = 1) -> None:
        """Give memory to the update; asserts that nothing runs."""
        ...

    def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Take memory back: "weights" before `load`, "kv_cache" after it (which also resets the prefix cache and serves)."""
        ...

    def load(self, version: int) -> None:
        """Serve new weights under `version`, which must be larger than the present one."""
        ...
