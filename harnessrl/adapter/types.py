"""The nouns of the adapter: what a harness did (Call, Rollout) and what a trainer trains on (Span, Sample).

Suffixes: R rollouts, S samples, C calls of a rollout, L tokens of a sample, P prompt tokens, A sampled tokens.
All are frozen; arrays are converted once, at construction, and made read-only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harnessrl.adapter import checks

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
Bool = NDArray[np.bool_]


LOGPROB_ROUNDING = 1e-3
"""How far above 0 a logprob may lie, in nats. A log-softmax in float32 of logits below 1000 rounds by about 1e-4; what
claims a probability of more than 1.001 is something else: a probability, a negative log-likelihood, half precision."""


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
    """float32 [A], nats, of the distribution sampled from (after temperature), at most 0 but for rounding; None is not
    recorded, never 0.0."""
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
        for name in ("call_id", "agent", "finish_reason", "request_id"):
            if name in ("call_id", "agent") or getattr(self, name) is not None:
                checks.text(getattr(self, name), where + name)
        for name in ("trainable", "delivered", "constrained"):
            set_(self, name, checks.flag(getattr(self, name), where + name))
        set_(self, "prompt_ids", checks.ids(self.prompt_ids, where + "prompt_ids"))
        set_(self, "response_ids", checks.ids(self.response_ids, where + "response_ids"))
        if self.logprobs is not None:
            set_(self, "logprobs", checks.logprobs(self.logprobs, where + "logprobs"))
        version = self.policy_version
        if isinstance(version, (int, np.integer)) and not isinstance(version, bool):
            if not -(2**31) <= version < 2**31:
                raise ValueError(f"{where}policy_version is {version}, which does not fit int32")
            set_(self, "policy_version", int(version))
        else:
            set_(self, "policy_version", checks.ids(version, where + "policy_version"))

    def check(self, rollout_id: str) -> None:
        """Raise ValueError naming rollout, call, field and both lengths where the columns do not fit together."""
        where = f"rollout {rollout_id!r}, call {self.call_id!r}: "
        length = len(self.response_ids)
        columns = {"logprobs": self.logprobs, "policy_version": self.policy_version}
        for name, column in columns.items():
            if isinstance(column, np.ndarray) and len(column) != length:
                raise ValueError(f"{where}{name} has length {len(column)}, response_ids has length {length}")
        for name in ("prompt_ids", "response_ids", "policy_version"):
            ids = np.atleast_1d(getattr(self, name))
            if len(ids) and int(ids.min()) < 0:
                at = int(np.argmax(ids < 0))
                raise ValueError(f"{where}{name}[{at}] is {ids[at]} (length {len(ids)}); it cannot be negative")
        if self.logprobs is None:
            return
        allowed = np.isfinite(self.logprobs) & (self.logprobs <= LOGPROB_ROUNDING)
        if not allowed.all():
            at = int(np.argmin(allowed))
            raise ValueError(
                f"{where}logprobs[{at}] is {self.logprobs[at]} (logprobs has length {length}, response_ids has length "
                f"{length}); a logprob is finite and at most 0, use logprobs=None where they were not recorded"
            )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Call:
        """Read one call of a trace line; unknown keys are ignored, absent or null ones take the field's default."""
        if not isinstance(data, Mapping) or data.get("call_id") is None:
            raise ValueError(f"a call must be an object with 'call_id', got {checks.kind_of(data)}")
        known: dict[str, Any] = {"prompt_ids": [], "response_ids": []}
        known |= {key: data[key] for key in cls.__dataclass_fields__ if data.get(key) is not None}
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
    """Final reward, finite; None is unscored, and NaN becomes None."""

    def __post_init__(self) -> None:
        where = f"rollout {self.rollout_id!r}: "
        checks.text(self.rollout_id, where + "rollout_id")
        checks.text(self.group_id, where + "group_id")
        object.__setattr__(self, "reward", _reward(self.reward, where + "reward"))
        if not isinstance(self.calls, Iterable):
            raise ValueError(f"{where}calls must be a list of Call, got {checks.kind_of(self.calls)}")
        object.__setattr__(self, "calls", tuple(self.calls))
        seen: set[str] = set()
        for index, call in enumerate(self.calls):
            if not isinstance(call, Call):
                raise ValueError(f"{where}calls[{index}] must be a Call, got {checks.kind_of(call)}")
            call.check(self.rollout_id)
            if call.call_id in seen:
                raise ValueError(f"rollout {self.rollout_id!r}, call {call.call_id!r}: call_id appears twice")
            seen.add(call.call_id)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Rollout:
        """Read one line of a trace file (rollout_id, group_id, reward, calls); ids that are integers become strings."""
        if not isinstance(data, Mapping):
            raise ValueError(f"a rollout must be an object, got {checks.kind_of(data)}")
        missing = [key for key in ("rollout_id", "group_id", "calls") if data.get(key) is None]
        if missing:
            raise ValueError(f"rollout {data.get('rollout_id', '?')!r}: field {missing[0]!r} is missing")
        rollout_id = _name(data["rollout_id"])
        if not isinstance(data["calls"], Sequence):
            raise ValueError(f"rollout {rollout_id!r}: calls must be a list, got {checks.kind_of(data['calls'])}")
        calls = []
        for index, item in enumerate(data["calls"]):
            if not isinstance(item, Mapping) or item.get("call_id") is None:
                raise ValueError(f"rollout {rollout_id!r}, call {index}: field 'call_id' is missing")
            try:
                calls.append(Call.from_dict({**item, "call_id": _name(item["call_id"])}))
            except ValueError as error:
                raise ValueError(f"rollout {rollout_id!r}, {error}") from error
        return cls(rollout_id=rollout_id, group_id=_name(data["group_id"]), calls=calls, reward=data.get("reward"))

    def to_dict(self) -> dict[str, Any]:
        """The rollout as one line of a trace file; an unscored reward is null."""
        return {
            "rollout_id": self.rollout_id,
            "group_id": self.group_id,
            "reward": self.reward,
            "calls": [call.to_dict() for call in self.calls],
        }


