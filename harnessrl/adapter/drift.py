"""Why a prompt left the tokens that were sampled: one word for the metrics, both texts and both windows for people."""

from __future__ import annotations

import re
import string
import unicodedata
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
_EDGE = _MARK + string.whitespace

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
    - ``summarized``: the agent had come further from the same head before, and never takes that history up again.
    - ``unrelated``: no sampled token is shared, nor is what was said in one call history in the other. Another agent
      that begins differently (under a quarter of the shorter prompt is shared) may quote it.
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
        if _same_but_markup(known, found, at, len(old.prompt_ids), decode):
            return "template"
    quotes = old.agent != new.agent and _short_head(broken, at)  # a conversation of its own, whatever it repeats
    held = not quotes and _holds(found[at:], old.response_ids, decode)
    if at < len(broken.earlier.prompt_ids) and not held:
        # The two calls begin alike and go different ways; neither has the other in its history.
        if broken.joint:
            return "branched"
        if decode is None or not _summarized(broken, new, at):
            return "unrelated"
    if decode is None:
        return "diverged"
    return "summarized" if not held and _summarized(broken, new, at) else "rewritten"


def _same_text(known: Int32, found: Int32, at: int, decode: Decode) -> bool:
    """Whether both sides come, soon after ``at``, to token boundaries with equal text, or one ends in step.

    Texts are taken apart into letters and accents (NFD) first: some tokenizers compose them before they encode.
    """
    start, i, j = max(0, at - _LOOK_BACK), at + 1, at + 1
    while max(i, j) <= at + _LOOK_AHEAD:
        sides = (known[start:i], found[start:j])
        left, right = (unicodedata.normalize("NFD", decode(side.tolist())) for side in sides)
        if left == right:
            return True
        short, long = sorted((left, right), key=len)
        if not long.startswith(short.rstrip("\ufffd")):  # the last character may be unfinished
            return False
        if (i == len(known)) if short is left else (j == len(found)):
            return long.startswith(short)
        i, j = (i + 1, j) if short is left else (i, j + 1)
    return False


def _same_but_markup(known: Int32, found: Int32, at: int, joint: int, decode: Decode) -> bool:
    """Whether the texts around ``at`` agree once each run of markup, with the whitespace around it, is one mark.

    Both are ignored at ``joint``, where the sampled tokens of ``known`` begin, though the role's name may stand there.
    """
    start, stop = max(0, at - _LOOK_BACK), at + _LOOK_AHEAD
    joint = joint if start < joint < stop else start
    sides = (known[start:joint], known[joint:stop], found[start : stop + _LOOK_AHEAD])
    head, left, right = (_MARKUP.sub(_MARK, decode(side.tolist())) for side in sides)
    head = head.rstrip(_EDGE)
    if not right.startswith(head):
        return False
    rest = right[len(head) :]
    left, right = left.lstrip(_EDGE), rest.lstrip(_EDGE)
    if stop < len(known):  # there is more, and the window may end inside markup
        return right.startswith(left[: -len("<|longest_usual_markup|>")])
    left = left.rstrip().removesuffix(_MARK).rstrip()
    rest = right[len(left) :] if left else rest
    return right.startswith(left) and (not rest or rest.startswith(_MARK) or rest[0].isspace())


def _holds(found: Int32, response: Int32, decode: Decode | None) -> bool:
    """Whether the sampled response comes later in the prompt, as ids or, by text, its last part as the end of a line."""
    if decode is not None:
        spoken = [part.strip() for part in _MARKUP.split(decode(response.tolist())) if part.strip()]
        text = _MARKUP.sub("\n", decode(found.tolist()))
        return bool(spoken) and re.search(re.escape(spoken[-1]) + r"\s*?(\n|$)", text) is not None
    count = len(found) - len(response) + 1
    starts = np.flatnonzero(found[: max(0, count)] == response[0])
    return any(np.array_equal(found[start : start + len(response)], response) for start in starts)


def _summarized(broken: Break, new: Call, at: int) -> bool:
    """Whether the agent had come further from the same head before, and never took that history up again."""
    if _short_head(broken, at):
        return False
    calls, head = broken.rollout.calls, new.prompt_ids[:at]
    now = calls.index(new)
    before = [call for call in calls[:now] if call.agent == new.agent and _starts(call, head)]
    longest = max(before, key=lambda call: len(call.prompt_ids), default=new)
    grew = any(_starts(longest, call.prompt_ids) for call in before if len(call.prompt_ids) < len(longest.prompt_ids))
    if not grew or len(longest.prompt_ids) <= len(new.prompt_ids):
        return False
    return not any(_starts(call, longest.prompt_ids[: at + 1]) for call in calls[now + 1 :])


def _short_head(broken: Break, at: int) -> bool:
    """Whether the two calls share less than a quarter of the shorter prompt."""
    return 4 * at < min(len(broken.earlier.prompt_ids), len(broken.call.prompt_ids))


def _starts(call: Call, ids: Int32) -> bool:
    return np.array_equal(call.prompt_ids[: len(ids)], ids)
