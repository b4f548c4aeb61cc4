"""Why a prompt left the tokens that were sampled: one word for the metrics, both texts and both windows for people."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from harnessrl.adapter.types import Break, Call, Int32

KINDS = ("retokenized", "template", "rewritten", "summarized", "branched", "unrelated", "diverged")
WINDOW = 16
_LOOK_BACK = 8
_LOOK_AHEAD = 64
_MARKUP = re.compile(r"(?:\s*(?:<[^<>\s]{1,48}>|\[/?[A-Z_]{2,24}\])\s*)+")
_MARK = "\0"

Decode = Callable[[list[int]], str]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drift:
    """The explanation of one break. Of the two calls, "known" is the one that arrived first, "found" the later one.

    Example: sampled ``h`` + ``aving``, sent back as ``hav`` + ``ing``: kind "retokenized", equal texts, other ids.
    """

    kind: str
    """One of KINDS."""
    position: int
    """Index of the first token of the found prompt that differs; its length where none does."""
    known_call: str
    """The call whose context (prompt + response) was there first."""
    found_call: str
    """The call whose prompt did not continue it."""
    known_ids: Int32
    """At most WINDOW tokens of that context on either side of ``position``."""
    found_ids: Int32
    """At most WINDOW tokens of that prompt on either side of ``position``."""
    known_text: str | None
    """known_ids decoded; None without ``decode``."""
    found_text: str | None
    """found_ids decoded; None without ``decode``."""


def explain_break(broken: Break, decode: Decode | None = None) -> Drift:
    """Tell why a prompt did not continue the earlier context, from the ids and, with ``decode``, from the texts.

    The first that holds:

    - ``branched``: nothing differs (one holds the other whole: a second sample of a prompt, or a context that another
      call had extended already), or the two calls continue one context with different observations.
    - ``retokenized``: the texts agree across the first differing tokens.
    - ``template``: they agree but for markup (``<|im_end|>``, ``</think>``, ``[INST]``) and whitespace next to it or at
      the end of the earlier context.
    - ``unrelated``: no sampled token is shared, and another agent spoke or most of both prompts differs.
    - ``summarized``: an older prompt with the same head was longer than the new one.
    - ``rewritten``: none of these, so the history's text was edited.

    Args:
      broken: one entry of ``Merge.breaks``.
      decode: token ids to text; it must keep special tokens. None tells only branched, unrelated and diverged.

    Returns:
      Drift.

    Source: arXiv:2608.17528, section on retokenization and merging, names the causes; the kinds and rules are ours.
    """
    arrival = {call.call_id: index for index, call in enumerate(broken.rollout.calls)}
    old, new = broken.earlier, broken.call
    if arrival[new.call_id] < arrival[old.call_id]:
        old, new = new, old
    known = np.concatenate([old.prompt_ids, old.response_ids])
    at = min(broken.position, len(new.prompt_ids))
    around = slice(max(0, at - WINDOW), at + WINDOW)
    known_ids, found_ids = known[around], new.prompt_ids[around]
    return Drift(
        kind=_kind(broken, old, new, known, at, decode),
        position=at,
        known_call=old.call_id,
        found_call=new.call_id,
        known_ids=known_ids,
        found_ids=found_ids,
        known_text=None if decode is None else decode(known_ids.tolist()),
        found_text=None if decode is None else decode(found_ids.tolist()),
    )


def _kind(broken: Break, old: Call, new: Call, known: Int32, at: int, decode: Decode | None) -> str:
    found = new.prompt_ids
    if at == len(known) or at == len(found):
        return "branched"
    if decode is not None:
        if _same_text(known, found, at, decode):
            return "retokenized"
        if _same_but_markup(known, found, at, decode):
            return "template"
    if broken.joint > 0 and at < len(broken.earlier.prompt_ids) and not _holds(found[at:], old.response_ids, decode):
        return "branched"
    if _unrelated(broken):
        return "unrelated"
    if decode is None:
        return "diverged"
    return "summarized" if _shrank(broken, new) else "rewritten"


def _same_text(known: Int32, found: Int32, at: int, decode: Decode) -> bool:
    """Whether both sides come, soon after ``at``, to token boundaries with equal text, or one ends in step."""
    start, i, j = max(0, at - _LOOK_BACK), at + 1, at + 1
    while max(i, j) <= at + _LOOK_AHEAD:
        left, right = decode(known[start:i].tolist()), decode(found[start:j].tolist())
        if left == right:
            return True
        short, long = sorted((left, right), key=len)
        if not long.startswith(short.rstrip("\ufffd")):  # the last character may be unfinished
            return False
        if (i == len(known)) if short is left else (j == len(found)):
            return long.startswith(short)
        i, j = (i + 1, j) if short is left else (i, j + 1)
    return False


def _same_but_markup(known: Int32, found: Int32, at: int, decode: Decode) -> bool:
    """Whether the texts around ``at`` agree once each run of markup, with the whitespace around it, is one mark."""
    start, stop = max(0, at - _LOOK_BACK), at + _LOOK_AHEAD
    left = _MARKUP.sub(_MARK, decode(known[start:stop].tolist()))
    right = _MARKUP.sub(_MARK, decode(found[start : stop + _LOOK_AHEAD].tolist()))
    if stop < len(known):  # there is more, and the window may end inside markup
        return right.startswith(left[: -len("<|longest_usual_markup|>")])
    left = left.rstrip().removesuffix(_MARK).rstrip()
    rest = right[len(left) :]
    return right.startswith(left) and (not rest or rest.startswith(_MARK) or rest[0].isspace())


def _holds(found: Int32, response: Int32, decode: Decode | None) -> bool:
    """Whether the sampled response comes later in the prompt, as ids or as text: then it is history, edited before."""
    if decode is not None:
        return _MARKUP.sub("", decode(response.tolist())).strip() in decode(found.tolist())
    count = len(found) - len(response) + 1
    starts = np.flatnonzero(found[: max(0, count)] == response[0])
    return any(np.array_equal(found[start : start + len(response)], response) for start in starts)


def _unrelated(broken: Break) -> bool:
    old, new = broken.earlier, broken.call
    if broken.joint or broken.position >= len(old.prompt_ids):
        return False
    return old.agent != new.agent or 2 * broken.position < min(len(old.prompt_ids), len(new.prompt_ids))


def _shrank(broken: Break, new: Call) -> bool:
    """Whether an older prompt that starts like the new one, up to the break, was longer."""
    head = new.prompt_ids[: broken.position]
    for call in broken.rollout.calls:
        if call is new:
            return False
        if len(call.prompt_ids) > len(new.prompt_ids) and np.array_equal(call.prompt_ids[: len(head)], head):
            return True
    return False
