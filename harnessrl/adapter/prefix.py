"""A prefix tree of token contexts: which open samples can a prompt extend, and how far has it been seen before."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Any

import numpy as np

from harnessrl.adapter.types import Int32

NO_IDS: Int32 = np.zeros(0, dtype=np.int32)


class PrefixTree:
    """All contexts seen, as a compressed prefix tree; adding one compares each of its tokens at most once.

    The tree is kept as lines. A line is a path that ends where some context ends, stored as references into that
    call's arrays, with the other lines that branch off it. The newest context is always one unbroken line from the
    root (this object); what it leaves behind becomes a branch. That is the "access" of a link-cut tree: a context
    jumps between O(log C) lines, amortised, however many samples are open and wherever they broke off.

    ``ends`` are open samples whose context ends on this line: (depth, -sample), sorted.
    ``firsts`` are (depth, order): up to this depth the tokens of this line were first seen in that call.
    ``branches`` are (depth, token, line), sorted: at this depth the line goes on with this token instead.
    """

    __slots__ = ("branches", "ends", "firsts", "prompt", "response")

    def __init__(self, prompt: Int32 = NO_IDS, response: Int32 = NO_IDS) -> None:
        self.prompt = prompt
        self.response = response
        self.ends: list[tuple[int, int]] = []
        self.firsts: list[tuple[int, int]] = []
        self.branches: list[tuple[int, int, PrefixTree]] = []

    def add(self, prompt: Int32, response: Int32, order: int) -> tuple[int, int]:
        """Make this context the main line; (length of the prompt's longest known prefix, first call that has it)."""
        at, length = 0, len(prompt) + len(response)
        while True:
            at = common_prefix(self.prompt, self.response, prompt, response, at)
            if at < len(self.prompt) + len(self.response):
                self._cut(at)
            if at == length:
                break
            key = (at, _token(prompt, response, at))
            index = bisect_left(self.branches, key)
            if index == len(self.branches) or self.branches[index][:2] != key:
                break
            self._graft(self.branches.pop(index)[2])
        shared = min(at, len(prompt))
        first = self.firsts[bisect_left(self.firsts, (shared,))][1] if shared else 0
        self.prompt, self.response = prompt, response
        if at < length:
            self.firsts.append((length, order))
        return shared, first

    def _cut(self, at: int) -> None:
        """Turn what lies deeper than ``at`` on this line into a branch."""
        tail = PrefixTree(self.prompt, self.response)
        tail.ends = _deeper(self.ends, at)
        tail.branches = _deeper(self.branches, at)
        tail.firsts = _deeper(self.firsts, at)
        if at and (not self.firsts or self.firsts[-1][0] < at):
            self.firsts.append((at, tail.firsts[0][1]))
        insort(self.branches, (at, _token(self.prompt, self.response, at), tail))

    def _graft(self, line: PrefixTree) -> None:
        """Continue this line, which ends where ``line`` branches off, with that branch."""
        self.prompt, self.response = line.prompt, line.response
        if self.firsts and self.firsts[-1][1] == line.firsts[0][1]:
            self.firsts.pop()
        self.ends += line.ends
        self.firsts += line.firsts
        self.branches += line.branches

    def take_end(self, limit: int, only: int | None = None) -> int | None:
        """Close and return the deepest open sample on the main line that ends within ``limit`` tokens.

        Of several at one depth the one opened first; with ``only``, every other sample met is closed for good.
        """
        index = bisect_left(self.ends, (limit + 1,)) - 1
        while index >= 0:
            sample = -self.ends.pop(index)[1]
            if only is None or sample == only:
                return sample
            index -= 1
        return None

    def open_end(self, depth: int, sample: int) -> None:
        insort(self.ends, (depth, -sample))


def _deeper(items: list[Any], at: int) -> list[Any]:
    """Remove and return the items, sorted by depth, that lie deeper than ``at``."""
    if not items or items[-1][0] <= at:
        return []
    index = bisect_left(items, (at + 1,))
    tail = items[index:]
    del items[index:]
    return tail


def _token(prompt: Int32, response: Int32, at: int) -> int:
    return int(prompt[at]) if at < len(prompt) else int(response[at - len(prompt)])


def common_prefix(p: Int32, a: Int32, q: Int32, b: Int32, at: int) -> int:
    """Length of the longest common prefix of p + a and q + b, which are known to agree up to ``at``."""
    length = min(len(p) + len(a), len(q) + len(b))
    while at < length:
        x, from_x = (p, 0) if at < len(p) else (a, len(p))
        y, from_y = (q, 0) if at < len(q) else (b, len(q))
        stop = min(from_x + len(x), from_y + len(y))
        at += equal_run(x[at - from_x : stop - from_x], y[at - from_y : stop - from_y])
        if at < stop:
            break
    return at


def equal_run(x: Int32, y: Int32) -> int:
    """Number of leading equal elements of two vectors of one length; blocks bound the memory and the waste."""
    start, block, length = 0, 1024, len(x)
    while start < length:
        differs = x[start : start + block] != y[start : start + block]
        first = int(differs.argmax())  # any() would cost another pass through numpy's wrappers
        if differs[first]:
            return start + first
        start, block = start + block, 65536
    return length
