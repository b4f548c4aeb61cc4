"""The nouns of the adapter: what a harness did (Call, Rollout) and what a trainer trains on (Span, Sample).

Suffixes: R rollouts, S samples, C calls of a rollout, L tokens of a sample, P prompt tokens, A sampled tokens.
All are frozen; arrays are converted once, at construction, and made read-only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
Bool = NDArray[np.bool_]


def _ids(value: ArrayLike, where: str) -> Int32:
    """Token ids or versions as a read-only int32 vector, refusing whatever a cast would silently change."""
    array = np.asarray(value)
    if array.size == 0:
        array = array.reshape(-1).astype(np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"{where} must be a vector of integers, got shape {array.shape} of {array.dtype}")
    if array.dtype != np.int32 and array.size and (int(array.min()) < -(2**31) or int(array.max()) >= 2**31):
        raise ValueError(f"{where} holds a value that does not fit int32 ({array.min()}..{array.max()})")
    return _frozen(array.astype(np.int32, copy=False), value)


def _frozen(array: NDArray[Any], value: Any) -> NDArray[Any]:
    """A read-only array that the caller's own writable array cannot change afterwards: that one is copied."""
    if array is value and array.flags.writeable:
        array = array.copy()
    view = array.view()
    view.flags.writeable = False
    return view


