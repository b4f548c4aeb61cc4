"""The grid of an ablation file: which runs there are.

An ablation file names a base configuration and lists only differences:

    base: ../experiments/lookup/config.yaml
    seeds: 2
    reference: OTHER                      # what the others are compared with; the last setting if absent
    reported: ["a line under the table"]
    settings:
      NAME: {advantage.unit: sample, loss.normalizer: token_mean}
      OTHER: {}

On the command line `seeds`, `jobs`, `results` and `only=NAME,NAME` (some of the settings) belong to the grid, every other
`key=value` to all runs. Finished runs are kept as rows in `results` (default: the run folder of the ablation; see `harnessrl.results`). A run that
has its row there is not run again, so a grid continues from committed rows on any machine.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harnessrl.config import Config, from_mapping, read_yaml
from harnessrl.errors import ConfigError
from harnessrl.metrics import of_steps, read_jsonl, versions, write_atomically
from harnessrl.results import PRIMARY, Results, differences

KEYS = ("base", "seeds", "jobs", "results", "reference", "reported", "settings")


@dataclass(kw_only=True)
class Cell:
    """One run of the grid."""

    setting: str
    """Name of the setting."""
    seed: int
    """Its seed."""
    config: Config
    """What it runs."""
    argv: list[str]
    """Arguments of `harnessrl`."""
    process: subprocess.Popen[bytes] | None = None
    """The running process."""
    failed: str = ""
    """Why it ended early; empty if it did not."""
    metrics: list[dict[str, Any]] = field(default_factory=list)
    """Lines of metrics.jsonl so far."""
    recorded: bool = False
    """It has its row in the results."""

    @property
    def log(self) -> Path:
        return self.config.folder / "train.log"

    @property
    def key(self) -> tuple[str, int]:
        return self.setting, self.seed

    @property
    def done(self) -> bool:
        """It has its row, or all steps are recorded and the last checkpoint is written."""
        return self.recorded or (self.config.folder / "checkpoints" / f"step-{self.config.steps:05d}").is_dir()

    def read(self) -> None:
        """Take note of steps that were recorded since."""
        self.metrics = of_steps(read_jsonl(self.config.folder / "metrics.jsonl"))


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A parsed ablation."""

    name: str
    cells: list[Cell]
    jobs: int
    folder: Path
    """Where runs, curves.png and (unless named) results lie."""
    results: Path
    reference: str
    reported: list[str]

    def earlier(self) -> dict[str, Any]:
        """Settings that the results' manifest.json already tells of.

        Raises:
            ConfigError: it is damaged.
        """
        path = self.results / "manifest.json"
        try:
            return dict(json.loads(path.read_text())["settings"]) if path.exists() else {}
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}: damaged: {error!r}") from error

    def write(self, results: Results) -> None:
        """Write the rows and, beside them, manifest.json: what they are of, other settings of earlier grids included."""
        settings = self.earlier() | {cell.setting: differences(cell.config) for cell in self.cells}
        manifest = {
            "ablation": self.name,
            "reference": self.reference,
            "primary_outcomes": list(PRIMARY),
            "settings": {name: settings[name] for name in settings if name in results.settings},
            "versions": versions(),
        }
        write_atomically(self.results / "manifest.json", json.dumps(manifest, indent=1) + "\n")
        results.write(self.results)


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold a folder of results: two grids that write its tables would lose each other's rows.

    Raises:
        ConfigError: another process holds it, or nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"results: {folder} cannot be written to: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            text = f"results: another ablation is writing to {folder}; wait for it, or take another results=FOLDER"
            raise ConfigError(text) from error
        yield
    finally:
        os.close(descriptor)


