"""From sampled tokens to the API forms: Chat Completions and Completions, whole or as server-sent events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from harnessrl.service.dialects import Ask


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One sampled response, ready to be written."""

    text: str
    """Without special tokens and without the stop string."""
    ids: NDArray[np.int32]
    """int32 [A]"""
    logprobs: NDArray[np.float32]
    """float32 [A]"""
    tokens: list[str] | None
    """Each id's text, where the request wants logprobs; else None."""
    finish_reason: str
    """stop or length."""


def answer(
    ask: Ask, model: str, answer_id: str, created: int, prompt_ids: NDArray[np.int32], choices: Sequence[Choice]
) -> dict[str, Any]:
    """The API's answer; ids and logprobs are in it only where they were asked for."""
    sampled = sum(len(choice.ids) for choice in choices)
    usage = {
        "prompt_tokens": len(prompt_ids),
        "completion_tokens": sampled,
        "total_tokens": len(prompt_ids) + sampled,
    }
    chat, want_ids = ask.kind == "chat", ask.body.get("return_token_ids") is True
    written = [_chat_choice(choice, i) if chat else _text_choice(choice, i) for i, choice in enumerate(choices)]
    answer = {
        "id": ("chatcmpl-" if chat else "cmpl-") + answer_id,
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": model,
        "choices": written,
        "usage": usage,
    }
    if want_ids:
        for entry, choice in zip(written, choices, strict=True):
            entry["token_ids"] = choice.ids.tolist()
            if not chat:
                entry["prompt_token_ids"] = prompt_ids.tolist()
        if chat:
            answer["prompt_token_ids"] = prompt_ids.tolist()
    return answer


def _chat_choice(choice: Choice, index: int) -> dict[str, Any]:
    logprobs = None
    if choice.tokens is not None:
        pairs = zip(choice.tokens, choice.logprobs.tolist(), strict=True)
        content = [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in pairs
        ]
        logprobs = {"content": content}
    message = {"role": "assistant", "content": choice.text}
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish_reason}


def _text_choice(choice: Choice, index: int) -> dict[str, Any]:
    logprobs = None
    if choice.tokens is not None:
        offsets = np.cumsum([0, *(len(text) for text in choice.tokens)])[:-1]
        logprobs = {
            "tokens": choice.tokens,
            "token_logprobs": choice.logprobs.tolist(),
            "top_logprobs": None,
            "text_offset": offsets.tolist(),
        }
    return {"index": index, "text": choice.text, "logprobs": logprobs, "finish_reason": choice.finish_reason}


def stream(answer: dict[str, Any], *, include_usage: bool) -> bytes:
    """A finished answer as the server-sent events of a stream: role, content, finish reason, usage if asked, [DONE]."""
    chat = "message" in answer["choices"][0]
    head = {name: answer[name] for name in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk" if chat else "text_completion"
    chunks = []
    for choice in answer["choices"]:
        for part in _chat_parts(choice) if chat else [choice]:
            chunks.append({**head, "choices": [part]} | ({"usage": None} if include_usage else {}))
    if include_usage:
        chunks.append({**head, "choices": [], "usage": answer["usage"]})
    lines = [b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks]
    return b"".join(lines) + b"data: [DONE]\n\n"


def _chat_parts(choice: dict[str, Any]) -> list[dict[str, Any]]:
    message = choice["message"]
    content = {name: value for name, value in message.items() if name != "role" and value}
    if calls := content.get("tool_calls"):
        content["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
    deltas = [{"role": "assistant", "content": ""}, content or {"content": ""}, {}]
    last = len(deltas) - 1
    return [
        {
            "index": choice["index"],
            "delta": delta,
            "logprobs": choice.get("logprobs") if at == 1 else None,
            "finish_reason": choice["finish_reason"] if at == last else None,
        }
        for at, delta in enumerate(deltas)
    ]
