"""Encoding of histories that grow: a text is split at its special tokens, and what was encoded before is looked up.

Every turn of a harness sends its whole history again; only the last messages are new. Tokenizers encode what lies
between two special tokens on its own, so the pieces can be kept. `can_split` refuses tokenizers where that is not so.
"""

from __future__ import annotations

import json
import re
import threading

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

BUDGET = 64 * 2**20
"""Bytes of text and ids kept at most."""


def can_split(tokenizer: Tokenizer) -> bool:
    """True where encoding is the concatenation of the encodings of the pieces between special tokens.

    Not so where a token takes the blanks around it along, must stand alone as a word, or is sought in the normalized
    text, and where the first piece of a text is treated unlike the others.
    """
    added = tokenizer.get_added_tokens_decoder().values()
    plain = all(not (token.lstrip or token.rstrip or token.single_word or token.normalized) for token in added)
    parts = json.loads(tokenizer.to_str())
    return plain and '"prepend_scheme": "first"' not in json.dumps([parts["pre_tokenizer"], parts["normalizer"]])


class Segments:
    """Encodes piece by piece, with the least recently used pieces forgotten beyond a budget."""

    def __init__(self, tokenizer: Tokenizer, budget: int = BUDGET) -> None:
        self._tokenizer = tokenizer
        self._budget = budget
        added = {token.content: index for index, token in tokenizer.get_added_tokens_decoder().items()}
        self._special = {text: np.array([index], np.int32).tobytes() for text, index in added.items()}
        longest_first = sorted(filter(None, added), key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None
        self._kept: dict[str, bytes] = {}
        self._lock = threading.Lock()  # long texts are encoded in threads
        self.size = 0
        """Bytes kept now."""

    def encode(self, text: str) -> NDArray[np.int32]:
        """Ids of a text, int32 [P], no special tokens added."""
        pieces = [text] if self._split is None else self._split.split(text)
        parts = [self._special[piece] if at % 2 else self._piece(piece) for at, piece in enumerate(pieces) if piece]
        return np.frombuffer(b"".join(parts), np.int32)

    def _piece(self, text: str) -> bytes:
        with self._lock:
            ids = self._kept.pop(text, None)
            if ids is not None:
                self._kept[text] = ids  # the newest is last
                return ids
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids = np.array(encoding.ids, np.int32).tobytes()
        with self._lock:
            if text not in self._kept:
                self.size += _cost(text, ids)
            self._kept[text] = ids
            while self.size > self._budget:
                oldest = next(iter(self._kept))
                self.size -= _cost(oldest, self._kept.pop(oldest))
        return ids


def _cost(text: str, ids: bytes) -> int:
    return 4 * len(text) + len(ids)
