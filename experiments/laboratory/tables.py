"""Rows of numbers as CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path

Row = dict[str, str | float]


def write(path: Path, rows: Iterable[Row]) -> None:
    """A CSV with the fields of the first row."""
    texts = [{key: _text(value) for key, value in row.items()} for row in rows]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(texts[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(texts)


def _text(value: str | float) -> str:
    """Floats with four significant digits, and rounding errors as 0."""
    if isinstance(value, float):
        return "0" if abs(value) < 1e-12 else f"{value:.4g}"
    return str(value)
