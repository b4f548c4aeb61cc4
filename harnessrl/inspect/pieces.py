"""Token ids as text that a person can read and that keeps every token's bounds visible."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from harnessrl.errors import ConfigError

Decode = Callable[[list[int]], str]
UNFINISHED = "\ufffd"
LONGEST_CHARACTER = 4
"""Tokens that one character may be spread over: UTF-8 has at most four bytes."""


class TokenText:
    """A tokenizer for reading: ids to text, special tokens kept.

    Args:
        path: a tokenizer.json, or the folder that holds one.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        from tokenizers import Tokenizer

        file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        if not file.is_file():
            raise ConfigError(f"tokenizer={path}: no such folder with a tokenizer.json, nor such a file")
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception for a file that it cannot read
            raise ConfigError(f"tokenizer={path}: {file} is not a tokenizer: {error}") from error
        self._piece = lru_cache(maxsize=1 << 16)(self._after)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids, special tokens included."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def pieces(self, ids: Sequence[int], before: int | None = None) -> Iterator[tuple[tuple[int, ...], str]]:
        """Cut the text of some ids into (ids, text), a token each, or more where a character is spread over several.

        Args:
            ids: the tokens.
            before: the token in front of them; some decoders take a first token's leading space away.
        """
        start = 0
        while start < len(ids):
            previous = before if start == 0 else ids[start - 1]
            stop, text = start + 1, self._piece(previous, (ids[start],))
            for longer in range(start + 2, min(start + LONGEST_CHARACTER, len(ids)) + 1):
                if UNFINISHED not in text:
                    break
                joined = self._piece(previous, tuple(ids[start:longer]))
                if UNFINISHED not in joined:
                    stop, text = longer, joined
            yield tuple(ids[start:stop]), text
            start = stop

    def _after(self, previous: int | None, ids: tuple[int, ...]) -> str:
        if previous is None:
            return self.decode(ids)
        head, both = self.decode([previous]), self.decode([previous, *ids])
        return both[len(head) :] if both.startswith(head) else self.decode(ids)


def visible(text: str) -> str:
    """Control characters as their Unicode pictures, so that text of a trace steers neither terminal nor page."""
    return "".join(map(_visible_character, text))


def _visible_character(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    if 0x7F <= code < 0xA0 or 0x200B <= code <= 0x200F or 0x202A <= code <= 0x202E or 0x2066 <= code <= 0x2069:
        return f"\\u{code:04x}"
    return "\\ufffd" if 0xD800 <= code <= 0xDFFF else character
