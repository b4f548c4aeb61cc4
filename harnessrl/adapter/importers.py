"""Rollouts from what other systems recorded: Agent Lightning's events and vLLM's responses, as parsed JSON.

Ids are taken as they are or refused: nothing is tokenised, and a missing logprob is None, never 0.0. A logprob of
``NOT_RECORDED`` among a call's makes all of them None. Our own traces are read by ``Rollout.from_dict``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import replace
from typing import Any

from harnessrl.adapter.types import Call, Rollout

Json = Mapping[str, Any]

NOT_RECORDED = -9999.0
"""What OpenAI's API and vLLM write where they have no logprob, or one too small to say: not a value to train on."""

_AGENT_LIGHTNING = "ask for format=triplet, and for token ids from the model server"
_VLLM = 'send "return_token_ids": true with the request'


def from_agent_lightning(events: Sequence[Json], *, rollout_id: str, group_id: str) -> Rollout:
    """Read the events of one attempt, as ``GET /api/rollouts/{id}/events?format=triplet`` returns them.

    A model_request becomes a call; one that failed (status "error") becomes a call without ids, which merging counts as
    ``missing_ids``. The last reward event gives the reward, without one the rollout is unscored. Events of other types
    hold no tokens and are passed over.

    Args:
      events: in order of arrival; a model_request's data holds prompt_token_ids, response_token_ids, response_log_probs
        (null, or -9999.0 among them: not recorded) and server.version, which policy_version goes before; call_id, request_id, delivered,
        constrained, finish_reason and agent are read where they are.
      rollout_id: unique in its batch.
      group_id: shared by the rollouts of one input.

    Returns:
      Rollout; calls without a call_id are named by their event, "event-0".

    Raises:
      ValueError: events of several attempts or of another rollout, a successful request without ids, lengths that
        differ, a reward that is not a number; it names the rollout, the event's index and the field.

    Source: Agent Lightning v1's HTTP interface; arXiv:2508.03680 (v0) for the triplets.
    """
    calls, reward = [], None
    for index, event in enumerate(_objects(events, f"rollout {rollout_id!r}", "event")):
        where = f"rollout {rollout_id!r}, event {index}: "
        if str(event.get("rollout_id", rollout_id)) != rollout_id:
            raise ValueError(f"{where}rollout_id is {event['rollout_id']!r}; pass the events of one rollout")
        if event.get("attempt_id") != events[0].get("attempt_id"):
            first = events[0].get("attempt_id")
            raise ValueError(
                f"{where}attempt_id is {event.get('attempt_id')!r}, event 0 has {first!r}; never mix attempts"
            )
        if event.get("event_type") == "reward":
            reward = _reward(_object(event, "data", where).get("value"), where + "data.value")
        elif event.get("event_type") == "model_request":
            calls.append(_event_call(_object(event, "data", where), f"event-{index}", where))
    return Rollout(rollout_id=rollout_id, group_id=group_id, calls=calls, reward=reward)


def _event_call(data: Json, name: str, where: str) -> Call:
    failed = data.get("status") == "error"
    version = data.get("policy_version")
    if version is None and data.get("server") is not None:
        version = _object(data, "server", where).get("version")
    prompt, response = data.get("prompt_token_ids"), data.get("response_token_ids")
    if not failed and _empty(prompt):
        raise _no_ids(where, "data.prompt_token_ids", _AGENT_LIGHTNING)
    if not failed and response is None:
        raise _no_ids(where, "data.response_token_ids", _AGENT_LIGHTNING)
    delivered, constrained = data.get("delivered"), data.get("constrained")
    return _call(
        where,
        call_id=name if data.get("call_id") is None else str(data["call_id"]),
        prompt_ids=[] if prompt is None else prompt,
        response_ids=[] if response is None else response,
        logprobs=data.get("response_log_probs"),
        policy_version=0 if version is None else version,
        finish_reason=data.get("finish_reason"),
        agent=data.get("agent") or "",
        delivered=not failed if delivered is None else delivered,
        constrained=False if constrained is None else constrained,
        request_id=data.get("request_id"),
    )


def from_vllm_chat(
    responses: Sequence[Json], *, rollout_id: str, group_id: str, reward: float | None = None
) -> Rollout:
    """Read Chat Completions of vLLM that were asked for with ``return_token_ids`` (and ``logprobs``).

    Each choice is a call of its own, named by the response's id and the choice's index. A choice that ended as "abort"
    is kept as undelivered, so it is never trained.

    Args:
      responses: whole response bodies, in order of arrival, with prompt_token_ids at the top,
        choices[i].token_ids, and choices[i].logprobs.content[j].logprob (null: not recorded; nor are any of a
        choice's where one is -9999.0, which vLLM writes for those it does not know). The logprobs are those
        sampled from only where the server runs with ``logprobs_mode=processed_logprobs``.
      rollout_id: unique in its batch.
      group_id: shared by the rollouts of one input.
      reward: final reward; None (or NaN) is unscored.

    Returns:
      Rollout; vLLM does not say which weights sampled, so policy_version is 0.

    Raises:
      ValueError: no prompt ids, no token_ids, an entry without logprob, lengths that differ, a response twice; it names
        the rollout, the response's index and the field.

    Source: vLLM's OpenAI-compatible server, 0.32.
    """
    return _from_vllm(responses, _read_chat, rollout_id, group_id, reward)


