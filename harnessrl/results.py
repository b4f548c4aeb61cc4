"""What finished runs of an ablation left, as three small tables that can be committed and continued.

summary.csv  one row a run: its outcomes, the configuration's digest, the commit
curves.csv   one row a run and step
lengths.csv  how many rollouts, samples and responses were how long, early and late in a run

`manifest.json` beside them has each setting's configuration, the primary outcomes and the versions of libraries.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from harnessrl.adapter import Rollout, merge_calls
from harnessrl.config import Config
from harnessrl.errors import ConfigError
from harnessrl.metrics import of_steps, read_jsonl, read_manifest, write_atomically
from harnessrl.preflight import check_same, flatten

LAST = 10
"""Steps that "final" and "late" average over, and "early" at the start."""
CURVES = (
    "reward/mean", "val/reward_mean", "rollout/samples_mean", "rollout/single_sample_share", "rollout/drift_share",
    "rollout/tokens_mean", "sample/tokens_mean", "rollout/samples_reward_correlation", "policy/entropy", "loss/kl",
    "policy/grad_norm", "policy/engine_logprob_gap", "advantage/zero_signal_groups", "loss/weight_advantage_sum",
    "update/computed_tokens", "rollout/count", "time/rollout", "time/update", "time/step",
)  # fmt: skip
"""Columns of curves.csv, by their names in metrics.jsonl."""
PRIMARY = {"final_reward": "final reward", "drift_share_final": "final drift share"}
"""The outcomes fixed before any run; everything else is description."""
FREE = ("run", "runs", "seed", "threads", "checkpoint_every", "checkpoint_keep", "stall_seconds", "service.")
"""Keys that do not belong to a setting."""
SIGNIFICANT = 5
Key = tuple[str, int]
"""Setting and seed."""


def differences(config: Config) -> dict[str, Any]:
    """A configuration's keys that differ from their defaults, dotted; those in `FREE` left out."""
    defaults = flatten(asdict(Config()))
    return {
        key: value
        for key, value in flatten(asdict(config)).items()
        if (key not in defaults or value != defaults[key]) and not key.startswith(FREE)
    }


def digest(config: Config) -> str:
    """Twelve hex digits of a configuration: of its `differences`."""
    return hashlib.sha256(json.dumps(differences(config), sort_keys=True).encode()).hexdigest()[:12]


def column(lines: Sequence[Mapping[str, Any]], key: str) -> np.ndarray:
    """One metric of metrics.jsonl or curves.csv, float64 [steps]; NaN where a step has no value."""
    return np.array([_value(line, key) for line in lines], np.float64)


def _whole(values: np.ndarray, setting: str) -> np.ndarray:
    if not (values >= 0).all() or (values % 1).any():
        raise ConfigError(f"curves.csv: steps of {setting} are not whole numbers")
    return values.astype(np.int64)


def _value(row: Mapping[str, Any], key: str) -> float:
    try:
        return float("nan") if row.get(key) in (None, "") else float(row[key])
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key} is no number in the row {dict(row)}") from error


