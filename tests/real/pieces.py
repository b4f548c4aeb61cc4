"""Ids to text without a tokenizer: the bytes of each token, as a data file holds them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path


class Pieces:
    """Decodes as the tokenizer does that the bytes were taken from, special tokens included."""

    def __init__(self, stored: Mapping[str, str]) -> None:
        """stored: id -> its bytes, each byte as the character of that number (latin-1), as JSON holds them."""
        self._bytes = {int(index): text.encode("latin-1") for index, text in stored.items()}

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(self._bytes[int(index)] for index in ids).decode("utf-8", errors="replace")


def pieces_of(tokenizer_json: Path, ids: Iterable[int]) -> dict[str, str]:
    """The bytes of some ids of a tokenizer.json, in the form that Pieces takes; byte-level or with byte fallback."""
    data = json.loads(tokenizer_json.read_text(encoding="utf-8"))
    added = {token["id"]: token["content"] for token in data["added_tokens"]}
    vocabulary = {index: text for text, index in data["model"]["vocab"].items()}
    byte_level = '"ByteLevel"' in json.dumps(data["decoder"])
    read = _byte_level if byte_level else _byte_fallback
    pieces = {index: added[index].encode() if index in added else read(vocabulary[index]) for index in sorted(set(ids))}
    return {str(index): piece.decode("latin-1") for index, piece in pieces.items()}


def _byte_level(text: str) -> bytes:
    """Each character stands for a byte: itself where it can be printed, else one of those from U+0100 on."""
    return bytes(_BYTES[character] for character in text)


def _byte_fallback(text: str) -> bytes:
    """<0x0A> is that byte; elsewhere U+2581 is a blank."""
    if len(text) == 6 and text.startswith("<0x"):
        return bytes([int(text[3:5], 16)])
    return text.replace("\u2581", " ").encode()


_PRINTED = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTED]
_BYTES = {chr(byte): byte for byte in _PRINTED} | {chr(256 + at): byte for at, byte in enumerate(_OTHERS)}
