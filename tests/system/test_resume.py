"""Killed, damaged or moved to another number of processes, a run goes on to the same numbers; a NaN ends it by name."""

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

from harnessrl.metrics import read_jsonl
from tests.system import toy
from tests.system.running import ENV, ROOT, harnessrl, start, wait_for
from tests.system.toy import write_config

STEPS = 6
pytestmark = pytest.mark.timeout(300)  # several processes a test


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(folder, config): a run recorded once, then replayed to the end without a stop, as runs/toy; all checkpoints kept."""
    folder = tmp_path_factory.mktemp("whole")
    live = write_config(folder, steps=STEPS, checkpoint_every=STEPS, run="live")
    done = harnessrl("train", live)
    assert done.returncode == 0, done.stderr
    record = folder / "recorded.jsonl"
    shutil.copy(folder / "runs" / "live" / "rollouts.jsonl", record)
    settings = {"update__rollouts_per_update": 4, "update__warmup_steps": 5, "checkpoint_keep": STEPS}
    config = write_config(folder, steps=STEPS, replay=str(record), **settings)
    done = harnessrl("train", config)
    assert done.returncode == 0, done.stderr
    return folder, config


def numbers(folder):
    """metrics.jsonl without what a clock said."""
    lines = read_jsonl(folder / "metrics.jsonl")
    timed = ("time/", "async/drain_seconds", "perf/train_tokens_per_second")
    return [{key: value for key, value in line.items() if not key.startswith(timed)} for line in lines]


def run_of(root):
    return root / "runs" / "toy"


def resumed(whole, root):
    """Continue the run under `root` to its end, and compare with the one that was never stopped."""
    done = harnessrl("train", whole[1], f"runs={root / 'runs'}")
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in numbers(run_of(root))] == list(range(STEPS))
    assert numbers(run_of(root)) == numbers(run_of(whole[0]))
    ours, theirs = (read_jsonl(run_of(folder) / "rollouts.jsonl") for folder in (root, whole[0]))
    assert ours == theirs
    return done.stdout


def upto(whole, root, step):
    """A copy of the whole run as it was after some steps."""
    shutil.copytree(run_of(whole[0]), run_of(root))
    for path in (run_of(root) / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)


def test_the_uninterrupted_run_is_worth_comparing_with(whole):
    lines = numbers(run_of(whole[0]))
    assert len(lines) == STEPS and all(line["update/count"] == 3 for line in lines)
    assert len({line["policy/grad_norm"] for line in lines}) == STEPS
    assert len({line["policy/entropy"] for line in lines}) == STEPS


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_killed_at_a_random_moment_resumes_to_the_same_numbers(whole, tmp_path, seed):
    draw = random.Random(seed)
    process = start(whole[1], f"runs={tmp_path / 'runs'}")
    wait_for(process, f"step {draw.randint(2, STEPS - 2)}/{STEPS}")  # so one checkpoint is complete
    time.sleep(draw.uniform(0, 0.1))  # the moment of the kill, not a synchronisation
    process.kill()
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL
    assert "resumed at step" in resumed(whole, tmp_path)


def stopped(pid):
    """Stop a process and wait until the kernel says so."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


def test_a_run_killed_while_it_writes_a_checkpoint_resumes_to_the_same_numbers(whole, tmp_path):
    process = start(whole[1], f"runs={tmp_path / 'runs'}")
    checkpoints = run_of(tmp_path) / "checkpoints"
    written = lambda: len(list(checkpoints.glob("step-*")))  # noqa: E731
    writing = lambda: list(checkpoints.glob(".step-*.partial"))  # noqa: E731
    while process.poll() is None:
        if written() and writing():
            stopped(process.pid)
            if writing():
                break
            process.send_signal(signal.SIGCONT)  # it was complete in the meantime; catch the next
    process.kill()
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL and writing()
    complete = written()
    assert f"resumed at step {complete}" in resumed(whole, tmp_path) and not writing()


def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_gives_the_same_numbers(whole, tmp_path):
    upto(whole, tmp_path, STEPS)
    checkpoints = run_of(tmp_path) / "checkpoints"
    damage(checkpoints / f"step-0000{STEPS}" / "__0_0.distcp")
    output = resumed(whole, tmp_path)
    assert "step-00006 is damaged (__0_0.distcp" in output and "using step-00005" in output
    assert "resumed at step 5" in output
    assert (checkpoints / "damaged-step-00006").is_dir() and (checkpoints / "step-00006").is_dir()


