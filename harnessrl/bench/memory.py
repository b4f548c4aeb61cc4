"""Peak memory of a piece of work: what the process held at most while it ran, beyond what it held before."""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

MiB = 2**20


def peak_memory(work: Callable[[], Any]) -> int:
    """Run `work` and return the growth of the process's resident memory at its peak, in bytes.

    Measure in a fresh process, after a small warm-up: memory that the allocator has kept from earlier work counts as
    held before, so a second measurement reads too low.
    """
    gc.collect()
    _reset()
    before = resident()
    work()
    return max(0, _peak() - before)


def resident() -> int:
    """Bytes of memory that this process holds now, files it has mapped included."""
    return _status("VmRSS") if _linux() else _peak()


def _peak() -> int:
    if _linux():
        return _status("VmHWM")
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


def _reset() -> None:
    """Let the kernel count the peak from here; elsewhere the peak of the whole process has to do."""
    if _linux():
        Path("/proc/self/clear_refs").write_text("5")


def _linux() -> bool:
    return sys.platform == "linux"


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")
