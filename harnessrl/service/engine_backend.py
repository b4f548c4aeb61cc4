"""Turns answered by a token engine: render, encode, sample, decode. Text ends here; the engine sees ids."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from harnessrl.service import answers, wire
from harnessrl.service.answers import Choice
from harnessrl.service.attempts import Attempts
from harnessrl.service.dialects import Ask, Pinned, pin
from harnessrl.service.engine_client import Batch, EngineClient, EngineLost
from harnessrl.service.errors import ApiError
from harnessrl.service.events import Recorded, prompt_key
from harnessrl.service.gate import Gate
from harnessrl.service.gateway import Outcome, Turn
from harnessrl.service.settings import ServiceConfig
from harnessrl.service.tokens import TemplateError, TextCodec

CANCEL_SECONDS = 10.0
"""How long a cancelled request may take to hand back what it sampled."""
LONG_TEXT = 20_000
"""Characters from which a prompt is encoded in a thread, so that others need not wait."""


def noise_key(seed: int, rollout_id: str, attempt: str, prompt_ids: NDArray[np.int32], occurrence: int) -> int:
    """Key of one request's sampling noise: it repeats whenever the same rollout asks the same thing again.

    blake2b-64 of seed, rollout, occurrence, attempt (unless "0") and the prompt's ids as int32 bytes.
    """
    name = f"{seed}\0{rollout_id}\0{occurrence}" + ("" if attempt == "0" else f"\0{attempt}")
    return int.from_bytes(blake2b(name.encode() + b"\0\0" + prompt_ids.tobytes(), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """One turn on its way through the engine."""

    turn: Turn
    pinned: Pinned
    prompt_ids: NDArray[np.int32]
    """int32 [P]"""
    key: int
    """The prompt's `prompt_key`."""
    first: int
    """Occurrence of the first choice; the others follow."""
    keys: list[int]
    """Noise key of each choice; in hex it is the call's id."""
    stop_ids: tuple[int, ...]
    """Ids that end a response; the one that did is not part of its text."""


