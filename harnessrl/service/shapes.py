"""Bodies of the management routes, checked field by field: a wrong shape is a 422 that names the field."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson

from harnessrl.adapter.baselines import LARGEST
from harnessrl.service.errors import ApiError
from harnessrl.service.store import STATES

_IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@=+~-]{0,127}")
_TAKEN = ("terminal",)
_PATCHABLE = ("state", "k8s_job_name", "last_attempt_id", "error_message")


def need(condition: bool, message: str) -> None:
    """Refuse a body whose shape is wrong."""
    if not condition:
        raise ApiError(422, message)


def identifier(value: Any, name: str) -> str:
    """An id that can stand in a URL and in a file name."""
    fits = isinstance(value, str) and _IDENTIFIER.fullmatch(value) is not None
    need(fits, f"{name} must be 1 to 128 letters, digits or ._:@=+~- and begin with a letter or digit, got {value!r}")
    return str(value)


def new_rollouts(body: Any, default_timeout: float) -> list[dict[str, Any]]:
    """Read the list of POST /api/rollouts, with every default filled in."""
    need(isinstance(body, list), "the body must be a list of rollouts")
    return [_new_rollout(item, f"[{index}]", default_timeout) for index, item in enumerate(body)]


def _new_rollout(item: Any, where: str, default_timeout: float) -> dict[str, Any]:
    need(isinstance(item, dict) and "input" in item, f"{where} must be an object with input")
    is_train = item.get("is_train", True)
    need(isinstance(is_train, bool), f"{where}.is_train must be true or false")
    metadata = {} if item.get("metadata") is None else item["metadata"]
    need(isinstance(metadata, dict), f"{where}.metadata must be an object")
    given = item.get("rollout_id")
    need(given not in _TAKEN, f"{where}.rollout_id must not be {given!r}: /api/rollouts/{given} is a route of its own")
    return {
        "rollout_id": None if given is None else identifier(given, f"{where}.rollout_id"),
        "input": item["input"],
        "is_train": is_train,
        "config": _config(item.get("config"), item["input"], f"{where}.config", default_timeout),
        "metadata": {"batch_idx": None, "sample_idx_in_batch": None, **metadata},
    }


def _config(value: Any, task: Any, where: str, default_timeout: float) -> dict[str, Any]:
    config = {} if value is None else value
    need(isinstance(config, dict), f"{where} must be an object")
    timeout = default_timeout if config.get("timeout_seconds") is None else config["timeout_seconds"]
    number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    need(number and timeout > 0, f"{where}.timeout_seconds must be a number above 0, got {timeout!r}")
    for name in ("local", "k8s"):
        need(config.get(name) is None or isinstance(config[name], dict), f"{where}.{name} must be an object or null")
    local = None if config.get("local") is None else _local(config["local"], task, f"{where}.local")
    return {**config, "timeout_seconds": timeout, "local": local, "k8s": config.get("k8s")}


def _local(local: dict[str, Any], task: Any, where: str) -> dict[str, Any]:
    agent, command = local.get("agent_class"), local.get("command")
    need(agent is None or isinstance(agent, str), f"{where}.agent_class must be MODULE:FUNCTION, got {agent!r}")
    strings = isinstance(command, list) and bool(command) and all(isinstance(part, str) for part in command)
    need(command is None or strings, f"{where}.command must be a list of strings, got {command!r}")
    need(agent is None or command is None, f"{where} must not have both agent_class and command")
    env_map = {} if local.get("env_map") is None else local["env_map"]
    flat = isinstance(env_map, dict) and all(isinstance(path, str) for path in env_map.values())
    need(flat, f"{where}.env_map must map names to paths")
    try:
        environment(task, env_map)
    except ValueError as error:
        raise ApiError(422, f"{where}.env_map: {error}") from None
    return {"agent_class": agent, **({} if command is None else {"command": command}), "env_map": env_map}


def environment(task: Any, env_map: Mapping[str, str]) -> dict[str, str]:
    """Look up the paths of an env_map in a rollout's input; what does not begin with `input` is taken literally.

    Strings pass as they are, everything else as JSON.

    Raises:
        ValueError: A path leads nowhere, or a value cannot be in an environment; names the variable.
    """
    out = {}
    for name, path in env_map.items():
        value: Any = task if path == "input" or path.startswith("input.") else path
        for part in path.split(".")[1:] if value is not path else ():
            if isinstance(value, dict) and part in value:
                value = value[part]
            elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
                value = value[int(part)]
            else:
                raise ValueError(f"{name}: the input has no {path}")
        out[name] = value if isinstance(value, str) else orjson.dumps(value).decode()
        if not name or "=" in name or "\0" in name + out[name]:
            raise ValueError(f"{name!r} cannot be set in an environment")
    return out


def status_patch(body: Any) -> dict[str, Any]:
    """Read the body of PATCH /api/rollouts/{id}: the columns to change."""
    need(isinstance(body, dict) and not set(body) - {"status"}, "only status can be changed")
    status = {} if body.get("status") is None else body["status"]
    need(isinstance(status, dict), "status must be an object")
    unknown = sorted(set(status) - set(_PATCHABLE))
    need(not unknown, f"status has no field {unknown[:1]}; it has {', '.join(_PATCHABLE)}")
    for name, value in status.items():
        need(value is None or isinstance(value, str), f"status.{name} must be a string or null")
    if "state" in status:
        need(status["state"] in STATES, f"status.state must be one of {', '.join(STATES)}, got {status['state']!r}")
    return status


def new_event(body: Any) -> tuple[str, dict[str, Any], str | None]:
    """Read the body of POST .../events: type, data, and the id under which it may be posted again."""
    need(isinstance(body, dict), "the body must be an object")
    event_type, data, event_id = body.get("event_type"), body.get("data", {}), body.get("event_id")
    need(isinstance(event_type, str) and bool(event_type), "event_type must be a non-empty string")
    need(event_type != "model_request", "model_request events are written by the gateway alone")
    need(isinstance(data, dict), "data must be an object")
    need(event_id is None or isinstance(event_id, str), "event_id must be a string")
    if event_type in ("reward", "call_reward"):
        value = data.get("value")
        fits = isinstance(value, (int, float)) and abs(value) <= LARGEST  # NaN does not
        need(fits, f"a reward's data.value must be a finite number within +-{LARGEST:g}")
    if event_type == "call_reward":
        need(
            isinstance(data.get("call_id"), str),
            "a call_reward's data.call_id must name a call, or the id of its answer",
        )
    return event_type, data, event_id


def new_models(body: Any) -> list[dict[str, Any]]:
    """Read the list of POST /api/models."""
    need(isinstance(body, list), "the body must be a list of models")
    for index, item in enumerate(body):
        names = isinstance(item, dict) and all(isinstance(item.get(name), str) for name in ("model", "endpoint"))
        need(names, f"[{index}] must be an object with model and endpoint")
        good = item["endpoint"].startswith(("http://", "https://")) and item["endpoint"].rstrip("/").endswith("/v1")
        need(good, f"[{index}].endpoint must be a URL that ends in /v1, got {item['endpoint']!r}")
        need(type(item.get("version", 0)) is int, f"[{index}].version must be an integer")
    return [
        {"model": item["model"], "endpoint": item["endpoint"].rstrip("/"), "version": item.get("version", 0)}
        for item in body
    ]


def pause(body: Any) -> tuple[int, str | None]:
    """Read the body of POST /proxy/pause: seconds for Retry-After, and why."""
    need(isinstance(body, dict), "the body must be an object")
    seconds, reason = body.get("retry_after_seconds", 5), body.get("reason")
    need(type(seconds) is int and seconds >= 0, "retry_after_seconds must be an integer of 0 or more")
    need(reason is None or isinstance(reason, str), "reason must be a string")
    return seconds, reason
