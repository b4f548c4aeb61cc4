"""Nothing done before moves: twenty recorded steps of the lookup experiment give the numbers that are committed.

If a change of mathematics is meant, `python -m tests.reference.make losses` writes them anew, in a commit of its own.
"""

import csv

import pytest

from harnessrl.metrics import read_jsonl
from tests.reference.make import HERE, KEYS, STEPS, train, unpack


def test_the_reference_run_repeats(tmp_path):
    policy, rollouts = unpack(tmp_path)
    run = train(tmp_path, "replay", policy, f"replay={rollouts}")
    found = read_jsonl(run / "metrics.jsonl")
    expected = list(csv.DictReader((HERE / "losses.csv").read_text().splitlines()))
    assert len(found) == len(expected) == STEPS
    for ours, row in zip(found, expected, strict=True):
        for key in KEYS:
            # Rounding differs between machines and grows over 20 updates; the losses themselves are of order 0.1.
            assert ours[key] == pytest.approx(float(row[key]), rel=1e-3, abs=1e-5), (row["step"], key)
