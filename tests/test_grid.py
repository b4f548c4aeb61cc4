"""Ablation files: those of the repository are whole, and what is wrong in one is named."""

import fcntl
import json
import os
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from harnessrl.ablate import ablate
from harnessrl.config import load
from harnessrl.errors import ConfigError
from harnessrl.grid import read_grid
from harnessrl.preflight import flatten
from harnessrl.results import FREE, Results, digest

FILES = sorted((Path(__file__).parent.parent / "ablations").glob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_ablation_is_readable_and_its_settings_differ(file):
    grid = read_grid(file, ["seeds=2"])
    settings = {cell.setting: cell.config for cell in grid.cells}
    assert grid.reference in settings and len(settings) > 1
    assert len({digest(config) for config in settings.values()}) == len(settings)
    assert [cell.seed for cell in grid.cells] == [0] * len(settings) + [1] * len(settings)
    head = file.read_text().partition("base:")[0]
    assert re.search(r"^# Claims? \(.*arXiv:\d{4}\.\d{5}", head, re.MULTILINE), "quotes no claim with its source"


def test_settings_hold_only_the_differences_that_they_name():
    grid = read_grid(FILES[0].parent / "normalization.yaml", ["seeds=1"])
    flat = {cell.setting: flatten(asdict(cell.config)) for cell in grid.cells}
    keys = {key for one in flat.values() for key in one if one[key] != flat["rollout+rollout-mean"][key]}
    assert {key for key in keys if not key.startswith(FREE)} == {"advantage.unit", "loss.normalizer"}


def write(tmp_path, **changes):
    (tmp_path / "base.yaml").write_text(
        json.dumps({"task": {"inputs": "a:b", "harness": "a:c"}, "policy": {"source": "x"}})
    )
    data = {"base": "base.yaml", "settings": {"one": {"update.lr": 0.1}, "two": {}}} | changes
    path = tmp_path / "grid.yaml"
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))
    return path


def test_command_line_words_reach_the_grid_or_every_run(tmp_path):
    grid = read_grid(write(tmp_path), ["seeds=3", "jobs=1", "only=two", "results=rows", "steps=7", f"runs={tmp_path}"])
    assert [(cell.setting, cell.seed, cell.config.steps) for cell in grid.cells] == [("two", n, 7) for n in range(3)]
    assert (grid.jobs, grid.results, grid.reference) == (1, Path("rows"), "two")
    assert grid.folder == tmp_path / "ablations" / "grid"
    assert read_grid(write(tmp_path), []).results == Path("runs/ablations/grid")  # beside the runs where none is named


@pytest.mark.parametrize(
    ("changes", "overrides", "words"),
    [
        ({"settings": {}}, [], ["settings"]),
        ({"base": None}, [], ["base"]),
        ({"setings": {}}, [], ["setings", "allowed: base"]),
        ({"settings": {"one": 3}}, [], ["settings.one", "mapping"]),
        ({"settings": {"one": {"update.rl": 1}}}, [], ["update.rl", "allowed: strategy"]),
        ({"reference": "three"}, [], ["reference", "three", "one, two"]),
        ({"results": 3}, [], ["results"]),
        ({"reported": "text"}, [], ["reported", "list of lines"]),
        ({"settings": {"a/b": {}}}, [], ["settings.a/b", "a name has"]),
        ({"settings": {"..": {}}}, [], ["settings...", "a name has"]),
        ({"settings": {"a,b": {}}}, [], ["settings.a,b", "a name has"]),
        ({"settings": {"": {}}}, [], ["settings.", "a name has"]),
        ({"settings": {"one": {"seed": 3}}}, [], ["settings.one", "seed is given by the grid"]),
        ({"settings": {"one": {"update": {"lr": 0.1}}}}, ["update.lr=1"], ["update.lr", "settings.one"]),
        ({"settings": {"one": {"update.lr": 0.1}}}, ["update.lr=1"], ["update.lr", "settings.one"]),
        ({"settings": {"one": {"update.lr": 0.1}}}, ["update={lr: 1}"], ["update", "settings.one"]),
        ({}, ["seed=1"], ["seed", "seeds=N"]),
        ({}, ["update[lr]=1"], ["update.lr", "settings.one"]),
        ({"settings": {"x" * 101: {}}}, [], ["a name has"]),
        ({}, ["only=three"], ["only", "three", "one, two"]),
        ({}, ["seeds=0"], ["seeds", "0"]),
        ({}, ["seeds=1.5"], ["seeds", "1.5"]),
        ({}, ["jobs=-1"], ["jobs"]),
    ],
)
def test_what_is_wrong_is_named(tmp_path, changes, overrides, words):
    with pytest.raises(ConfigError) as error:
        read_grid(write(tmp_path, **changes), overrides)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(("text", "words"), [("settings: {1: {}}\nbase: base.yaml", "settings.1"), ("1: 2", "'1'")])
def test_names_are_text(tmp_path, text, words):
    file = write(tmp_path)
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_grid(file, [])


def test_the_manifest_keeps_settings_of_earlier_grids(tmp_path):
    rows = tmp_path / "rows"
    results = Results()
    for name in ("one", "two"):
        grid = read_grid(write(tmp_path), [f"only={name}", f"results={rows}", "seeds=1"])
        results.runs[name, 0] = {"setting": name, "seed": 0, "config": digest(grid.cells[0].config)}
        grid.write(results)
    manifest = json.loads((rows / "manifest.json").read_text())
    assert list(manifest["settings"]) == ["one", "two"] and manifest["settings"]["one"]["update.lr"] == 0.1
    assert Results.read(rows).runs.keys() == {("one", 0), ("two", 0)}


@pytest.mark.parametrize("held", [True, False])
def test_results_have_one_writer(tmp_path, held):
    rows = tmp_path / "rows"
    rows.mkdir()
    descriptor = os.open(rows, os.O_RDONLY)
    if held:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(ConfigError, match="another ablation is writing" if held else "No module named"):
        ablate(write(tmp_path), [f"results={rows}"])  # the module a of its configuration does not exist
    os.close(descriptor)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"results: .*file cannot be written to"):
        ablate(write(tmp_path), [f"results={tmp_path / 'file'}"])


def test_values_reach_the_runs_as_they_stand_in_the_file(tmp_path):
    changes = {
        "task.env_map": {"A": "-0.5", "B": "yes: no"},
        "update.max_updates": None,
        "update": {"lr": 0.25},
        "deterministic": True,
    }
    (cell,) = read_grid(write(tmp_path, settings={"one": changes}), ["seeds=1"]).cells
    assert cell.config.task.env_map == {"A": "-0.5", "B": "yes: no"}  # text stays text
    assert (cell.config.update.max_updates, cell.config.update.lr, cell.config.deterministic) == (None, 0.25, True)
    again = load(cell.argv[1], cell.argv[2:])  # what the run's own command line says
    assert again == cell.config


def test_a_damaged_manifest_stops_a_grid_before_it_starts(tmp_path):
    rows = tmp_path / "rows"
    rows.mkdir()
    (rows / "manifest.json").write_text("[")
    with pytest.raises(ConfigError, match=r"manifest.json: damaged"):
        ablate(write(tmp_path), [f"results={rows}"])
