"""Checkpoints: what is restored, what damage does, which are kept, and what a kill leaves."""

import json
import multiprocessing
import random
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from harnessrl.errors import ConfigError, RunError
from harnessrl.train import checkpoint
from harnessrl.train.checkpoint import Checkpoints, Position, Score
from harnessrl.train.export import copy_description, export
from harnessrl.train.manifest import damage
from harnessrl.train.policy import Policy
from harnessrl.train.update import warmup
from tests.conftest import make_tiny_model


class Run:
    """A tiny policy that is trained on the step's number, with everything a checkpoint holds."""

    def __init__(self, folder, updates=4, vocabulary=97, **options):
        self.policy = Policy(make_tiny_model(seed=0, vocabulary=vocabulary))
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), 1e-2)
        self.scheduler = warmup(self.optimizer, updates)
        self.checkpoints = Checkpoints(folder, self.policy, self.optimizer, self.scheduler, **options)

    def train(self, *steps):
        for step in steps:
            tokens = torch.tensor([[step, step + 1, step + 2]])
            self.optimizer.zero_grad()
            self.policy.model(input_ids=tokens, labels=tokens).loss.backward()
            self.optimizer.step()
            self.scheduler.step()

    def save(self, step, score=None):
        score = None if score is None else Score(metric="reward/mean", value=score)
        self.checkpoints.save(Position(step=step, version=step, inputs=3 * step), score)
        self.checkpoints.wait()

    def load(self, path):
        return checkpoint.load(path, self.policy, self.optimizer, self.scheduler)

    def numbers(self):
        return torch.cat([p.detach().flatten() for p in self.policy.parameters()])


def named(folder):
    return sorted(path.name for path in folder.iterdir())


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def flip(path, at=-1):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_restored_run_goes_on_bit_for_bit(tmp_path):
    first = Run(tmp_path)
    first.train(0, 1)
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    first.save(2)
    drawn = random.random(), np.random.rand(), torch.rand(1)
    first.train(2, 3)
    second = Run(tmp_path)
    assert second.load(tmp_path / "step-00002") == Position(step=2, version=2, inputs=6)
    assert (random.random(), np.random.rand(), torch.rand(1)) == drawn
    second.train(2, 3)
    assert torch.equal(first.numbers(), second.numbers())
    assert first.optimizer.param_groups[0]["lr"] == second.optimizer.param_groups[0]["lr"] == 1e-2


def test_what_is_written_is_what_was_there_when_save_was_called(tmp_path):
    run = Run(tmp_path)
    run.train(0)
    before, moment = run.numbers().clone(), run.optimizer.state_dict()["state"][0]["exp_avg"].clone()
    run.checkpoints.save(Position(step=1, version=1, inputs=1))
    run.train(1)  # while it is written
    with torch.no_grad():
        for parameter in run.policy.parameters():
            parameter.zero_()
    run.checkpoints.wait()
    run.load(tmp_path / "step-00001")
    assert torch.equal(run.numbers(), before)
    assert torch.equal(run.optimizer.state_dict()["state"][0]["exp_avg"], moment)


def test_saving_before_the_first_update_changes_nothing(tmp_path):
    plain, saved = Run(tmp_path / "a"), Run(tmp_path / "b")
    saved.save(0)
    assert not saved.optimizer.state
    restored = Run(tmp_path / "c")
    restored.load(tmp_path / "b" / "step-00000")
    for run in (plain, saved, restored):
        run.train(0, 1)
    assert torch.equal(plain.numbers(), saved.numbers()) and torch.equal(plain.numbers(), restored.numbers())


def test_the_learning_rate_rises_linearly(tmp_path):
    run, rates = Run(tmp_path), []
    for step in range(6):
        rates.append(run.optimizer.param_groups[0]["lr"])
        run.train(step)
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01])
    constant = Run(tmp_path, updates=0)
    assert constant.optimizer.param_groups[0]["lr"] == 1e-2


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "state.json", "manifest.json"])
@pytest.mark.parametrize("how", ["one bit", "cut short", "missing"])
def test_damage_is_refused_by_name_and_the_checkpoint_before_is_used(tmp_path, name, how):
    run = Run(tmp_path)
    run.save(1), run.save(2)
    assert damage(tmp_path / "step-00002") is None
    file = tmp_path / "step-00002" / name
    if how == "one bit":
        flip(file, at=len(file.read_bytes()) // 2)
    elif how == "cut short":
        file.write_bytes(file.read_bytes()[:-3])
    else:
        file.unlink()
    found, notes = checkpoint.usable(tmp_path)
    assert found == tmp_path / "step-00001" and len(notes) == 1
    assert "step-00002 is damaged" in notes[0] and "using step-00001" in notes[0]
    assert name in notes[0] or name == "manifest.json"  # whose one bit may say something wrong of any file
    assert named(tmp_path) == ["damaged-step-00002", "step-00001"]
    assert checkpoint.usable(tmp_path) == (found, [])


def test_where_all_are_damaged_nothing_is_touched(tmp_path):
    run = Run(tmp_path)
    run.save(1), run.save(2)
    for step in (1, 2):
        flip(tmp_path / f"step-0000{step}" / "__0_0.distcp")
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=r"step-00002: __0_0\.distcp.*step-00001: __0_0\.distcp.*run=NAME"):
        checkpoint.usable(tmp_path)
    assert contents(tmp_path) == before
    assert checkpoint.usable(tmp_path / "nothing") == (None, [])


