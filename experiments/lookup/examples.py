"""From demonstrated turns to rows of tokens: rendered by the chat template, the replies under BPE dropout.

BPE dropout (arXiv:1910.13267) leaves out each candidate merge with some probability, so the policy learns to write the
same text in several ways. Most of them do not survive decoding and encoding: that is the drift this experiment is about.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from transformers import AutoTokenizer

from experiments.lookup.demonstrations import Turn
from experiments.lookup.harness import Message

FOLDER = Path(__file__).parent / "tokenizer"
IGNORE = -100
"""Label of a position without loss."""


@dataclass(slots=True)
class Row:
    """One training sequence: labels[t] is token_ids[t] where a reply stands, else IGNORE."""

    messages: list[Message]
    """The history that the last reply of this row answered."""
    token_ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)

    def add(self, token_ids: list[int], trained: bool) -> None:
        """Append tokens."""
        self.token_ids += token_ids
        self.labels += token_ids if trained else [IGNORE] * len(token_ids)


class Encoder:
    """The experiment's tokenizer with its template, and the same merges under dropout."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        merges = json.loads((folder / "tokenizer.json").read_text())["model"]["merges"]
        self.rank = {(left, right): rank for rank, (left, right) in enumerate(merges)}
        self.vocabulary: dict[str, int] = self.tokenizer.get_vocab()
        self.end: int = self.tokenizer.eos_token_id
        self.pad: int = self.tokenizer.pad_token_id
        self._prompts: dict[tuple[tuple[str, str], ...], list[int]] = {}

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a rendered history, ready for the assistant's turn; most come more than once, so they are kept."""
        key = tuple((message["role"], message["content"]) for message in messages)
        if key not in self._prompts:
            text = self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
            self._prompts[key] = self.tokenizer.encode(text, add_special_tokens=False)
        return self._prompts[key]

    def reply(self, text: str, dropout: float, rng: random.Random) -> list[int]:
        """The ids of a reply and its end of turn.

        Merges by rank, the lowest first and the leftmost of equals; at every step each candidate is left out with
        probability `dropout`. 0 is the tokenizer's own encoding, 1 gives single characters.
        """
        parts = list(text)
        while True:
            pairs = enumerate(itertools.pairwise(parts))
            ranks = [(self.rank[pair], at) for at, pair in pairs if pair in self.rank]
            kept = [item for item in ranks if rng.random() >= dropout] if dropout else ranks
            if not kept:
                return [self.vocabulary[part] for part in parts] + [self.end]
            at = min(kept)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]

    def rows(self, turns: Sequence[Turn], dropout: float, rng: random.Random) -> list[Row]:
        """Turns as rows: one a conversation, and a new one where the history was cut by a summary.

        The harness's echo of a reply is replaced by the reply's own tokens, as in a sample that did not break.
        """
        rows: list[Row] = []
        for turn in turns:
            row = next((row for row in rows if _continues(turn.messages, row.messages)), None)
            if row is None:
                rows.append(row := Row(messages=turn.messages))
                row.add(self.prompt(turn.messages), trained=False)
            else:
                row.add(self.prompt(turn.messages[len(row.messages) + 1 :]), trained=False)
                row.messages = turn.messages
            row.add(self.reply(turn.reply, dropout, rng), trained=True)
        return rows


def _continues(later: list[Message], earlier: list[Message]) -> bool:
    """Whether `later` is `earlier`, an assistant's turn and more."""
    return len(later) > len(earlier) and later[: len(earlier)] == earlier
