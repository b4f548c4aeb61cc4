"""Plays every cause of causes.py and writes data/breaks.json: python -m tests.real.make_breaks

Needs the packages that README.md names. The file holds token ids and the bytes of each token; a prompt is stored as how
many tokens of the call before it (prompt and response) it repeats, and the rest.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from tests.real.causes import CAUSES, Calls
from tests.real.families import load

DATA = Path(__file__).parent / "data" / "breaks.json"


def shorten(calls: Calls) -> list[list[int | list[int]]]:
    """[tokens repeated, rest of the prompt, response] of each call."""
    before: list[int] = []
    short: list[list[int | list[int]]] = []
    for prompt, response in calls:
        pairs = list(zip(before, prompt, strict=False))
        keep = next((at for at, (x, y) in enumerate(pairs) if x != y), len(pairs))
        short.append([keep, prompt[keep:], response])
        before = prompt + response
    return short


def main() -> None:
    family = cache(load)
    cases, used = {}, {}
    for cause, names in CAUSES.items():
        for name in names:
            calls = cause(family(name))
            cases[f"{name}: {cause.__name__}"] = shorten(calls)
            used.setdefault(name, set()).update(index for call in calls for ids in call for index in ids)
    lines = [f"{json.dumps(name)}:{json.dumps(case, separators=(',', ':'))}" for name, case in cases.items()]
    pieces = json.dumps({name: family(name).pieces(ids) for name, ids in used.items()}, separators=(",", ":"))
    DATA.write_text('{"pieces":' + pieces + ',\n"cases":{\n' + ",\n".join(lines) + "\n}}\n")


if __name__ == "__main__":
    main()
