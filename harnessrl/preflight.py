"""What is checked before anything starts, without torch: names, folders, files, ports, and whose run folder it is."""

from __future__ import annotations

import fcntl
import importlib
import inspect
import json
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harnessrl.config import Config
from harnessrl.errors import ConfigError
from harnessrl.metrics import read_manifest
from harnessrl.trace import read_steps


def resolve(name: str) -> Callable[..., Any]:
    """The function behind `MODULE:FUNCTION`.

    Raises:
        ValueError: no such module or function, by name.
    """
    module, colon, function = name.partition(":")
    if not colon:
        raise ValueError(f"{name!r}: expected MODULE:FUNCTION")
    try:
        return getattr(importlib.import_module(module), function)  # type: ignore[no-any-return]
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name!r}: {error}") from error


def check(config: Config) -> None:
    """Refuse what would fail later: names that do not resolve, folders that are absent, another run's folder, a port in use.

    Raises:
        ConfigError: by the key's path.
    """
    names = {
        "task.inputs": config.task.inputs,
        "task.harness": config.task.harness,
        "policy.source": config.policy.source,
    }
    for key, name in names.items():
        if name is None:
            continue
        if key == "policy.source" and ":" not in name:
            missing = [f for f in ("config.json", "tokenizer.json") if not (Path(name) / f).is_file()]
            if missing:
                raise ConfigError(
                    f"{key}: {name} has no {missing[0]}; expected a transformers folder or MODULE:FUNCTION"
                )
            continue
        try:
            function = resolve(name)
        except ValueError as error:
            raise ConfigError(f"{key}: {error}") from error
        if key == "task.harness" and not inspect.iscoroutinefunction(function):
            raise ConfigError(f"{key}: {name} must be an `async def run(env)`")
        if not _takes(function, CALLED[key]):
            raise ConfigError(f"{key}: {name} cannot be called as {CALLED[key][0]}")
    if config.task.command and shutil.which(config.task.command[0]) is None:
        raise ConfigError(f"task.command: {config.task.command[0]} is not a program that can be run here")
    if config.replay:
        steps = {step for step, _ in read_steps(config.replay)}
        if missing := sorted(set(range(config.steps)) - steps):
            raise ConfigError(
                f"replay: {config.replay} holds {len(steps)} steps and not step {missing[0]}; give steps={missing[0]}"
                if missing[0]
                else f"replay: {config.replay} holds no step 0"
            )
    if config.service.port:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((config.service.host, config.service.port))
            except OSError as error:
                raise ConfigError(
                    f"service.port: {config.service.host}:{config.service.port}: {error.strerror}"
                ) from error
    check_same(config)


CALLED: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "task.inputs": ('inputs(seed, "train")', (0, "train"), {}),
    "task.harness": ("run(env)", ({},), {}),
    "policy.source": ("policy(seed, cache, report=None)", (0, Path()), {"report": None}),
}
"""How the functions that a configuration names are called."""


def _takes(function: Callable[..., Any], called: tuple[str, tuple[Any, ...], dict[str, Any]]) -> bool:
    """Whether a function's parameters allow the call."""
    try:
        inspect.signature(function).bind(*called[1], **called[2])
    except TypeError:
        return False
    except ValueError:  # built in C: it has no signature to look at
        return True
    return True


def check_same(config: Config) -> None:
    """A run folder belongs to one configuration; only how long and how often it is saved may change."""
    recorded = read_manifest(config.folder).get("config")
    if recorded is None:
        return
    old, new, defaults = (
        flatten(json.loads(json.dumps(value))) for value in (recorded, asdict(config), asdict(Config()))
    )
    old = defaults | old  # a key that is younger than the run was at its default
    free = {"steps", "checkpoint_every", "checkpoint_keep", "threads", "stall_seconds", "runs"}
    changed = [
        key
        for key in sorted(old.keys() | new.keys())
        if key not in free and not key.startswith("service.") and old.get(key) != new.get(key)
    ]
    if changed:
        key = changed[0]
        raise ConfigError(
            f"{key}: {config.folder} was started with {old.get(key)!r}, now it is {new.get(key)!r}; "
            "take another run=NAME"
        )


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys."""
    if not isinstance(value, dict):
        return {prefix[:-1]: value}
    return {k: v for name, item in value.items() for k, v in flatten(item, f"{prefix}{name}.").items()}


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a run folder alone.

    Raises:
        ConfigError: another process holds it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise ConfigError(f"run: {folder} cannot be written: {error.strerror}") from error
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"run: {folder} is in use by another process") from error
        yield
