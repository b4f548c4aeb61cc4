"""An ablation in real processes: its grid, its resume, its report."""

import csv
import json
import os
import shutil
import signal
import subprocess

import pytest

from harnessrl.metrics import read_jsonl
from tests.system.running import ENV, ROOT, children_of, gone, harnessrl
from tests.system.toy import command, write_config


def test_an_ablation_runs_its_grid_resumes_and_reports(tmp_path):
    config = write_config(tmp_path)
    file = tmp_path / "small.yaml"
    settings = {"first": {"loss.normalizer": "token_mean"}, "second": {"advantage.unit": "sample"}}
    file.write_text(json.dumps({"base": config.name, "settings": settings}))
    done = harnessrl("ablate", file, "seeds=2", "jobs=2")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "runs" / "ablations" / "small"
    rows = list(csv.DictReader((folder / "summary.csv").read_text().splitlines()))
    assert [(row["setting"], row["seed"], row["steps"]) for row in rows] == [
        ("first", "0", "2"), ("first", "1", "2"), ("second", "0", "2"), ("second", "1", "2")
    ]  # fmt: skip
    curves = list(csv.DictReader((folder / "curves.csv").read_text().splitlines()))
    assert [(row["setting"], row["step"]) for row in curves[:2]] == [("first", "0"), ("first", "1")]
    for row in rows:
        lines = read_jsonl(folder / row["setting"] / f"seed-{row['seed']}" / "metrics.jsonl")
        assert float(row["final_reward"]) == pytest.approx(sum(line["reward/mean"] for line in lines) / 2, rel=1e-5)
        manifest = json.loads((folder / row["setting"] / f"seed-{row['seed']}" / "manifest.json").read_text())
        assert manifest["config"]["loss"]["normalizer"] == (
            "token_mean" if row["setting"] == "first" else "rollout_mean"
        )
    assert (folder / "curves.png").stat().st_size > 20_000
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["settings"]["first"]["loss.normalizer"] == "token_mean"
    assert manifest["settings"]["second"]["advantage.unit"] == "sample" and manifest["versions"]["torch"]
    rows = {name: (folder / f"{name}.csv").read_text() for name in ("summary", "curves", "lengths")}
    for setting in settings:
        shutil.rmtree(folder / setting)  # the rows are enough: as on another machine, with committed ones
    again = harnessrl("ablate", file, "seeds=2", "jobs=2")
    assert again.returncode == 0 and "4 of 4 runs are finished already" in again.stdout
    assert not list(folder.rglob("metrics.jsonl"))
    assert {name: (folder / f"{name}.csv").read_text() for name in rows} == rows
    other = harnessrl("ablate", file, "seeds=2", "jobs=2", "update.lr=0.5")
    assert other.returncode == 2 and "first seed 0 is recorded with another configuration" in other.stderr


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_ablation_leaves_nothing_behind_and_keeps_finished_runs(tmp_path, how):
    config = write_config(tmp_path)
    file = tmp_path / "stopped.yaml"
    settings = {"short": {"steps": 1}, "long": {"steps": 500}}
    file.write_text(json.dumps({"base": config.name, "settings": settings}))
    mark = f"{os.getpid()}-ablate-{how.name}"
    process = subprocess.Popen(
        command("ablate", file, "seeds=1", "jobs=1"), cwd=ROOT, env=ENV | {"HARNESSRL_TEST": mark},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    for line in process.stdout:
        if "long seed 0: reward" in line or "long seed 0: N_rho" in line:
            break
    assert len(children_of(mark)) >= 4  # the ablation, a trainer, its service and its worker
    process.send_signal(how)
    process.communicate(timeout=60)
    assert process.returncode == (130 if how is signal.SIGINT else -signal.SIGKILL)
    assert gone(mark)
    folder = tmp_path / "runs" / "ablations" / "stopped"
    assert [line["step"] for line in read_jsonl(folder / "short" / "seed-0" / "metrics.jsonl")] == [0]
    steps = len(read_jsonl(folder / "long" / "seed-0" / "metrics.jsonl"))
    settings["long"]["steps"] = steps + 1
    file.write_text(json.dumps({"base": config.name, "settings": settings}))
    again = harnessrl("ablate", file, "seeds=1", "jobs=1")
    assert again.returncode == 0 and "1 of 2 runs are finished already" in again.stdout
    assert len(read_jsonl(folder / "long" / "seed-0" / "metrics.jsonl")) == steps + 1
