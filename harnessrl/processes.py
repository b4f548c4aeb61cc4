"""Child processes that cannot outlive their parent: one JSON line in, one JSON line out when ready.

A child reads its configuration as one line on stdin and then watches stdin: its end means that the parent is gone,
however it went, and the child stops. So nothing stays behind after Ctrl-C, an error or kill -9 of the parent.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harnessrl.errors import ConfigError, RunError

LITTLE = 65536
"""Bytes of a disk that cannot take a log any more."""


class ChildError(RunError):
    """A child process ended or did not start."""


class Child:
    """A running child.

    Args:
        module: run as `python -m MODULE`.
        settings: the JSON line on its stdin.
        log: file that its stderr is appended to.
    """

    def __init__(self, module: str, settings: Mapping[str, Any], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.module, self.log = module, log
        self._log_start = log.stat().st_size if log.exists() else 0
        with log.open("ab") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C reaches the parent only, which then closes stdin
            )
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(settings).encode() + b"\n")
        self.process.stdin.flush()

    def ready(self, timeout: float = 60.0) -> dict[str, Any]:
        """The child's ready line.

        Raises:
            ConfigError: the child refused its configuration (exit code 2), with its own words.
            ChildError: it ended otherwise, or said nothing in time.
        """
        stdout = self.process.stdout
        assert stdout is not None
        deadline = time.monotonic() + timeout
        if select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            line = stdout.readline()
            if line:
                return json.loads(line)  # type: ignore[no-any-return]
            code = self.process.wait(timeout=10)
            if code == 2:
                raise ConfigError(self.last_words())
            raise ChildError(f"{self.module} ended with exit code {code} before it was ready: {self.last_words()}")
        self.stop()
        raise ChildError(f"{self.module} was not ready after {timeout:.0f} s; its log is {self.log}")

    def check(self, seconds: float = 0.0) -> None:
        """Raise ChildError if the child has ended, or does so within `seconds`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.process.wait(seconds)
            raise ChildError(f"{self.module} ended with exit code {code}: {self.last_words()} (log: {self.log})")

    def stop(self, timeout: float = 10.0) -> None:
        """Close its stdin and wait; kill it if it stays. Calling it twice is fine."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()

    def last_words(self) -> str:
        """The last line that the child wrote to its log."""
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            lines = file.read().decode(errors="replace").strip().splitlines()
        if not lines and shutil.disk_usage(self.log.parent).free < LITTLE:
            return f"no space left on the disk of {self.log}"
        return lines[-1] if lines else "it said nothing"
