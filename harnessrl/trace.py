"""Trace files: JSON lines, one rollout a line, plain or gzipped; every error names the file, the line and the field."""

from __future__ import annotations

import gzip
import itertools
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from harnessrl.adapter import checks
from harnessrl.adapter.baselines import LARGEST
from harnessrl.adapter.types import Rollout
from harnessrl.errors import ConfigError

GZIP = b"\x1f\x8b"

ROLLOUT_FIELDS: dict[str, tuple[tuple[type, ...], str]] = {
    "rollout_id": ((str,), "a string"),
    "group_id": ((str, int), "a string"),
    "calls": ((list,), "a list"),
}
OPTIONAL_ROLLOUT_FIELDS: dict[str, tuple[tuple[type, ...], str]] = {
    "reward": ((int, float, type(None)), "a number or null"),
    "step": ((int, type(None)), "an integer or null"),
    "advantage": ((int, float, type(None)), "a number or null"),
    "resampled": ((bool,), "true or false"),
    "is_train": ((bool,), "true or false"),
    "call_rewards": ((dict,), "an object of call ids and numbers"),
}
CALL_FIELDS: dict[str, tuple[tuple[type, ...], str]] = {
    "prompt_ids": ((list, type(None)), "a list of integers or null"),
    "response_ids": ((list, type(None)), "a list of integers or null"),
    "logprobs": ((list, type(None)), "a list of numbers or null"),
    "policy_version": ((int, list, type(None)), "an integer or a list of integers"),
    "finish_reason": ((str, type(None)), "a string or null"),
    "agent": ((str,), "a string"),
    "trainable": ((bool,), "true or false"),
    "delivered": ((bool,), "true or false"),
    "constrained": ((bool,), "true or false"),
    "request_id": ((str, type(None)), "a string or null"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One rollout of a trace."""

    number: int
    """Its line, from 1."""
    rollout: Rollout
    """The rollout."""
    data: Mapping[str, Any]
    """The whole object: a run's trace adds step, advantage and input."""


class Trace:
    """Reads a trace file line by line; iterate over it for ``Line``s.

    Args:
        path: JSON lines, gzipped where the first bytes say so, whatever the file's name.

    Raises:
        ConfigError: the file cannot be read; while iterating, a line that is not a rollout, by line and field.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.cut_line: int | None = None
        """A last line without its end, as a killed run leaves one; it is not read. None while there was none."""
        self._raw: IO[bytes] | None = None
        try:
            self.bytes = self.path.stat().st_size
            with self.path.open("rb") as file:
                self._zipped = file.read(2) == GZIP
        except OSError as error:
            raise ConfigError(f"{self.path}: {error.strerror or error}") from error

    @property
    def fraction(self) -> float:
        """How much of the file has been read, 0 to 1."""
        if self._raw is None or self.bytes == 0:
            return 0.0
        return 1.0 if self._raw.closed else min(1.0, self._raw.tell() / self.bytes)

    def __iter__(self) -> Iterator[Line]:
        number = 0
        try:
            with self.path.open("rb") as self._raw:
                file: Any = gzip.GzipFile(fileobj=self._raw) if self._zipped else self._raw
                for number, text in enumerate(file, 1):
                    if text.strip():
                        data = self._parse(text, number)
                        if data is not None:
                            yield Line(number=number, rollout=self._rollout(data, number), data=data)
        except (OSError, EOFError, zlib.error) as error:
            raise ConfigError(f"{self.path}, after line {number}: the file is damaged ({error})") from error

    def _parse(self, text: bytes, number: int) -> Mapping[str, Any] | None:
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            if not text.endswith(b"\n"):
                self.cut_line = number
                return None
            raise ConfigError(f"{self.path}, line {number}: not JSON: {error}") from error
        if not isinstance(data, dict):
            raise ConfigError(f"{self.path}, line {number}: expected an object, got {_kind(data)}")
        return data

    def _rollout(self, data: Mapping[str, Any], number: int) -> Rollout:
        try:
            _check(data, ROLLOUT_FIELDS, "", required=True)
            _check(data, OPTIONAL_ROLLOUT_FIELDS, "", required=False)
            if data.get("reward") is not None and abs(data["reward"]) > LARGEST:
                raise ValueError(
                    f"field 'reward' is {data['reward']}; rewards lie within +-{LARGEST}, or are null where unscored"
                )
            for index, call in enumerate(data["calls"]):
                if not isinstance(call, dict):
                    raise ValueError(f"field 'calls[{index}]' must be an object, got {_kind(call)}")
                _check(call, {"call_id": ((str, int), "a string")}, f"calls[{index}].", required=True)
                _check(call, CALL_FIELDS, f"calls[{index}].", required=False)
                call["call_id"] = str(call["call_id"])
            _check_call_rewards(data.get("call_rewards", {}), {call["call_id"] for call in data["calls"]})
            return Rollout.from_dict(data)
        except ValueError as error:
            raise ConfigError(f"{self.path}, line {number}: {error}") from error


def read_steps(path: str | Path) -> Iterator[tuple[int, list[Mapping[str, Any]]]]:
    """The rollouts of a recorded run, step by step: what `train replay=FILE` trains on.

    Raises:
        ConfigError: a line that is no rollout or has no step, a rollout of a validation, a step that does not follow, a
            rollout twice in a step, a last line that was cut; by file and line.
    """
    trace, last = Trace(path), -1
    for step, group in itertools.groupby(trace, key=lambda line: line.data.get("step")):
        lines = list(group)
        where = f"{path}, line {lines[0].number}"
        if step is None or step <= last:
            raise ConfigError(f"{where}: step is {step} after {last}; a recorded run has a growing step on every line")
        seen: set[str] = set()
        for line in lines:
            if line.rollout.rollout_id in seen:
                raise ConfigError(
                    f"{path}, line {line.number}: rollout {line.rollout.rollout_id!r} is in step {step} twice"
                )
            if line.data.get("is_train") is False:
                raise ConfigError(
                    f"{path}, line {line.number}: rollout {line.rollout.rollout_id!r} is of a validation, which samples in "
                    "another way than what is trained"
                )
            seen.add(line.rollout.rollout_id)
        last = step
        ids = [{"rollout_id": line.rollout.rollout_id, "group_id": line.rollout.group_id} for line in lines]
        yield step, [{**line.data, **own} for line, own in zip(lines, ids, strict=True)]  # numbers became strings
    if trace.cut_line is not None:
        raise ConfigError(
            f"{path}, line {trace.cut_line}: the line is cut; a step without all its rollouts is not trained"
        )


def _check(
    data: Mapping[str, Any], fields: Mapping[str, tuple[tuple[type, ...], str]], at: str, required: bool
) -> None:
    """Refuse fields of the wrong JSON type, which numpy or Python's truth values would bend into something else."""
    for name, (types, allowed) in fields.items():
        if name not in data:
            if required:
                raise ValueError(f"field '{at}{name}' is missing")
            continue
        value = data[name]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise ValueError(f"field '{at}{name}' must be {allowed}, got {_kind(value)}")


def _check_call_rewards(rewards: Mapping[str, Any], calls: set[str]) -> None:
    for name, value in rewards.items():
        if name not in calls:
            raise ValueError(f"field 'call_rewards' names {name!r}, which is no call of this rollout")
        checks.number(value, f"field 'call_rewards[{name!r}]'")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