def _logprobs(value: ArrayLike, where: str) -> Float32:
    array = np.asarray(value)
    if array.size == 0:
        array = array.reshape(-1).astype(np.float32)
    if array.ndim != 1 or array.dtype.kind not in "fiu":
        raise ValueError(f"{where} must be a vector of numbers, got shape {array.shape} of {array.dtype}")
    return _frozen(array.astype(np.float32, copy=False), value)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """One model call as it crossed the endpoint: exact prompt ids in, exact sampled ids out.

    Example: ``Call(call_id="c0", prompt_ids=[1, 2], response_ids=[3], logprobs=[-0.1])``
    """

    call_id: str
    """Unique in its rollout."""
    prompt_ids: Int32
    """int32 [P], the prompt the engine was given; empty where it was not recorded."""
    response_ids: Int32
    """int32 [A], the ids that were sampled; empty where nothing was."""
    logprobs: Float32 | None = None
    """float32 [A], nats, of the distribution sampled from (after temperature); None is not recorded, never 0.0."""
    policy_version: int | Int32 = 0
    """The version of the weights that sampled, one for all tokens or int32 [A]; 0 before the first update."""
    finish_reason: str | None = None
    """"stop", "length", ... as the endpoint said; None is unknown."""
    agent: str = ""
    """Which agent of the harness called; "" where there is only one."""
    trainable: bool = True
    """False for calls of agents that are not trained; they may still be context."""
    delivered: bool = True
    """False where the harness never received the response."""
    constrained: bool = False
    """True where the logits were masked (guided decoding, forced tool choice): logprobs are not the policy's."""
    request_id: str | None = None
    """Shared by the tries of one request; None where there was one try."""

    def __post_init__(self) -> None:
        where = f"call {self.call_id!r}: "
        set_ = object.__setattr__
        set_(self, "prompt_ids", _ids(self.prompt_ids, where + "prompt_ids"))
        set_(self, "response_ids", _ids(self.response_ids, where + "response_ids"))
        if self.logprobs is not None:
            set_(self, "logprobs", _logprobs(self.logprobs, where + "logprobs"))
        if isinstance(self.policy_version, (int, np.integer)):
            if not -(2**31) <= self.policy_version < 2**31:
                raise ValueError(f"{where}policy_version is {self.policy_version}, which does not fit int32")
            set_(self, "policy_version", int(self.policy_version))
        else:
            set_(self, "policy_version", _ids(self.policy_version, where + "policy_version"))

    def check(self, rollout_id: str) -> None:
        """Raise ValueError naming rollout, call, field and both lengths where the columns do not fit together."""
        where = f"rollout {rollout_id!r}, call {self.call_id!r}: "
        length = len(self.response_ids)
        columns = {"logprobs": self.logprobs, "policy_version": self.policy_version}
        for name, column in columns.items():
            if isinstance(column, np.ndarray) and len(column) != length:
                raise ValueError(f"{where}{name} has length {len(column)}, response_ids has length {length}")
        for name in ("prompt_ids", "response_ids"):
            ids = getattr(self, name)
            if len(ids) and int(ids.min()) < 0:
                at = int(np.argmax(ids < 0))
                raise ValueError(f"{where}{name}[{at}] is {ids[at]} (length {len(ids)}); ids are not negative")
        if self.logprobs is not None and not np.isfinite(self.logprobs).all():
            at = int(np.argmin(np.isfinite(self.logprobs)))
            raise ValueError(
                f"{where}logprobs[{at}] is {self.logprobs[at]} (logprobs has length {length}, response_ids has length "
                f"{length}); use logprobs=None where they were not recorded"
            )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Call:
        """Read one call of a trace line; unknown keys are ignored, absent ones take the field's default."""
        known = {key: data[key] for key in cls.__dataclass_fields__ if key in data}
        for key in ("prompt_ids", "response_ids"):
            known[key] = [] if known.get(key) is None else known[key]
        if known.get("policy_version", 0) is None:
            del known["policy_version"]
        return cls(**known)

    def to_dict(self) -> dict[str, Any]:
        """The call as JSON-ready values."""
        out: dict[str, Any] = {key: getattr(self, key) for key in self.__dataclass_fields__}
        return {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in out.items()}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """One run of the harness on one input.

    Example: ``Rollout(rollout_id="r0", group_id="g0", calls=[Call(...)], reward=1.0)``
    """

    rollout_id: str
    """Unique in its batch."""
    group_id: str
    """Shared by the rollouts of one input: the set a baseline is taken over."""
    calls: Sequence[Call]
    """[C], in order of arrival."""
    reward: float | None = None
    """Final reward; None is unscored."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "calls", tuple(self.calls))
        seen: set[str] = set()
        for call in self.calls:
            call.check(self.rollout_id)
            if call.call_id in seen:
                raise ValueError(f"rollout {self.rollout_id!r}, call {call.call_id!r}: call_id appears twice")
            seen.add(call.call_id)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Rollout:
        """Read one line of a trace file (rollout_id, group_id, reward, calls); a NaN reward is unscored."""
        missing = [key for key in ("rollout_id", "group_id", "calls") if key not in data]
        if missing:
            raise ValueError(f"rollout {data.get('rollout_id', '?')!r}: field {missing[0]!r} is missing")
        rollout_id, reward = str(data["rollout_id"]), data.get("reward")
        calls = []
        for index, item in enumerate(data["calls"]):
            if "call_id" not in item:
                raise ValueError(f"rollout {rollout_id!r}, call {index}: field 'call_id' is missing")
            try:
                calls.append(Call.from_dict(item))
            except (ValueError, TypeError, OverflowError) as error:
                raise ValueError(f"rollout {rollout_id!r}, {error}") from error
        scored = reward is not None and not math.isnan(reward)
        return cls(
            rollout_id=rollout_id,
            group_id=str(data["group_id"]),
            calls=calls,
            reward=float(reward) if scored else None,  # type: ignore[arg-type]
        )

    def to_dict(self) -> dict[str, Any]:
        """The rollout as one line of a trace file; an unscored reward is null."""
        return {
            "rollout_id": self.rollout_id,
            "group_id": self.group_id,
            "reward": self.reward,
            "calls": [call.to_dict() for call in self.calls],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Where one call's sampled tokens lie in a sample: ``token_ids[start:stop] == call.response_ids``."""

    call_id: str
    """The trained call."""
    start: int
    """First token position, in tokens from the sample's start; equals the length of the call's prompt."""
    stop: int
    """One past the last."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One training sequence of a rollout: S_{rho,j} of the paper (arXiv:2608.17528).

    Example: prompt [1, 2], sampled [3] -> token_ids [1, 2, 3], loss_mask [F, F, T], one span (2, 3).
    """

    rollout_id: str
    """The rollout it came from."""
    group_id: str
    """That rollout's group."""
    index: int
    """j, from 0, in the order the samples were opened."""
    token_ids: Int32
    """int32 [L]"""
    loss_mask: Bool
    """bool [L], True on sampled tokens."""
    logprobs: Float32
    """float32 [L], the engine's own; 0.0 where loss_mask is False, NaN where a trained call had none recorded."""
    policy_version: Int32
    """int32 [L]; -1 where loss_mask is False."""
    spans: tuple[Span, ...]
    """One per trained call, in order."""
    faithful: bool = True
    """False where history tokens were overwritten (strategy "substitute")."""

    def __post_init__(self) -> None:
        where = f"rollout {self.rollout_id!r}, sample {self.index}: "
        set_ = object.__setattr__
        set_(self, "token_ids", _ids(self.token_ids, where + "token_ids"))
        set_(self, "loss_mask", _frozen(np.asarray(self.loss_mask, dtype=np.bool_), self.loss_mask))
        set_(self, "logprobs", _logprobs(self.logprobs, where + "logprobs"))
        set_(self, "policy_version", _ids(self.policy_version, where + "policy_version"))
        set_(self, "spans", tuple(self.spans))
        length = len(self.token_ids)
        for name in ("loss_mask", "logprobs", "policy_version"):
            if getattr(self, name).shape != (length,):
                shape = getattr(self, name).shape
                raise ValueError(f"{where}{name} has shape {shape}, token_ids has length {length}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """One call that is not trained, and why. Example: ``Skip(call_id="c3", reason="empty_response", tokens=0)``"""

    call_id: str
    """The call."""
    reason: str
    """The first of SKIP_REASONS that holds."""
    tokens: int
    """Sampled tokens that are not trained for it; 0 for an empty response."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Break:
    """Where a prompt left everything that the rollout's earlier calls had built, so that a new sample began.

    Example: calls ([1, 2] -> [7]) and ([1, 2, 8] -> [9]): sample 1, position 2 (7 was sampled, 8 came back).
    """

    rollout: Rollout
    """The rollout, for what else happened in it (a reference, no copy)."""
    sample: int
    """Index of the sample that began here; 1 or more."""
    call: Call
    """Its first call."""
    earlier: Call
    """The call, earlier in merge order, whose context (prompt + response) shares the longest prefix with ``call``'s
    prompt; the first in merge order where several do."""
    position: int
    """Length of that prefix in tokens, so the index of the first token that differs. It equals the prompt's length
    where the prompt lies inside that context, and the context's length where the context lies inside the prompt."""
    joint: int
    """Length of the context that ``earlier`` itself extended, in tokens; 0 where it opened its sample. From here to
    the end of its prompt ``earlier`` added tokens nobody sampled."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Merge:
    """What merge_calls returns. Every sampled token is in a span of ``samples`` or counted in ``skipped``."""

    samples: tuple[Sample, ...]
    """[S], in the order they were opened."""
    breaks: tuple[Break, ...]
    """[S - 1], one for each sample after the first, in the same order; empty where there is no sample."""
    skipped: tuple[Skip, ...]
    """One for each call that is not trained, in order of arrival."""