def test_a_run_goes_on_past_a_damaged_checkpoint(tmp_path):
    run = Run(tmp_path)
    run.save(1), run.save(2)
    flip(tmp_path / "step-00002" / "state.json")
    assert checkpoint.usable(tmp_path)[0] == tmp_path / "step-00001"
    run.save(2), run.save(3)
    assert named(tmp_path) == ["damaged-step-00002", "step-00002", "step-00003"]
    flip(tmp_path / "step-00003" / "state.json")
    assert checkpoint.usable(tmp_path)[0] == tmp_path / "step-00002"


@pytest.mark.parametrize(
    ("keep", "scores", "kept", "best"),
    [
        (2, [0.1, 0.5, 0.2, 0.3], [2, 3, 4], 2),
        (1, [0.1, 0.5, 0.2, 0.5], [2, 4], 2),  # equal: the first stays
        (3, [0.4, 0.3, 0.2, 0.1], [1, 2, 3, 4], 1),
        (2, [0.1, 0.2, 0.3, 0.4], [3, 4], 4),
        (2, [None, None, None, None], [3, 4], None),
    ],
)
def test_the_newest_and_the_best_are_kept(tmp_path, keep, scores, kept, best):
    run = Run(tmp_path, keep=keep)
    for step, value in enumerate(scores, 1):
        run.save(step, value)
    assert [checkpoint.step_of(path) for path in checkpoint.complete(tmp_path)] == kept
    if best is None:
        assert not (tmp_path / "best.json").exists()
    else:
        expected = {"checkpoint": f"step-0000{best}", "metric": "reward/mean", "value": scores[best - 1]}
        assert json.loads((tmp_path / "best.json").read_text()) == expected
    assert {name for name in named(tmp_path) if name.startswith(".")} == set()


def test_validation_is_preferred_to_training_whatever_their_values(tmp_path):
    run = Run(tmp_path, keep=1)
    for step, (metric, value) in enumerate([("val/reward_mean", 0.2), ("reward/mean", 0.9), ("val/reward_mean", 0.1)]):
        run.checkpoints.save(Position(step=step, version=step, inputs=0), Score(metric=metric, value=value))
        run.checkpoints.wait()
    assert json.loads((tmp_path / "best.json").read_text()) == {
        "checkpoint": "step-00000", "metric": "val/reward_mean", "value": 0.2
    }  # fmt: skip


def test_scores_are_literal():
    lines = [{"reward/mean": 0.25}, {"reward/mean": None}, {"reward/mean": float("nan")}, {"reward/mean": 0.75}]
    assert checkpoint.score(lines, {}) == Score(metric="reward/mean", value=0.5)
    assert checkpoint.score(lines, {"val/reward_mean": 0.7}) == Score(metric="val/reward_mean", value=0.7)
    earlier = [{"val/reward_mean": 0.7, "reward/mean": 1.0}]  # of other weights than those to be saved
    assert checkpoint.score(earlier, {}) == Score(metric="reward/mean", value=1.0)
    assert checkpoint.score([], {}) is None and checkpoint.score([{"reward/mean": None}], {}) is None
    assert checkpoint.score(lines, {"val/reward_mean": float("nan")}) is None


def test_what_does_not_fit_is_said_by_path(tmp_path):
    run = Run(tmp_path)
    run.train(0)
    run.save(1)
    with pytest.raises(ConfigError, match=r"step-00001: not a checkpoint of this policy.* Size mismatch"):
        Run(tmp_path, vocabulary=50).load(tmp_path / "step-00001")


