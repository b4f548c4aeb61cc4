"""A folder's manifest: size and sha256 of each of its files, so that damage is found and named."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

NAME = "manifest.json"


def write_manifest(folder: Path) -> None:
    """Write `manifest.json` about every file that lies in a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    listed = {str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": _digest(path)} for path in files}
    (folder / NAME).write_text(json.dumps({"files": listed}, indent=1) + "\n")


def damage(folder: Path) -> str | None:
    """What differs from a folder's manifest, by file; None where nothing does. Reads every byte."""
    try:
        for name, expected in json.loads((folder / NAME).read_text())["files"].items():
            file = folder / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != expected["bytes"]:
                return f"{name} has {file.stat().st_size} bytes, {expected['bytes']} were written"
            if _digest(file) != expected["sha256"]:
                return f"{name} has other content than was written"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{NAME}: {error}"
    return None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