def test_where_every_checkpoint_is_damaged_the_run_is_left_alone(whole, tmp_path):
    upto(whole, tmp_path, 2)
    for step in (1, 2):
        damage(run_of(tmp_path) / "checkpoints" / f"step-0000{step}" / "state.json")
    before = {path: path.read_bytes() for path in run_of(tmp_path).rglob("*") if path.is_file()}
    refused = harnessrl("train", whole[1], f"runs={tmp_path / 'runs'}")
    assert refused.returncode == 2 and len(refused.stderr.strip().splitlines()) == 1
    assert "step-00002: state.json" in refused.stderr and "step-00001: state.json" in refused.stderr
    assert {path: path.read_bytes() for path in run_of(tmp_path).rglob("*") if path.is_file()} == before


def damage(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def two_ranks(*arguments):
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "harnessrl"]
    return subprocess.run([*argv, *map(str, arguments)], cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=200)


def test_one_process_then_two_then_one_give_the_same_numbers(whole, tmp_path):
    upto(whole, tmp_path, 2)
    done = two_ranks("train", whole[1], f"runs={tmp_path / 'runs'}", "steps=4")
    assert done.returncode == 0 and "resumed at step 2" in done.stdout, done.stderr[-2000:]
    checkpoint = run_of(tmp_path) / "checkpoints" / "step-00004"
    assert {path.name for path in checkpoint.glob("*.distcp")} == {"__0_0.distcp", "__1_0.distcp"}
    assert len(json.loads((checkpoint / "state.json").read_text())["random"]) == 2
    done = harnessrl("train", whole[1], f"runs={tmp_path / 'runs'}")
    assert done.returncode == 0 and "resumed at step 4" in done.stdout, done.stderr
    for ours, theirs in zip(numbers(run_of(tmp_path)), numbers(run_of(whole[0])), strict=True):
        for key in ("loss/policy", "policy/grad_norm", "policy/entropy", "policy/ratio_mean", "reward/mean"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5, abs=1e-6)


def test_export_writes_a_policy_that_transformers_loads(whole, tmp_path):
    done = harnessrl("export", run_of(whole[0]), tmp_path / "out", "step=best")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    named = json.loads((run_of(whole[0]) / "checkpoints" / "best.json").read_text())
    assert named["checkpoint"] in done.stdout and named["metric"] == "reward/mean"
    first = AutoModelForCausalLM.from_pretrained(toy.policy(0, run_of(whole[0]).parent / "cache"))
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    change = max((a - b).abs().max() for a, b in zip(first.parameters(), trained.parameters(), strict=True))
    assert 1e-4 < change < 3e-2  # up to 18 updates of at most 1e-3 a weight
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (toy.TOKENIZER / "tokenizer.json").read_bytes()
    again = harnessrl("export", run_of(whole[0]), tmp_path / "out")
    assert again.returncode == 2 and "exists" in again.stderr and "Traceback" not in again.stderr


def rare_token(lines):
    """A token that one rollout alone reads, with that rollout, in the lines of a step; 0 is what an empty pack reads."""
    readers = {}
    for line in lines:
        for call in line["calls"]:
            for token in [*call["prompt_ids"], *call["response_ids"][:-1]]:
                readers.setdefault(token, set()).add(line["rollout_id"])
    return next((token, *names) for token, names in sorted(readers.items()) if len(names) == 1 and token)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_nan_ends_the_run_and_names_its_rollout(whole, tmp_path, ranks):
    """The policy's embedding of one token is NaN; the recorded rollouts read it once. On two ranks nobody hangs."""
    token, rollout = rare_token([line for line in read_jsonl(whole[0] / "recorded.jsonl") if line["step"] == 0])
    model = AutoModelForCausalLM.from_pretrained(toy.policy(0, whole[0] / "runs" / "cache"))
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with torch.no_grad():
        model.get_input_embeddings().weight[token] = math.nan
    source = tmp_path / "source"
    model.save_pretrained(source)
    for file in toy.TOKENIZER.iterdir():
        shutil.copy(file, source)
    arguments = ["train", whole[1], f"runs={tmp_path / 'runs'}", f"policy.source={source}", "update.max_tokens=100"]
    arguments += ["update.rollouts_per_update=null"]
    done = harnessrl(*arguments) if ranks == 1 else two_ranks(*arguments)
    assert done.returncode == 1
    spoken = [line for line in done.stderr.splitlines() if line.startswith("harnessrl: ")]
    assert len(spoken) == 1 and "step 0: loss nan" in spoken[0] and f"rollout {rollout}." in spoken[0]
    assert ranks > 1 or done.stderr.strip() == spoken[0]
    folder = run_of(tmp_path) / "faults" / "step-0"
    files = sorted(path.suffix for path in folder.iterdir())
    assert files and files.count(".npz") == files.count(".json") == len(files) / 2
    for path in folder.glob("*.json"):
        about = json.loads(path.read_text())
        assert about["at_fault"] == [rollout] and rollout in {sample["rollout_id"] for sample in about["samples"]}
    assert read_jsonl(run_of(tmp_path) / "metrics.jsonl") == []
    assert not list((run_of(tmp_path) / "checkpoints").glob("step-*"))