@dataclass
class Results:
    """The tables of one ablation."""

    runs: dict[Key, dict[str, Any]] = field(default_factory=dict)
    """Row of each run."""
    curves: dict[Key, list[dict[str, Any]]] = field(default_factory=dict)
    """Rows of each run, a step each."""
    lengths: dict[Key, list[dict[str, Any]]] = field(default_factory=dict)
    """Rows of each run: phase, quantity, from, below, count."""

    @classmethod
    def read(cls, folder: Path) -> Results:
        """Read a folder's tables; a folder without any is empty.

        Raises:
            ConfigError: a table that is damaged or lost, a run or a step that is there twice.
        """
        paths = [folder / f"{name}.csv" for name in ("summary", "curves", "lengths")]
        if paths[0].exists() and (missing := [path for path in paths if not path.exists()]):
            raise ConfigError(f"{missing[0]} is missing beside summary.csv: restore it")
        parts = [_read_csv(path) for path in paths]
        self = cls()
        for row in parts[0]:
            if (key := _key(row, folder)) in self.runs:
                raise ConfigError(f"{paths[0]}: two rows of {key[0]} seed {key[1]}: remove one")
            self.runs[key] = row
        for rows, table in zip(parts[1:], (self.curves, self.lengths), strict=True):
            for row in rows:
                table.setdefault(_key(row, folder), []).append(row)
        for key, lines in self.curves.items():
            if len({line.get("step") for line in lines}) < len(lines):
                raise ConfigError(f"{paths[1]}: a step of {key[0]} seed {key[1]} is there twice: restore it")
        return self

    def write(self, folder: Path) -> None:
        """Write the three tables, each in one step, in order of setting (as first seen) and seed.

        summary.csv goes last: a run that has its row there has all its others.
        """
        order = list(dict.fromkeys(setting for setting, _ in self.runs))
        keys = sorted(self.runs, key=lambda key: (order.index(key[0]), key[1]))
        for name, table in (("curves", self.curves), ("lengths", self.lengths)):
            _write_csv(folder / f"{name}.csv", [row for key in keys for row in table.get(key, [])])
        _write_csv(folder / "summary.csv", [self.runs[key] for key in keys])

    def add(self, key: Key, config: Config) -> None:
        """Take in a finished run from its folder; replaces an earlier row of the same setting and seed.

        Raises:
            ConfigError: the folder holds a run of another configuration, or of other steps.
        """
        setting, seed = key
        lines = read_jsonl(config.folder / "metrics.jsonl")
        manifest = read_manifest(config.folder)
        if not manifest:
            raise ConfigError(f"{config.folder} has no manifest.json: nothing says what its run was")
        check_same(config)
        if (steps := len(of_steps(lines))) != config.steps:
            raise ConfigError(
                f"{config.folder / 'metrics.jsonl'} has {steps} steps, not {config.steps}: take another runs=FOLDER"
            )
        head = {"setting": setting, "seed": seed}
        self.runs[key] = head | _outcomes(lines) | {"config": digest(config), "commit": manifest.get("commit") or ""}
        self.curves[key] = [
            head | {"step": line["step"]} | {name: _number(line.get(name)) for name in CURVES} for line in lines
        ]
        self.lengths[key] = [head | row for row in _lengths(config.folder / "rollouts.jsonl", config.steps)]

    def has(self, key: Key, config: Config) -> bool:
        """Whether this run is recorded.

        Raises:
            ConfigError: a run of its setting is recorded under another configuration: mixing the two would compare nothing.
        """
        for (setting, seed), row in self.runs.items():
            if setting == key[0] and row.get("config") != digest(config):
                raise ConfigError(
                    f"{setting} seed {seed} is recorded with another configuration ({row.get('config')}, now "
                    f"{digest(config)}): take another results=FOLDER, or remove its rows"
                )
        if key in self.runs and len(self.curves.get(key, [])) < _value(self.runs[key], "steps"):
            raise ConfigError(f"curves.csv lacks steps of {key[0]} seed {key[1]}: restore it, or remove the run's rows")
        return key in self.runs

    def only(self, keys: Iterable[Key]) -> Results:
        """The part with these runs."""
        wanted = [key for key in keys if key in self.runs]
        parts = [
            {key: table[key] for key in wanted if key in table} for table in (self.runs, self.curves, self.lengths)
        ]
        return Results(*parts)

    @property
    def settings(self) -> list[str]:
        """Names, in the order in which they were first recorded."""
        return list(dict.fromkeys(setting for setting, _ in self.runs))

    def outcome(self, setting: str, name: str) -> dict[int, float]:
        """One outcome of a setting by seed; NaN where a row has none."""
        return {seed: _value(row, name) for (own, seed), row in sorted(self.runs.items()) if own == setting}

    def curve(self, setting: str, name: str) -> np.ndarray:
        """float64 [seeds, steps], up to the last step that all seeds of the setting have; NaN where there is no value."""
        tables = [lines for (own, _), lines in sorted(self.curves.items()) if own == setting]
        at = [_whole(column(lines, "step"), setting) for lines in tables]
        steps = min((int(one.max()) + 1 for one in at), default=0)
        values = np.full((len(tables), steps), np.nan)
        for row, one, lines in zip(values, at, tables, strict=True):
            row[one[one < steps]] = column(lines, name)[one < steps]
        return values


