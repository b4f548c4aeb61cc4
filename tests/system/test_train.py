"""The whole path in real processes: harness -> gateway -> engine -> trainer, its record, its resume, its end."""

import json
import math
import shutil
import subprocess
import sys

import pytest
from tokenizers import Tokenizer

from harnessrl.adapter import Rollout, merge_calls
from harnessrl.metrics import read_jsonl
from tests.system.running import ENV, ROOT, harnessrl
from tests.system.toy import TOKENIZER, command, write_config

NEEDED = {
    "step", "reward/mean", "reward/std", "rollout/samples_mean", "rollout/single_sample_share", "rollout/drift_share",
    "rollout/tokens_mean", "sample/tokens_mean", "advantage/zero_signal_groups", "loss/policy", "loss/kl",
    "loss/weight_advantage_sum", "rollout/trained_token_share", "policy/entropy", "policy/grad_norm", "policy/ratio_mean",
    "policy/clip_fraction", "policy/engine_logprob_gap", "time/step", "time/rollout", "time/update",
    "async/version_age_mean", "async/drain_seconds", "perf/train_tokens_per_second", "perf/padding_share", "perf/rank_balance",
}  # fmt: skip


SETTINGS = {
    "deterministic": True,
    "task__resample_zero_signal": True,
    "advantage": {"credit": "mean_preserving"},
    "validation": {"every": 2, "inputs": 3, "rollouts": 2},
}


