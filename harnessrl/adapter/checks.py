"""What users hand in: names, flags, numbers and vectors, each refused by its name where it is something else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

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
    try:
        found = float(value)
    except OverflowError:  # an integer of some hundred digits
        raise ValueError(f"{name} is beyond float64") from None
    if not math.isfinite(found):
        raise ValueError(f"{name} must be finite, got {found}")
    return found


def whole(value: Any, name: str, least: int, allowed: str) -> int:
    """One whole number that is not below ``least``; ``allowed`` says so in words. True and 2.0 are none."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} must be a whole number, got {value!r} of type {kind_of(value)}; allowed: {allowed}")
    if value < least:
        raise ValueError(f"{name} is {value}; allowed: {allowed}")
    return int(value)


def finite(values: Float64, what: str) -> Float64:
    """A result, refused where the numbers that led to it were too large (or too small) for float64."""
    if not np.isfinite(values).all():
        at = int(np.argmin(np.isfinite(values)))
        raise ValueError(f"{what} overflow float64: entry {at} comes out as {values[at]}")
    return values


def array(value: Any, name: str) -> NDArray[Any]:
    """Whatever numpy makes of it; what numpy refuses (ragged lists, tensors on a device) or would lose is refused.

    Lost would be the mask of a masked array, and True or False among numbers, which would become 1 or 0.
    """
    if isinstance(value, np.ndarray) and hasattr(value, "mask"):
        raise ValueError(f"{name} is a masked array, whose mask would be lost; pass what it holds, without the mask")
    try:
        found = np.asarray(value)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{name} cannot be read as an array: {error}") from error
    if found.ndim == 1 and found.dtype.kind in "fiu" and isinstance(value, Sequence):
        for at in np.flatnonzero((found == 0) | (found == 1)).tolist():  # only there can one hide
            if isinstance(value[at], (bool, np.bool_)):
                raise ValueError(f"{name}[{at}] is {value[at]}, among numbers")
    return found


def integers(values: Any, name: str) -> Int64:
    """A vector of integers of any sign."""
    found = array(values, name)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise ValueError(f"{name} must be a vector of integers, got shape {found.shape} of {found.dtype}")
    return found.astype(np.int64)


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
    return frozen(found, np.int32, value)


def logprobs(value: Any, name: str) -> NDArray[np.float32]:
    """Logprobs as a read-only float32 vector."""
    found = array(value, name)
    if found.size == 0:
        found = found.reshape(-1).astype(np.float32)
    if found.ndim != 1 or found.dtype.kind not in "fiu":
        raise ValueError(f"{name} must be a vector of numbers, got shape {found.shape} of {found.dtype}")
    with np.errstate(over="ignore"):  # an infinity is refused by the call that it belongs to
        return frozen(found, np.float32, value)


def mask(value: Any, name: str) -> NDArray[np.bool_]:
    """Truth values as a read-only vector; 1 and 0 are also understood."""
    found = array(value, name)
    if found.dtype != np.bool_ and not ((found == 0) | (found == 1)).all():
        raise ValueError(f"{name} must hold True or False (or 1 and 0), got {found.dtype} with other values")
    return frozen(found, np.bool_, value)


def frozen(found: NDArray[Any], dtype: DTypeLike, value: Any) -> NDArray[Any]:
    """``found``, which numpy made of ``value``, as a read-only array that nobody can change afterwards.

    It is copied unless it is new (made of a list, or cast) or sealed already.
    """
    out = found.astype(dtype, copy=False)
    new = out is not found or isinstance(value, (list, tuple))
    if not new and not _sealed(out):
        out = out.copy()
    out.flags.writeable = False
    return out


def _sealed(found: NDArray[Any]) -> bool:
    """Whether the memory belongs to a read-only array or to bytes; a read-only view of anything else can change."""
    owner = found if found.base is None else found.base
    if isinstance(owner, np.ndarray):
        return owner.base is None and owner.flags.owndata and not owner.flags.writeable and not found.flags.writeable
    return isinstance(owner, bytes)