def from_vllm_completions(
    responses: Sequence[Json], *, rollout_id: str, group_id: str, reward: float | None = None
) -> Rollout:
    """Read Completions of vLLM; as ``from_vllm_chat``, but the prompt's ids lie in each choice.

    Args:
      responses: as there, with choices[i].prompt_token_ids, choices[i].token_ids and
        choices[i].logprobs.token_logprobs (null or -9999.0: not recorded). An answer with ``echo`` has more logprobs than sampled
        tokens and is refused.
      rollout_id: unique in its batch.
      group_id: shared by the rollouts of one input.
      reward: final reward; None (or NaN) is unscored.

    Returns:
      Rollout, as ``from_vllm_chat``.

    Raises:
      ValueError: as ``from_vllm_chat``.

    Source: vLLM's OpenAI-compatible server, 0.32.
    """
    return _from_vllm(responses, _read_completion, rollout_id, group_id, reward)


Columns = tuple[Any, list[float] | None]
Reader = Callable[[Json, Json, str, str], Columns]
"""(response, choice, where, path of the choice) -> prompt ids, logprobs."""


def _from_vllm(
    responses: Sequence[Json], read: Reader, rollout_id: str, group_id: str, reward: float | None
) -> Rollout:
    calls = []
    for index, response in enumerate(_objects(responses, f"rollout {rollout_id!r}", "response")):
        name = f"rollout {rollout_id!r}, response {index}"
        for place, choice in enumerate(_objects(response.get("choices"), name, "choice")):
            where, path = name + ": ", f"choices[{place}]."
            prompt, logprobs = read(response, choice, where, path)
            if choice.get("token_ids") is None:
                raise _no_ids(where, path + "token_ids", _VLLM)
            finish_reason = choice.get("finish_reason")
            call = _call(
                where,
                call_id=f"{response.get('id') or f'response-{index}'}/{choice.get('index', place)}",
                prompt_ids=prompt,
                response_ids=choice["token_ids"],
                logprobs=logprobs,
                finish_reason=finish_reason,
                delivered=finish_reason != "abort",
            )
            calls.append(call)
    scored = None if reward is None else _reward(reward, f"rollout {rollout_id!r}: reward")
    return Rollout(rollout_id=rollout_id, group_id=group_id, calls=calls, reward=scored)


def _read_chat(response: Json, choice: Json, where: str, path: str) -> Columns:
    prompt = response.get("prompt_token_ids")
    if _empty(prompt):
        raise _no_ids(where, "prompt_token_ids", _VLLM)
    if choice.get("logprobs") is None:
        return prompt, None
    content = _object(choice, "logprobs", where + path).get("content")
    if content is None:
        return prompt, None
    entries = _objects(content, where + path + "logprobs.content", "logprob")
    name = where + path + "logprobs.content[{}].logprob"
    return prompt, [_number(entry.get("logprob"), name.format(j)) for j, entry in enumerate(entries)]


def _read_completion(response: Json, choice: Json, where: str, path: str) -> Columns:
    prompt = choice.get("prompt_token_ids")
    if _empty(prompt):
        raise _no_ids(where, path + "prompt_token_ids", _VLLM)
    if choice.get("logprobs") is None:
        return prompt, None
    values = _object(choice, "logprobs", where + path).get("token_logprobs")
    name = where + path + "logprobs.token_logprobs"
    if values is None:
        return prompt, None
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise ValueError(f"{name} must be a list of numbers, got {type(values).__name__}")
    return prompt, [_number(value, f"{name}[{j}]") for j, value in enumerate(values)]


def _call(where: str, **fields: Any) -> Call:
    """A checked call; what is wrong with it is said with the place that it came from."""
    try:
        call = Call(**fields)
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"{where}{error}") from error
    known = call.logprobs
    if known is not None and len(known) == len(call.response_ids) and (known == NOT_RECORDED).any():
        return replace(call, logprobs=None)
    return call


def _objects(items: Any, where: str, kind: str) -> Sequence[Json]:
    """A list of JSON objects, or an error that says which entry is none."""
    if not isinstance(items, Sequence) or isinstance(items, (str, bytes)):
        raise ValueError(f"{where}: expected a list of {kind} objects, got {type(items).__name__}")
    for index, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise ValueError(f"{where}, {kind} {index}: expected an object, got {type(item).__name__}")
    return items


def _object(parent: Json, field: str, where: str) -> Json:
    value = parent.get(field)
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}{field} must be an object, got {type(value).__name__}")
    return value


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{where} must be a number, got {value!r}")
    try:
        return float(value)
    except OverflowError:  # an integer of some hundred digits
        raise ValueError(f"{where} is beyond float64") from None


def _empty(ids: Any) -> bool:
    """Whether no ids were recorded; an array has no truth value of its own."""
    return ids is None or (isinstance(ids, Sized) and getattr(ids, "ndim", 1) > 0 and len(ids) == 0)


def _reward(value: Any, where: str) -> float | None:
    number = _number(value, where)
    if math.isinf(number):
        raise ValueError(f"{where} must be finite, got {number}")
    return None if math.isnan(number) else number


def _no_ids(where: str, field: str, advice: str) -> ValueError:
    return ValueError(f"{where}field {field} has no ids; {advice} (text is never tokenised again)")
