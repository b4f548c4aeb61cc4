"""What the adapter's benchmark runs: each case names its work, its floor and its goal, and grows through three sizes."""

from __future__ import annotations

import statistics
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from harnessrl.adapter import Call, Rollout, merge_calls, pack, plan_updates, rollout_advantages, token_weights
from harnessrl.adapter.packer import COLUMNS
from harnessrl.adapter.tree import pack_tree
from harnessrl.bench import peers

Timed = Callable[[], Any]
Times = Mapping[str, Sequence[float]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of the table, before it is measured."""

    work: str
    """What is done."""
    calls: Mapping[str, Timed | None]
    """What is timed in turn: "ours", "floor" where there is one, and peers; None where a peer is not installed."""
    floor: str = ""
    """What the floor does; empty where there is none."""
    goal: float | None = None
    """Largest ours / floor; None where there is no goal."""
    holds: bool = True
    """Whether what a goal says besides time is kept (bins, step time)."""
    growth: Sequence[tuple[int, Timed]] = ()
    """Three sizes of the same work and the calls that do it."""
    note: Callable[[Times], str] = field(default=lambda times: "")
    """What the time does not say, from the seconds of every round."""


def cases() -> Iterator[Case]:
    """All cases, in the order of the table; each is made when it is asked for."""
    yield from merging()
    yield from mathematics()
    yield from planning()
    yield from packing()


def conversation(calls: int, tokens: int, *, agents: int = 1, break_every: int = 0, seed: int = 0) -> Rollout:
    """A rollout of append-only agents in turn; every call adds `tokens` to its agent's context.

    Args:
        calls: of all agents together.
        tokens: a call adds, two fifths of them sampled.
        agents: that take turns.
        break_every: after so many calls the last response comes back with its first token changed; 0 is never.
        seed: of the token ids.
    """
    rng = np.random.default_rng(seed)
    contexts = [np.empty(0, dtype=np.int32) for _ in range(agents)]
    sampled, out = 2 * tokens // 5, []
    for index in range(calls):
        context = contexts[index % agents]
        if break_every and index and index % break_every == 0:
            context = context.copy()
            context[-sampled] += 1
        prompt = np.concatenate([context, rng.integers(0, 100_000, tokens - sampled, dtype=np.int32)])
        response = rng.integers(0, 100_000, sampled, dtype=np.int32)
        contexts[index % agents] = np.concatenate([prompt, response])
        logprobs = np.full(sampled, -0.5, dtype=np.float32)
        out.append(Call(call_id=str(index), prompt_ids=prompt, response_ids=response, logprobs=logprobs))
    return Rollout(rollout_id=f"r{seed}", group_id="g", calls=out, reward=1.0)


def merging() -> Iterator[Case]:
    """Long contexts, with breaks and with agents in turn, and batches of rollouts with longer and shorter calls."""

    def long(agents: int = 1, break_every: int = 0) -> list[list[Rollout]]:
        sizes = (50, 100, 200)
        return [[conversation(calls, 327 * agents, agents=agents, break_every=break_every)] for calls in sizes]

    def batches(rollouts: int, tokens: int) -> list[list[Rollout]]:
        made = [conversation(20, tokens, seed=seed) for seed in range(rollouts)]
        return [made[: rollouts // 4], made[: rollouts // 2], made]

    yield _merge("merge 200 calls, context of 65,400", long())
    yield _merge("the same, a break every 20 calls", long(break_every=20))
    yield _merge("merge 200 calls of 2 agents in turn", long(agents=2), agents=2)
    yield _merge("merge 128 rollouts x 20 calls, 8,000", batches(128, 400))
    yield _merge("merge 256 rollouts x 20 calls, 600", batches(256, 30))


def _merge(work: str, made: Sequence[list[Rollout]], agents: int = 1) -> Case:
    rollouts = made[-1]
    calls = sum(len(rollout.calls) for rollout in rollouts)
    samples, peak = _memory(rollouts)

    def note(times: Times) -> str:
        joined = statistics.median(ours / other for ours, other in zip(times["ours"], times["joined"], strict=True))
        each = min(times["ours"]) / calls
        return (
            f"{samples:,} samples; {1e6 * each:.1f} us a call; {joined:.2f} x comparing contexts joined beforehand; "
            f"peak memory {peak:.2f} x the samples"
        )

    return Case(
        work=work,
        calls={
            "ours": partial(_merge_all, rollouts),
            "floor": compare(rollouts, agents),
            "joined": compare_joined(rollouts, agents),
            "tinker-cookbook": peers.tinker_merge(rollouts),
            "SkyRL": peers.skyrl_merge(rollouts),
        },
        floor="numpy compares each prompt with the prompt and response before it",
        goal=2.0,
        growth=[(_prompt_tokens(some), partial(_merge_all, some)) for some in made],
        note=note,
    )


def _merge_all(rollouts: Sequence[Rollout]) -> None:
    """Results are dropped at once, as the floor's are."""
    for rollout in rollouts:
        merge_calls(rollout)


def _prompt_tokens(rollouts: Sequence[Rollout]) -> int:
    return sum(len(call.prompt_ids) for rollout in rollouts for call in rollout.calls)


def _pairs(rollouts: Sequence[Rollout], agents: int) -> list[tuple[Call, Call]]:
    """Each call and the one that its agent made before it."""
    return [pair for rollout in rollouts for pair in zip(rollout.calls, rollout.calls[agents:], strict=False)]


def compare(rollouts: Sequence[Rollout], agents: int) -> Timed:
    """One comparison of the data where it lies: each prompt with its agent's previous prompt and response."""
    arrays = [(old.prompt_ids, old.response_ids, new.prompt_ids) for old, new in _pairs(rollouts, agents)]

    def run() -> None:
        for prompt, response, following in arrays:
            start, stop = len(prompt), len(prompt) + len(response)
            (prompt == following[:start]).all()
            (response == following[start:stop]).all()

    return run


def compare_joined(rollouts: Sequence[Rollout], agents: int) -> Timed:
    """The same, with every prompt and response joined before the clock starts: half the calls of numpy."""
    arrays = []
    for old, new in _pairs(rollouts, agents):
        context = np.concatenate([old.prompt_ids, old.response_ids])
        arrays.append((context, new.prompt_ids[: len(context)]))

    def run() -> None:
        for context, following in arrays:
            (context == following).all()

    return run


def _memory(rollouts: Sequence[Rollout]) -> tuple[int, float]:
    """Samples of all; peak memory of merging the first 32, over the size of their samples' columns."""
    tracemalloc.start()
    merged = [merge_calls(rollout) for rollout in rollouts[:32]]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    samples = [sample for merge in merged for sample in merge.samples]
    merged += [merge_calls(rollout) for rollout in rollouts[32:]]
    columns = ("token_ids", "loss_mask", "logprobs", "policy_version")
    size = sum(getattr(sample, name).nbytes for sample in samples for name in columns)
    return sum(len(merge.samples) for merge in merged), peak / size


def mathematics() -> Iterator[Case]:
    """Advantages and weights."""
    rng = np.random.default_rng(0)
    group_ids = [f"g{index // 8}" for index in range(4096)]
    rewards = rng.random(4096)
    many = [(rng.random(count), [f"g{index // 8}" for index in range(count)]) for count in (4096, 16384, 65536)]
    yield Case(
        work="GRPO advantages, 4096 rollouts, groups of 8",
        calls={
            "ours": partial(rollout_advantages, rewards, group_ids),
            "floor": partial(two_pass, rewards, group_ids),
            "verl": peers.verl_grpo(rewards, np.array(group_ids), vectorized=False),
            "verl vectorized": peers.verl_grpo(rewards, np.array(group_ids), vectorized=True),
        },
        floor="groups numbered by a dict, then two passes of float64",
        goal=2.0,
        growth=[(len(values), partial(rollout_advantages, values, ids)) for values, ids in many],
    )
    lengths, owner = rng.integers(1, 500, 40_000), np.arange(40_000) // 3
    sizes = (10_000, 20_000, 40_000)
    yield Case(
        work="weights of 10,000 samples",
        calls={
            "ours": partial(token_weights, lengths[:10_000], owner[:10_000]),
            "floor": partial(np.unique, owner[:10_000], return_inverse=True),
        },
        floor="np.unique of the rollout index",
        growth=[(size, partial(token_weights, lengths[:size], owner[:size])) for size in sizes],
    )


def two_pass(rewards: np.ndarray, group_ids: Sequence[str]) -> np.ndarray:
    """Means, then squared deviations from them."""
    seen: dict[str, int] = {}
    group = np.array([seen.setdefault(name, len(seen)) for name in group_ids])
    size = np.bincount(group)
    deviation = rewards - (np.bincount(group, weights=rewards) / size)[group]
    return deviation / (np.sqrt(np.bincount(group, weights=deviation**2) / (size - 1))[group] + 1e-6)


def lognormal(count: int) -> np.ndarray:
    """Lengths of 64 to 32,768 tokens."""
    return np.clip(np.random.default_rng(0).lognormal(8.0, 1.0, count), 64, 32768).astype(np.int64)


def planning() -> Iterator[Case]:
    """4096 samples of lognormal length over 8 ranks: in packs of a token limit, without one, and in 512 micro-batches."""
    lengths = lognormal(4096)
    total = int(lengths.sum())
    bins = len(peers.first_fit_decreasing(lengths.tolist(), 32768))

    def plan(lengths: np.ndarray, room: int) -> Any:
        owner = np.arange(len(lengths)) // 2
        return plan_updates(lengths, owner, num_updates=1, world_size=8, max_tokens=room).updates[0]

    for work, room, others in (
        ("plan 4096 samples, 8 ranks, packs of 32,768", 32768, {}),
        ("the same, one pack a rank", total, {"verl": peers.verl_partitions(lengths, 8)}),
        ("the same, 64 packs a rank", int(1.02 * total / 512), {"verl": peers.verl_partitions(lengths, 512)}),
    ):
        update = plan(lengths, room)
        packs = sum(len(pack) > 0 for rank in update.ranks for pack in rank)
        says = f"{packs} packs (at least {-(-total // room)}); step time {1 / update.balance:.4f} x total cost / ranks"
        calls: dict[str, Timed | None] = {"ours": partial(plan, lengths, room), **others}
        floor, goal, holds = "", None, True
        if room == 32768:
            calls["floor"] = partial(peers.first_fit_decreasing, lengths.tolist(), room)
            calls["SkyRL"] = peers.skyrl_bins(lengths.tolist(), room)
            floor, goal = f"first-fit decreasing that tries each bin in turn: {bins} bins", 1.0
            holds = packs <= bins and 1 / update.balance <= 1.03
        growth = [
            (n, partial(plan, lognormal(n), room * n // 4096 if room > 50_000 else room)) for n in (4096, 8192, 16384)
        ]
        yield Case(
            work=work,
            calls=calls,
            floor=floor,
            goal=goal,
            holds=holds,
            growth=growth,
            note=lambda times, says=says: says,
        )


def packing() -> Iterator[Case]:
    """Samples whose chains break, as flat columns and as trees."""
    chains = [merge_calls(conversation(20, 400, break_every=5, seed=seed)).samples for seed in range(128)]
    made = [[sample for samples in chains[:rollouts] for sample in samples] for rollouts in (32, 64, 128)]
    samples = made[0]
    done, tree = pack(samples, range(len(samples))), pack_tree(samples, range(len(samples)))
    yield Case(
        work=f"pack {len(samples)} samples, {len(done.token_ids):,} tokens",
        calls={
            "ours": lambda: pack(samples, range(len(samples))),
            "floor": lambda: [getattr(done, name).copy() for name in COLUMNS],
        },
        floor="one copy of its columns",
        growth=[(_tokens(some), partial(pack, some, range(len(some)))) for some in made],
    )
    yield Case(
        work="pack the same as 32 trees",
        calls={"ours": lambda: pack_tree(samples, range(len(samples)))},
        growth=[(_tokens(some), partial(pack_tree, some, range(len(some)))) for some in made],
        note=lambda times: f"{tree.flat_tokens / len(tree.token_ids):.2f} x fewer tokens to compute",
    )


def _tokens(samples: Sequence[Any]) -> int:
    return sum(len(sample.token_ids) for sample in samples)
