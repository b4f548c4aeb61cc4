"""A tokenizer that drifts and a chat template with switchable faults: small enough to check by hand, no downloads.

``decode`` is many-to-one, as it is for every byte-pair encoder: a model may sample ``h`` + ``aving`` where ``encode``
gives ``having`` as ``hav`` + ``ing``. Half a character can be sampled too; it decodes to U+FFFD and stays that way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

SPECIALS = ("<|begin|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>", "<think>", "</think>")
ROLES = ("system", "user", "assistant", "tool")
LETTERS = 'noighavedtké {}":,?|<>/\n\ufffd'
# In order of rank. They overlap on purpose: which one wins depends on the neighbours.
MERGES = (
    *("in", "ing", "av", "hav", "aving", "no", "on", "ed", "end", "an", "de", "ha", "ve"),
    *(' "', '":', '{"', "é", "\ufffd", "  ", "\n\n"),
)


class ToyTokenizer:
    """Ids 0..7 are special tokens; then single bytes; then merged pieces."""

    def __init__(self) -> None:
        units = dict.fromkeys(LETTERS.encode())
        self.pieces = [special.encode() for special in SPECIALS]
        self.pieces += [bytes([unit]) for unit in units] + [merge.encode() for merge in MERGES]
        self.ids = {piece: index for index, piece in enumerate(self.pieces)}
        self.ordinary = range(len(SPECIALS), len(self.pieces))
        self.end = self.special("<|end|>")

    def special(self, text: str) -> int:
        return SPECIALS.index(text)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids, special tokens included."""
        return b"".join(self.pieces[index] for index in ids).decode("utf-8", errors="replace")

    def encode(self, text: str) -> list[int]:
        """The canonical ids of a text; text that spells a special token becomes that token."""
        ids: list[int] = []
        while text:
            found = [(text.index(special), special) for special in SPECIALS if special in text]
            at, special = min(found, default=(len(text), ""))
            ids += self._encode_ordinary(text[:at].encode())
            if special:
                ids.append(self.special(special))
            text = text[at + len(special) :]
        return ids

    @cache  # noqa: B019 (one tokenizer, short texts)
    def _encode_ordinary(self, data: bytes) -> list[int]:
        """For each merge in order of rank, join the neighbours that spell it, left to right."""
        parts = [bytes([unit]) for unit in data]
        for piece in (merge.encode() for merge in MERGES if merge.encode() in data):
            joined: list[bytes] = []
            while parts:
                count = next((n for n in range(2, len(piece) + 1) if b"".join(parts[:n]) == piece), 1)
                joined.append(b"".join(parts[:count]))
                del parts[:count]
            parts = joined
        return [self.ids[part] for part in parts]


@dataclass(frozen=True, kw_only=True)
class Template:
    """How messages (role, text) become a prompt. The default keeps every earlier prompt as a prefix of the next."""

    separator: str = "\n"
    """Written after <|end|>; nobody samples it."""
    begins: int = 1
    """How many <|begin|> tokens open a prompt (2 is a duplicated BOS)."""
    trim: bool = False
    """Strip whitespace from contents, as many templates do."""
    drop_thinking: bool = False
    """Drop what stands before </think> from every answer, as thinking templates do to history."""
    opening: str = ""
    """Put after the last <|assistant|> to make the model begin with it; history does not have it."""

    def render(self, messages: Iterable[tuple[str, str]]) -> str:
        """The prompt text for the model's next answer."""
        parts = ["<|begin|>" * self.begins]
        for role, text in messages:
            if self.drop_thinking and role == "assistant":
                text = text.rpartition("</think>")[2]
            parts += [f"<|{role}|>", text.strip() if self.trim else text, "<|end|>", self.separator]
        return "".join([*parts, "<|assistant|>", self.opening])
