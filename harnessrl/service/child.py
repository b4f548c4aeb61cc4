"""How a child process and its parent speak: one JSON line in, one JSON line out, and end of input means the end.

The parent writes the configuration as one line and keeps the pipe open. The child answers with one line on stdout when
it is ready; logs go to stderr. When the pipe closes, the parent is gone (killed, perhaps) and the child shuts down.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from typing import Any, NoReturn

import orjson


def read_line() -> bytes:
    """Read the configuration line from stdin, without taking a byte beyond it into a buffer."""
    line = bytearray()
    while not line.endswith(b"\n"):
        chunk = os.read(0, 1)
        if not chunk:
            break
        line += chunk
    return bytes(line)


def announce(ready: dict[str, Any]) -> None:
    """Print the ready line, then send everything else written to stdout to stderr: nobody reads it there."""
    sys.stdout.write(orjson.dumps(ready).decode() + "\n")
    sys.stdout.flush()
    os.dup2(2, 1)


def stop_event(*, follow_stdin: bool = True) -> asyncio.Event:
    """An event of the running loop that is set by SIGTERM, SIGINT or, where it is followed, the end of stdin."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop.set)
    if not follow_stdin:
        return stop

    def watch() -> None:  # a thread, since a file or a terminal as stdin cannot be polled
        while os.read(0, 4096):
            pass
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            loop.call_soon_threadsafe(stop.set)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
    return stop


def refuse(message: str) -> NoReturn:
    """Bad input: one line on stderr, which the parent puts its own name before, and exit code 2."""
    print(message, file=sys.stderr)
    raise SystemExit(2)


def die(message: str) -> NoReturn:
    """The process cannot go on: one line on stderr, exit code 1 at once, without any cleaning up."""
    try:
        print(message, file=sys.stderr, flush=True)
    finally:  # stderr may be a file on the disk that is full
        os._exit(1)
