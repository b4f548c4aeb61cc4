"""What the service and a worker are told when they start: two frozen records, read from one JSON line each."""

from __future__ import annotations

import json
import sys
import types
import typing
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

Settings = TypeVar("Settings")


@dataclass(frozen=True, kw_only=True)
class ServiceConfig:
    """One service: gateway, store and controller. Example: ``ServiceConfig(store="run/store.sqlite", key="k")``"""

    host: str = "127.0.0.1"
    """Interface to listen on; loopback by default."""
    port: int = 0
    """TCP port of the gateway; 0 takes a free one."""
    store: str
    """Path of the SQLite file; created where it does not exist."""
    key: str
    """Master bearer key: reaches every route. Keys limited to one rollout are derived from it."""
    engine: str | None = None
    """ZeroMQ address that a token engine binds; exclusive with upstream."""
    upstream: str | None = None
    """URL (ending in /v1) of an OpenAI-compatible server that returns token ids; exclusive with engine."""
    model: str = "policy"
    """Name of the model, whatever name a harness asks for."""
    tokenizer: str | None = None
    """Folder with tokenizer.json and tokenizer_config.json; needed with engine."""
    train_temperature: float = 1.0
    """Temperature of every call in train mode; above 0."""
    val_temperature: float = 0.7
    """Temperature of every call in val mode; 0 is greedy."""
    hold_seconds: float = 100.0
    """How long a request waits for the end of a pause before 503; below the first-byte timeout of harnesses."""
    max_context: int = 0
    """Most tokens of prompt and response together; 0 is unknown."""
    max_response: int = 1024
    """Default of max_tokens, and its upper clamp."""
    max_calls: int = 0
    """Most model calls of one rollout attempt; 0 is no bound."""
    max_body: int = 32 * 2**20
    """Largest request body, bytes."""
    controller: str = "tcp://127.0.0.1:*"
    """ZeroMQ address that workers connect to."""
    heartbeat_seconds: float = 2.0
    """How often a worker reports; one that is silent five times as long is lost."""
    rollout_timeout: float = 1800.0
    """Seconds a harness may run where the rollout's config names no timeout_seconds."""
    attempts: int = 2
    """Executions of a rollout at most; only losses to infrastructure lead to another one."""
    seed: int = 0
    """Root of all sampling noise."""
    run_folder: str | None = None
    """Harness output goes to RUN_FOLDER/harness/; None keeps none."""

    def __post_init__(self) -> None:
        if self.engine and self.upstream:
            raise ValueError("engine and upstream exclude each other: give one of them")
        if self.engine and not self.tokenizer:
            raise ValueError("engine needs tokenizer, a folder with tokenizer.json and tokenizer_config.json")
        if not self.key:
            raise ValueError("key must not be empty")
        at_least = {"port": 0, "max_context": 0, "max_response": 1, "max_calls": 0, "max_body": 1, "attempts": 1}
        at_least |= {"val_temperature": 0, "hold_seconds": 0}
        for name, least in at_least.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be {least} or more, got {getattr(self, name)}")
        for name in ("train_temperature", "heartbeat_seconds", "rollout_timeout"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """One worker. Example: ``WorkerConfig(controller="tcp://127.0.0.1:5555")``"""

    controller: str
    """ZeroMQ address of the controller."""
    capacity: int = 256
    """Harnesses that may run at once."""
    path: list[str] = field(default_factory=list)
    """Folders to put first on sys.path, so that in-process harnesses can be imported."""

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise ValueError(f"capacity must be 1 or more, got {self.capacity}")


def read_settings(kind: type[Settings], line: bytes | str) -> Settings:
    """Read one JSON object into a settings record.

    Raises:
        ValueError: Not JSON, an unknown or missing key, a value of the wrong type; names the key and what is allowed.
    """
    try:
        data = json.loads(line)
    except ValueError as error:
        raise ValueError(f"configuration is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"configuration must be a JSON object, got {type(data).__name__}")
    hints = typing.get_type_hints(kind)
    if unknown := sorted(set(data) - set(hints)):
        raise ValueError(f"unknown key {unknown[0]!r}; known: {', '.join(sorted(hints))}")
    for item in fields(kind):  # type: ignore[arg-type]
        if item.name in data and not _fits(data[item.name], hints[item.name]):
            kind_of = "a finite float" if hints[item.name] is float else item.type
            raise ValueError(f"{item.name} must be {kind_of}, got {data[item.name]!r}")
    try:
        return kind(**data)
    except TypeError as error:  # a required key is missing
        raise ValueError(str(error).split("__init__() ")[-1]) from None


def _fits(value: Any, hint: Any) -> bool:
    if isinstance(hint, types.UnionType):
        return any(_fits(value, option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is list:
        return isinstance(value, list) and all(_fits(item, typing.get_args(hint)[0]) for item in value)
    if hint is float:  # a finite one: no JSON but Python's has inf and nan
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return number and abs(value) <= sys.float_info.max
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)