def write_forever(folder, progress):
    """A process that is killed: every weight of checkpoint n is n."""
    torch.set_num_threads(1)
    model = torch.nn.Linear(700, 1000, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    saver = Checkpoints(folder, model, optimizer, warmup(optimizer, 0))
    for step in range(checkpoint.step_of(checkpoint.usable(folder)[0] or Path("step-0")) + 1, 1000):
        with torch.no_grad():
            model.weight.fill_(step)
        saver.save(Position(step=step, version=step, inputs=step))
        progress.send(step)


def test_a_kill_at_any_moment_leaves_whole_checkpoints(tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    draw, partial, last = random.Random(0), 0, 0
    for _ in range(8):
        ours, theirs = context.Pipe()
        process = context.Process(target=write_forever, args=(tmp_path, theirs))
        process.start()
        theirs.close()
        for _ in range(draw.randint(2, 6)):
            step = ours.recv()
        process.join(draw.uniform(0, 0.03))  # the moment of the kill, not a synchronisation
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        partial += len(list(tmp_path.glob(".*")))
        found, notes = checkpoint.usable(tmp_path)
        assert notes == [] and last <= step - 1 <= checkpoint.step_of(found)
        last = checkpoint.step_of(found)
        model = torch.nn.Linear(700, 1000, bias=False)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        assert checkpoint.load(found, model, optimizer, warmup(optimizer, 0)).step == last
        assert (model.weight == last).all()
        complete = checkpoint.complete(tmp_path)
        assert 1 <= len(complete) <= 3 and all(damage(path) is None for path in complete)
    assert partial  # at least one kill fell into the writing


def test_what_cannot_be_written_ends_the_run_with_one_line(tmp_path):
    run = Run(tmp_path / "checkpoints")
    run.save(1)
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(RunError, match=r"checkpoints: a checkpoint could not be written: [^\n]+$"):
        run.save(2)


@pytest.fixture(scope="module")
def exportable(tmp_path_factory):
    """A run folder with three checkpoints, the second the best; and the source of its policy."""
    folder = tmp_path_factory.mktemp("exportable")
    make_tiny_model(seed=0).save_pretrained(folder / "source")
    (folder / "source" / "tokenizer.json").write_text('{"made": "here"}')
    (folder / "source" / "chat_template.jinja").write_text("{{ messages }}")
    run, logits = Run(folder / "run" / "checkpoints", keep=3), {}
    copy_description(folder / "source", folder / "run" / "checkpoints")
    for step, value in ((1, 0.1), (2, 0.9), (3, 0.3)):
        run.train(step)
        run.save(step, value)
        with torch.no_grad():
            logits[step] = run.policy.model(input_ids=torch.arange(20)[None]).logits
    return folder, logits


@pytest.mark.parametrize(("which", "step"), [("", 3), ("step=best", 2), ("step=1", 1)])
def test_an_exported_policy_is_the_policy(exportable, tmp_path, which, step):
    folder, logits = exportable
    assert export(folder / "run", tmp_path / "out", which).name == f"step-0000{step}"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(model) is LlamaForCausalLM and model.dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(model(input_ids=torch.arange(20)[None]).logits, logits[step])
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"made": "here"}'
    assert (tmp_path / "out" / "chat_template.jinja").is_file() and (tmp_path / "out" / "model.safetensors").is_file()
    assert named(tmp_path) == ["out"]


def test_what_cannot_be_exported_is_said(exportable, tmp_path):
    folder, _ = exportable
    for which in ("step=7", "last", "step=", "epoch=1"):
        with pytest.raises(ConfigError, match=r"step=best or step=N.*1, 2, 3"):
            export(folder / "run", tmp_path / "out", which)
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        export(folder, tmp_path / "out")
    with pytest.raises(ConfigError, match="exists"):
        export(folder / "run", folder / "source")
    shutil.copytree(folder / "run", tmp_path / "run")
    flip(tmp_path / "run" / "checkpoints" / "step-00003" / "__0_0.distcp")
    with pytest.raises(ConfigError, match="step-00003 is damaged"):
        export(tmp_path / "run", tmp_path / "out")
    (tmp_path / "run" / "checkpoints" / "step-00002" / "state.json").write_text("[]")
    with pytest.raises(ConfigError, match="step-00002 is damaged"):  # the best is the one that was, not the next best
        export(tmp_path / "run", tmp_path / "out", "step=best")
    (tmp_path / "run" / "manifest.json").write_text('{"config": ')
    with pytest.raises(ConfigError, match=r"manifest\.json: damaged, not JSON"):
        export(tmp_path / "run", tmp_path / "out", "step=1")
    (tmp_path / "run" / "manifest.json").unlink()
    (tmp_path / "run" / "checkpoints" / "policy" / "config.json").unlink()
    with pytest.raises(ConfigError, match="checkpoints/policy: no configuration of a policy"):
        export(tmp_path / "run", tmp_path / "out", "step=1")
    assert named(tmp_path) == ["run"]
