"""Two runs side by side, and the tables of an ablation: from files written here to the numbers that are shown."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
from PIL import Image

from harnessrl import cli
from harnessrl.adapter import Rollout
from harnessrl.compare import sparkline
from harnessrl.config import Advantage, Config, Policy, Task
from harnessrl.errors import ConfigError
from harnessrl.report import PANELS, panels, seeds_of, smooth, summary_tables
from harnessrl.results import Results, digest


def make_run(runs, name, rewards, **changes):
    """A run folder as training leaves it: manifest, metrics, rollouts; returns its configuration."""
    config = Config(run=name, runs=str(runs), steps=len(rewards), **changes)
    config.folder.mkdir(parents=True)
    manifest = {"config": json.loads(json.dumps(asdict(config))), "commit": "abc"}
    (config.folder / "manifest.json").write_text(json.dumps(manifest))
    lines = [
        {"step": n, "reward/mean": r, "rollout/drift_share": 0.1 * n, "time/step": 2.0} for n, r in enumerate(rewards)
    ]
    (config.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rollout = Rollout.from_dict(
        {"rollout_id": "r", "group_id": "g", "reward": 1.0, "calls": [
            {"call_id": "a", "prompt_ids": [1, 2], "response_ids": [3, 4], "logprobs": [-1.0, -1.0]},
            {"call_id": "b", "prompt_ids": [1, 2, 3, 4, 5], "response_ids": [6], "logprobs": [-1.0]},
        ]}
    ).to_dict()  # fmt: skip
    (config.folder / "rollouts.jsonl").write_text(
        "".join(json.dumps({"step": n} | rollout) + "\n" for n in range(len(rewards)))
    )
    return config


def test_compare_shows_what_differs_and_the_numbers(tmp_path, capsys):
    make_run(tmp_path, "one", [0.0] * 5 + [0.5] * 10)
    make_run(tmp_path, "two", [0.0] * 5 + [0.75] * 10 + [0.0] * 3, advantage=Advantage(unit="sample"))
    assert cli.run(["compare", str(tmp_path / "one"), str(tmp_path / "two")]) == 0
    shown = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in shown.splitlines() if line.split()}
    assert rows["advantage.unit"] == ["rollout", "sample"]
    assert "loss.normalizer" not in rows
    assert "steps 6 to 15" in shown
    assert rows["reward/mean"][:3] == ["0.5", "0.75", "+0.25"]
    with Image.open(tmp_path / "one" / "compare.png") as image:
        assert len(image.getcolors(maxcolors=10**6)) > 20  # drawn, not blank; for its lines see below


def test_a_last_row_of_validation_alone_draws_nothing():
    curve = np.array([[0.0, 1.0, np.nan]])
    axis = panels({"a": dict.fromkeys(PANELS, curve)}).axes[0]
    assert axis.lines[0].get_xdata().tolist() == [1, 2] and axis.lines[0].get_ydata().tolist() == [0.0, 0.5]


def test_pictures_draw_the_running_mean_with_its_band():
    seeds = np.array([[0.0, 1.0, 2.0], [1.0, 2.0, 6.0]])
    none = np.zeros((1, 3))
    figure = panels({"a": dict.fromkeys(PANELS, seeds), "b": dict.fromkeys(PANELS, none)}, ["a note"])
    axis = figure.axes[0]
    assert axis.get_ylabel() == "mean reward" and len(figure.axes) == 4
    drawn = {line.get_label(): (line.get_xdata().tolist(), line.get_ydata().tolist()) for line in axis.lines}
    assert drawn["a"] == ([1, 2, 3], [0.5, 1.0, 2.0])  # running means: 0, .5, 1 and 1, 1.5, 3
    assert drawn["b"] == ([1, 2, 3], [0.0, 0.0, 0.0])
    band = axis.collections[0].get_paths()[0].vertices
    assert {tuple(point) for point in band} >= {(1, 0.0), (1, 1.0), (3, 1.0), (3, 3.0)}  # two seeds: the range
    assert "a note" in figure.get_supxlabel()


@pytest.mark.parametrize("missing", ["manifest.json", "metrics.jsonl"])
def test_compare_names_a_folder_that_is_no_run(tmp_path, missing, capsys):
    make_run(tmp_path, "one", [0.0])
    make_run(tmp_path, "two", [0.0])
    (tmp_path / "two" / missing).unlink()
    assert cli.run(["compare", str(tmp_path / "one"), str(tmp_path / "two")]) == 2
    error = capsys.readouterr().err
    assert str(tmp_path / "two") in error and missing in error


def test_a_sparkline_has_the_lowest_and_highest_bar_at_the_ends_of_its_range():
    assert sparkline(np.array([0.0, 0.5, 1.0, np.nan]), 0.0, 1.0) == "▁▅█ "
    assert sparkline(np.arange(4.0), 0.0, 3.0, width=2) == "▂▇"  # means 0.5 and 2.5 of 3
    assert sparkline(np.array([2.0, 2.0]), 2.0, 2.0) == "▁▁"


def grid_of(tmp_path):
    """Two settings, five seeds; the second setting is 0.1 higher on every seed."""
    results, configs = Results(), {}
    for setting, lift, unit in (("low", 0.0, "sample"), ("high", 0.1, "rollout")):
        for seed in range(5):
            rewards = [0.2] * 5 + [0.4 + 0.01 * seed + lift] * 10
            config = make_run(tmp_path, f"{setting}-{seed}", rewards, seed=seed, advantage=Advantage(unit=unit))
            results.add((setting, seed), config)
            configs[setting, seed] = config
    return results, configs


def test_rows_survive_writing_and_reading(tmp_path):
    results, configs = grid_of(tmp_path)
    results.write(tmp_path / "rows")
    again = Results.read(tmp_path / "rows")
    assert again.settings == ["low", "high"]
    assert again.outcome("high", "final_reward") == pytest.approx({s: 0.5 + 0.01 * s for s in range(5)})
    assert again.outcome("low", "seconds") == dict.fromkeys(range(5), 30.0)
    assert again.curve("low", "reward/mean").shape == (5, 15)
    assert again.curve("low", "reward/mean")[2].tolist() == pytest.approx([0.2] * 5 + [0.42] * 10)
    assert all(again.has(key, config) for key, config in configs.items())
    first = {name: (tmp_path / "rows" / f"{name}.csv").read_text() for name in ("summary", "curves", "lengths")}
    again.write(tmp_path / "rows")
    assert {name: (tmp_path / "rows" / f"{name}.csv").read_text() for name in first} == first


def test_a_step_without_a_reward_is_left_out(tmp_path):
    results = Results()
    results.add(("a", 0), make_run(tmp_path, "a", [0.5] * 10 + [float("nan")] + [0.25] * 11))
    assert results.runs["a", 0]["best_reward"] == pytest.approx(0.5)
    assert results.runs["a", 0]["final_reward"] == 0.25 and results.runs["a", 0]["mean_reward"] == 7.75 / 21


def test_lengths_are_counted_in_half_octaves_early_and_late(tmp_path):
    results = Results()
    results.add(("a", 0), make_run(tmp_path, "a", [0.0] * 12))
    found = {(row["phase"], row["quantity"], row["from"]): row["count"] for row in results.lengths["a", 0]}
    # 12 steps of a rollout with one sample: 3 trained tokens of 6, from responses of 2 and 1 tokens
    assert found == {
        (phase, quantity, low): 10
        for phase in ("early", "late")
        for quantity, low in (("rollout", 2.83), ("sample", 5.66), ("response", 2.0), ("response", 1.0))
    }  # fmt: skip


def test_rows_of_another_configuration_are_refused(tmp_path):
    results, configs = grid_of(tmp_path)
    key = ("low", 3)
    assert not results.has(("low", 9), configs[key])
    with pytest.raises(ConfigError, match="low seed 0 is recorded with another configuration"):
        results.has(key, make_run(tmp_path, "other", [0.0] * 15, seed=3))


def test_the_digest_is_of_the_setting_and_not_of_where_or_how_fast_it_runs():
    plain = digest(Config())
    assert digest(Config(seed=4, runs="elsewhere", run="x", threads=3, checkpoint_every=7)) == plain
    assert digest(Config(policy=Policy(max_response=9))) != plain
    assert digest(Config(steps=99)) != plain
    assert digest(Config(task=Task(env_map={"Q": "input.q"}))) != plain


def test_the_tables_pair_settings_by_seed_and_fit_into_eighty_columns(tmp_path, capsys):
    from rich.console import Console

    results, _ = grid_of(tmp_path)
    for table in summary_tables("grid", results, "low"):
        Console(width=80).print(table)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    value, difference = (number for number, line in enumerate(lines) if line[:1] == ["high"])
    assert lines[value][1] == "0.520"  # interquartile mean of .50 to .54
    assert lines[difference][1:3] == ["+0.100", "0.062"]  # p: all of five are higher, 2 of 32
    assert lines[difference + 1][:4] == ["+0.100", "to", "+0.100", "1.00"]  # and so is every pair
    assert not any("…" in cell for line in lines for cell in line)


def test_the_tables_of_the_longest_names_fit_into_eighty_columns(tmp_path, capsys):
    from rich.console import Console

    results, _ = grid_of(tmp_path)
    results.runs = {
        ("rollout+rollout-mean" if name == "low" else "reinforce_pp_baseline", seed): row
        for (name, seed), row in results.runs.items()
    }
    for table in summary_tables("grid", results, "rollout+rollout-mean"):
        Console(width=80).print(table)
    assert "…" not in capsys.readouterr().out


def test_a_table_without_its_reference_says_so(tmp_path, capsys):
    from rich.console import Console

    results, _ = grid_of(tmp_path)
    (table,) = summary_tables("grid", results.only([("high", seed) for seed in range(5)]), "low")
    Console(width=80).print(table)
    assert "no differences: the reference, low, is not among these settings" in " ".join(
        capsys.readouterr().out.split()
    )


def test_the_number_of_seeds_is_that_of_every_setting(tmp_path):
    results, _ = grid_of(tmp_path)
    assert seeds_of(results) == "5 seeds"
    del results.runs["high", 4]
    assert seeds_of(results) == "4 to 5 seeds"
    assert seeds_of(results.only([("low", 0)])) == "1 seed"


def test_a_run_whose_curve_is_lost_is_not_taken_for_recorded(tmp_path):
    results, configs = grid_of(tmp_path)
    del results.curves["high", 2][3:]
    with pytest.raises(ConfigError, match=r"curves.csv lacks steps of high seed 2"):
        results.has(("high", 2), configs["high", 2])
    results.curves["low", 0][3]["step"] = "x"
    with pytest.raises(ConfigError, match="step is no number"):
        results.curve("low", "reward/mean")


def test_tables_that_are_lost_or_hold_a_row_twice_are_refused(tmp_path):
    results, _ = grid_of(tmp_path)
    folder = tmp_path / "rows"
    results.write(folder)
    for name, words in (("summary", "two rows of high seed 4"), ("curves", "a step of high seed 4 is there twice")):
        path = folder / f"{name}.csv"
        text = path.read_text()
        path.write_text(text + text.splitlines()[-1] + "\n")
        with pytest.raises(ConfigError, match=words):
            Results.read(folder)
        path.write_text(text)
    (folder / "lengths.csv").unlink()
    with pytest.raises(ConfigError, match=r"lengths.csv is missing"):
        Results.read(folder)


@pytest.mark.parametrize("damage", ["summary", "curves"])
def test_a_kill_while_rows_are_written_loses_no_run(tmp_path, damage):
    """A run counts as recorded by its row in summary.csv, which is written when all the others are."""
    results, configs = grid_of(tmp_path)
    folder = tmp_path / "rows"
    results.only([key for key in configs if key != ("high", 4)]).write(folder)
    before = {name: (folder / f"{name}.csv").read_text() for name in ("summary", "curves", "lengths")}
    results.write(folder)
    (folder / "summary.csv").write_text(before["summary"])  # the kill came before the last file
    if damage == "curves":
        (folder / "lengths.csv").write_text(before["lengths"])
    again = Results.read(folder)
    assert not again.has(("high", 4), configs["high", 4])
    again.add(("high", 4), configs["high", 4])
    assert (again.runs.keys(), again.curves.keys(), again.lengths.keys()) == (configs.keys(),) * 3
    assert len(again.curves["high", 4]) == 15


def test_the_order_of_writing(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr("harnessrl.results.write_atomically", lambda path, text: written.append(path.name))
    grid_of(tmp_path)[0].write(tmp_path)
    assert written == ["curves.csv", "lengths.csv", "summary.csv"]


def test_a_curve_is_placed_by_its_steps(tmp_path):
    results, _ = grid_of(tmp_path)
    del results.curves["low", 1][4]  # step 4 of seed 1 is lost
    assert np.isnan(results.curve("low", "reward/mean"))[:, 3:6].tolist() == [
        [False] * 3, [False, True, False], [False] * 3, [False] * 3, [False] * 3
    ]  # fmt: skip
    assert results.curve("none", "reward/mean").shape == (0, 0)


def test_a_run_folder_of_another_run_is_no_row(tmp_path):
    results, _ = grid_of(tmp_path)
    config = make_run(tmp_path, "short", [0.5] * 3)
    with pytest.raises(ConfigError, match=r"advantage.unit: .*short was started with 'rollout', now it is 'sample'"):
        results.add(("low", 5), replace(config, advantage=Advantage(unit="sample")))
    with pytest.raises(ConfigError, match=r"short/metrics.jsonl has 3 steps, not 2"):
        results.add(("low", 5), replace(config, steps=2))
    (config.folder / "manifest.json").unlink()
    with pytest.raises(ConfigError, match=r"no manifest.json"):
        results.add(("low", 5), config)
    with pytest.raises(ConfigError, match="low seed 0 is recorded with another configuration"):
        results.has(("low", 5), config)  # seeds of a setting have one configuration


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("summary", b"setting,seed,final_reward\na,0,\xff\n", "summary.csv: damaged"),
        ("summary", b"setting,final_reward\na,1\n", "without setting and whole seed"),
        ("summary", b"setting,seed,final_reward\na,0,much\n", "final_reward is no number"),
    ],
)
def test_damaged_tables_are_named(tmp_path, file, text, words):
    Results().write(tmp_path)
    (tmp_path / f"{file}.csv").write_bytes(text)
    with pytest.raises(ConfigError, match=words):
        Results.read(tmp_path).outcome("a", "final_reward")
    (tmp_path / "summary.csv").write_text("setting,seed,final_reward\na,0,\n")
    results = Results.read(tmp_path)
    assert np.isnan([results.outcome("a", "final_reward")[0], results.outcome("a", "steps")[0]]).all()


@pytest.mark.parametrize(
    ("out", "words"), [("x.foo", "should end in one of .png"), ("/dev/null/x.png", "cannot be written")]
)
def test_compare_refuses_a_picture_that_it_cannot_make(tmp_path, out, words, capsys):
    for name in ("one", "two"):
        make_run(tmp_path, name, [float("inf"), 0.5])
    assert cli.run(["compare", str(tmp_path / "one"), str(tmp_path / "two"), f"out={out}"]) == 2
    assert words in capsys.readouterr().err
    assert cli.run(["compare", str(tmp_path / "one"), str(tmp_path / "two")]) == 0  # and infinity is no bar


def test_smoothing_takes_the_last_steps_and_leaves_nan_out():
    values = np.array([[1.0, np.nan, 3.0, 5.0, np.nan]])
    assert smooth(values, 2)[0].tolist() == [1.0, 1.0, 3.0, 4.0, 5.0]