class EngineBackend:
    """Serves turns from one token engine."""

    def __init__(
        self, config: ServiceConfig, codec: TextCodec, client: EngineClient, attempts: Attempts, gate: Gate
    ) -> None:
        self._config = config
        self._codec = codec
        self._client = client
        self._attempts = attempts
        self._gate = gate

    def models(self) -> list[str]:
        """The one model of the engine."""
        return [self._config.model]

    async def close(self) -> None:
        """Disconnect from the engine."""
        self._client.close()

    async def run(self, turn: Turn) -> Outcome:
        """Sample a turn's choices, each as a request of its own."""
        count = turn.ask.n
        pinned = pin(turn.ask.body, turn.mode, self._config)
        prompt_ids = await self._prompt(turn.ask)
        room = self._room(turn.ask, len(prompt_ids))
        key = prompt_key(prompt_ids)
        with self._attempts.enter(turn.rollout, turn.attempt, count) as live:
            first = live.take(key, count)
            await self._ready()
            await self._gate.enter(count)
            try:
                job = self._job(turn, pinned, prompt_ids, key, first)
                batch = self._client.submit(prompt_ids, self._samplings(job, room))
                gone = await self._finished(batch)
            finally:
                self._gate.leave(count)
            return self._outcome(job, batch, gone)

    async def _prompt(self, ask: Ask) -> NDArray[np.int32]:
        if isinstance(ask.prompt, list):
            if any(not 0 <= index < self._codec.vocabulary for index in ask.prompt):
                raise ApiError(422, f"prompt holds an id outside 0..{self._codec.vocabulary - 1}")
            return np.array(ask.prompt, np.int32)
        try:
            text = ask.prompt if ask.prompt is not None else self._codec.render(ask.messages, ask.tools)
        except TemplateError as error:
            raise ApiError(400, str(error)) from None
        whole = ask.kind == "completion"
        if len(text) >= LONG_TEXT:
            ids = await asyncio.to_thread(self._codec.encode, text, special=whole)
        else:
            ids = self._codec.encode(text, special=whole)
        if not len(ids):
            raise ApiError(400, "the prompt is empty")
        return ids

    def _room(self, ask: Ask, prompt: int) -> int:
        """Most tokens to sample: what was asked, clamped to the service's limit and to what the context leaves."""
        room = min(ask.max_tokens or self._config.max_response, self._config.max_response)
        if not self._config.max_context:
            return room
        if prompt >= self._config.max_context:
            message = (
                f"This model's maximum context length is {self._config.max_context} tokens. However, your messages"
                f" resulted in {prompt} tokens. Please reduce the length of the messages."
            )
            raise ApiError(400, message, code="context_length_exceeded")
        return min(room, self._config.max_context - prompt)

    async def _ready(self) -> None:
        try:
            await self._client.ready(self._config.hold_seconds)
        except EngineLost as error:
            raise ApiError(503, str(error), retry_after=self._gate.retry_after_seconds) from None

    def _job(self, turn: Turn, pinned: Pinned, prompt_ids: NDArray[np.int32], key: int, first: int) -> _Job:
        keys = [
            noise_key(self._config.seed, turn.rollout_id, turn.attempt, prompt_ids, occurrence)
            for occurrence in range(first, first + turn.ask.n)
        ]
        stop_ids = self._stop_ids(turn.ask)
        return _Job(turn=turn, pinned=pinned, prompt_ids=prompt_ids, key=key, first=first, keys=keys, stop_ids=stop_ids)

    def _stop_ids(self, ask: Ask) -> tuple[int, ...]:
        """The model's own, the request's, and special tokens that the request names by their text."""
        if not (ask.stop or ask.stop_ids):
            return self._codec.stop_ids
        named = (self._codec.special_id(stop) for stop in ask.stop)
        return tuple(sorted({*self._codec.stop_ids, *ask.stop_ids, *(index for index in named if index is not None)}))

    def _samplings(self, job: _Job, room: int) -> list[wire.Sampling]:
        return [
            wire.Sampling(
                max_tokens=room,
                temperature=job.pinned.temperature,
                top_p=job.pinned.top_p,
                top_k=job.pinned.top_k,
                stop_ids=job.stop_ids,
                noise=key,
            )
            for key in job.keys
        ]

    async def _finished(self, batch: Batch) -> bool:
        """Wait for all replies; True where the harness went away meanwhile (then for what the engine hands back)."""
        try:
            await batch.wait()
            return False
        except asyncio.CancelledError:
            await self._client.cancel(batch, CANCEL_SECONDS)
            return True

    def _outcome(self, job: _Job, batch: Batch, gone: bool) -> Outcome:
        """Keep whatever was sampled; answer only where every choice was, and the harness is there."""
        choices, calls, error = [], [], None
        answer: dict[str, Any] | None = None
        for index, result in enumerate(batch.results):
            reply = result if isinstance(result, wire.Reply) else None
            if reply is not None and len(reply.ids) and (gone or reply.finish_reason in ("stop", "length")):
                choice, after_stop = self._choice(job, reply)
                answer = self._answer(job, job.keys[index], [choice])
                choices.append(choice)
                calls.append(self._recorded(job, index, reply, choice, answer, after_stop))
            else:
                why = str(result) if reply is None else reply.error or f"the engine answered {reply.finish_reason}"
                error = ApiError(503, why, retry_after=self._gate.retry_after_seconds)
        if gone or error is not None:
            return Outcome(calls=calls, answer=None, error=None if gone else error)
        return Outcome(calls=calls, answer=answer if len(choices) == 1 else self._answer(job, job.keys[0], choices))

    def _choice(self, job: _Job, reply: wire.Reply) -> tuple[Choice, int]:
        """What the harness sees of a reply, and how many ids were sampled beyond a stop string."""
        ended = reply.finish_reason == "stop" and int(reply.ids[-1]) in job.stop_ids
        said = reply.ids[:-1] if ended else reply.ids
        cut = self._codec.cut(said, job.turn.ask.stop)
        kept, text = (len(reply.ids), self._codec.decode(said)) if cut is None else cut
        ids = reply.ids[:kept]
        choice = Choice(
            text=text,
            ids=ids,
            logprobs=reply.logprobs[:kept],
            tokens=self._codec.tokens(ids) if job.turn.ask.logprobs else None,
            finish_reason=reply.finish_reason if cut is None else "stop",
        )
        return choice, len(reply.ids) - kept

    def _answer(self, job: _Job, key: int, choices: list[Choice]) -> dict[str, Any]:
        name, created = f"{key:016x}", int(job.turn.arrived)
        return answers.answer(job.turn.ask, self._config.model, name, created, job.prompt_ids, choices)

    def _recorded(
        self, job: _Job, index: int, reply: wire.Reply, choice: Choice, answer: dict[str, Any], after_stop: int
    ) -> Recorded:
        model, pinned = self._config.model, job.pinned
        meta = {
            "model": model,
            "server": {"model": model, "endpoint": self._config.engine, "version": reply.policy_version},
            "latency_ms": (time.time() - job.turn.arrived) * 1e3,
            "http_status": 200,
            "status": "ok",
            "usage": answer["usage"],
            "sampling": {"temperature": pinned.temperature, "top_p": pinned.top_p, "top_k": pinned.top_k},
            "overrides": pinned.overrides,
            "after_stop": after_stop,
        }
        return Recorded(
            call_id=f"{job.keys[index]:016x}",
            arrived=job.turn.arrived,
            prompt_ids=job.prompt_ids,
            key=job.key,
            response_ids=choice.ids,
            logprobs=choice.logprobs,
            occurrence=job.first + index,
            policy_version=reply.policy_version,
            finish_reason=choice.finish_reason,
            agent=job.turn.agent,
            constrained=job.turn.foreign,
            request=job.turn.raw,
            response=orjson.dumps(answer),
            meta=meta,
        )
