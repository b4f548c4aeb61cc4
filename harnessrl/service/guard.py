"""Kills the process groups of a worker that died, even by kill -9. A script of its own: it imports nothing of ours.

The worker writes "+PID" when it starts a harness and "-PID" when that is gone; when its pipe closes, every group that
is left is killed.
"""

import contextlib
import os
import signal
import sys


def main() -> None:
    """Follow the worker until its end, then clean up after it."""
    alive: set[int] = set()
    for line in sys.stdin:
        (alive.add if line[0] == "+" else alive.discard)(int(line[1:]))
    for group in alive:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
