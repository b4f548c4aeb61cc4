"""Starting `harnessrl` as a person does, and watching that nothing stays behind."""

import os
import subprocess
import time
from pathlib import Path

from tests.system.toy import command

ROOT = Path(__file__).parent.parent.parent
ENV = os.environ | {"OMP_NUM_THREADS": "1"}


def harnessrl(*arguments, timeout=110):
    return subprocess.run(command(*arguments), cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=timeout)


def children_of(group_leader):
    """pids whose environment marks them as descendants of a test run (they are in sessions of their own)."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"HARNESSRL_TEST={group_leader}".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def start(config, *arguments, **env):
    return subprocess.Popen(
        command("train", config, *arguments), cwd=ROOT, env=ENV | env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip


def wait_for(process, words):
    """Read stdout up to a line with these words."""
    seen = []
    for line in process.stdout:
        seen.append(line)
        if words in line:
            return
    raise AssertionError(f"{words!r} not seen in {seen}; stderr: {process.stderr.read()[-2000:]}")


def gone(mark):
    """Wait (bounded) until no process carries the mark."""
    deadline = time.monotonic() + 20
    while children_of(mark) and time.monotonic() < deadline:
        time.sleep(0.05)  # poll of the process table; the bound above is the test
    return not children_of(mark)
