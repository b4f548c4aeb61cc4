"""Turns answered by an OpenAI-compatible server that returns token ids (vLLM and its like), over HTTP."""

from __future__ import annotations

import os
import time
from typing import Any
from zlib import crc32

import aiohttp
import numpy as np
import orjson
from numpy.typing import NDArray

from harnessrl.adapter.importers import NOT_RECORDED
from harnessrl.adapter.types import LOGPROB_ROUNDING
from harnessrl.service.attempts import Attempts
from harnessrl.service.dialects import BIASES, MASKS, Ask, Pinned, masks, pin
from harnessrl.service.errors import ApiError
from harnessrl.service.events import Recorded, prompt_key
from harnessrl.service.gate import Gate
from harnessrl.service.gateway import Outcome, Turn
from harnessrl.service.settings import ServiceConfig
from harnessrl.service.store import Store

ROUTES = {"chat": "/chat/completions", "completion": "/completions"}
_OURS = ("stream", "stream_options", "max_completion_tokens")
_PINNED = ("model", "max_tokens", "temperature", "top_p", "top_k", "logprobs", "top_logprobs", "return_token_ids")
PASSES = (
    *("messages", "prompt", "tools", "n", "stop", "stop_token_ids", "user", "metadata"),
    *("chat_template", "chat_template_kwargs", "documents", "reasoning_effort", "parallel_tool_calls"),
    *("add_generation_prompt", "continue_final_message", "add_special_tokens", "truncate_prompt_tokens"),
    *("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output", "include_reasoning"),
    *("priority", "request_id", "cache_salt"),
)
"""Fields that go on to the server in train mode: they make the prompt, end the response or say how it is shown. No seed: a
harness that sends one would make a group's rollouts copies of each other."""
_IDS = ("token_ids", "prompt_token_ids")


