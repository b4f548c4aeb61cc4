"""Adapters and KL in the reward on the whole path: an engine with a copy of its own, resumed on two ranks, replayed by one."""

import subprocess
import sys

import pytest

from harnessrl.metrics import read_jsonl
from tests.system.running import ENV, ROOT, harnessrl
from tests.system.toy import write_config


@pytest.mark.timeout(300)
def test_the_engine_follows_the_adapters_and_a_replay_takes_the_same_kl(tmp_path):
    """One step moves a logprob by more than 1e-2: an engine that resumed with the weights of the folder would show it."""
    pytest.importorskip("peft", reason="needs the extra harnessrl[lora]")
    options = [
        "policy.lora.rank=4",
        "loss.kl_coef=0.5",
        "loss.kl_in=reward",
        "advantage.estimator=reinforce_pp",
        "update.lr=0.02",
    ]
    config = write_config(tmp_path)
    done = harnessrl("train", config, *options, "steps=1")
    assert done.returncode == 0, done.stderr
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "harnessrl"]
    arguments = [*ranks, "train", str(config), *options, "steps=2"]
    done = subprocess.run(arguments, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    record = tmp_path / "runs" / "toy" / "rollouts.jsonl"
    done = harnessrl("train", config, *options, "steps=2", f"replay={record}", "run=again")
    assert done.returncode == 0, done.stderr
    live, again = (
        [line for line in read_jsonl(tmp_path / "runs" / name / "metrics.jsonl") if "loss/kl" in line]
        for name in ("toy", "again")
    )
    assert live[0]["reward/kl_penalty"] == pytest.approx(0, abs=1e-5) and abs(live[1]["reward/kl_penalty"]) > 1e-3
    for ours, theirs in zip(again, live, strict=True):
        assert ours["policy/engine_logprob_gap"] < 1e-4 and theirs["policy/engine_logprob_gap"] < 1e-4
        assert ours["replay/advantage_gap"] < 1e-4
        assert ours["loss/kl"] == pytest.approx(theirs["loss/kl"], abs=1e-5)
        assert ours["policy/grad_norm"] == pytest.approx(theirs["policy/grad_norm"], rel=1e-4)
