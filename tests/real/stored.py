"""The data files as rollouts."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from harnessrl.adapter import Call, Rollout
from tests.real.pieces import Pieces

FOLDER = Path(__file__).parent / "data"


@cache
def data(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def rollout(calls: list[tuple[list[int], list[int]]]) -> Rollout:
    """Calls given as (prompt, response), in order of arrival."""
    made = [
        Call(call_id=f"c{at}", prompt_ids=prompt, response_ids=response, logprobs=[-1.0] * len(response))
        for at, (prompt, response) in enumerate(calls)
    ]
    return Rollout(rollout_id="r", group_id="g", calls=made)


def calls_of(case: str) -> list[tuple[list[int], list[int]]]:
    """The calls of a case of breaks.json."""
    calls: list[tuple[list[int], list[int]]] = []
    before: list[int] = []
    for keep, rest, response in data("breaks")["cases"][case]:
        prompt = before[:keep] + rest
        calls.append((prompt, response))
        before = prompt + response
    return calls


@cache
def pieces(family: str) -> Pieces:
    """The token texts of a family of breaks.json, or of "smollm2" in smollm2_responses.json."""
    return Pieces(data("smollm2_responses")["pieces"] if family == "smollm2" else data("breaks")["pieces"][family])
