"""However a run is stopped, nothing outlives it and it resumes; a harness that hangs is a failure, not the end."""

import os
import signal
import subprocess
import sys

import pytest

from harnessrl.metrics import read_jsonl
from tests.system.running import ENV, ROOT, children_of, gone, harnessrl, start, wait_for
from tests.system.toy import command, write_config


@pytest.mark.parametrize("how", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL])
def test_nothing_outlives_a_stopped_run_and_it_resumes(tmp_path, how):
    config = write_config(tmp_path, steps=100)
    mark = f"{os.getpid()}-{how.name}"
    process = start(config, HARNESSRL_TEST=mark)
    wait_for(process, "step 2/100")
    assert len(children_of(mark)) >= 3
    process.send_signal(how)
    _, stderr = process.communicate(timeout=30)
    if how is not signal.SIGKILL:
        assert process.returncode == 130
        assert "continues from the last checkpoint" in stderr and "Traceback" not in stderr
    assert gone(mark)
    steps = len(read_jsonl(tmp_path / "runs" / "toy" / "metrics.jsonl"))
    more = harnessrl("train", config, f"steps={steps + 1}")
    assert more.returncode == 0, more.stderr
    lines = read_jsonl(tmp_path / "runs" / "toy" / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(steps + 1))


def test_a_harness_that_hangs_is_a_timeout_with_the_failure_reward(tmp_path):
    config = write_config(tmp_path, steps=1, task__harness="tests.system.toy:hang", task__timeout=0.5)
    done = harnessrl("train", config)
    assert done.returncode == 0, done.stderr
    (line,) = read_jsonl(tmp_path / "runs" / "toy" / "metrics.jsonl")
    assert line["rollout/failed_timeout"] == 12 and line["reward/mean"] == 0 and line["loss/policy"] == 0


def test_ranks_end_when_their_launcher_is_killed(tmp_path):
    config = write_config(tmp_path, steps=100)
    mark = f"{os.getpid()}-launcher"
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "harnessrl"]
    process = subprocess.Popen(
        [*argv, "train", str(config)], cwd=ROOT, env=ENV | {"HARNESSRL_TEST": mark}, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True, start_new_session=True,
    )  # fmt: skip
    wait_for(process, "step 1/100")
    assert len(children_of(mark)) >= 5  # the launcher, two ranks, the service and a worker
    process.kill()
    process.communicate(timeout=30)
    assert gone(mark)


def test_a_run_that_follows_its_stdin_ends_with_its_own_exit_code():
    """The thread that waits for the end of stdin must not abort the interpreter when the work is done first."""
    with subprocess.Popen(
        command("train", "keys"), cwd=ROOT, env=ENV | {"HARNESSRL_FOLLOW_STDIN": "1"}, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        process.stdout.read()  # to its end, while stdin stays open
        assert (process.wait(60), process.stderr.read()) == (0, "")
