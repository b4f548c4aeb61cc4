"""Which samples share an optimizer update, a rank and a pack: whole rollouts first, then balanced packs.

Suffixes: S samples, K packs. Updates are counted in rollouts, packs in tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from harnessrl.adapter import checks
from harnessrl.adapter.bins import first_fit_decreasing, spread

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]
Cost = Callable[[Int64], float | Float64]

QUADRATIC = 1 / 32768
"""b / a of the default cost: attention over 32,768 tokens costs what all other layers cost, as in models of a few B."""
TOLERANCE = 0.02
"""First-fit packs stand where their step time is within this share of total cost / ranks."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Update:
    """One optimizer update. Example: two ranks of two packs, one of them empty: ranks = (([0, 2], [3]), ([1], []))."""

    ranks: tuple[tuple[Int64, ...], ...]
    """ranks[r][k]: int64, the samples of pack k on rank r, ascending; all ranks have the same number of packs. An empty
    pack has no samples and zero weight, and its forward and backward are run all the same (FSDP waits for them)."""
    step_time: float
    """Sum over k of the cost of the slowest rank's pack k, in units of the cost function."""
    total_cost: float
    """Sum of the costs of all packs; step_time is at least total_cost / ranks."""

    @property
    def samples(self) -> Int64:
        """All samples of the update, ascending."""
        packs = [pack for packs in self.ranks for pack in packs]
        return np.sort(np.concatenate(packs))

    @property
    def balance(self) -> float:
        """total_cost / (ranks * step_time): 1.0 where no rank ever waits; 1.0 where nothing costs anything."""
        return self.total_cost / (len(self.ranks) * self.step_time) if self.step_time > 0 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """Every sample exactly once: ``plan.updates[u].ranks[r][k]`` holds the samples of pack k."""

    updates: tuple[Update, ...]
    """In the order in which to run them; empty where there are no samples."""


def plan_updates(
    lengths: ArrayLike,
    rollout_index: ArrayLike,
    *,
    rollouts_per_update: int | None = None,
    num_updates: int | None = None,
    world_size: int,
    max_tokens: int,
    group_index: ArrayLike | None = None,
    oversize: str = "raise",
    cost: Cost | None = None,
    seed: int = 0,
) -> Plan:
    """Plan optimizer updates, ranks and packs such that seven promises hold.

    1. Every sample is planned exactly once.
    2. All samples of a rollout, and with group_index all rollouts of a group, lie in one update.
    3. Updates are counted in rollouts and nothing is dropped to make counts fit. With rollouts_per_update each takes
       whole groups up to that number, by first-fit decreasing, so no two could be one; the smaller ones come last (a
       larger group is an update of its own). With num_updates rollouts are spread evenly, and there are fewer updates
       only where there are fewer groups.
    4. All ranks of an update have the same number of packs; an empty pack is legal.
    5. No pack holds more than max_tokens, except a longer sample alone under oversize="alone".
    6. The same arguments give the same plan.
    7. The step time, sum over k of max over ranks of cost(pack k), is balanced at the packs a rank that first-fit
       decreasing needs, ceil(bins / ranks). Its bins stand where the step time is within 2% of total cost / ranks;
       else samples are spread over all slots of all ranks if that is faster. Packs of similar cost run side by side.
       On lognormal lengths the step time is within 3% of total cost / ranks from about 100 samples a rank on; with 32
       a rank it was up to 10% over, since a few long samples set the pace.

    Args:
        lengths: int [S], tokens of each whole sample, context included (or of each tree, see ``tree_items``).
        rollout_index: int [S], equal for samples of one rollout.
        rollouts_per_update: rollouts in an update, at most; exactly one of this and num_updates is given.
        num_updates: updates to spread the rollouts over.
        world_size: number of ranks.
        max_tokens: tokens a pack may hold.
        group_index: int [S], equal for samples of one group; None lets a group's rollouts part (neutral).
        oversize: "raise" refuses a sample longer than max_tokens, "alone" gives it a pack of its own.
        cost: takes the lengths of a pack's samples, int64 [n], and returns its cost, or one cost a sample, which are
            summed; the backend's (a dense mask costs ``lengths.sum() ** 2``). None is L + L^2 / 32768 a sample.
        seed: of the shuffle that decides which groups of one size share an update, and in which order updates run.

    Returns:
        Plan.

    Raises:
        ValueError: lengths that differ or are no whole numbers, a rollout in two groups, a sample over max_tokens,
            counts that are not positive whole numbers, a seed that is not a whole number of 0 or more (None would give
            another plan each time), a cost that is no function or not finite.

    Source: arXiv:2608.17528 (v1.0), scheduling: all samples of a rollout see one policy.
    """
    length_S, rollout_S = checks.wholes(lengths, "lengths"), checks.integers(rollout_index, "rollout_index")
    if len(length_S) != len(rollout_S):
        raise ValueError(f"lengths has length {len(length_S)}, rollout_index has length {len(rollout_S)}")
    _check_counts(rollouts_per_update, num_updates, world_size, max_tokens)
    checks.whole(seed, "seed", 0, "0 or more")
    if cost is not None and not callable(cost):
        raise ValueError(f"cost must be a function of lengths or None, got {cost!r}")
    if oversize not in ("raise", "alone"):
        raise ValueError(f'oversize {oversize!r} is unknown; allowed: "raise", "alone"')
    too_long_S = np.flatnonzero(length_S > max_tokens)
    if len(too_long_S) and oversize == "raise":
        at = int(too_long_S[0])
        raise ValueError(
            f"sample {at} has {length_S[at]} tokens, max_tokens is {max_tokens} ({len(too_long_S)} samples are longer); "
            'raise max_tokens, or oversize="alone" gives each a pack of its own'
        )
    update_S = _updates(rollout_S, group_index, rollouts_per_update, num_updates, seed)
    by_update = np.argsort(update_S, kind="stable")
    parts = np.split(by_update, np.flatnonzero(np.diff(update_S[by_update])) + 1) if len(update_S) else []
    return Plan(updates=tuple(_plan_update(part, length_S[part], world_size, max_tokens, cost) for part in parts))


