"""A break told to a person: what was sampled, what came back, where the prefix broke."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class Broken(AssertionError):
    """Something does not hold; the message is the story."""


Decode = Callable[[list[int]], str]


def story(decode: Decode, known: Sequence[int], found: Sequence[int], kind: str, *, window: int = 6) -> str:
    """The tokens on either side of the first difference between what was there and what came back."""
    at = next((i for i, (x, y) in enumerate(zip(known, found, strict=False)) if x != y), min(len(known), len(found)))
    lines = [f"the prefix broke at token {at} of {len(known)}: {kind}"]
    lines.append(f"  up to there                 {_tokens(decode, known[max(0, at - window) : at])}")
    lines.append(f"  what was sampled, or sent   {_tokens(decode, known[at : at + window])}")
    lines.append(f"  what came back              {_tokens(decode, found[at : at + window])}")
    return "\n".join(lines)


def _tokens(decode: Decode, ids: Sequence[int]) -> str:
    """Each token as its text and id: 'h'(15) 'aving'(51)."""
    return " ".join(f"{decode([index])!r}({index})" for index in ids) or "(nothing)"
