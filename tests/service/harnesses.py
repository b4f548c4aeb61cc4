"""Harnesses for the tests: async functions that a worker imports, and one script that it starts."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping

import aiohttp


async def post(env: Mapping[str, str], url: str, body: dict) -> dict:
    """POST with the rollout's own key."""
    headers = {"Authorization": f"Bearer {env['AGL_KEY']}"}
    async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as response:
        response.raise_for_status()
        return await response.json()


async def event(env: Mapping[str, str], event_type: str, **data: object) -> None:
    """Post an event of the rollout."""
    await post(env, env["AGL_EVENT_URL"], {"event_type": event_type, "data": data})


async def chat(env: Mapping[str, str], text: str) -> str:
    """One chat call."""
    body = {"messages": [{"role": "user", "content": text}]}
    answer = await post(env, env["AGL_OPENAI_BASE_URL"] + "/chat/completions", body)
    return answer["choices"][0]["message"]["content"]


async def solve(env: Mapping[str, str]) -> None:
    """Two calls, then a reward."""
    first = await chat(env, env.get("QUESTION", "the key"))
    await chat(env, first + " door")
    await event(env, "reward", value=1.0)


async def chat_only(env: Mapping[str, str]) -> None:
    """Calls until one fails; posts no reward."""
    text = "the key"
    while True:
        text += " " + await chat(env, text)


async def fail(env: Mapping[str, str]) -> None:
    """Raises."""
    raise RuntimeError("the harness broke")


async def leave(env: Mapping[str, str]) -> None:
    """Ends the way a script would."""
    sys.exit(int(env["CODE"]))


async def give_up(env: Mapping[str, str]) -> None:
    """Cancels itself."""
    raise asyncio.CancelledError


async def wait(env: Mapping[str, str]) -> None:
    """Says that it runs, and never ends; but a later attempt ends at once."""
    await event(env, "started")
    if "/attempt/0/" in env["AGL_EVENT_URL"]:
        await asyncio.Event().wait()
    await event(env, "reward", value=0.5)


async def block(env: Mapping[str, str]) -> None:
    """Keeps the whole process busy for longer than a worker may be silent."""
    time.sleep(1.5)
    await event(env, "reward", value=1.0)


def not_async(env: Mapping[str, str]) -> None:
    """Not a harness."""


SCRIPT = """
import json, os, signal, subprocess, sys, urllib.request
def post(url, body):
    headers = {"Authorization": "Bearer " + os.environ["AGL_KEY"]}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))
def event(event_type, **data):
    post(os.environ["AGL_EVENT_URL"], {"event_type": event_type, "data": data})
"""
"""Beginning of a script for [sys.executable, "-c", SCRIPT + ...]."""

WAIT_WITH_CHILD = (
    SCRIPT
    + """
deaf = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
child = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE)
child.stdout.readline()
event("started", pids=[os.getpid(), child.pid])
if "/attempt/0/" in os.environ["AGL_EVENT_URL"]:
    signal.pause()
child.kill()
event("reward", value=0.5)
"""
)
"""Starts a grandchild that ignores SIGTERM, reports both pids, and never ends (a later attempt does)."""