class UpstreamBackend:
    """Serves turns from the registered models; all calls of a rollout go to one of them."""

    def __init__(self, config: ServiceConfig, store: Store, attempts: Attempts, gate: Gate) -> None:
        self._config, self._store, self._attempts, self._gate = config, store, attempts, gate
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)
        if config.upstream is not None:
            endpoint = config.upstream.rstrip("/")
            if all(model["endpoint"] != endpoint for model in store.models()):
                store.add_models([{"model": config.model, "endpoint": endpoint, "version": 0}])

    def models(self) -> list[str]:
        """Names of the registered models."""
        return sorted({model["model"] for model in self._store.models()})

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def run(self, turn: Turn) -> Outcome:
        """Forward a turn with its sampling pinned, and take the ids out of the answer."""
        pinned = pin(turn.ask.body, turn.mode, self._config, masks_stand=True)
        self._server(turn.rollout_id)  # refused at once where there is none
        count = turn.ask.n
        with self._attempts.enter(turn.rollout, turn.attempt, count) as live:
            await self._gate.enter(count)
            try:
                server = self._server(turn.rollout_id)  # as it is now: a pause may have brought other weights
                body = self._body(turn, pinned, server["model"])
                answer = await self._post(server["endpoint"] + ROUTES[turn.ask.kind], body)
            finally:
                self._gate.leave(count)
            prompts = [_ids(answer, choice, "prompt_token_ids") for choice in answer["choices"]]
            first = live.take(prompt_key(prompts[0]), len(prompts))
            calls = [
                self._recorded(turn, pinned, server, answer, index, prompt, first + index)
                for index, prompt in enumerate(prompts)
            ]
        return Outcome(calls=calls, answer=_shown(turn.ask, answer))

    def _server(self, rollout_id: str) -> dict[str, Any]:
        """The rollout's server: always the same while the set of servers is (and mostly so when it changes)."""
        servers = self._store.models()
        if not servers:
            raise ApiError(503, "no model is registered", retry_after=self._gate.retry_after_seconds)
        return max(servers, key=lambda server: crc32(f"{rollout_id} {server['endpoint']}".encode()))

    def _body(self, turn: Turn, pinned: Pinned, model: str) -> dict[str, Any]:
        asked = turn.ask.body
        body = {name: value for name, value in asked.items() if name not in _OURS and _passes(name, turn.mode)}
        if asked.get("tool_choice") == "none":
            body["tool_choice"] = "none"  # masks nothing
        limit = min(turn.ask.max_tokens or self._config.max_response, self._config.max_response)
        chat = turn.ask.kind == "chat"
        return body | {
            "model": model,
            "max_tokens": limit,
            "temperature": pinned.temperature,
            "top_p": pinned.top_p,
            "top_k": pinned.top_k or -1,
            "logprobs": True if chat else 0,
            "return_token_ids": True,
            **({"top_logprobs": 0} if chat else {}),
        }

    async def _post(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a request; whatever is not an answer with choices becomes an ApiError."""
        retry = self._gate.retry_after_seconds
        try:
            headers = {"Content-Type": "application/json"}
            async with self._session.post(url, data=orjson.dumps(body), headers=headers) as response:
                status, raw = response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ApiError(503, f"the model server cannot be reached: {error}", retry_after=retry) from None
        answer: Any
        try:
            answer = orjson.loads(raw)
        except orjson.JSONDecodeError:
            answer = None
        if status >= 400:
            raise _refused(status, answer, retry)
        if wrong := _malformed(answer, body.get("n") or 1):
            raise ApiError(503, f"the model server gave no answer that can be read: {wrong}", retry_after=retry)
        if any(choice.get("finish_reason") in (None, "abort", "error") for choice in answer["choices"]):
            raise ApiError(503, "the model server ended the request without an answer", retry_after=retry)
        return dict(answer)

    def _recorded(
        self,
        turn: Turn,
        pinned: Pinned,
        server: dict[str, Any],
        answer: dict[str, Any],
        index: int,
        prompt_ids: NDArray[np.int32],
        occurrence: int,
    ) -> Recorded:
        choice = answer["choices"][index]
        meta = {
            "model": server["model"],
            "server": server,
            "latency_ms": (time.time() - turn.arrived) * 1e3,
            "http_status": 200,
            "status": "ok",
            "usage": answer.get("usage"),
            "sampling": {"temperature": pinned.temperature, "top_p": pinned.top_p, "top_k": pinned.top_k},
            "overrides": pinned.overrides | _removed(turn),
            "after_stop": 0,
        }
        return Recorded(
            call_id=os.urandom(8).hex(),
            arrived=turn.arrived,
            prompt_ids=prompt_ids,
            key=prompt_key(prompt_ids),
            response_ids=_ids(answer, choice, "token_ids"),
            logprobs=_logprobs(choice),
            occurrence=occurrence,
            policy_version=server["version"],
            finish_reason=choice["finish_reason"],
            agent=turn.agent,
            constrained=turn.foreign or (turn.mode != "train" and bool(masks(turn.ask.body))),
            request=turn.raw,
            response=orjson.dumps(_shown(turn.ask, {**answer, "choices": [choice]})),
            meta=meta,
        )


def _passes(name: str, mode: str) -> bool:
    """Whether a field of a request goes on to the server; in train mode only what leaves the sampling alone does."""
    return name in PASSES or mode != "train"


def _removed(turn: Turn) -> dict[str, Any]:
    """The fields that do not go on, beside those that we set ourselves or that `pin` tells of."""
    known = {*_OURS, *_PINNED, *MASKS, *BIASES}
    names = [name for name in turn.ask.body if name not in known and not _passes(name, turn.mode)]
    return {name: {"asked": turn.ask.body[name], "used": None} for name in names}


def _refused(status: int, answer: Any, retry: int) -> ApiError:
    """The server's refusal: overload and failures as 503, the caller's mistakes as they are."""
    error = answer.get("error", answer) if isinstance(answer, dict) else {}
    message = str(error.get("message") if isinstance(error, dict) else error) or f"status {status}"
    if status == 429 or status >= 500:
        return ApiError(503, f"the model server answered {status}: {message}", retry_after=retry)
    code = error.get("code") if isinstance(error, dict) else None
    overflow = status == 400 and ("context length" in message or code == "context_length_exceeded")
    return ApiError(status, message, code="context_length_exceeded" if overflow else None)


def _malformed(answer: Any, count: int) -> str:
    """What is wrong with the shape of an answer; "" where nothing is."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        return "choices must be a list of objects"
    if len(choices) != count:
        return f"{count} choice(s) were asked for, {len(choices)} came"
    for where in (answer, *choices):
        for name in _IDS:
            ids = where.get(name) or []
            if not isinstance(ids, list) or not all(type(index) is int and 0 <= index < 2**31 for index in ids):
                return f"{name} must be a list of ids"
    for choice in choices:
        if not isinstance(choice.get("finish_reason"), str | None):
            return "finish_reason must be a string"
        logprobs = choice.get("logprobs") or {}
        content = logprobs.get("content") if isinstance(logprobs, dict) else "none"
        values = logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None
        if not isinstance(content, list | None) or not all(isinstance(item, dict) for item in content or []):
            return "logprobs.content must be a list of objects"
        numbers = values if values is not None else [item.get("logprob") for item in content or []]
        if not isinstance(numbers, list) or not all(isinstance(x, int | float | None) for x in numbers):
            return "logprobs must be numbers"
    return ""


def _ids(answer: dict[str, Any], choice: dict[str, Any], name: str) -> NDArray[np.int32]:
    """Ids of a choice; empty where the server gave none, so that the call is counted and not trained."""
    return np.array(choice.get(name) or (answer.get(name) if name == "prompt_token_ids" else None) or [], np.int32)


def _logprobs(choice: dict[str, Any]) -> NDArray[np.float32] | None:
    """Logprobs of a choice's tokens; None unless there is one for each id, finite and (to rounding) not above 0.

    -9999.0 is none: vLLM writes it where it has no logprob, or one too small to say.
    """
    logprobs = choice.get("logprobs") or {}
    values = logprobs.get("token_logprobs")
    if values is None and logprobs.get("content") is not None:
        values = [item.get("logprob") for item in logprobs["content"]]
    if values is None or len(values) != len(choice.get("token_ids") or []) or None in values:
        return None
    array = np.array(values, np.float32)
    known = np.isfinite(array) & (array <= LOGPROB_ROUNDING) & (array != NOT_RECORDED)
    return array if known.all() else None


def _shown(ask: Ask, answer: dict[str, Any]) -> dict[str, Any]:
    """The answer as the harness asked for it: without the ids and logprobs that only we wanted."""
    hidden = set() if ask.body.get("return_token_ids") is True else set(_IDS)
    without = hidden if ask.logprobs else {*hidden, "logprobs"}
    choices = [{name: value for name, value in choice.items() if name not in without} for choice in answer["choices"]]
    return {name: value for name, value in answer.items() if name not in hidden} | {"choices": choices}
