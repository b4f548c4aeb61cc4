"""The tables of ablations/README.md and README.md, from the committed rows.

    python -m ablations.tables           # print them
    python -m ablations.tables --write   # put them into the two files

A line `<!-- table: NAME -->` there is followed by the table of that name.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from harnessrl.config import read_yaml
from harnessrl.results import Results
from harnessrl.statistics import interquartile_mean, interval, paired_differences, sign_flip_p

HERE = Path(__file__).parent
TEXTS = (HERE / "README.md", HERE.parent / "README.md")
BOLD = 1 / 16
"""Sign-flip p from which on a difference is bold: of five seeds all must have one sign."""
OUTCOMES = {
    "final_reward": ("final reward", 3),
    "drift_share_final": ("final drift share", 3),
    "final_validation": ("last validation", 3),
    "mean_reward": ("mean reward, whole run", 3),
    "samples_per_rollout": ("N_rho, whole run", 2),
    "samples_per_rollout_final": ("N_rho, last ten steps", 2),
    "single_sample_share": ("single-sample share", 3),
    "entropy_final": ("final entropy", 3),
    "kl_final": ("final KL", 2),
}
"""Outcome -> what it is called, and digits behind the point."""
COSTS = {"rollouts": "rollouts", "computed_tokens": "computed tokens"}
CONTRASTS = (
    ("unit sample − rollout, with seq-mean", "sample+seq-mean", "rollout+seq-mean"),
    ("unit sample − rollout, with token-mean", "sample+token-mean", "rollout+token-mean"),
    ("seq-mean − rollout-mean, unit rollout", "rollout+seq-mean", "rollout+rollout-mean"),
    ("token-mean − rollout-mean, unit rollout", "rollout+token-mean", "rollout+rollout-mean"),
    ("seq-mean − token-mean, unit sample", "sample+seq-mean", "sample+token-mean"),
    ("(sample, seq-mean) − (rollout, rollout-mean)", "sample+seq-mean", "rollout+rollout-mean"),
    ("(sample, token-mean) − (rollout, rollout-mean)", "sample+token-mean", "rollout+rollout-mean"),
)
"""What a row is, and the two settings; one thing changes, except in the last two."""
SETTINGS = ("sample+token-mean", "sample+seq-mean", "rollout+token-mean", "rollout+seq-mean", "rollout+rollout-mean")
VALUES = (
    "final_reward", "drift_share_final", "final_validation", "samples_per_rollout", "samples_per_rollout_final",
    "single_sample_share", "entropy_final", "kl_final",
)  # fmt: skip
SHORT = ("final_reward", "drift_share_final", "samples_per_rollout", "entropy_final")
COMPARED = (
    "final_reward", "drift_share_final", "final_validation", "mean_reward", "samples_per_rollout",
    "samples_per_rollout_final", "kl_final",
)  # fmt: skip
SMALL = ("estimators", "unit", "credit", "zero_signal", "split_updates", "merging")


def values(name: str, keys: Sequence[str] = VALUES) -> str:
    """A setting a row: interquartile means over seeds with their intervals."""
    results = Results.read(HERE / "results" / name)
    rows = [[setting, *(_value(results, setting, key) for key in keys)] for setting in SETTINGS]
    return _table(["advantage + loss", *(OUTCOMES[key][0] for key in keys)], rows)


def contrasts(name: str) -> str:
    """A pair of settings a row: their differences, paired by seed."""
    results = Results.read(HERE / "results" / name)
    rows = [[what, *(_difference(results, a, b, key) for key in COMPARED)] for what, a, b in CONTRASTS]
    return _table(["", *(OUTCOMES[key][0] for key in COMPARED)], rows)


def small() -> str:
    """A setting of a smaller ablation a row: differences to its reference, and ratios of costs."""
    keys = ("final_reward", "drift_share_final", "final_validation", "mean_reward", "samples_per_rollout")
    rows = []
    for name in SMALL:
        results, file = Results.read(HERE / "results" / name), read_yaml(HERE / f"{name}.yaml")
        reference = file["reference"]
        for setting in [one for one in file["settings"] if one != reference and one in results.settings]:
            differences = [_difference(results, setting, reference, key) for key in keys]
            costs = [_ratio(results, setting, reference, key) for key in COSTS]
            rows.append([f"{name}: {setting} − {reference}", *differences, *costs])
    return _table(["", *(OUTCOMES[key][0] for key in keys), *COSTS.values()], rows)


def budget() -> str:
    """An ablation a row: its runs, and the hours that their steps took."""
    rows = []
    for name in ("normalization", "normalization_babyai", *SMALL):
        results = Results.read(HERE / "results" / name)
        hours = sum(float(row["seconds"]) for row in results.runs.values()) / 3600
        seeds = sorted({len(results.outcome(setting, "steps")) for setting in results.settings})
        rows.append([name, str(len(results.settings)), " to ".join(map(str, seeds)), f"{hours:.1f}"])
    return _table(["ablation", "settings", "seeds", "hours"], rows)


TABLES: Mapping[str, Callable[[], str]] = {
    **{f"{name} values": lambda name=name: values(name) for name in ("normalization", "normalization_babyai")},
    **{f"{name} contrasts": lambda name=name: contrasts(name) for name in ("normalization", "normalization_babyai")},
    "lookup": lambda: values("normalization", SHORT),
    "small": small,
    "budget": budget,
}


def filled(text: str) -> str:
    """A text with the table behind each of its marks made again."""
    return re.sub(r"(<!-- table: ([\w ]+) -->\n)(?:\|.*\n)*", lambda found: found[1] + TABLES[found[2]]() + "\n", text)


def _value(results: Results, setting: str, key: str) -> str:
    digits = OUTCOMES[key][1]
    found = np.array(list(results.outcome(setting, key).values()))
    low, high = interval(found)
    return f"{interquartile_mean(found):.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def _difference(results: Results, ours: str, theirs: str, key: str) -> str:
    digits = OUTCOMES[key][1]
    found = paired_differences(results.outcome(ours, key), results.outcome(theirs, key))
    low, high = interval(found)
    text = f"{interquartile_mean(found):+.{digits}f}"
    return f"{f'**{text}**' if sign_flip_p(found) <= BOLD else text} ({low:.{digits}f} to {high:.{digits}f})"


def _ratio(results: Results, ours: str, theirs: str, key: str) -> str:
    """The geometric mean of the ratios on common seeds."""
    logs = [{seed: np.log(value) for seed, value in results.outcome(one, key).items()} for one in (ours, theirs)]
    return f"× {np.exp(paired_differences(*logs).mean()):.2f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(arguments: Sequence[str]) -> None:
    """Print the tables, or write them into their files."""
    if arguments == ["--write"]:
        for path in TEXTS:
            path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print("\n\n".join(f"{name}\n{table()}" for name, table in TABLES.items()))


if __name__ == "__main__":
    main(sys.argv[1:])
