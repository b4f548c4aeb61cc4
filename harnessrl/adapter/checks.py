"""What users hand in: names, flags, numbers and vectors, each refused by its name where it is something else."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]


def kind_of(value: Any) -> str:
    """The type's name, for messages."""
    return type(value).__name__


def text(value: Any, name: str) -> str:
    """A string."""
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a string, got {value!r} of type {kind_of(value)}")
    return value


def flag(value: Any, name: str) -> bool:
    """True or False; "false" and 0 are neither."""
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name} must be True or False, got {value!r} of type {kind_of(value)}")
    return bool(value)


def number(value: Any, name: str) -> float:
    """A finite number; text and truth values are none."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, Real):
        raise ValueError(f"{name} must be a number, got {value!r} of type {kind_of(value)}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")
    return float(value)


def array(value: Any, name: str) -> NDArray[Any]:
    """Whatever numpy makes of it; what numpy refuses (ragged lists, tensors on a device) is refused by name."""
    try:
        return np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"{name} cannot be read as an array: {error}") from error


def numbers(values: Any, name: str) -> Float64:
    """A vector of numbers; None becomes NaN."""
    found = array(values, name)
    if found.dtype == object and found.ndim == 1:
        found = array([math.nan if value is None else value for value in found], name)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "fiu"):
        raise ValueError(f"{name} must be a vector of numbers, got shape {found.shape} of {found.dtype}")
    return found.astype(np.float64, copy=False)


def wholes(values: Any, name: str) -> Int64:
    """A vector of whole numbers that are not negative."""
    found = array(values, name)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise ValueError(f"{name} must be a vector of integers, got shape {found.shape} of {found.dtype}")
    if found.size and not 0 <= int(found.min()) <= int(found.max()) < 2**63:
        at = int(np.argmin(found)) if int(found.min()) < 0 else int(np.argmax(found))
        raise ValueError(f"{name}[{at}] is {found[at]}; it cannot be negative or beyond int64")
    return found.astype(np.int64)


def ids(value: Any, name: str) -> NDArray[np.int32]:
    """Token ids or versions as a read-only int32 vector, refusing whatever a cast would silently change."""
    found = array(value, name)
    if found.size == 0:
        found = found.reshape(-1).astype(np.int32)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise ValueError(f"{name} must be a vector of integers, got shape {found.shape} of {found.dtype}")
    if found.dtype != np.int32 and found.size and (int(found.min()) < -(2**31) or int(found.max()) >= 2**31):
        raise ValueError(f"{name} holds a value that does not fit int32 ({found.min()}..{found.max()})")
    return frozen(found.astype(np.int32, copy=False), value)


def logprobs(value: Any, name: str) -> NDArray[np.float32]:
    """Logprobs as a read-only float32 vector."""
    found = array(value, name)
    if found.size == 0:
        found = found.reshape(-1).astype(np.float32)
    if found.ndim != 1 or found.dtype.kind not in "fiu":
        raise ValueError(f"{name} must be a vector of numbers, got shape {found.shape} of {found.dtype}")
    with np.errstate(over="ignore"):  # an infinity is refused by the call that it belongs to
        return frozen(found.astype(np.float32, copy=False), value)


def mask(value: Any, name: str) -> NDArray[np.bool_]:
    """Truth values as a read-only vector; 1 and 0 are also understood."""
    found = array(value, name)
    if found.dtype != np.bool_ and not ((found == 0) | (found == 1)).all():
        raise ValueError(f"{name} must hold True or False (or 1 and 0), got {found.dtype} with other values")
    return frozen(found.astype(np.bool_, copy=False), value)


def frozen(found: NDArray[Any], value: Any) -> NDArray[Any]:
    """A read-only array that the caller's own buffer cannot change afterwards: what could be written there is copied."""
    borrowed = found is value or found.base is not None
    if borrowed and found.flags.writeable:
        found = found.copy()
    view = found.view()
    view.flags.writeable = False
    return view
