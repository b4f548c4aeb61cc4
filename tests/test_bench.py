"""The trainer's benchmark: every method leaves the same gradient, the data are what they are called, bad keys are refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from harnessrl import cli
from harnessrl.bench.methods import Work, batches, packs, tree
from harnessrl.bench.train import METHODS, Options, Row, note, read_options
from harnessrl.bench.workloads import DATA, make_model, make_samples
from harnessrl.errors import ConfigError


def work(data="tree", tokens=900, max_tokens=400):
    return Work(make_model("tiny"), make_samples(data, tokens, 130), max_tokens)


@pytest.mark.parametrize("data", DATA)
def test_all_methods_leave_the_gradient_of_the_samples_run_one_by_one(data):
    torch.set_num_threads(1)
    model, given = make_model("tiny"), work(data)
    for sample, weight, advantage in zip(given.samples, given.weights, given.advantages, strict=True):
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))
        at = np.flatnonzero(sample.loss_mask)
        at = at[at > 0]
        logprobs = model(input_ids=ids[None], use_cache=False).logits[0, at - 1].log_softmax(-1)
        (-weight * advantage * logprobs[torch.arange(len(at)), ids[at]].sum()).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert len(packs(given)) > 1 and len(list(batches(given, np.arange(len(given.samples))))) > 1
    seen = []
    for name, method in (METHODS | {"trees": tree}).items():
        given = work(data)
        step = method(given)
        if step is None:
            continue
        for _ in range(2):  # a step leaves nothing to the next
            step()
        found = torch.cat([parameter.grad.flatten() for parameter in given.model.parameters()])
        assert (found - expected).norm() / expected.norm() < 1e-5, name
        seen.append(name)
    assert {"ours", "floor", "padded", "padded, sorted", "trees"} <= set(seen)


def test_the_data_are_what_they_are_called():
    short, long, chains = (make_samples(data, 40_000, 130) for data in DATA)
    lengths = np.array([len(sample.token_ids) for sample in short])
    assert 28 < lengths.mean() < 32 and lengths.min() >= 8 and lengths.max() <= 70
    lengths = np.array([len(sample.token_ids) for sample in long])
    assert lengths.min() >= 64 and lengths.max() <= 2048 and 300 < np.median(lengths) < 550
    rollouts = {sample.rollout_id for sample in chains}
    assert 2.2 < len(chains) / len(rollouts) < 2.6
    nodes = sum(len(packed.token_ids) for packed in packs(Work(make_model("tiny"), chains, 8192), tree=True))
    assert 1.4 < sum(len(sample.token_ids) for sample in chains) / nodes < 1.9
    for samples in (short, long, chains):
        assert sum(len(sample.token_ids) for sample in samples) >= 40_000
        assert all(sample.token_ids.min() >= 0 and sample.token_ids.max() < 130 for sample in samples)


def test_packs_and_batches_hold_every_sample_once_within_their_limit():
    given = work("lognormal", tokens=6000, max_tokens=1000)
    order = np.concatenate([packed.order for packed in packs(given)])
    assert sorted(order) == list(range(len(given.samples)))
    rows = list(batches(given, np.arange(len(given.samples))))
    assert np.concatenate(rows).tolist() == list(range(len(given.samples)))
    for batch in rows:
        widest = max(len(given.samples[row].token_ids) for row in batch)
        assert len(batch) == 1 or widest * len(batch) <= 1000


def test_notes_read_the_goals_from_the_ratios():
    row = {"model": "tiny", "tokens": 1000, "seconds": 0.5, "peak_mib": None}
    assert "1.25 x its time" in note(Row(data="short", method="floor", times_ours=0.8, **row))
    assert "3.00 x as fast" in note(Row(data="lognormal", method="padded", times_ours=3.0, **row))
    trees = Row(data="tree", method="trees", times_ours=0.625, token_ratio=2.0, **row)
    assert "1.60 x as fast: 80%" in note(trees) and trees.tokens_per_second == 2000


def test_options_are_read_and_bad_ones_named():
    assert read_options([]) == Options()
    assert read_options(["tokens=500", "memory=false", "model=tiny"]) == Options(tokens=500, memory=False, model="tiny")
    for item, says in {
        "speed=1": "one of model, data, tokens",
        "tokens": "expected key=value",
        "tokens=-1": "a whole number from 0",
        "repeats=0": "a whole number from 1",
        "memory=1": "true, false",
        "data=long": "short, lognormal, tree, all",
    }.items():
        with pytest.raises(ConfigError, match=says):
            read_options([item])


@pytest.mark.parametrize(
    "arguments",
    [["train", "repeats=x"], ["adapter", "seconds=-1"], ["adapter", "tokens=5"], ["adapter", "json=maybe"]],
)
def test_bad_keys_leave_by_exit_code_2(arguments, capsys):
    assert cli.run(["bench", *arguments]) == 2
    assert arguments[1].partition("=")[0] in capsys.readouterr().err


def test_the_command_prints_a_row_a_method():
    """The real command in a process of its own, which starts one for the times and one for each peak."""
    command = [sys.executable, "-m", "harnessrl", "bench", "train", "json=true"]
    small = ["model=tiny", "data=tree", "tokens=900", "max_tokens=300", "repeats=1"]
    root, environment = Path(__file__).parents[1], os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *small], capture_output=True, text=True, cwd=root, env=environment, timeout=110)
    assert done.returncode == 0, done.stderr
    rows = {row["method"]: row for row in json.loads(done.stdout)}
    assert {"ours", "floor", "padded", "padded, sorted", "trees"} <= rows.keys()
    assert rows["ours"]["times_ours"] == 1 and rows["trees"]["token_ratio"] > 1
    assert all(row["seconds"] > 0 and row["peak_mib"] > 0.1 and row["tokens"] >= 900 for row in rows.values())
