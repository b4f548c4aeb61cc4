"""Which chat templates keep each prompt a prefix of the next, by family and situation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from paper_figs.style import BASE, add_note, label_panels

DATA = ("tests/real/data/template_survey.json",)
MAKE = "python -m tests.real.survey"
SITUATIONS = {
    "plain": "plain chat",
    "blanks": "blanks around\nan answer",
    "thinking": "reasoning,\nnew question",
    "tool": "tool call,\nresult",
    "tool_user": "tool call,\nnew question",
    "thinking_tool_user": "the same with\nreasoning",
}
PATCHED = "_training"
"""How trl names a template that it changed for training."""
FAMILIES = {
    "cohere": "Cohere",
    "deepseek": "DeepSeek",
    "diffusion_gemma": "Gemma",
    "gemma": "Gemma",
    "glm": "GLM",
    "gptoss": "gpt-oss",
    "idefics": "Idefics, LLaVA, SmolVLM",
    "llava": "Idefics, LLaVA, SmolVLM",
    "smolvlm": "Idefics, LLaVA, SmolVLM",
    "lfm": "LFM2",
    "llama": "Llama",
    "muse": "Muse",
    "nemotron": "Nemotron",
    "phi": "Phi",
    "qwen2": "Qwen 2.5",
    "qwen3_5": "Qwen 3.5 and later",
    "qwen3_6": "Qwen 3.5 and later",
    "qwen3_8": "Qwen 3.5 and later",
    "qwen3": "Qwen 3",
}
"""Start of a template's name -> family; the first that fits."""


def numbers(root: Path) -> dict[str, dict[str, dict[str, tuple[int, int]]]]:
    """By kind of template, family and situation: how many break, of how many that know the situation."""
    found: dict[str, dict[str, dict[str, tuple[int, int]]]] = {"original": {}, "patched by trl for training": {}}
    original, patched = found.values()
    for name, row in json.loads((root / DATA[0]).read_text()).items():
        cells = (patched if name.endswith(PATCHED) else original).setdefault(family_of(name), {})
        for situation in SITUATIONS:
            broken, of = cells.get(situation, (0, 0))
            kept = row[situation]
            cells[situation] = (broken + (kept is False), of + (kept is not None))
    return {kind: dict(sorted(families.items())) for kind, families in found.items()}


def family_of(name: str) -> str:
    """The family of a template's name.

    Raises:
        ValueError: no family fits.
    """
    for start, family in FAMILIES.items():
        if name.startswith(start):
            return family
    raise ValueError(f"template {name!r} belongs to no family of {', '.join(FAMILIES)}")


def draw(figure: Figure, found: dict[str, dict[str, dict[str, tuple[int, int]]]]) -> None:
    """A panel a kind, a row a family; the darker a cell, the larger the share that breaks, which stands in it."""
    figure.set_size_inches(9.6, 4.6)
    axes = figure.subplots(1, len(found))
    for axis, (kind, families) in zip(axes, found.items(), strict=True):
        table = [_all(families), *families.values()]
        shares = np.array([[b / of if of else np.nan for b, of in row.values()] for row in table])
        axis.imshow(shares, cmap="Greys", vmin=0, vmax=1.6, aspect="auto")
        for y, row in enumerate(table):
            for x, (broken, of) in enumerate(row.values()):
                axis.text(x, y, f"{broken}/{of}" if of else "–", ha="center", va="center", fontsize=BASE - 1)
        axis.set_yticks(range(len(table)), ["all", *families])
        axis.set_xticks(range(len(SITUATIONS)), SITUATIONS.values(), fontsize=BASE - 2, rotation=35)
        axis.set_title(kind)
        axis.axhline(0.5, color="black", linewidth=0.8)
        axis.grid(visible=False)
    label_panels(axes)
    add_note(
        figure,
        "In each cell: templates that break / templates that know the situation. 72 templates in the wheel of trl, by text.",
    )


def _all(families: dict[str, dict[str, tuple[int, int]]]) -> dict[str, Any]:
    return {
        situation: tuple(sum(row[situation][part] for row in families.values()) for part in (0, 1))
        for situation in SITUATIONS
    }
