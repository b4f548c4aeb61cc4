"""The harness: an ordinary chat client with one tool. It knows text and HTTP, nothing of tokens, training or gateways.

It sends the whole history every turn, parses the tool call out of the reply, writes it back in its own canonical form
(as tool parsers do), answers a malformed call with an error, hands some hops to a helper with a conversation of its
own, and replaces a history that grew too long by one summary line. It runs from its environment:

    AGL_OPENAI_BASE_URL=... AGL_EVENT_URL=... AGL_KEY=... LOOKUP_INPUT='{"seed": ...}' python -m experiments.lookup.harness

or as `await run(env)`, thousands at a time in one event loop. `play` is the same without HTTP.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from experiments.lookup.task import answer

Message = dict[str, str]
Ask = Callable[[list[Message], str], Awaitable[str]]
"""(messages, agent) -> the model's reply."""
LookUp = Callable[[str, bool], Awaitable[str | None]]
"""(key, whether the turn before was an error) -> the value, None where there is none."""

CALL = re.compile(r"\s*(get|say)[\s:]*([a-e]{3})[\s.]*", re.IGNORECASE)
BAD_CALL = "bad call"
NO_KEY = "no key"
ERRORS = {"main": 3, "helper": 1}
"""Errors an agent survives; one more ends its conversation."""
TURNS = {"main": 10, "helper": 4}
HANDOFF = 0.1
HANDOFF_AFTER_ERROR = 0.5
HISTORY_LIMIT = 45
"""Characters of content; a longer history is summarised before the next turn."""
MAX_TOKENS = 16
TRIES = 60


def parse(text: str) -> tuple[str, str] | None:
    """Read a reply as (verb, key) in lower case, forgiving spacing, case, a colon and a full stop; None is malformed."""
    match = CALL.fullmatch(text)
    return (match[1].lower(), match[2].lower()) if match else None


async def converse(head: list[Message], start: str, agent: str, ask: Ask, look_up: LookUp) -> str | None:
    """Hold one agent's conversation from `head` to its answer; None where it ran out of errors or turns."""
    messages, seen, now, errors, failed = head, 0, start, 0, False
    for _ in range(TURNS[agent]):
        if sum(len(message["content"]) for message in messages) > HISTORY_LIMIT:
            messages = [*head, {"role": "user", "content": f"so far {seen} now {now}"}]
        text = await ask(messages, agent)
        call = parse(text)
        if call is not None and call[0] == "say":
            return call[1]
        value = None if call is None else await look_up(call[1], failed)
        failed = value is None
        if value is None:
            errors += 1
            if errors > ERRORS[agent]:
                return None
        else:
            seen, now = seen + 1, value
        echo = text.strip() if call is None else f"get {call[1]}"
        result = value or (BAD_CALL if call is None else NO_KEY)
        messages = [*messages, {"role": "assistant", "content": echo}, {"role": "tool", "content": result}]
    return None


async def play(task: Mapping[str, Any], ask: Ask, rng: random.Random) -> float:
    """Play one episode and return its reward: 1.0 for the right answer, else 0.0.

    Args:
        task: one of task.inputs.
        ask: the model.
        rng: decides which hops are handed to the helper.
    """

    async def read(key: str, failed: bool) -> str | None:
        return task["table"].get(key)

    async def read_or_hand_off(key: str, failed: bool) -> str | None:
        if key in task["table"] and rng.random() < (HANDOFF_AFTER_ERROR if failed else HANDOFF):
            head = [{"role": "user", "content": f"look up {key}"}]
            return await converse(head, key, "helper", ask, read)
        return task["table"].get(key)

    head = [{"role": "user", "content": f"follow {task['start']} {task['hops']} times"}]
    said = await converse(head, task["start"], "main", ask, read_or_hand_off)
    return float(said == answer(task))


def failed_call(text: str, task: Mapping[str, Any]) -> bool:
    """Whether a reply is a malformed call, or asks for a key that is not in the table."""
    call = parse(text)
    return call is None or (call[0] == "get" and call[1] not in task["table"])


async def run(env: Mapping[str, str]) -> None:
    """Play the episode in env["LOOKUP_INPUT"] against the endpoint in `env` and post the reward.

    With LOOKUP_FAILED_CALL=VALUE every failed call is given that reward too, for ablations of credit.

    Raises:
        RuntimeError: where the endpoint refused a request or stayed overloaded.
    """
    task = json.loads(env["LOOKUP_INPUT"])
    base = env["AGL_OPENAI_BASE_URL"]
    headers = {"Authorization": f"Bearer {env['AGL_KEY']}"}
    session = await _session()

    replies: list[tuple[str, str]] = []

    async def ask(messages: list[Message], agent: str) -> str:
        body = {"model": "policy", "messages": messages, "max_tokens": MAX_TOKENS}
        reply = await _post(session, f"{base}/chat/completions", body, {**headers, "X-Agent": agent})
        text = reply["choices"][0]["message"]["content"] or ""
        replies.append((reply["id"], text))
        return text

    # The path names the rollout: its siblings share the input, but not the choices made here.
    rng = random.Random(f"{task['seed']} {urlsplit(base).path}")
    reward = await play(task, ask, rng)
    events = [{"event_type": "reward", "data": {"value": reward}}]
    if "LOOKUP_FAILED_CALL" in env:
        value = float(env["LOOKUP_FAILED_CALL"])
        bad = [name for name, text in replies if failed_call(text, task)]
        events = [{"event_type": "call_reward", "data": {"call_id": name, "value": value}} for name in bad] + events
    for event in events:
        await _post(session, env["AGL_EVENT_URL"], event, headers)


async def _post(session: aiohttp.ClientSession, url: str, body: Any, headers: Mapping[str, str]) -> Any:
    """POST until it is answered: 429, 503 and dropped connections are tried again, as the API's own clients do."""
    data, problem = json.dumps(body).encode(), ""
    for _ in range(TRIES):
        wait = 0.5
        try:
            async with session.post(url, data=data, headers={**headers, "Content-Type": "application/json"}) as reply:
                text = await reply.text()
                if reply.status < 300:
                    return json.loads(text)
                problem = f"{reply.status}: {text[:200]}"
                if reply.status not in (429, 503):
                    break
                after = reply.headers.get("Retry-After", "")
                wait = max(0.05, float(after)) if after.replace(".", "", 1).isdecimal() else wait
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            problem = repr(error)
        await asyncio.sleep(wait)
    raise RuntimeError(f"POST {url} failed with {problem}")


_SESSIONS: dict[asyncio.AbstractEventLoop, tuple[aiohttp.ClientSession, AsyncIterator[None]]] = {}


async def _session() -> aiohttp.ClientSession:
    """The running loop's one session: its connections are kept alive between rollouts."""
    loop = asyncio.get_running_loop()
    if loop not in _SESSIONS:
        timeout = aiohttp.ClientTimeout(total=None, sock_read=600)
        session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)
        closer = _close_with_loop(loop, session)
        _SESSIONS[loop] = session, closer
        await anext(closer)
    return _SESSIONS[loop][0]


async def _close_with_loop(loop: asyncio.AbstractEventLoop, session: aiohttp.ClientSession) -> AsyncIterator[None]:
    """A generator left suspended: asyncio.run closes those before its loop, the one hook a client gets."""
    try:
        yield
    finally:
        del _SESSIONS[loop]
        await session.close()


if __name__ == "__main__":
    asyncio.run(run(os.environ))