def read_grid(file: str | Path, overrides: Sequence[str]) -> Grid:
    """Read and check a whole grid before anything starts.

    Raises:
        ConfigError: by file, setting and key.
    """
    file = Path(file)
    data = _read(file)
    _refuse_overridden(data["settings"], overrides, file)
    own = {key: data.get(key, value) for key, value in (("seeds", 2), ("jobs", 2), ("results", None), ("only", None))}
    passed = []
    for item in overrides:
        key, _, value = item.partition("=")
        if key in own:
            own[key] = value
        else:
            passed.append(item)
    seeds, jobs = (_positive(key, own[key], file) for key in ("seeds", "jobs"))
    base = file.parent / data["base"]
    settings = _chosen(data["settings"], own["only"], file)
    cells = []
    for seed in range(seeds):  # seed by seed, so that an unfinished grid has all settings of the seeds it has
        for setting, changes in settings.items():
            items = [f"{key}={json.dumps(value)}" for key, value in changes.items()]  # JSON is YAML
            items += [*passed, f"seed={seed}", f"run=ablations/{file.stem}/{setting}/seed-{seed}"]
            config = from_mapping(read_yaml(base), items, source=base)
            cells.append(Cell(setting=setting, seed=seed, config=config, argv=["train", str(base), *items]))
    folder = Path(cells[0].config.runs) / "ablations" / file.stem
    return Grid(
        name=file.stem,
        cells=cells,
        jobs=jobs,
        folder=folder,
        results=Path(own["results"]) if own["results"] else folder,
        reference=data.get("reference") or list(data["settings"])[-1],
        reported=data.get("reported", []),
    )


def _refuse_overridden(settings: dict[str, Any], overrides: Sequence[str], file: Path) -> None:
    """A key of the command line that settings differ in would make them alike, under their own names."""
    for key in [item.partition("=")[0].replace("[", ".").replace("]", "") for item in overrides]:
        if key in ("seed", "run"):
            raise ConfigError(
                f"{key}: the grid gives it to every run; seeds=N takes the first N, runs=FOLDER other folders"
            )
        for name, changes in settings.items():
            if any(one == key or one.startswith(f"{key}.") or key.startswith(f"{one}.") for one in changes):
                raise ConfigError(
                    f"{key}: {file} compares its values (settings.{name}); it cannot be given to all runs"
                )


def _chosen(settings: dict[str, Any], only: str | None, file: Path) -> dict[str, Any]:
    """The settings named in `only`, "A,B"; all of them where it is None."""
    if only is None:
        return settings
    names = only.split(",")
    if unknown := [name for name in names if name not in settings]:
        raise ConfigError(f"{file}: only: {unknown[0]!r} is not one of {', '.join(settings)}")
    return {name: settings[name] for name in settings if name in names}


def _read(file: Path) -> dict[str, Any]:
    """The file's mapping, its shape checked."""
    data = read_yaml(file)
    if unknown := sorted(map(str, data.keys() - set(KEYS))):
        raise ConfigError(f"{file}: unknown key {unknown[0]!r}; allowed: {', '.join(KEYS)}")
    settings = data.get("settings")
    if not isinstance(data.get("base"), str) or not isinstance(settings, dict) or not settings:
        raise ConfigError(
            f"{file}: needs `base` (a configuration file) and `settings` (a mapping of names to differences)"
        )
    for name, changes in settings.items():
        _check_setting(file, name, changes)
    if data.get("reference") not in (None, *settings):
        raise ConfigError(f"{file}: reference: {data['reference']!r} is not one of {', '.join(settings)}")
    if not isinstance(data.get("results", ""), str):
        raise ConfigError(f"{file}: results: expected a folder's path, got {data['results']!r}")
    reported = data.get("reported", [])
    if not isinstance(reported, list) or not all(isinstance(line, str) for line in reported):
        raise ConfigError(f"{file}: reported: expected a list of lines, got {reported!r}")
    return data


def _check_setting(file: Path, name: Any, changes: Any) -> None:
    """A setting's name is a folder and a word of `only=`; the grid itself gives every run its seed and folder."""
    if not isinstance(name, str) or not re.fullmatch(r"\w[\w .+=-]{0,99}", name):
        raise ConfigError(
            f"{file}: settings.{name}: a name has letters, digits and any of '_ .+=-', letters or digits first"
        )
    if not isinstance(changes, dict) or not all(isinstance(key, str) for key in changes):
        raise ConfigError(f"{file}: settings.{name}: expected a mapping of keys to values")
    if taken := [key for key in changes if key in ("seed", "run", "runs")]:
        raise ConfigError(f"{file}: settings.{name}: {taken[0]} is given by the grid (seeds=N), not by a setting")


def _positive(key: str, value: Any, file: Path) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = 0
    if number < 1 or str(number) != str(value):
        raise ConfigError(f"{file}: {key} must be a whole number of at least 1, got {value!r}")
    return number