VALIDATED = {"reward_mean", "count", "samples_mean", "tokens_mean"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of two steps that validates, replaces groups of equal rewards, and gives calls their own credit."""
    folder = tmp_path_factory.mktemp("run")
    config = write_config(folder, **SETTINGS)
    done = harnessrl("train", config)
    assert done.returncode == 0, done.stderr
    return folder, config, done.stdout


def steps_of(run):
    """Lines of metrics.jsonl that tell of a step: the last of a validated run does not."""
    return [line for line in read_jsonl(run / "metrics.jsonl") if "loss/policy" in line]


def test_a_run_leaves_its_record(finished):
    folder, _, output = finished
    run = folder / "runs" / "toy"
    lines = read_jsonl(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert set(lines[0]) >= NEEDED and set(lines[1]) >= NEEDED
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["config"]["update"]["lr"] == 1e-3 and manifest["versions"]["torch"]
    assert list((run / "tensorboard").iterdir()) and (run / "checkpoints" / "step-00002").is_dir()
    assert "step 2/2" in output


def test_engine_and_trainer_agree_on_every_token(finished):
    for line in steps_of(finished[0] / "runs" / "toy"):
        assert 0 < line["policy/engine_logprob_gap"] < 1e-4


def test_weight_times_advantage_sums_to_zero_over_whole_groups(finished):
    for line in steps_of(finished[0] / "runs" / "toy"):
        assert line["advantage/std"] > 0.5  # there is something to balance
        assert abs(line["loss/weight_advantage_sum"]) < 1e-12


def texts(rollout):
    tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    ends = {tokenizer.token_to_id("<|end|>")}
    ids = [call.response_ids.tolist() for call in rollout.calls]
    return [tokenizer.decode(row[:-1] if row[-1] in ends else row) for row in ids]


def test_groups_of_equal_rewards_are_replaced_recorded_and_not_trained(finished):
    run = finished[0] / "runs" / "toy"
    lines, used = read_jsonl(run / "rollouts.jsonl"), 0
    for step, metrics in enumerate(steps_of(run)):
        groups = {}
        for line in lines:
            if line["step"] == step:
                groups.setdefault(line["group_id"], []).append(line)
        replaced = {name for name, group in groups.items() if all(line.get("resampled") for line in group)}
        assert len(groups) - len(replaced) == 3
        for name, group in groups.items():
            equal = len({line["reward"] for line in group}) == 1
            assert equal == (name in replaced)  # three rounds are enough here
            assert all(line["advantage"] == 0 for line in group) == equal
        assert metrics["rollout/resampled_groups"] == len(replaced)
        assert metrics["rollout/resampled"] == 4 * len(replaced)
        assert metrics["rollout/count"] == 4 * len(groups)
        assert metrics["reward/mean"] == pytest.approx(
            sum(line["reward"] for group in groups.values() for line in group) / (4 * len(groups))
        )
        kept = [line for line in lines if line["step"] == step and not line.get("resampled")]
        trained = sum(len(call["response_ids"]) for line in kept for call in line["calls"])
        assert metrics["update/trained_tokens"] == trained
        used += len(groups)
        state = json.loads((run / "checkpoints" / f"step-{step + 1:05d}" / "state.json").read_text())
        assert state["position"]["inputs"] == used
    assert used > 6  # the toy's fifth input always earns 1
    assert {line["input"]["number"] for line in lines} == set(range(used))


def test_validation_runs_before_the_first_step_and_after_the_last(finished):
    run = finished[0] / "runs" / "toy"
    recorded = read_jsonl(run / "validation.jsonl")
    assert [line["step"] for line in recorded] == [0] * 6 + [2] * 6
    assert [line["rollout_id"] for line in recorded[:6]] == [line["rollout_id"] for line in recorded[6:]]
    assert [line["input"]["number"] for line in recorded[:6]] == [500_000, 500_000, 500_001, 500_001, 500_002, 500_002]
    assert not any(line["is_train"] for line in recorded) and not any("advantage" in line for line in recorded)
    assert {call["policy_version"] for line in recorded[6:] for call in line["calls"]} == {2}
    metrics = {line["step"]: line for line in read_jsonl(run / "metrics.jsonl")}
    assert set(metrics[2]) == {"step", "time/validation", *(f"val/{key}" for key in VALIDATED)}
    assert not any(key.startswith("val/") for key in metrics[1])
    for step, lines in ((0, recorded[:6]), (2, recorded[6:])):
        assert metrics[step]["val/count"] == 6
        assert metrics[step]["val/reward_mean"] == pytest.approx(sum(line["reward"] for line in lines) / 6)
        rollouts = [Rollout.from_dict(line) for line in lines]
        assert metrics[step]["val/samples_mean"] == sum(len(merge_calls(r).samples) for r in rollouts) / 6
        sampled = sum(len(call.response_ids) for r in rollouts for call in r.calls)
        assert metrics[step]["val/tokens_mean"] == pytest.approx(sampled / 6)
    best = json.loads((run / "checkpoints" / "best.json").read_text())
    assert best == {
        "checkpoint": "step-00002", "metric": "val/reward_mean", "value": metrics[2]["val/reward_mean"]
    }  # fmt: skip


def test_rollouts_are_recorded_as_traces(finished):
    lines = read_jsonl(finished[0] / "runs" / "toy" / "rollouts.jsonl")
    assert len({line["group_id"] for line in lines if not line.get("resampled")}) == 2 * 3
    assert len(lines) == 4 * len({line["group_id"] for line in lines})
    assert {line["step"] for line in lines} == {0, 1}
    tidied = []
    for line in lines:
        rollout = Rollout.from_dict(line)
        assert len(rollout.calls) == 2 and all(call.logprobs is not None for call in rollout.calls)
        assert {int(call.policy_version) for call in rollout.calls} == {line["step"]}
        assert math.isfinite(line["advantage"])
        ends = {
            call.call_id: 0.5 * (len(text) % 2 == 0) for call, text in zip(rollout.calls, texts(rollout), strict=True)
        }
        assert line["call_rewards"] == ends
        tidied.append(len(merge_calls(rollout).samples))
    assert set(tidied) == {1, 2}


def test_the_same_command_has_nothing_left_to_do_and_more_steps_resume(finished, tmp_path):
    folder, config, _ = finished
    again = harnessrl("train", config)
    assert again.returncode == 0 and "finished already" in again.stdout
    shutil.copytree(folder / "runs" / "toy", folder / "runs" / "more")
    manifest = folder / "runs" / "more" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"run": "toy"', '"run": "more"'))
    more = harnessrl("train", config, "run=more", "steps=3")
    assert more.returncode == 0 and "resumed at step 2" in more.stdout
    whole = harnessrl("train", config, "run=whole", "steps=3")
    assert whole.returncode == 0, whole.stderr
    for name in ("rollouts", "validation"):
        ours, theirs = (read_jsonl(folder / "runs" / run / f"{name}.jsonl") for run in ("more", "whole"))
        assert ours == theirs and len(ours) == len({(line["step"], line["rollout_id"]) for line in ours})
    ours, theirs = (untimed(folder / "runs" / run) for run in ("more", "whole"))
    assert ours == theirs and [line["step"] for line in ours] == [0, 1, 2, 3]
    assert [line["step"] for line in ours if "val/count" in line] == [0, 2, 3]


def untimed(run):
    """metrics.jsonl without what a clock said."""
    timed = ("time/", "async/drain_seconds", "perf/train_tokens_per_second")
    return [
        {key: x for key, x in line.items() if not key.startswith(timed)} for line in read_jsonl(run / "metrics.jsonl")
    ]


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
    record = run / "rollouts.jsonl"
    replay(config, record, "one")
    replay(config, record, "small", "update.max_tokens=64")
    replay(config, record, "two", ranks=2)
    live = steps_of(run)
    for name in ("one", "small", "two"):
        for ours, theirs in zip(read_jsonl(folder / "runs" / name / "metrics.jsonl"), live, strict=True):
            assert ours["loss/policy"] == pytest.approx(theirs["loss/policy"], abs=1e-6)
            assert ours["policy/grad_norm"] == pytest.approx(theirs["policy/grad_norm"], rel=1e-5)
            assert ours["policy/entropy"] == pytest.approx(theirs["policy/entropy"], rel=1e-5)
            assert ours["policy/engine_logprob_gap"] < 1e-4
            assert ours["replay/advantage_gap"] < 1e-12 and "val/count" not in ours
            for key in ("rollout/resampled", "rollout/count", "update/trained_tokens", "reward/mean"):
                assert ours[key] == theirs[key]
