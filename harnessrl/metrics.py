"""The run folder: manifest.json, metrics.jsonl, rollouts.jsonl, validation.jsonl and TensorBoard's events.

Line n of metrics.jsonl has "step": n and is about the policy that step n starts from: the reward of its rollouts, its
validation (val/...) where it was validated, and the update made from it. With validation a last line, of step `steps`,
holds val/... alone.
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from harnessrl.errors import ConfigError

ROLLOUTS, VALIDATION = "rollouts.jsonl", "validation.jsonl"
"""Trace files of a run: what it trained on, and what it validated with."""
STATUS = ("status", "--porcelain", "--untracked-files=no", ":/", ":(exclude,top)ablations/results")
LIBRARIES = ("harnessrl", "torch", "transformers", "numpy", "aiohttp", "pyzmq")


class RunFolder:
    """Writes one run's record. Opening it for a resumed run first forgets every line of a step that will run again.

    Args:
        folder: `runs/NAME`; made if absent.
        start: the first step that will run.
        config: resolved configuration, as plain values.
    """

    def __init__(self, folder: Path, start: int, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        for name in ("metrics.jsonl", ROLLOUTS, VALIDATION):
            _keep_before(folder / name, start)
        self._manifest(start, config)
        self._metrics = (folder / "metrics.jsonl").open("a")
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=start or None)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one step's metrics; NaN is null in metrics.jsonl and absent in TensorBoard."""
        clean = {key: None if math.isnan(value) else value for key, value in sorted(metrics.items())}
        self._metrics.write(json.dumps({"step": step} | clean) + "\n")
        self._metrics.flush()
        for key, value in clean.items():
            if value is not None:
                self._board.add_scalar(key, value, step)

    def histograms(self, step: int, columns: Mapping[str, Any]) -> None:
        """Histograms for TensorBoard, by name."""
        for key, values in columns.items():
            if len(values):
                self._board.add_histogram(key, values, step)

    def record(self, lines: Iterable[Mapping[str, Any]], name: str = ROLLOUTS) -> None:
        """Append rollouts in the trace format to the file of this name."""
        with (self.folder / name).open("a") as file:
            for line in lines:
                file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Flush and close every file."""
        self._metrics.close()
        self._board.close()

    def _manifest(self, start: int, config: Mapping[str, Any]) -> None:
        path = self.folder / "manifest.json"
        earlier = read_manifest(self.folder).get("starts", [])
        entry = {"step": start, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "command": sys.argv}
        manifest = {
            "config": config,
            "seed": config.get("seed"),
            "versions": versions(),
            "commit": _commit(),
            "starts": [*earlier, entry],
        }
        write_atomically(path, json.dumps(manifest, indent=2) + "\n")


def read_manifest(folder: Path) -> dict[str, Any]:
    """A run folder's manifest.json; empty where there is none.

    Raises:
        ConfigError: it is damaged.
    """
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_text()) if path.exists() else {}
    except ValueError as error:
        raise ConfigError(f"{path}: damaged, not JSON: {error}; restore it, or take another run=NAME") from error
    if not isinstance(manifest, dict) or (manifest and not isinstance(manifest.get("config"), dict)):
        raise ConfigError(f"{path}: damaged, it has no configuration; restore it, or take another run=NAME")
    return manifest


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Objects of a JSON-lines file; a last line cut short by a crash is left out.

    Raises:
        ConfigError: a line that is not JSON, by file and line.
    """
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(json.loads(line))
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: damaged, not JSON: {error}") from error
    return found


def of_steps(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that tell of a step: all but a last one that holds a validation alone."""
    return [line for line in lines if "reward/mean" in line]


def write_atomically(path: Path, text: str) -> None:
    """Replace a file's content in one step: a reader sees the old or the new text, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text)
    temporary.replace(path)


def _keep_before(path: Path, start: int) -> None:
    """Drop the lines of step `start` and later."""
    if path.exists():
        kept = [line for line in read_jsonl(path) if line["step"] < start]
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept))


def versions() -> dict[str, str | None]:
    """Of Python and of the libraries that numbers depend on."""
    return {"python": platform.python_version()} | {name: _version(name) for name in LIBRARIES}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the checkout that this code runs from, with + where it has changes; None outside one.

    Tables of ablations are no code: they change while a grid runs.
    """
    here = Path(__file__).parent
    try:
        run = lambda *argv: subprocess.run(["git", *argv], cwd=here, capture_output=True, text=True, check=True).stdout  # noqa: E731
        return run("rev-parse", "HEAD").strip() + ("+" if run(*STATUS) else "")
    except (OSError, subprocess.CalledProcessError):
        return None
