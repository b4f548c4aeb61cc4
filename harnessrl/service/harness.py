"""Runs one harness, as a process group or as a task of this process, and says how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

GRACE_SECONDS = 3.0
"""Between SIGTERM and SIGKILL."""
TAIL = 2000
"""Characters of output kept as the error message."""

Function = Callable[[Mapping[str, str]], Awaitable[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a harness ended. Example: ``Ending(ok=False, failure="timeout", message="...")``"""

    ok: bool
    """It ended in order: exit code 0, or `run` returned."""
    failure: str | None = None
    """timeout, exit_code, or lost (it could not be started, which is no fault of the policy); None where ok."""
    message: str | None = None
    """For people; None where ok."""


class Guard:
    """A small process that outlives this one just long enough to kill what it started (guard.py)."""

    def __init__(self) -> None:
        script = str(Path(__file__).with_name("guard.py"))
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", script], stdin=subprocess.PIPE, start_new_session=True, text=True
        )

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()

    @contextlib.contextmanager
    def watch(self, group: int) -> Iterator[None]:
        """Have a process group killed if this process dies inside the block."""
        self._tell(f"+{group}\n")
        try:
            yield
        finally:
            self._tell(f"-{group}\n")

    def close(self) -> None:
        """End the guard, and with it whatever it still watches."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


async def run_command(
    argv: Sequence[str], env: Mapping[str, str], timeout: float, log: str | None, guard: Guard
) -> Ending:
    """Run a harness as a process group of its own; all of the group is gone when this returns or is cancelled.

    Args:
        argv: Command line.
        env: Added to this process's environment.
        timeout: Seconds until the group gets SIGTERM, and SIGKILL after a grace.
        log: File that stdout and stderr go to; None drops them.
        guard: Kills the group if this process dies first.
    """
    with _open(log) as output:
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                env={**os.environ, **env},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return Ending(ok=False, failure="lost", message=f"{argv[0]} cannot be started: {error}")
        with guard.watch(process.pid):
            try:
                async with asyncio.timeout(timeout):
                    code = await process.wait()
            except TimeoutError:
                return Ending(ok=False, failure="timeout", message=f"timeout after {timeout:g} s\n{_tail(log)}".strip())
            finally:
                await _end(process)
    if code == 0:
        return Ending(ok=True)
    return Ending(ok=False, failure="exit_code", message=f"exit code {code}\n{_tail(log)}".strip())


async def _end(process: asyncio.subprocess.Process) -> None:
    """End what is left of a process group: SIGTERM, then SIGKILL; at once where its leader has exited."""
    if process.returncode is None and _signal(process.pid, signal.SIGTERM):
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), GRACE_SECONDS)
    alive = _signal(process.pid, signal.SIGKILL)
    await process.wait()
    for _ in range(100):  # the system takes a moment to remove what is killed
        if not alive:
            return
        await asyncio.sleep(0.01)
        alive = _signal(process.pid, signal.SIGKILL)


def _signal(group: int, number: signal.Signals) -> bool:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def find_function(name: str) -> Function:
    """Import MODULE:FUNCTION.

    Raises:
        ValueError: The name has another form, or what it names is no `async def`.
    """
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ValueError(f"agent_class must be MODULE:FUNCTION, got {name!r}")
    function: Function = getattr(importlib.import_module(module), attribute)
    if not inspect.iscoroutinefunction(function):
        raise ValueError(f"{name} must be an async function that takes the environment")
    return function


async def run_function(name: str, env: Mapping[str, str], timeout: float, log: str | None) -> Ending:
    """Run `async def run(env)` as a task of this process; an exception, SystemExit included, is a failure.

    A name that leads to no `async def` is no failure of the harness: it is lost.

    Args:
        name: MODULE:FUNCTION.
        env: Added to this process's environment in the mapping that `run` gets.
        timeout: Seconds until it is cancelled.
        log: File that a traceback goes to; None drops it.
    """
    try:
        function = find_function(name)
    except (Exception, SystemExit):  # importing runs the module
        return _raised(log, failure="lost")
    try:
        async with asyncio.timeout(timeout) as clock:
            await function({**os.environ, **env})
    except SystemExit as error:
        return _raised(log) if error.code else Ending(ok=True)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return _raised(log)  # the harness cancelled itself
    except Exception as error:
        if isinstance(error, TimeoutError) and clock.expired():
            return Ending(ok=False, failure="timeout", message=f"timeout after {timeout:g} s")
        return _raised(log)
    return Ending(ok=True)


def _raised(log: str | None, failure: str = "exit_code") -> Ending:
    """The failure that the exception being handled is; its traceback goes to the log."""
    text = traceback.format_exc()
    with _open(log) as output:
        if not isinstance(output, int):
            output.write(text.encode())
    return Ending(ok=False, failure=failure, message=text[-TAIL:])


def _open(log: str | None) -> contextlib.AbstractContextManager[IO[bytes] | int]:
    if log is None:
        return contextlib.nullcontext(subprocess.DEVNULL)
    Path(log).parent.mkdir(parents=True, exist_ok=True)
    return open(log, "ab")


def _tail(log: str | None) -> str:
    if log is None:
        return ""
    with open(log, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
        return file.read().decode(errors="replace")
