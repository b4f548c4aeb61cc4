"""The tables of the two README files are those of the committed rows, and say what rows hold."""

import pytest

from ablations import tables
from harnessrl.results import Results


@pytest.mark.parametrize("path", tables.TEXTS, ids=lambda path: str(path.relative_to(tables.HERE.parent)))
def test_texts_hold_the_tables_of_the_committed_rows(path):
    text = path.read_text(encoding="utf-8")
    assert text.count("<!-- table: ") >= 1
    assert tables.filled(text) == text, "python -m ablations.tables --write"


def test_every_table_is_shown():
    shown = "".join(path.read_text(encoding="utf-8") for path in tables.TEXTS)
    assert [name for name in tables.TABLES if f"<!-- table: {name} -->\n|" not in shown] == []


def rows(folder, settings, outcomes):
    """Five seeds of each setting; an outcome is the setting's number plus .1 of the seed."""
    results = Results()
    for setting, number in settings.items():
        for seed in range(5):
            row = {"setting": setting, "seed": seed, "steps": 60, "seconds": 720.0, "config": "x", "commit": "abc"}
            results.runs[setting, seed] = row | {key: number + seed / 10 for key in outcomes}
    results.write(folder)
    return results


def test_values_and_paired_differences(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "HERE", tmp_path)
    numbers = {setting: index for index, setting in enumerate(tables.SETTINGS)}
    results = rows(tmp_path / "results" / "normalization", numbers, {*tables.VALUES, *tables.COMPARED})
    table = tables.values("normalization", ("final_reward", "kl_final")).splitlines()
    assert table[0] == "| advantage + loss | final reward | final KL |"
    assert table[3].startswith("| sample+seq-mean | 1.200 (1.")  # 1, 1.1, ... 1.4 without the ends
    cells = [line.split(" | ") for line in tables.contrasts("normalization").splitlines()]
    assert cells[2][:2] == ["| unit sample − rollout, with seq-mean", "**-2.000** (-2.000 to -2.000)"]
    assert cells[4][2] == "**-1.000** (-1.000 to -1.000)"  # all five of one sign: p = 2 / 32
    results.runs["sample+seq-mean", 0]["final_reward"] = (
        9.0  # one of another sign, and left out by the interquartile mean
    )
    results.write(tmp_path / "results" / "normalization")
    assert tables.contrasts("normalization").splitlines()[2].split(" | ")[1].startswith("-2.000 (")


def test_costs_are_geometric_means_of_ratios(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "HERE", tmp_path)
    monkeypatch.setattr(tables, "SMALL", ("unit",))
    (tmp_path / "unit.yaml").write_text("reference: rollout\nsettings: {sample: {}, rollout: {}}\n")
    keys = {*tables.OUTCOMES, *tables.COSTS}
    results = rows(tmp_path / "results" / "unit", {"sample": 1.0, "rollout": 1.0}, keys)
    for seed, factor in enumerate((1, 1, 2, 4, 4)):
        results.runs["sample", seed]["rollouts"] = factor * float(results.runs["rollout", seed]["rollouts"])
    results.write(tmp_path / "results" / "unit")
    (line,) = tables.small().splitlines()[2:]
    assert line.startswith("| unit: sample − rollout | +0.000 (0.000 to 0.000) |")
    assert line.endswith("| × 2.00 | × 1.00 |")  # 2^((0 + 0 + 1 + 2 + 2) / 5)
    monkeypatch.setattr(tables, "SMALL", ())
    for name in ("normalization", "normalization_babyai"):
        rows(tmp_path / "results" / name, {"one": 0.0, "two": 0.0}, ())
    assert tables.budget().splitlines()[2] == "| normalization | 2 | 5 | 2.0 |"  # ten runs of 720 s