def _check_counts(rollouts_per_update: int | None, num_updates: int | None, world_size: int, max_tokens: int) -> None:
    if (rollouts_per_update is None) == (num_updates is None):
        raise ValueError("give exactly one of rollouts_per_update and num_updates")
    counts = {"rollouts_per_update": rollouts_per_update, "num_updates": num_updates}
    for name, count in (counts | {"world_size": world_size, "max_tokens": max_tokens}).items():
        if count is None and name in counts:
            continue
        checks.whole(count, name, 1, "1 or more")


def _updates(
    rollout_S: Int64, group_index: ArrayLike | None, per_update: int | None, num_updates: int | None, seed: int
) -> Int64:
    """The update of every sample: shuffled groups, each whole, counted in rollouts."""
    ids, first, rollout_S = np.unique(rollout_S, return_index=True, return_inverse=True)
    group_R = np.arange(len(ids))
    if group_index is not None:
        group_S = checks.integers(group_index, "group_index")
        if len(group_S) != len(rollout_S):
            raise ValueError(f"group_index has length {len(group_S)}, rollout_index has length {len(rollout_S)}")
        torn_S = np.flatnonzero(group_S != group_S[first][rollout_S])
        if len(torn_S):
            at = int(torn_S[0])
            other = group_S[first][rollout_S][at]
            raise ValueError(f"rollout {ids[rollout_S[at]]} is in group {other} and, by sample {at}, in {group_S[at]}")
        _, group_R = np.unique(group_S[first], return_inverse=True)
    size_G = np.bincount(group_R)
    shuffled_G = np.random.default_rng(seed).permutation(len(size_G))
    update_G = np.zeros(len(size_G), dtype=np.int64)
    if num_updates is not None:
        update_G[shuffled_G] = _even(size_G[shuffled_G].tolist(), num_updates)
    elif per_update is not None:
        update_G[shuffled_G] = _full(size_G[shuffled_G], per_update)
    return update_G[group_R][rollout_S]


