"""One look for all figures, and how they are saved: PNG, PDF, and a JSON file that says what they were drawn from."""

from __future__ import annotations

import hashlib
import json
import platform
import string
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harnessrl.report import COLOURS, STYLES

MARKERS = ("o", "s", "^", "D", "v", "P", "X")
HATCHES = ("", "///", "...", "xx")
GREY, LIGHT = "#5f5f5f", "#d9d9d9"
BASE, LINE = 8.0, 0.15
"""Font size in points; height in inches of a line at the foot of a figure."""
LOOK = {
    "font.size": BASE,
    "axes.titlesize": BASE + 1,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "legend.frameon": False,
    "legend.handlelength": 3.2,
    "hatch.linewidth": 0.6,
    "savefig.dpi": 160,
    "pdf.fonttype": 42,
}
LIBRARIES = ("harnessrl", "numpy", "matplotlib")


def look() -> Any:
    """A context in which figures are drawn and saved."""
    return matplotlib.rc_context(LOOK)


def new_figure() -> Figure:
    """An empty figure; `draw` sets its size and panels."""
    return Figure(layout="constrained")


def add_note(figure: Figure, text: str) -> None:
    """Lines at the foot that say what is drawn; after the figure has its size."""
    y = (LINE + 0.04) / figure.get_figheight()
    figure.text(0.006, y, text, fontsize=BASE - 1.5, va="bottom", gid="note")


def line_style(index: int) -> dict[str, Any]:
    """Colour, line style and marker of one of several series: each of the three tells them apart alone."""
    at = index % len(COLOURS)
    return {"color": COLOURS[at], "linestyle": STYLES[at], "marker": MARKERS[at]}


def label_panels(axes: Sequence[Axes]) -> None:
    """(a), (b), ... before each panel's title."""
    for axis, letter in zip(axes, string.ascii_lowercase, strict=False):
        axis.set_title(f"({letter}) {axis.get_title(loc='left')}", loc="left")


def draw_band(axis: Axes, band: Mapping[str, Any], label: str, index: int, *, shaded: bool = True) -> None:
    """The line, band and (with few seeds) single runs of `paper_figs.curves.band`; the line alone if not shaded."""
    look = line_style(index)
    if shaded:
        axis.fill_between(band["steps"], band["low"], band["high"], color=look["color"], alpha=0.15, linewidth=0)
    gap = max(1, len(band["steps"]) // 6)
    axis.plot(band["steps"], band["line"], label=label, markevery=(gap * (index % 6) // 6, gap), **look)
    for run in band["runs"] if shaded else ():
        axis.plot(band["steps"], run, color=look["color"], linewidth=0.4, alpha=0.6)


def draw_differences(axis: Axes, series: Mapping[str, Mapping[str, Any]], settings: Mapping[str, int]) -> None:
    """`paper_figs.curves.paired` of some settings, beside each other: a point and a bar from low to high each."""
    steps = sorted({at for one in series.values() for at in one["steps"]})
    gap = min(np.diff(steps), default=1.0) / (len(series) + 2)
    for place, (name, one) in enumerate(series.items()):
        look = line_style(settings[name]) | {"linestyle": "none", "markersize": 3}
        at = np.array(one["steps"]) + (place - (len(series) - 1) / 2) * gap
        axis.plot(at, one["value"], label=name, **look)
        axis.vlines(at, one["low"], one["high"], color=look["color"], linewidth=0.9)
    axis.axhline(0, color="black", linewidth=0.8)


def draw_reported(axis: Axes, values: Mapping[str, Sequence[float]], unit: str, colours: Mapping[str, int]) -> None:
    """Others' numbers on a panel and scale of their own: a point a value, an arrow from start to end."""
    for place, (name, numbers) in enumerate(values.items()):
        at = line_style(colours.get(name, len(COLOURS) - 1)) | {"linestyle": "none"}
        axis.plot([place] * len(numbers), numbers, **at, markerfacecolor="none", clip_on=False)
        if len(numbers) == 2:
            axis.annotate("", (place, numbers[1]), (place, numbers[0]), arrowprops={"arrowstyle": "->", "color": GREY})
        for number in numbers:
            axis.annotate(f"{number:g}", (place, number), (5, 0), textcoords="offset points", va="center")
    axis.set_xticks(range(len(values)), [name.replace("+", " +\n") for name in values], fontsize=BASE - 1.5)
    axis.set_xlim(-0.6, len(values) - 0.3)
    axis.set(ylabel=unit, facecolor="#f4f4f4", title="reported by others, not ours")
    axis.spines["left"].set_linestyle(":")
    axis.grid(visible=False)


def save(figure: Figure, name: str, out: Path, provenance: Mapping[str, Any]) -> list[Path]:
    """Write NAME.png, NAME.pdf and NAME.json below `out`; the first two carry one line of provenance."""
    out.mkdir(parents=True, exist_ok=True)
    line = one_line(name, provenance)
    notes = [text.get_text().count("\n") + 1 for text in figure.texts if text.get_gid() == "note"]
    foot = LINE * (1 + sum(notes)) / figure.get_figheight()
    figure.get_layout_engine().set(rect=(0, foot, 1, 1 - foot))
    figure.text(0.006, 0.03 / figure.get_figheight(), line, fontsize=5.5, color=GREY, va="bottom")
    paths = [out / f"{name}.{kind}" for kind in ("png", "pdf", "json")]
    figure.savefig(paths[0], metadata={"Description": line})
    figure.set_layout_engine("none")  # what is laid out stays
    figure.savefig(paths[1], metadata={"Title": name, "Subject": line, "CreationDate": None})
    paths[2].write_text(json.dumps({"figure": name, **provenance}, indent=2) + "\n")
    return paths


def one_line(name: str, provenance: Mapping[str, Any]) -> str:
    """What stands in the corner: the command, the data files by folder, their commit."""
    folders: dict[str, list[str]] = {}
    for file in map(PurePosixPath, provenance["data"]):
        folders.setdefault(str(file.parent), []).append(file.name)
    shown = "; ".join(
        f"{folder}/{files[0] if len(files) == 1 else '{' + ','.join(files) + '}'}" for folder, files in folders.items()
    )
    if len(folders) > 3:
        shown = f"{'; '.join(shown.split('; ')[:2])} and {len(folders) - 2} more, named in {name}.json"
    source = f"data: {shown} @ {provenance['commit']}" if folders else "computed by harnessrl.adapter"
    return f"harnessrl figures {name} · {source}"


def provenance_of(root: Path, files: Sequence[str], reported: Mapping[str, Any]) -> dict[str, Any]:
    """The data files with their SHA-256, the commit that holds them, library versions, and what is quoted."""
    return {
        "data": {name: hashlib.sha256((root / name).read_bytes()).hexdigest() for name in files},
        "commit": commit_of(root, files) if files else "",
        "versions": {"python": platform.python_version()} | {name: version(name) for name in LIBRARIES},
        "reported": dict(reported),
    }


def commit_of(root: Path, files: Sequence[str]) -> str:
    """The newest commit that touched the files, "+ changes" where they differ from it."""
    try:
        log, status = (
            subprocess.run(["git", *command, "--", *files], cwd=root, capture_output=True, text=True, check=True).stdout
            for command in (["log", "-1", "--format=%h"], ["status", "--porcelain"])
        )
    except (OSError, subprocess.CalledProcessError):
        return "no repository"
    return (log.strip() or "no commit") + (" + changes" if status.strip() else "")
