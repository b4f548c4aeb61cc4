"""A worker that dies in the middle of a step is replaced; its rollouts run again and the run goes on."""

import os
import signal
from pathlib import Path

from harnessrl.metrics import read_jsonl
from tests.system.running import children_of, gone, start, wait_for
from tests.system.toy import write_config


def workers(mark):
    return [
        pid for pid in children_of(mark) if b"harnessrl.service.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def test_a_killed_worker_is_replaced_and_no_rollout_is_lost(tmp_path):
    config = write_config(tmp_path, steps=6)
    mark = f"{os.getpid()}-worker"
    process = start(config, HARNESSRL_TEST=mark)
    wait_for(process, "step 1/6")
    (victim,) = workers(mark)
    os.kill(victim, signal.SIGKILL)
    _, stderr = process.communicate(timeout=100)
    assert process.returncode == 0, stderr[-2000:]
    lines = read_jsonl(tmp_path / "runs" / "toy" / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(6))
    assert all(line["rollout/count"] == 12 for line in lines)
    assert sum(line.get("rollout/failed_lost", 0) for line in lines) == 0
    assert gone(mark)
