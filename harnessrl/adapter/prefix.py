"""A prefix tree of token contexts: which open samples can a prompt extend, and how far has it been seen before."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Any

import numpy as np

from harnessrl.adapter.types import Int32

NO_IDS: Int32 = np.zeros(0, dtype=np.int32)
SHORT = 8192
"""Up to so many tokens, comparing bytes is cheaper than one numpy comparison and its result."""
BLOCK = 65536
"""Tokens compared at once."""


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

    __slots__ = ("branches", "ends", "firsts", "length", "prompt", "response")

    def __init__(self, prompt: Int32 = NO_IDS, response: Int32 = NO_IDS) -> None:
        self.prompt = prompt
        self.response = response
        self.length = len(prompt) + len(response)
        self.ends: list[tuple[int, int]] = []
        self.firsts: list[tuple[int, int]] = []
        self.branches: list[tuple[int, int, PrefixTree]] = []

    def add(self, prompt: Int32, response: Int32, order: int) -> int:
        """Make this context the main line; the length of the prompt's longest prefix that was known before."""
        length = len(prompt) + len(response)
        at = self._first_difference(prompt, response)
        while True:
            if at < self.length:
                self._cut(at)
            if at == length or not self.branches or self.branches[-1][0] < at:
                break
            key = (at, _token(prompt, response, at))
            index = bisect_left(self.branches, key)
            if index == len(self.branches) or self.branches[index][:2] != key:
                break
            self._graft(self.branches.pop(index)[2])
            at = common_prefix(self.prompt, self.response, prompt, response, at)
        self.prompt, self.response, self.length = prompt, response, length
        if at < length:
            self.firsts.append((length, order))
        return min(at, len(prompt))

    def _first_difference(self, prompt: Int32, response: Int32) -> int:
        """How far this line and a context agree.

        Agents in turn part where the first branch is: one look there spares comparing what lies behind it.
        """
        if self.branches:
            fork = self.branches[0][0]
            if fork < len(prompt) and fork < len(self.prompt) and prompt[fork] != self.prompt[fork]:
                return equal_run(prompt[:fork], self.prompt[:fork])
        return common_prefix(self.prompt, self.response, prompt, response, 0)

    def first_with(self, depth: int) -> int:
        """The first call whose context holds the first ``depth`` tokens of the main line."""
        return self.firsts[bisect_left(self.firsts, (depth,))][1] if depth else 0

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
        self.prompt, self.response, self.length = line.prompt, line.response, line.length
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

    def open_end(self, sample: int) -> None:
        """Let an open sample end where the main line does."""
        insort(self.ends, (self.length, -sample))


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
    len_p, len_q = len(p), len(q)
    whole = len_p + len(a)
    if at == 0 and whole <= len_q and whole <= SHORT:  # an agent's next prompt repeats all of p + a
        head, tail = q[:len_p], q[len_p:whole]
        if head.tobytes() == p.tobytes() and tail.tobytes() == a.tobytes():
            return whole
    length = min(whole, len_q + len(b))
    while at < length:
        x, i = (p, at) if at < len_p else (a, at - len_p)
        y, j = (q, at) if at < len_q else (b, at - len_q)
        run = min(len(x) - i, len(y) - j)
        same = equal_run(x[i : i + run], y[j : j + run])
        at += same
        if same < run:
            break
    return at


def equal_run(x: Int32, y: Int32) -> int:
    """Number of leading equal elements of two vectors of one length; blocks bound the memory and the waste."""
    start, length = 0, len(x)
    if length <= SHORT and x.tobytes() == y.tobytes():
        return length
    block = BLOCK if x[-1] == y[-1] else 256  # where the ends differ, the first difference may be near
    while start < length:
        differs = x[start : start + block] != y[start : start + block]
        first = int(differs.argmax())  # any() would cost another pass through numpy's wrappers
        if differs[first]:
            return start + first
        start, block = start + block, min(4 * block, BLOCK)
    return length
