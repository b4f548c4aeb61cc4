"""The whole path in real processes: harness -> gateway -> engine -> trainer, its record, its resume, its end."""

import json
import math
import subprocess
import sys

import pytest

from harnessrl.adapter import Rollout, merge_calls
from harnessrl.metrics import read_jsonl
from tests.system.running import ENV, ROOT, harnessrl
from tests.system.toy import command, write_config

NEEDED = {
    "step", "reward/mean", "reward/std", "rollout/samples_mean", "rollout/single_sample_share", "rollout/drift_share",
    "rollout/tokens_mean", "sample/tokens_mean", "advantage/zero_signal_groups", "loss/policy", "loss/kl",
    "loss/weight_advantage_sum", "rollout/trained_token_share", "policy/entropy", "policy/grad_norm", "policy/ratio_mean",
    "policy/clip_fraction", "policy/engine_logprob_gap", "time/step", "time/rollout", "time/update",
    "perf/train_tokens_per_second", "perf/padding_share", "perf/rank_balance",
}  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of two steps."""
    folder = tmp_path_factory.mktemp("run")
    config = write_config(folder)
    done = harnessrl("train", config)
    assert done.returncode == 0, done.stderr
    return folder, config, done.stdout


def test_a_run_leaves_its_record(finished):
    folder, _, output = finished
    run = folder / "runs" / "toy"
    lines = read_jsonl(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1]
    assert set(lines[0]) >= NEEDED
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["config"]["update"]["lr"] == 1e-3 and manifest["versions"]["torch"]
    assert list((run / "tensorboard").iterdir()) and (run / "checkpoints" / "step-00002").is_dir()
    assert "step 2/2" in output


def test_engine_and_trainer_agree_on_every_token(finished):
    for line in read_jsonl(finished[0] / "runs" / "toy" / "metrics.jsonl"):
        assert 0 < line["policy/engine_logprob_gap"] < 1e-4


def test_weight_times_advantage_sums_to_zero_over_whole_groups(finished):
    for line in read_jsonl(finished[0] / "runs" / "toy" / "metrics.jsonl"):
        assert line["advantage/zero_signal_groups"] < 3  # there is something to balance
        assert abs(line["loss/weight_advantage_sum"]) < 1e-12


def test_rollouts_are_recorded_as_traces(finished):
    lines = read_jsonl(finished[0] / "runs" / "toy" / "rollouts.jsonl")
    assert len(lines) == 2 * 3 * 4
    assert {line["step"] for line in lines} == {0, 1}
    tidied = []
    for line in lines:
        rollout = Rollout.from_dict(line)
        assert len(rollout.calls) == 2 and all(call.logprobs is not None for call in rollout.calls)
        assert {int(call.policy_version) for call in rollout.calls} == {line["step"]}
        assert math.isfinite(line["advantage"]) and line["input"]["number"] < 6
        tidied.append(len(merge_calls(rollout).samples))
    assert set(tidied) == {1, 2}


def test_the_same_command_has_nothing_left_to_do_and_more_steps_resume(finished, tmp_path):
    folder, config, _ = finished
    again = harnessrl("train", config)
    assert again.returncode == 0 and "finished already" in again.stdout
    more = harnessrl("train", config, "steps=3")
    assert more.returncode == 0 and "resumed at step 2" in more.stdout
    lines = read_jsonl(folder / "runs" / "toy" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    inputs = [line["input"]["number"] for line in read_jsonl(folder / "runs" / "toy" / "rollouts.jsonl")]
    assert sorted(set(inputs)) == list(range(9))  # no input was trained twice, none left out


def test_another_configuration_does_not_continue_a_run(finished):
    refused = harnessrl("train", finished[1], "update.lr=0.5")
    assert refused.returncode == 2
    assert "update.lr" in refused.stderr and "0.001" in refused.stderr and "run=NAME" in refused.stderr


def replay(config, record, name, *extra, ranks=1):
    arguments = ["train", config, f"replay={record}", f"run={name}", *extra]
    argv = command(*arguments)
    if ranks > 1:
        argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m",
                "harnessrl", *map(str, arguments)]  # fmt: skip
    done = subprocess.run(argv, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-2000:]


def test_replay_gives_the_same_numbers_for_one_and_two_processes_and_any_pack_size(finished):
    folder, config, _ = finished
    run = folder / "runs" / "toy"
    record = folder / "recorded.jsonl"
    record.write_text(
        "".join(x for x in (run / "rollouts.jsonl").read_text().splitlines(True) if json.loads(x)["step"] < 2)
    )
    replay(config, record, "one")
    replay(config, record, "small", "update.max_tokens=64")
    replay(config, record, "two", ranks=2)
    live = read_jsonl(run / "metrics.jsonl")[:2]
    for name in ("one", "small", "two"):
        for ours, theirs in zip(read_jsonl(folder / "runs" / name / "metrics.jsonl"), live, strict=True):
            assert ours["loss/policy"] == pytest.approx(theirs["loss/policy"], abs=1e-6)
            assert ours["policy/grad_norm"] == pytest.approx(theirs["policy/grad_norm"], rel=1e-5)
            assert ours["policy/entropy"] == pytest.approx(theirs["policy/entropy"], rel=1e-5)
            assert ours["policy/engine_logprob_gap"] < 1e-4
            assert ours["replay/advantage_gap"] < 1e-12
