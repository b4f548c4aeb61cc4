"""`harnessrl figures`: what it writes, what it refuses, and how finished runs become the tables that it draws from."""

import hashlib
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from PIL import Image

import paper_figs
from harnessrl import cli
from harnessrl import figures as command
from harnessrl.config import load
from harnessrl.errors import ConfigError
from harnessrl.results import Results
from paper_figs import ablations, style
from paper_figs.curves import REFERENCE
from paper_figs.traces import sources

ROOT = Path(__file__).parents[1]
REWARDS = {"sample+token-mean": [0.5, 0.7], REFERENCE: [0.4, 0.5]}


def test_files_and_their_provenance(tmp_path, capsys):
    assert cli.run(["figures", "fig4_baseline", "fig3_retokenization", f"out={tmp_path}"]) == 0
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        "fig4_baseline",
        "fig3_retokenization",
    ]
    source = "tests/real/data/smollm2_responses.json"
    sidecar = json.loads((tmp_path / "fig3_retokenization.json").read_text())
    assert sidecar["data"] == {source: hashlib.sha256((ROOT / source).read_bytes()).hexdigest()}
    assert sidecar["versions"].keys() == {"python", "harnessrl", "numpy", "matplotlib"}
    corner = f"harnessrl figures fig3_retokenization · data: {source} @ {sidecar['commit']}"
    with Image.open(tmp_path / "fig3_retokenization.png") as image:
        assert image.info["Description"] == corner
    assert (tmp_path / "fig3_retokenization.pdf").read_bytes().startswith(b"%PDF-")
    assert json.loads((tmp_path / "fig4_baseline.json").read_text())["reported"]["baseline"]["sample"] == 0.75


def test_what_cannot_be_drawn_is_said(tmp_path, capsys, monkeypatch):
    assert cli.run(["figures", "fig11"]) == 2
    assert "'fig11' is no figure; allowed: fig3_retokenization, fig4_baseline" in capsys.readouterr().err
    assert cli.run(["figures", "output=x"]) == 2
    assert "output: unknown key; allowed: out=FOLDER, from=FOLDER" in capsys.readouterr().err
    assert cli.run(["figures", f"from={tmp_path / 'none'}", "outcomes"]) == 2
    assert "none is no folder" in capsys.readouterr().err
    assert command.figures(["fig7_lookup", f"out={tmp_path}"], tmp_path) == 1
    said = capsys.readouterr().out
    assert said.startswith("fig7_lookup: skipped, no ablations/results/normalization/summary.csv yet")
    assert "harnessrl ablate ablations/normalization.yaml" in said
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(command, "ROOT", tmp_path)
    assert cli.run(["figures"]) == 2
    assert "drawn from a checkout" in capsys.readouterr().err


def test_figures_without_data_are_skipped_when_not_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(paper_figs, "FIGURES", ("fig5_normalizers", "fig8_babyai"))
    assert command.figures([f"out={tmp_path / 'out'}"], tmp_path) == 0
    assert "fig8_babyai: skipped" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        f"fig5_normalizers.{k}" for k in ("png", "pdf", "json")
    }


def test_the_commit_is_that_of_the_data(tmp_path):
    def git(*words):
        identity = ["-c", "user.name=n", "-c", "user.email=e"]
        done = subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "-q")
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text(name)
        git("add", name)
        git("commit", "-q", "-m", name)
    first, second = git("log", "--format=%h", "--reverse").split()
    assert style.commit_of(tmp_path, ["a.csv"]) == first
    assert style.commit_of(tmp_path, ["a.csv", "b.csv"]) == second
    (tmp_path / "a.csv").write_text("other")
    assert style.commit_of(tmp_path, ["a.csv"]) == f"{first} + changes"
    assert style.commit_of(tmp_path, ["b.csv"]) == second
    (tmp_path / "c.csv").write_text("new")
    assert style.commit_of(tmp_path, ["c.csv"]) == "no commit + changes"


BASE = "task: {inputs: 'x:y', harness: 'x:y'}\npolicy: {source: 'x:y'}\nsteps: 2\n"


def finished_grid(tmp_path, name):
    """Runs of ablations/NAME.yaml, two settings of two seeds, the last one unfinished; returns their folder."""
    (tmp_path / "ablations").mkdir()
    (tmp_path / "base.yaml").write_text(BASE)
    settings = f"settings:\n  sample+token-mean: {{advantage.unit: sample}}\n  {REFERENCE}: {{}}\n"
    (tmp_path / "ablations" / f"{name}.yaml").write_text(f"base: ../base.yaml\nreference: {REFERENCE}\n{settings}")
    runs = tmp_path / "runs"
    for setting, rewards in REWARDS.items():
        for seed, reward in enumerate(rewards):
            folder = runs / "ablations" / name / setting / f"seed-{seed}"
            (folder / "checkpoints" / "step-00002").mkdir(parents=True)
            unit = ["advantage.unit=sample"] if setting.startswith("sample") else []
            place = [f"runs={runs}", f"run=ablations/{name}/{setting}/seed-{seed}", f"seed={seed}"]
            config = asdict(load(tmp_path / "base.yaml", unit + place))
            (folder / "manifest.json").write_text(json.dumps({"config": config, "commit": "abc"}))
            lines = [{"step": step, "reward/mean": reward, "rollout/drift_share": 0.5} for step in range(2)]
            lines = [line | {"update/computed_tokens": 50 / reward} for line in lines]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            (folder / "rollouts.jsonl").write_text("")
    (folder / "checkpoints" / "step-00002").rename(folder / "checkpoints" / "step-00001")  # not finished
    (folder.parent / "seed-old").mkdir()  # not one of the grid's
    return runs