def _even(sizes: list[int], num_updates: int) -> list[int]:
    """The update of each group, in the order given: the largest goes to the update that has the fewest rollouts."""
    heap = [(0, update) for update in range(num_updates)]
    update_of = [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        rollouts, update = heap[0]
        heapq.heapreplace(heap, (rollouts + sizes[place], update))
        update_of[place] = update
    return update_of


def _full(size_G: Int64, per_update: int) -> Int64:
    """The update of each group, in the order given: first-fit decreasing; fuller updates first, equals in that order.

    Worked: sizes 1, 8, 1, 8, 6 into updates of 8 are placed as 8 | 8 | 6, 1, 1. All are full, so that with the first
    group runs first: updates 0, 1, 0, 2, 0.
    """
    bin_G = first_fit_decreasing(size_G, per_update)
    filled = np.bincount(bin_G, weights=size_G)
    first = np.unique(bin_G, return_index=True)[1]
    update_of_bin = np.argsort(np.lexsort((first, -filled)))
    return update_of_bin[bin_G]


def _plan_update(samples: Int64, length_S: Int64, ranks: int, max_tokens: int, cost: Cost | None) -> Update:
    """Pack one update: first-fit decreasing, or spread over all slots where ranks would wait for each other."""
    bin_S = first_fit_decreasing(length_S, max_tokens)
    packs = -(-(int(bin_S.max()) + 1) // ranks)
    cost_K = _pack_costs(bin_S, length_S, packs * ranks, cost)
    for by_cost in (True, False):  # by tokens is coarser, but fits where balancing costs leaves a slot overfull
        if _step_time(cost_K, ranks) * ranks <= (1 + TOLERANCE) * cost_K.sum():
            break
        load_S = _loads(length_S, cost) if by_cost else length_S.astype(np.float64)
        slot_S = spread(length_S, load_S, max_tokens, packs, ranks)
        slot_K = cost_K if slot_S is None else _pack_costs(slot_S, length_S, packs * ranks, cost)
        if slot_S is not None and _step_time(slot_K, ranks) < _step_time(cost_K, ranks):
            bin_S, cost_K = slot_S, slot_K
    members = _members(samples, bin_S, packs * ranks)
    rows = np.argsort(-cost_K, kind="stable").reshape(packs, ranks)
    rows[1::2] = rows[1::2, ::-1]  # the dearest pack of a row falls to either end in turn, so ranks' totals match too
    return Update(
        ranks=tuple(tuple(members[pack] for pack in rows[:, rank]) for rank in range(ranks)),
        step_time=_step_time(cost_K, ranks),
        total_cost=float(cost_K.sum()),
    )


def _loads(length_S: Int64, cost: Cost | None) -> Float64:
    """Each sample's own cost where a pack costs the sum of its samples, else its tokens."""
    if cost is None:
        return length_S + QUADRATIC * length_S.astype(np.float64) ** 2
    unique, inverse = np.unique(length_S, return_inverse=True)
    own_S = np.array([float(np.sum(cost(unique[at : at + 1]))) for at in range(len(unique))])[inverse]
    return own_S if np.isclose(own_S.sum(), np.sum(cost(length_S))) else length_S.astype(np.float64)


def _pack_costs(pack_S: Int64, length_S: Int64, packs: int, cost: Cost | None) -> Float64:
    """The cost of every pack; an empty one costs nothing."""
    if cost is None:
        return np.bincount(pack_S, weights=_loads(length_S, None), minlength=packs).astype(np.float64)
    members = _members(length_S, pack_S, packs)
    cost_K = np.array([float(np.sum(cost(part))) if len(part) else 0.0 for part in members])
    if not np.isfinite(cost_K).all():
        part = members[int(np.argmin(np.isfinite(cost_K)))]
        raise ValueError(f"cost of lengths {part.tolist()} is {cost_K[~np.isfinite(cost_K)][0]}; it must be finite")
    return cost_K


def _members(value_S: Int64, pack_S: Int64, packs: int) -> list[Int64]:
    """The values of each pack's samples, in their order."""
    by_pack = value_S[np.argsort(pack_S, kind="stable")]
    stops = np.cumsum(np.bincount(pack_S, minlength=packs)).tolist()
    return [by_pack[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]


def _step_time(cost_K: Float64, ranks: int) -> float:
    """Sum over k of max over ranks, packs of similar cost side by side."""
    return float(np.sort(cost_K)[::-1][::ranks].sum())
