"""Recorded batches: gradients by the functions that train, against a plain loss; and the command on a run folder."""

import csv
import json
from dataclasses import asdict

import numpy as np
import pytest
import torch

from experiments.laboratory.batches import CHOICES, cosine, halves, main, setting, update_of
from harnessrl.adapter import Call, Rollout, merge_calls, rollout_advantages, token_weights
from harnessrl.config import Config, Policy, Task
from harnessrl.train.batch import Finished
from harnessrl.train.policy import Policy as Scorer
from tests.conftest import make_tiny_model


@pytest.fixture(scope="module")
def own_model():
    from harnessrl.attention import use_layouts

    return use_layouts(make_tiny_model(seed=3))


def finished(groups=4, members=4, seed=0):
    """Rollouts whose calls continue or break at random; about half of them fail."""
    rng = np.random.default_rng(seed)
    out = []
    for g in range(groups):
        for m in range(members):
            context, calls = rng.integers(0, 97, 3).tolist(), []
            for c in range(rng.integers(1, 4)):
                response = rng.integers(0, 97, 2 + c).tolist()
                calls.append(
                    Call(call_id=f"c{c}", prompt_ids=context, response_ids=response, logprobs=[-1.0] * len(response))
                )
                context = [*context, *response, 5] if rng.random() < 0.6 else rng.integers(0, 97, 4).tolist()
            rollout = Rollout(rollout_id=f"r{g}{m}", group_id=f"g{g}", reward=float(m % 2), calls=calls)
            out.append(Finished(rollout=rollout, failure=None, input=None))
    return out


def config(source="x"):
    return Config(task=Task(inputs="a:b", harness="a:c"), policy=Policy(source=source, train_temperature=0.7))


@pytest.mark.parametrize(("unit", "normalizer"), CHOICES)
def test_gradients_equal_those_of_a_plain_loss(own_model, unit, normalizer):
    items = finished()
    merges = [merge_calls(item.rollout) for item in items]
    counts = [len(merge.samples) for merge in merges]
    rewards = [item.rollout.reward for item in items]
    advantage = rollout_advantages(
        rewards, [i.rollout.group_id for i in items], "grpo", unit=unit, samples_per_rollout=counts
    )
    samples = [(r, sample) for r, merge in enumerate(merges) for sample in merge.samples]
    weight = token_weights([int(s.loss_mask.sum()) for _, s in samples], [r for r, _ in samples], normalizer)
    plain = make_tiny_model(seed=3)
    gain, balance, failed, mass = 0.0, 0.0, 0.0, 0.0
    for (r, sample), w in zip(samples, weight.tolist(), strict=True):
        ids = torch.tensor(sample.token_ids[None].astype(np.int64))
        logprobs = (plain(input_ids=ids).logits[0] / 0.7).log_softmax(-1)
        at = np.flatnonzero(sample.loss_mask)
        gain = gain + w * advantage[r] * logprobs[at - 1, ids[0, at]].sum()
        balance += w * advantage[r] * len(at)
        mass += w * len(at)
        failed += w * len(at) * (rewards[r] == 0)
    gain.backward()
    expected = torch.cat([p.grad.double().flatten() for p in plain.parameters()]).numpy()
    update = update_of(Scorer(own_model), items, setting(config(), unit, normalizer))
    np.testing.assert_allclose(update.gradient, expected, atol=1e-6 * np.abs(expected).max())
    assert update.balance == pytest.approx(balance, abs=1e-12)
    assert update.on_failed == pytest.approx(failed / mass, rel=1e-9)
    assert (abs(update.balance) < 1e-12) == (
        (unit, normalizer) in (("rollout", "rollout_mean"), ("sample", "seq_mean"))
    )


def test_halves_keep_groups_whole():
    items = finished(groups=6)
    first, second = halves(items, np.random.default_rng(0))
    names = [{item.rollout.group_id for item in half} for half in (first, second)]
    assert len(first) == len(second) == 12 and names[0] | names[1] == {f"g{g}" for g in range(6)}
    assert not names[0] & names[1]


def test_cosines_by_hand():
    assert cosine(np.array([3.0, 4.0]), np.array([3.0, 0.0])) == pytest.approx(0.6)
    assert np.isnan(cosine(np.zeros(2), np.ones(2)))


def test_the_command_on_a_run_folder(own_model, tmp_path):
    own_model.save_pretrained(tmp_path / "model")
    run = tmp_path / "run"
    run.mkdir()
    (run / "manifest.json").write_text(json.dumps({"config": asdict(config(str(tmp_path / "model")))}))
    lines = [item.rollout.to_dict() | {"step": step} for step in (0, 1) for item in finished(seed=step)]
    (run / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main([str(run / "rollouts.jsonl"), "--splits", "2", "--out", str(tmp_path)]) == 0
    with (tmp_path / "recorded_settings.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["run"], row["step"]) for row in rows] == [("run", "0")] * 6  # step 1 has no checkpoint
    assert {row["reward"] for row in rows} == {"0.5"}
    whole = update_of(Scorer(own_model), finished(), setting(config(), "sample", "token_mean"))
    row = next(row for row in rows if (row["unit"], row["normalizer"]) == ("sample", "token_mean"))
    assert float(row["gradient_norm"]) == pytest.approx(np.linalg.norm(whole.gradient), rel=1e-3)
    with (tmp_path / "recorded_cosines.csv").open() as file:
        pairs = list(csv.DictReader(file))
    assert len(pairs) == 15 and all(-1 <= float(row["cosine"]) <= 1 for row in pairs)


def test_rollouts_without_a_run_are_refused(tmp_path, capsys):
    (tmp_path / "rollouts.jsonl").write_text("")
    assert main([str(tmp_path / "rollouts.jsonl")]) == 2
    assert "expected RUN/rollouts.jsonl with the run's manifest.json beside it" in capsys.readouterr().err
