"""Bin packing for the planner: first-fit decreasing, and an even spread over a given number of slots.

Both take from one structure, the lengths not yet placed in decreasing order: filling one bin with the longest that
still fits, again and again, is first-fit decreasing seen from the bin, and needs no search over bins.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]


class Unplaced:
    """Lengths not yet placed, longest first; taking one is constant time but for path compression."""

    def __init__(self, lengths: Int64, loads: Float64) -> None:
        self.order = np.argsort(-lengths, kind="stable")
        self.lengths: list[int] = lengths[self.order].tolist()
        self.loads: list[float] = loads[self.order].tolist()
        self._by_length = [-length for length in self.lengths]
        self._by_load = [-load for load in self.loads]
        self._next = list(range(len(self.lengths) + 1))  # _next[i] == i: still here; else look further on

    def longest(self, at: int = 0) -> int:
        """The first place from `at` on that still holds a length; len(lengths) when there is none."""
        following = self._next
        found = at
        while following[found] != found:
            found = following[found]
        while following[at] != found:
            following[at], at = found, following[at]
        return found

    def take(self, place: int) -> None:
        """Remove the length at `place`."""
        self._next[place] = place + 1

    def fill(self, room: int, height: float = math.inf) -> list[int]:
        """Take the longest length that fits what is left of `room` and `height`, until none does; return the places.

        A longest length over `room` is taken alone.
        """
        first = self.longest()
        places: list[int] = []
        if first < len(self.lengths) and self.lengths[first] > room:
            self.take(first)
            return [first]
        following, lengths, loads, place = self._next, self.lengths, self.loads, first
        while True:
            place = bisect_left(self._by_length, -room, place)
            if height < math.inf:
                place = max(place, bisect_left(self._by_load, -height))
            while following[place] != place:  # longest(), written out: this loop is what planning costs
                following[place] = place = following[following[place]]
            if place == len(lengths):
                return places
            following[place] = place + 1
            places.append(place)
            room -= lengths[place]
            height -= loads[place]

    def unsorted(self, value_of_place: Int64) -> Int64:
        """Values of the places as values of the lengths in their given order."""
        out = np.empty_like(value_of_place)
        out[self.order] = value_of_place
        return out


def first_fit_decreasing(lengths: Int64, room: int) -> Int64:
    """Put each length, longest first, into the first bin with room; a longer one has a bin of its own.

    Worked: lengths 3, 6, 4, 7 into bins of 10 are placed as 7 | 6, 4 into the second | 3 beside 7: bins 0, 1, 1, 0.

    Args:
        lengths: int64 [S], not negative.
        room: of every bin, positive.

    Returns:
        int64 [S], the bin of each length; bins are numbered from 0 without gaps.
    """
    unplaced = Unplaced(lengths, lengths.astype(np.float64))
    bin_of_place = np.empty(len(lengths), dtype=np.int64)
    placed, bins = 0, 0
    while placed < len(lengths):
        places = unplaced.fill(room)
        bin_of_place[places] = bins
        placed, bins = placed + len(places), bins + 1
    return unplaced.unsorted(bin_of_place)


def spread(lengths: Int64, loads: Float64, room: int, rows: int, width: int) -> Int64 | None:
    """Spread lengths over rows of `width` slots so that the sum over rows of the heaviest slot is small.

    While the longest length weighs more than an even share of what is left, it sets the height of a row, and the row's
    other slots are filled to that height; what is left goes, longest first, to the lightest slot of the other rows. A
    slot that once had no room is passed over from then on, which keeps the work linear.
    Worked: 8, 2, 2, 2, 1, 1 in 2 rows of 2 slots: 8 > 16/4, so row 0 is 8 | 2 2 2 1 1 and row 1 stays empty.

    Args:
        lengths: int64 [S], not negative.
        loads: float64 [S], what to balance; a longer length weighs no less. The lengths themselves are neutral.
        room: of every slot, in lengths; a longer length has a slot of its own.
        rows: number of rows, positive.
        width: slots of a row, positive.

    Returns:
        int64 [S], the slot of each length, row by row; None where they do not fit this way.
    """
    unplaced, slots = Unplaced(lengths, loads), rows * width
    slot_of_place = np.empty(len(lengths), dtype=np.int64)
    left, slot = float(loads.sum()), 0
    while (first := unplaced.longest()) < len(lengths) and slot + width < slots:
        height = unplaced.loads[first]
        if height * (slots - slot) <= left:
            break
        for _ in range(width):
            places = unplaced.fill(room, height)
            slot_of_place[places] = slot
            left -= sum(unplaced.loads[place] for place in places)
            slot += 1
    lightest = [(0.0, other, 0) for other in range(slot, slots)]
    while first < len(lengths):
        length = unplaced.lengths[first]
        while lightest and lightest[0][2] and lightest[0][2] + length > room:
            heapq.heappop(lightest)
        if not lightest:
            return None
        load, slot, filled = lightest[0]
        heapq.heapreplace(lightest, (load + unplaced.loads[first], slot, filled + length))
        slot_of_place[first] = slot
        unplaced.take(first)
        first = unplaced.longest(first)
    return unplaced.unsorted(slot_of_place)
