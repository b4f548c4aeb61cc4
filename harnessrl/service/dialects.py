"""From the API forms to token calls: Chat Completions and Completions. No I/O, no state.

reading   body -> Ask, what is asked for, in one form for every API
pinning   body -> Pinned, the sampling that is used, and what of the harness's wishes it overrides

answers.py writes what comes back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from harnessrl.service.errors import ApiError
from harnessrl.service.settings import ServiceConfig

MASKS = (
    *("response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
    *("min_tokens", "tool_choice", "allowed_token_ids", "bad_words"),
)
"""Fields that mask the logits: a token sampled under one is not the policy's own."""
BIASES = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "min_p": 0, "logit_bias": None}
"""Fields that shift the logits, with their neutral values."""
MOST_CHOICES = 128
LEAST_TOP_P = 1e-6
"""What a top_p of 0 means: the most likely token alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What one request asks for, whatever API it came through."""

    kind: Literal["chat", "completion"]
    """Which API the answer is written for."""
    body: dict[str, Any]
    """The request as it came."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """The conversation, in the form that chat templates expect; empty for a completion."""
    tools: list[dict[str, Any]] | None = None
    """Function tools; None where there are none."""
    prompt: str | list[int] | None = None
    """A completion's prompt, as text or as ids."""
    n: int = 1
    """Choices; each is a call of its own."""
    stream: bool = False
    """Answer as server-sent events."""
    include_usage: bool = False
    """End a stream with a chunk that carries the usage."""
    max_tokens: int | None = None
    """Most tokens to sample; None is the service's default."""
    stop: tuple[str, ...] = ()
    """Strings that end the response."""
    logprobs: bool = False
    """Give the sampled tokens' logprobs in the answer."""
    stop_ids: tuple[int, ...] = ()
    """Ids that end the response, in addition to the model's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """How a request is sampled, and which of its wishes are not followed."""

    temperature: float
    """The mode's."""
    top_p: float
    """1 in train mode."""
    top_k: int
    """0 (all) in train mode."""
    overrides: dict[str, Any]
    """Field -> {"asked", "used"}, recorded with the call; used is null for a field that was removed."""


# -- reading ------------------------------------------------------------------------------------------------------


def read_chat(body: Any) -> Ask:
    """Read a Chat Completions body; unknown fields are ignored.

    Raises:
        ApiError: 400, the body is no object, or 422, a field has the wrong shape.
    """
    fields = _common(body)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(422, "messages must be a list of one message or more")
    tools = [tool for tool in _list(body, "tools") if isinstance(tool, dict) and isinstance(tool.get("function"), dict)]
    limit = body.get("max_completion_tokens")
    return Ask(
        kind="chat",
        messages=[_message(message, index) for index, message in enumerate(messages)],
        tools=tools or None,
        logprobs=body.get("logprobs") is True,
        max_tokens=_positive("max_completion_tokens", limit) or _positive("max_tokens", body.get("max_tokens")),
        **fields,
    )


def read_completion(body: Any) -> Ask:
    """Read a Completions body: one prompt, as a string or as ids.

    Raises:
        ApiError: 400, the body is no object, or 422, a field has the wrong shape.
    """
    fields = _common(body)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    ids = isinstance(prompt, list) and bool(prompt) and all(type(index) is int for index in prompt)
    if not (ids or (isinstance(prompt, str) and prompt)):
        raise ApiError(422, "prompt must be one non-empty string or one non-empty list of token ids")
    return Ask(
        kind="completion",
        prompt=prompt,
        max_tokens=_positive("max_tokens", body.get("max_tokens")),
        logprobs=type(body.get("logprobs")) is int or body.get("logprobs") is True,
        **fields,
    )


def _common(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else _list(body, "stop")
    if not all(isinstance(item, str) for item in stops):
        raise ApiError(422, "stop must be a string or a list of strings")
    stop_ids = _list(body, "stop_token_ids")
    if not all(type(item) is int for item in stop_ids):
        raise ApiError(422, "stop_token_ids must be a list of integers")
    n = _positive("n", body.get("n")) or 1
    if n > MOST_CHOICES:
        raise ApiError(422, f"n must be {MOST_CHOICES} or less, got {n}")
    options = body.get("stream_options")
    return {
        "body": body,
        "n": n,
        "stream": body.get("stream") is True,
        "include_usage": isinstance(options, dict) and options.get("include_usage") is True,
        "stop": tuple(item for item in stops if item),
        "stop_ids": tuple(stop_ids),
    }


def _list(body: dict[str, Any], name: str) -> list[Any]:
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise ApiError(422, f"{name} must be a list, got {type(value).__name__}")
    return value


def _positive(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if type(value) is not int or value < 1:
        raise ApiError(422, f"{name} must be an integer of 1 or more, got {value!r}")
    return value


def _message(message: Any, index: int) -> dict[str, Any]:
    """One message with its content as one string, its role known to templates, its tool arguments as an object."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ApiError(422, f"messages[{index}] must be an object with a role")
    out = {**message, "content": _text(message.get("content"), f"messages[{index}].content")}
    if out["role"] == "developer":
        out["role"] = "system"
    calls = message.get("tool_calls")
    if not calls:
        out.pop("tool_calls", None)
    elif not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ApiError(422, f"messages[{index}].tool_calls must be a list of objects")
    else:
        out["tool_calls"] = [_tool_call(call) for call in calls]
    return out


def _text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ApiError(422, f"{where} must be a string or a list of parts, got {type(content).__name__}")
    texts = []
    for part in content:
        text = (
            part if isinstance(part, str) else part.get("text", part.get("refusal")) if isinstance(part, dict) else None
        )
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ApiError(400, f"{where} holds a part of type {kind!r}; this model reads text only")
        texts.append(text)
    return "".join(texts)


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """Templates render arguments from an object; text that is no JSON object stays the text it is."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = orjson.loads(function["arguments"])
    except orjson.JSONDecodeError:
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


# -- pinning ------------------------------------------------------------------------------------------------------


def pin(body: dict[str, Any], mode: str, config: ServiceConfig, *, masks_stand: bool = False) -> Pinned:
    """Decide the sampling: train mode pins everything; val mode pins the temperature and lets top_p and top_k stand.

    Masks and biases are removed in train mode, and in val mode too unless `masks_stand` (a token engine knows none).
    """
    train = mode == "train"
    temperature = config.train_temperature if train else config.val_temperature
    top_p = 1.0 if train else max(float(_number(body, "top_p", 1.0, 0.0, 1.0)), LEAST_TOP_P)
    top_k = 0 if train else int(max(0, _number(body, "top_k", 0, -1, 2**31 - 1)))
    used = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    overrides = {
        name: {"asked": body[name], "used": value}
        for name, value in used.items()
        if body.get(name) is not None and body[name] != value and not (name == "top_k" and body[name] == -1)
    }
    if train or not masks_stand:
        biases = [name for name, neutral in BIASES.items() if body.get(name) not in (None, neutral, {})]
        overrides |= {name: {"asked": body[name], "used": None} for name in (*biases, *masks(body))}
    return Pinned(temperature=temperature, top_p=top_p, top_k=top_k, overrides=overrides)


def masks(body: dict[str, Any]) -> list[str]:
    """The fields of a body that really mask the logits."""
    neutral = {"tool_choice": ("auto", "none"), "min_tokens": (0,), "response_format": ({"type": "text"},)}
    return [name for name in MASKS if body.get(name) and body[name] not in neutral.get(name, ())]


def _number(body: dict[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ApiError(422, f"{name} must be a number from {low:g} to {high:g}, got {value!r}")
    return value
