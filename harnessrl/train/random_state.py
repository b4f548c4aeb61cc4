"""The random generators of a process: Python's, numpy's and torch's."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """The states of Python's, numpy's and torch's generators, as JSON-ready values."""
    kind, keys, *rest = np.random.get_state()
    state = {"python": random.getstate(), "numpy": [kind, keys.tolist(), *rest]}
    state["torch"] = torch.get_rng_state().numpy().tobytes().hex()
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return state


def restore_random(state: Mapping[str, Any]) -> None:
    """Set the generators to what `random_state` returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))
    tensor = lambda text: torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)  # noqa: E731
    torch.set_rng_state(tensor(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensor(state["cuda"]))
