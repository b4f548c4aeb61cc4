"""The harness: mini-swe-agent's own agent loop, unmodified, in a room instead of a shell.

`DefaultAgent`, its action parser and its observation formatter are the package's (mini-swe-agent, PyPI). Ours are the
two parts that it takes as arguments: `Endpoint`, its Model protocol over a Chat Completions URL, and `RoomEnvironment`,
its Environment protocol. A reply that is no possible command is a format error: the agent drops it from its history and
says so instead. The second such reply ends the agent, and another one starts where it stood, with a history of its own.

It runs from its environment, as a program or as `await run(env)`:

    AGL_OPENAI_BASE_URL=... AGL_EVENT_URL=... AGL_KEY=... BABYAI_INPUT='{"seeds": [...]}' \\
        python -m experiments.babyai.harness
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlsplit

os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")

from minisweagent.agents.default import DefaultAgent
from minisweagent.exceptions import FormatError, Submitted
from minisweagent.models.utils.actions_text import format_observation_messages, parse_regex_actions

from experiments.babyai.task import Room

Message = dict[str, Any]
Ask = Callable[[list[Message]], str]
"""The history -> the model's reply."""

SYSTEM = "play"
TASK = "{{task}}"
CANNOT = "no. {room}"
"""What the agent is told instead of a reply that it dropped."""
ERRORS = 2
"""Dropped replies that end an agent: each costs 1, an executed one nothing, and this is the agent's cost limit."""
AGENTS = 2
"""A first one, and one that follows it."""
MAX_TOKENS = 16
TRIES = 60


class RoomEnvironment:
    """mini-swe-agent's Environment protocol around rooms, the next of which opens when one is done."""

    config = None

    def __init__(self, rooms: Sequence[Room]) -> None:
        self.rooms, self.at = rooms, 0

    @property
    def room(self) -> Room:
        """Where the agent is."""
        return self.rooms[self.at]

    @property
    def start(self) -> str:
        """What an agent is told that starts now."""
        return f"{self.room.mission}. {self.room.describe()}"

    def execute(self, action: dict[str, str], cwd: str = "") -> dict[str, Any]:
        """Take the command; the end of the episode is what the agent calls a submission."""
        self.room.act(action["command"])
        if not self.room.done:
            return {"output": self.room.describe(), "returncode": 0, "exception_info": ""}
        if not self.room.reward or self.room is self.rooms[-1]:
            raise Submitted({"role": "exit", "content": "", "extra": {"exit_status": "Submitted", "submission": ""}})
        self.at += 1
        return {"output": f"done. {self.start}", "returncode": 0, "exception_info": ""}

    def get_template_vars(self, **more: Any) -> dict[str, Any]:
        """Nothing for templates."""
        return {}

    def serialize(self) -> dict[str, Any]:
        """Nothing to save."""
        return {}


class Endpoint:
    """mini-swe-agent's Model protocol: asks, and reads one possible command out of the reply."""

    config = None

    def __init__(self, ask: Ask, environment: RoomEnvironment) -> None:
        self.ask, self.environment = ask, environment

    def query(self, messages: list[Message], **more: Any) -> Message:
        """One call.

        Raises:
            FormatError: from the package's parser, where the reply is not exactly one possible command.
        """
        text = self.ask([{"role": message["role"], "content": message["content"]} for message in messages])
        room = self.environment.room
        try:
            actions = parse_regex_actions(
                text,
                action_regex=rf"\A\s*({'|'.join(map(re.escape, room.commands()))})\s*\Z",
                format_error_template=CANNOT.format(room=room.describe()),
            )
        except FormatError as error:
            error.messages[0]["extra"]["cost"] = 1.0
            raise
        return {"role": "assistant", "content": text, "extra": {"actions": actions}}

    def format_message(self, **message: Any) -> Message:
        """A message as it is sent."""
        return message

    def format_observation_messages(
        self, message: Message, outputs: list[dict[str, Any]], template_vars: dict[str, Any] | None = None
    ) -> list[Message]:
        """The room after a command, by the package's formatter."""
        return format_observation_messages(
            outputs, observation_template="{{output.output}}", template_vars=template_vars
        )

    def get_template_vars(self, **more: Any) -> dict[str, Any]:
        """Nothing for templates."""
        return {}

    def serialize(self) -> dict[str, Any]:
        """Nothing to save."""
        return {}


def play(rooms: Sequence[Room], ask: Ask) -> float:
    """Play an episode to its end and return the mean of the package's rewards."""
    environment = RoomEnvironment(rooms)
    for _ in range(AGENTS):
        agent = DefaultAgent(
            Endpoint(ask, environment),
            environment,
            system_template=SYSTEM,
            instance_template=TASK,
            cost_limit=ERRORS,
            max_consecutive_format_errors=0,
        )
        if agent.run(environment.start)["exit_status"] == "Submitted":
            break
    return sum(room.reward for room in rooms) / len(rooms)


async def run(env: Mapping[str, str]) -> None:
    """Play the episode in env["BABYAI_INPUT"] against the endpoint in `env` and post the reward.

    The agent blocks, so it has a thread: a daemon, which cannot keep a worker alive that wants to end.

    Raises:
        RuntimeError: where the endpoint refused a request or stayed overloaded.
    """
    rooms = [Room(seed) for seed in json.loads(env["BABYAI_INPUT"])["seeds"]]
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def finish(error: Exception | None) -> None:
        if not ended.done():  # it is done where the run was cancelled
            ended.set_exception(error) if error else ended.set_result(None)

    def work() -> None:
        try:
            _play_over_http(rooms, env)
        except Exception as error:
            loop.call_soon_threadsafe(finish, error)
        else:
            loop.call_soon_threadsafe(finish, None)

    threading.Thread(target=work, daemon=True).start()
    await ended


def _play_over_http(rooms: Sequence[Room], env: Mapping[str, str]) -> None:
    base = urlsplit(env["AGL_OPENAI_BASE_URL"])
    connection = HTTPConnection(base.netloc, timeout=600)
    headers = {"Authorization": f"Bearer {env['AGL_KEY']}", "Content-Type": "application/json"}

    def ask(messages: list[Message]) -> str:
        body = {"model": "policy", "messages": messages, "max_tokens": MAX_TOKENS}
        reply = _post(connection, f"{base.path}/chat/completions", body, headers)
        return reply["choices"][0]["message"]["content"] or ""

    try:
        event = {"event_type": "reward", "data": {"value": play(rooms, ask)}}
        _post(connection, urlsplit(env["AGL_EVENT_URL"]).path, event, headers)
    finally:
        connection.close()


def _post(connection: HTTPConnection, path: str, body: Any, headers: Mapping[str, str]) -> Any:
    """POST until it is answered: 429, 503 and dropped connections are tried again."""
    data, problem = json.dumps(body).encode(), ""
    for _ in range(TRIES):
        wait = 0.5
        try:
            connection.request("POST", path, data, dict(headers))
            reply = connection.getresponse()
            text = reply.read()
            if reply.status < 300:
                return json.loads(text)
            problem = f"{reply.status}: {text[:200]!r}"
            if reply.status not in (429, 503):
                break
            after = reply.headers.get("Retry-After", "")
            wait = max(0.05, float(after)) if after.replace(".", "", 1).isdecimal() else wait
        except (HTTPException, OSError) as error:
            connection.close()
            problem = repr(error)
        time.sleep(wait)
    raise RuntimeError(f"POST {path} failed with {problem}")


if __name__ == "__main__":
    asyncio.run(run(os.environ))