def _reward(value: Any, name: str) -> float | None:
    unscored = value is None or (isinstance(value, Real) and value != value)
    return None if unscored else checks.number(value, name)


def _name(value: Any) -> Any:
    """An id as a string where it is an integer; anything else as it is."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


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
        set_(self, "token_ids", checks.ids(self.token_ids, where + "token_ids"))
        set_(self, "loss_mask", checks.mask(self.loss_mask, where + "loss_mask"))
        set_(self, "logprobs", checks.logprobs(self.logprobs, where + "logprobs"))
        set_(self, "policy_version", checks.ids(self.policy_version, where + "policy_version"))
        checks.text(self.rollout_id, where + "rollout_id")
        checks.text(self.group_id, where + "group_id")
        set_(self, "faithful", checks.flag(self.faithful, where + "faithful"))
        length = len(self.token_ids)
        for name in ("loss_mask", "logprobs", "policy_version"):
            if getattr(self, name).shape != (length,):
                shape = getattr(self, name).shape
                raise ValueError(f"{where}{name} has shape {shape}, token_ids has length {length}")
        if not isinstance(self.spans, Iterable):
            raise ValueError(f"{where}spans must be a list of Span, got {checks.kind_of(self.spans)}")
        set_(self, "spans", tuple(self.spans))
        self._check_values(where)

    def _check_values(self, where: str) -> None:
        """Refuse what no call could have left: negative ids, impossible logprobs, a mask that is not the spans'."""
        length, trained = len(self.token_ids), np.zeros(len(self.token_ids), dtype=np.bool_)
        before = 0
        for index, span in enumerate(self.spans):
            if not isinstance(span, Span):
                raise ValueError(f"{where}spans[{index}] must be a Span, got {checks.kind_of(span)}")
            whole = isinstance(span.start, (int, np.integer)) and isinstance(span.stop, (int, np.integer))
            if not whole or not before <= span.start <= span.stop <= length:
                at = f"{span.start}..{span.stop}"
                raise ValueError(f"{where}span {at} of call {span.call_id!r} is not within {before}..{length}")
            trained[span.start : span.stop] = True
            before = span.stop
        possible = np.isnan(self.logprobs) | (np.isfinite(self.logprobs) & (self.logprobs <= LOGPROB_ROUNDING))
        for name, wrong, why in (
            ("token_ids", self.token_ids < 0, "an id cannot be negative"),
            ("logprobs", ~possible, "a logprob is finite and at most 0, or NaN where it was not recorded"),
            ("loss_mask", self.loss_mask != trained, "it is True inside the spans and nowhere else"),
        ):
            if wrong.any():
                first = int(np.argmax(wrong))
                raise ValueError(f"{where}{name}[{first}] is {getattr(self, name)[first]}; {why}")

    @classmethod
    def _made(cls, **fields: Any) -> Sample:
        """A sample of columns that merging made from checked calls, in their final types: nothing is checked again."""
        sample = object.__new__(cls)
        for name, value in fields.items():
            object.__setattr__(sample, name, value)
        return sample


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