def test_finished_runs_of_the_small_ablations_become_rows(tmp_path, capsys):
    runs = finished_grid(tmp_path, "estimators")
    assert command.figures([f"from={runs}", f"out={tmp_path / 'out'}", "ablations"], tmp_path) == 0
    assert "ablations/results/estimators: 3 finished runs" in capsys.readouterr().out
    data = ablations.numbers(tmp_path)["estimators"]
    # of the seeds that both have, seed 0: .5 and .4; tokens are as 1 / reward
    assert data["difference"]["final_reward"] == {"sample+token-mean": pytest.approx((0.1, 0.1, 0.1))}
    assert data["ratio"]["computed_tokens"] == {"sample+token-mean": pytest.approx((0.8, 0.8, 0.8))}


def test_finished_runs_become_rows(tmp_path, capsys):
    runs = finished_grid(tmp_path, "normalization")
    arguments = [f"from={runs}", "fig8_babyai"]
    assert command.figures(arguments, tmp_path) == 1  # of the second experiment there is none
    assert "3 finished runs" in capsys.readouterr().out
    results = Results.read(tmp_path / "ablations" / "results" / "normalization")
    assert results.settings == ["sample+token-mean", REFERENCE]
    assert results.outcome("sample+token-mean", "final_reward") == {0: 0.5, 1: 0.7}
    assert results.outcome(REFERENCE, "final_reward") == {0: 0.4}
    assert command.figures([f"from={runs}", "tree_savings"], tmp_path) == 1
    assert "1 finished runs of the 5 that counts need: they stay as they are" in capsys.readouterr().out
    assert not (tmp_path / "paper_figs").exists()
    manifest = json.loads((tmp_path / "ablations" / "results" / "normalization" / "manifest.json").read_text())
    assert manifest["settings"]["sample+token-mean"]["advantage.unit"] == "sample"
    (tmp_path / "base.yaml").write_text(BASE + "advantage: {estimator: rloo}\n")
    with pytest.raises(ConfigError, match="recorded with another configuration"):
        command.figures(arguments, tmp_path)


def test_a_fresh_interpreter_draws_without_torch(tmp_path):
    code = (
        "import sys\nfrom harnessrl import cli\n"
        "assert cli.run(['figures', 'list']) == 0\n"
        f"assert cli.run(['figures', 'fig5_normalizers', 'out={tmp_path}']) == 0\n"
        "print(sorted({'torch', 'transformers', 'tests'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    out = done.stdout.splitlines()
    assert [line.split()[0] for line in out[: len(paper_figs.FIGURES)]] == list(paper_figs.FIGURES)
    assert out[-1] == "[]"


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="no device that is always full")
def test_a_full_disk_is_said_in_a_line(tmp_path, capsys):
    (tmp_path / "fig4_baseline.json").symlink_to("/dev/full")
    assert cli.run(["figures", "fig4_baseline", f"out={tmp_path}"]) == 1
    assert "harnessrl: no space left on the disk" in capsys.readouterr().err


def test_counts_are_of_the_first_and_last_ten_steps_of_five_finished_runs(tmp_path):
    (tmp_path / "ablations").mkdir()
    (tmp_path / "base.yaml").write_text("task: {inputs: 'x:y', harness: 'x:y'}\npolicy: {source: 'x:y'}\nsteps: 12\n")
    (tmp_path / "ablations" / "normalization.yaml").write_text(f"base: ../base.yaml\nsettings:\n  {REFERENCE}: {{}}\n")
    runs = tmp_path / "runs"
    for seed in range(6):
        name = f"ablations/normalization/{REFERENCE}/seed-{seed}"
        config = load(tmp_path / "base.yaml", [f"runs={runs}", f"run={name}", f"seed={seed}"])
        (runs / name / "checkpoints" / f"step-{12 if seed < 5 else 11:05d}").mkdir(parents=True)  # the sixth goes on
        (runs / name / "manifest.json").write_text(json.dumps({"config": asdict(config)}))
        lines = [
            {"step": step, "rollout_id": f"{seed}-{step}", "group_id": "g", "reward": 1.0, "calls": []}
            for step in range(12)
        ]
        (runs / name / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = {source: [rollout.rollout_id for rollout in rollouts] for source, rollouts in sources(runs, tmp_path)}
    assert found == {
        "lookup, first 10 steps": [f"{seed}-{step}" for seed in range(5) for step in range(10)],
        "lookup, last 10 steps": [f"{seed}-{step}" for seed in range(5) for step in range(2, 12)],
    }
