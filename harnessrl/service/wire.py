"""The frames between the service and a token engine: ids and logprobs are raw little-endian arrays, never JSON.

    request  (DEALER -> ROUTER)   [request id, 16 bytes][JSON header][int32 prompt ids]
    reply    (ROUTER -> DEALER)   [request id, 16 bytes][JSON header][int32 ids][float32 logprobs]

A ROUTER sees the sender's identity as one more frame in front: it strips it before decoding and puts it back to reply.
Both sides import this module; it needs numpy and orjson, no socket library.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import orjson
from numpy.typing import ArrayLike, NDArray

ID_BYTES = 16
FINISH_REASONS = ("stop", "length", "abort", "error")
_I32, _F32 = np.dtype("<i4"), np.dtype("<f4")

Op = Literal["generate", "cancel", "hello"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the tokens of one request are drawn. Example: ``Sampling(max_tokens=64, temperature=1.0, noise=7)``"""

    max_tokens: int
    """Most tokens to sample, the stop token included; 1 or more."""
    temperature: float = 1.0
    """Divides the logits; 1 is neutral, 0 is greedy (its logprobs are those of temperature 1)."""
    top_p: float = 1.0
    """Nucleus mass; 1 is neutral."""
    top_k: int = 0
    """Most likely tokens kept; 0 is all."""
    stop_ids: tuple[int, ...] = ()
    """Sampling ends after one of these, which is part of the response."""
    noise: int = 0
    """Unsigned 64-bit key of this request's sampling noise: equal keys, prompts and weights give equal tokens."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be finite and at least 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be at least 0 (0 is off), got {self.top_k}")
        if not 0 <= self.noise < 2**64:
            raise ValueError(f"noise must be an unsigned 64-bit number, got {self.noise}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One message to the engine."""

    request_id: bytes
    """16 bytes, the name of the answer; a cancel carries the id of what it cancels."""
    op: Op
    """generate (answered once), cancel (answered by the cancelled request's own reply, if any), hello (unanswered)."""
    prompt_ids: NDArray[np.int32]
    """int32 [P]; empty unless op is generate."""
    sampling: Sampling | None = None
    """None unless op is generate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The engine's answer to one generate request."""

    request_id: bytes
    """The request's."""
    ids: NDArray[np.int32]
    """int32 [A], what was sampled, the stop token included."""
    logprobs: NDArray[np.float32]
    """float32 [A], of the tempered distribution."""
    finish_reason: str
    """stop, length, abort (ended by the engine; may be retried) or error."""
    policy_version: int
    """Version of the weights that sampled."""
    error: str | None = None
    """What went wrong, for people."""


def new_request_id() -> bytes:
    """Draw a request id: 16 random bytes."""
    return os.urandom(ID_BYTES)


def encode_request(request_id: bytes, prompt_ids: ArrayLike, sampling: Sampling) -> list[bytes]:
    """Frame a generate request."""
    header = {
        "op": "generate",
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop_ids": sampling.stop_ids,
        "noise": sampling.noise,
    }
    return [request_id, orjson.dumps(header), np.asarray(prompt_ids, dtype=_I32).tobytes()]


def encode_cancel(request_id: bytes) -> list[bytes]:
    """Frame the cancelling of an earlier request."""
    return [request_id, orjson.dumps({"op": "cancel"})]


def encode_hello() -> list[bytes]:
    """Frame a greeting: it lets a ROUTER learn the peer before its first request."""
    return [new_request_id(), orjson.dumps({"op": "hello"})]


def decode_request(frames: Sequence[bytes]) -> Request:
    """Read a request (without the ROUTER's identity frame).

    Raises:
        ValueError: The frames are not a request; the engine answers nothing to it.
    """
    if len(frames) < 2:
        raise ValueError(f"a request has 2 or 3 frames, got {len(frames)}")
    request_id, header = _id(frames[0]), _header(frames[1])
    op = header.pop("op", None)
    if op not in ("generate", "cancel", "hello"):
        raise ValueError(f"op must be generate, cancel or hello, got {op!r}")
    if op != "generate":
        return Request(request_id=request_id, op=op, prompt_ids=np.empty(0, _I32))
    if len(frames) != 3:
        raise ValueError(f"a generate request has 3 frames, got {len(frames)}")
    try:
        sampling = Sampling(**{**header, "stop_ids": tuple(header.get("stop_ids", ()))})
    except TypeError as error:
        raise ValueError(f"bad generate header: {error}") from None
    return Request(request_id=request_id, op="generate", prompt_ids=_array(frames[2], _I32), sampling=sampling)


def encode_reply(
    request_id: bytes,
    ids: ArrayLike,
    logprobs: ArrayLike,
    *,
    finish_reason: str,
    policy_version: int,
    error: str | None = None,
) -> list[bytes]:
    """Frame the answer to a generate request (the ROUTER puts the peer's identity in front)."""
    ids, logprobs = np.asarray(ids, dtype=_I32), np.asarray(logprobs, dtype=_F32)
    assert ids.shape == logprobs.shape and ids.ndim == 1, (ids.shape, logprobs.shape)
    assert finish_reason in FINISH_REASONS, finish_reason
    header = {"finish_reason": finish_reason, "policy_version": policy_version, "error": error}
    return [request_id, orjson.dumps(header), ids.tobytes(), logprobs.tobytes()]


def decode_reply(frames: Sequence[bytes]) -> Reply:
    """Read a reply.

    Raises:
        ValueError: The frames are not a reply, or ids and logprobs differ in length.
    """
    if len(frames) != 4:
        raise ValueError(f"a reply has 4 frames, got {len(frames)}")
    header, ids, logprobs = _header(frames[1]), _array(frames[2], _I32), _array(frames[3], _F32)
    if len(ids) != len(logprobs):
        raise ValueError(f"reply has {len(ids)} ids and {len(logprobs)} logprobs")
    if header.get("finish_reason") not in FINISH_REASONS:
        raise ValueError(f"finish_reason must be one of {FINISH_REASONS}, got {header.get('finish_reason')!r}")
    return Reply(
        request_id=_id(frames[0]),
        ids=ids,
        logprobs=logprobs,
        finish_reason=header["finish_reason"],
        policy_version=int(header.get("policy_version", 0)),
        error=header.get("error"),
    )


def _id(frame: bytes) -> bytes:
    if len(frame) != ID_BYTES:
        raise ValueError(f"a request id has {ID_BYTES} bytes, got {len(frame)}")
    return bytes(frame)


def _header(frame: bytes) -> dict[str, Any]:
    try:
        header = orjson.loads(frame)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise ValueError(f"header must be an object, got {type(header).__name__}")
    return header


def _array(frame: bytes, dtype: np.dtype[Any]) -> NDArray[Any]:
    if len(frame) % dtype.itemsize:
        raise ValueError(f"a frame of {len(frame)} bytes is no array of {dtype}")
    return np.frombuffer(frame, dtype=dtype)