def _outcomes(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A run in one row. "final" is the mean of the last steps, "best" the best mean of as many steps in a row.

    A step without a scored rollout has no reward: it is left out of means, and no row of steps with it is the best.
    """
    validation = column(lines, "val/reward_mean")
    validation = validation[~np.isnan(validation)]
    lines = of_steps(lines)
    reward = column(lines, "reward/mean")
    window = min(LAST, len(reward))
    means = np.convolve(reward, np.full(window, 1 / window), "valid")
    known = means[~np.isnan(means)]
    late = lambda key: mean_of_known(column(lines, key)[-LAST:])  # noqa: E731
    return {
        "steps": len(lines),
        "final_reward": late("reward/mean"),
        "drift_share_final": late("rollout/drift_share"),
        "first_validation": float(validation[0]) if len(validation) else float("nan"),
        "final_validation": float(validation[-1]) if len(validation) else float("nan"),
        "best_reward": float(known.max()) if len(known) else float("nan"),
        "mean_reward": mean_of_known(reward),
        "samples_per_rollout": mean_of_known(column(lines, "rollout/samples_mean")),
        "samples_per_rollout_final": late("rollout/samples_mean"),
        "single_sample_share": mean_of_known(column(lines, "rollout/single_sample_share")),
        "entropy_final": late("policy/entropy"),
        "kl_final": late("loss/kl"),
        "grad_norm_mean": mean_of_known(column(lines, "policy/grad_norm")),
        "rollouts": float(np.nansum(column(lines, "rollout/count"))),
        "computed_tokens": float(np.nansum(column(lines, "update/computed_tokens"))),
        "update_seconds": float(np.nansum(column(lines, "time/update"))),
        "seconds": float(np.nansum(column(lines, "time/step"))),
    }


def mean_of_known(values: np.ndarray) -> float:
    """The mean of what is not NaN; NaN where nothing is known."""
    values = values[~np.isnan(values)]
    return float(values.mean()) if len(values) else float("nan")


def _lengths(path: Path, steps: int) -> list[dict[str, Any]]:
    """Histograms of trained tokens a rollout, tokens a sample and tokens a response, in powers of 2^(1/2)."""
    counts: dict[tuple[str, str], Counter[int]] = {}
    for line in read_jsonl(path):
        phases = (["early"] if line["step"] < LAST else []) + (["late"] if line["step"] >= steps - LAST else [])
        if not phases:
            continue
        rollout = Rollout.from_dict(line)
        samples = merge_calls(rollout).samples
        found = {
            "rollout": [sum(int(sample.loss_mask.sum()) for sample in samples)],
            "sample": [len(sample.token_ids) for sample in samples],
            "response": [len(call.response_ids) for call in rollout.calls],
        }
        for phase in phases:
            for quantity, values in found.items():
                bins = [int(2 * np.log2(value)) for value in values if value]
                counts.setdefault((phase, quantity), Counter()).update(bins)
    return [
        {"phase": phase, "quantity": quantity, "from": round(2 ** (b / 2), 2), "below": round(2 ** ((b + 1) / 2), 2)}
        | {"count": counted[b]}
        for (phase, quantity), counted in sorted(counts.items())
        for b in sorted(counted)
    ]


def _number(value: Any) -> Any:
    return "" if value is None else value


def _key(row: Mapping[str, Any], folder: Path) -> Key:
    try:
        return row["setting"], int(row["seed"])
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(f"{folder}: a row without setting and whole seed: {dict(row)}") from error


def _read_csv(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: damaged, no table: {error}") from error


def _write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Rows with a few significant digits; columns of later rows that earlier ones lack stay empty there."""
    text = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(text, names, lineterminator="\n", restval="")
    writer.writeheader()
    for row in rows:
        writer.writerow({k: f"{v:.{SIGNIFICANT}g}" if isinstance(v, float) else v for k, v in row.items()})
    write_atomically(path, text.getvalue())
