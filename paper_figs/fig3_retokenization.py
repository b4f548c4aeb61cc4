"""Figure 3: a sampled response that comes back in other tokens, and what that does to the prefix (a real example)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harnessrl.adapter import Call, Rollout, explain_break, merge_calls
from paper_figs.style import BASE, COLOURS, GREY, LIGHT

DATA = ("tests/real/data/smollm2_responses.json",)
MAKE = "python -m tests.real.make_responses"
RESPONSE = 71
"""Which of the 120 stored responses is shown; 32 of them drift."""
AROUND = 4
"""Tokens shown on either side of the changed ones."""

Tokens = list[tuple[str, str]]
"""Text of each token, and what it is: `kept`, `changed` or `behind`."""


def numbers(root: Path) -> dict[str, Any]:
    """The tokens around the first change, as sampled and as they came back, and what the library makes of the two calls."""
    data = json.loads((root / DATA[0]).read_text(encoding="utf-8"))
    pieces = {int(index): text.encode("latin-1") for index, text in data["pieces"].items()}

    def decode(ids: Sequence[int]) -> str:
        return b"".join(pieces[int(index)] for index in ids).decode("utf-8", errors="replace")

    response = data["responses"][RESPONSE]
    prompt, ids = data["prompts"][response["question"]], response["ids"]
    content = ids[:-1] if ids[-1] == data["tail"][0] else ids
    back = list(content)
    for low, high, new in reversed(response["edits"]):
        back[low:high] = new
    calls = [(prompt, ids), (prompt + back + data["tail"], data["tail"][:1])]
    merged = merge_calls(
        Rollout(
            rollout_id="r",
            group_id="g",
            calls=[
                Call(call_id=f"c{at}", prompt_ids=p, response_ids=a, logprobs=[-1.0] * len(a))
                for at, (p, a) in enumerate(calls)
            ],
        )
    )
    low, high, new = response["edits"][0]
    told = explain_break(merged.breaks[0], decode)
    return {
        "question": data["questions"][response["question"]],
        "sampled": _window(ids, low, high, decode),
        "back": _window(back, low, low + len(new), decode),
        "kind": told.kind,
        "prefix": told.position,
        "goes_on": [low > AROUND, high + AROUND < len(ids)],
        "lengths": [len(prompt) + len(ids), len(prompt) + len(back) + len(data["tail"])],
        "samples": [len(sample.token_ids) for sample in merged.samples],
    }


def _window(ids: Sequence[int], low: int, high: int, decode: Any) -> Tokens:
    places = range(max(0, low - AROUND), min(len(ids), high + AROUND))
    kinds = ["kept" if at < low else "changed" if at < high else "behind" for at in places]
    return [(decode([ids[at]]), kind) for at, kind in zip(places, kinds, strict=True)]


def draw(figure: Figure, found: dict[str, Any]) -> None:
    """Two rows of token boxes, as wide as their text, and the break between what is shared and what is not."""
    figure.set_size_inches(7.2, 2.5)
    axis = figure.subplots()
    axis.axis("off")
    width = max(_row(axis, found["sampled"], 1.0), _row(axis, found["back"], 0.0))
    for x, more in zip((-0.5, width + 0.5), found["goes_on"], strict=True):
        for y in (1.2, 0.2) if more else ():
            axis.text(x, y, "…", ha="center", va="center", color=GREY)
    shared = sum(len(text) for text, kind in found["sampled"] if kind == "kept")
    axis.plot([shared, shared], [-0.35, 1.75], linestyle="--", color=COLOURS[5], linewidth=1)
    axis.text(shared, 1.8, f"the prefix ends after {found['prefix']} tokens", color=COLOURS[5], ha="center")
    axis.text(0, 1.5, "sampled", ha="left", va="bottom", color=GREY)
    axis.text(0, 0.5, "the same text, encoded for the next prompt", ha="left", va="bottom", color=GREY)
    first, second = found["samples"]
    axis.text(
        0,
        -0.6,
        f"harnessrl: {found['kind']}, so two samples of {first} and {second} tokens, each exactly as the model saw it.\n"
        f"SmolLM2-135M-Instruct, asked: “{found['question']}”",
        va="top",
        fontsize=BASE - 1,
    )
    axis.set(xlim=(-1, width + 1), ylim=(-1.3, 2.1))


def _row(axis: Axes, tokens: Tokens, y: float) -> float:
    """Draw a row and return its width in characters."""
    from matplotlib.patches import Rectangle

    x = 0.0
    for text, kind in tokens:
        look = {
            "kept": {"facecolor": LIGHT},
            "changed": {"facecolor": COLOURS[1], "hatch": "///", "linewidth": 1.6},
            "behind": {"facecolor": "white"},
        }[kind]
        axis.add_patch(Rectangle((x, y - 0.02), len(text), 0.45, edgecolor="black", **look))
        label = text.replace(" ", "␣").replace("\n", "↵")
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8} if kind == "changed" else None
        axis.text(x + len(text) / 2, y + 0.2, label, ha="center", va="center", family="monospace", bbox=box)
        x += len(text)
    return x
