"""What the adapter costs, beside floors and peers timed in the same run: ``python -m harnessrl.bench.adapter``.

Timings of one row are taken in turn, round by round, and the best of each counts: on a shared machine only the ratios of
one row mean anything. Peers are called where they are installed (``bench/peers.py``); nothing here needs them.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from harnessrl.adapter import Call, Rollout, Sample, merge_calls, pack, plan_updates, rollout_advantages, token_weights
from harnessrl.adapter.packer import COLUMNS
from harnessrl.adapter.tree import pack_tree
from harnessrl.bench import peers

Timed = Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table; times in seconds."""

    work: str
    """What is done."""
    ours: float
    """By harnessrl."""
    floor: float | None = None
    """What the work cannot be had below; None where there is no obvious floor."""
    peers: Mapping[str, float] = field(default_factory=dict)
    """By others, where installed."""
    note: str = ""
    """What the time does not say: counts, quality, growth."""

    @property
    def ratio(self) -> float | None:
        """ours / floor."""
        return None if self.floor is None else self.ours / self.floor


def run(seconds: float = 1.0) -> list[Row]:
    """Measure everything, print the table, return its rows.

    Args:
        seconds: to spend on the timings of each row, at least; more is steadier.
    """
    rows = [*_merging(seconds), *_mathematics(seconds), *_planning(seconds), *_packing(seconds)]
    _print(rows)
    return rows


def best_times(calls: Mapping[str, Timed | None], seconds: float) -> dict[str, float]:
    """The best time of each call, taken in turn until `seconds` are spent; a peer that fails is left out."""
    running = {name: call for name, call in calls.items() if call is not None}
    for name, call in list(running.items()):
        try:
            call()
        except Exception:
            if name in ("ours", "floor"):
                raise
            del running[name]
    best = dict.fromkeys(running, float("inf"))
    gc.collect()
    gc.disable()
    try:
        start = time.perf_counter()
        while True:
            for name, call in running.items():
                before = time.perf_counter()
                call()
                best[name] = min(best[name], time.perf_counter() - before)
            if time.perf_counter() - start > seconds:
                return best
    finally:
        gc.enable()


def _row(work: str, calls: Mapping[str, Timed | None], seconds: float, note: str = "") -> Row:
    times = best_times(calls, seconds)
    ours, floor = times.pop("ours"), times.pop("floor", None)
    return Row(work=work, ours=ours, floor=floor, peers=times, note=note)


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
        call = Call(call_id=str(index), prompt_ids=prompt, response_ids=response, logprobs=logprobs)
        out.append(call)
    return Rollout(rollout_id=f"r{seed}", group_id="g", calls=out, reward=1.0)


def _compare(rollouts: Sequence[Rollout], agents: int) -> Timed:
    """The floor of merging: each prompt is compared once with its agent's previous prompt and response."""
    pairs = []
    for rollout in rollouts:
        for before, after in zip(rollout.calls, rollout.calls[agents:], strict=False):
            context = np.concatenate([before.prompt_ids, before.response_ids])
            pairs.append((context, after.prompt_ids[: len(context)]))
    return lambda: [bool((context == prompt).all()) for context, prompt in pairs]


def _merging(seconds: float) -> list[Row]:
    rows = []
    cases = (
        ("merge 200 calls, 65,400-token context, append-only", [conversation(200, 327)], 1),
        ("merge the same, a break every 20 calls", [conversation(200, 327, break_every=20)], 1),
        ("merge 200 calls of two agents in turn", [conversation(200, 654, agents=2)], 2),
        ("merge 128 rollouts x 20 calls x 8k context", [conversation(20, 400, seed=seed) for seed in range(128)], 1),
    )
    for work, rollouts, agents in cases:
        calls = {
            "ours": lambda rollouts=rollouts: [merge_calls(rollout) for rollout in rollouts],
            "floor": _compare(rollouts, agents),
            "tinker-cookbook": peers.tinker_merge(rollouts),
            "SkyRL": peers.skyrl_merge(rollouts),
        }
        samples = [sample for rollout in rollouts for sample in merge_calls(rollout).samples]
        tracemalloc.start()
        kept = [merge_calls(rollout) for rollout in rollouts]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        size = sum(_bytes(sample) for merge in kept for sample in merge.samples)
        rows.append(_row(work, calls, seconds, f"{len(samples)} samples; peak memory {peak / size:.2f} x the samples"))
    growth = []
    for count in (50, 100, 200):
        rollout = conversation(count, 327)
        tokens = sum(len(call.prompt_ids) for call in rollout.calls)
        growth.append((tokens, best_times({"ours": lambda rollout=rollout: merge_calls(rollout)}, seconds / 3)["ours"]))
    return [*rows, _linear("merge, by prompt tokens", growth)]


def _bytes(sample: Sample) -> int:
    return sum(getattr(sample, name).nbytes for name in ("token_ids", "loss_mask", "logprobs", "policy_version"))


def _mathematics(seconds: float) -> list[Row]:
    rng = np.random.default_rng(0)
    group_ids = [f"g{index // 8}" for index in range(4096)]
    rewards = rng.random(4096)
    rows = [
        _row(
            "GRPO advantages, 4096 rollouts in groups of 8",
            {
                "ours": lambda: rollout_advantages(rewards, group_ids),
                "floor": lambda: _two_pass(rewards, group_ids),
                "verl": peers.verl_grpo(rewards, np.array(group_ids), vectorized=False),
                "verl vectorized": peers.verl_grpo(rewards, np.array(group_ids), vectorized=True),
            },
            seconds,
            "floor: np.unique, then two passes of float64",
        )
    ]
    growth = []
    for count in (4096, 16384, 65536):
        ids, values = np.arange(count) // 8, rng.random(count)
        calls = {"ours": lambda values=values, ids=ids: rollout_advantages(values, ids)}
        growth.append((count, best_times(calls, seconds / 3)["ours"]))
    rows.append(_linear("advantages, by rollouts", growth))
    lengths, owner = rng.integers(1, 500, 10_000), np.arange(10_000) // 3
    calls = {"ours": lambda: token_weights(lengths, owner), "floor": lambda: np.unique(owner, return_inverse=True)}
    return [*rows, _row("weights of 10,000 samples", calls, seconds, "floor: np.unique of the rollout index")]


def _two_pass(rewards: np.ndarray, group_ids: Sequence[str]) -> np.ndarray:
    """Mean, then squared deviations, over groups found by sorting their ids."""
    group = np.unique(group_ids, return_inverse=True)[1]
    size = np.bincount(group)
    deviation = rewards - (np.bincount(group, weights=rewards) / size)[group]
    return deviation / (np.sqrt(np.bincount(group, weights=deviation**2) / (size - 1))[group] + 1e-6)


def _lognormal(count: int) -> np.ndarray:
    return np.clip(np.random.default_rng(0).lognormal(8.0, 1.0, count), 64, 32768).astype(np.int64)


def _planning(seconds: float) -> list[Row]:
    lengths = _lognormal(4096)
    owner, total = np.arange(4096) // 2, int(lengths.sum())

    def plan(room: int, ranks: int, lengths: np.ndarray = lengths, owner: np.ndarray = owner) -> Any:
        return plan_updates(lengths, owner, num_updates=1, world_size=ranks, max_tokens=room).updates[0]

    rows = []
    room_512 = int(1.02 * total / 512)
    for work, room, ranks, others in (
        ("balance 4096 lognormal samples on 8 ranks", total, 8, {"verl": peers.verl_partitions(lengths, 8)}),
        ("the same into 512 micro-batches of 8 ranks", room_512, 8, {"verl": peers.verl_partitions(lengths, 512)}),
        ("the same into 32,768-token bins", 32768, 1, {"SkyRL": peers.skyrl_bins(lengths, 32768)}),
        ("the same into 32,768-token packs of 8 ranks", 32768, 8, {}),
    ):
        update = plan(room, ranks)
        packs = sum(len(pack) > 0 for rank in update.ranks for pack in rank)
        note = f"{packs} packs (at least {-(-total // room)}), step time {1 / update.balance:.5f} x even"
        rows.append(_row(work, {"ours": lambda room=room, ranks=ranks: plan(room, ranks), **others}, seconds, note))
    growth = []
    for count in (2048, 8192, 32768):
        arguments = {"lengths": _lognormal(count), "owner": np.arange(count) // 2}
        calls = {"ours": lambda arguments=arguments: plan(32768, 8, **arguments)}
        growth.append((count, best_times(calls, seconds / 3)["ours"]))
    return [*rows, _linear("plan, by samples", growth)]


def _packing(seconds: float) -> list[Row]:
    rollouts = [conversation(20, 400, break_every=5, seed=seed) for seed in range(32)]
    samples = [sample for rollout in rollouts for sample in merge_calls(rollout).samples]
    weights = np.full(len(samples), 0.5)
    done = pack(samples, range(len(samples)), weights=weights, advantages=weights)
    flat = {
        "ours": lambda: pack(samples, range(len(samples)), weights=weights, advantages=weights),
        "floor": lambda: [getattr(done, name).copy() for name in COLUMNS],
    }
    tree = {"ours": lambda: pack_tree(samples, range(len(samples)), weights=weights, advantages=weights)}
    packed = pack_tree(samples, range(len(samples)))
    ratio = packed.flat_tokens / len(packed.token_ids)
    return [
        _row(
            f"pack {len(samples)} samples, {packed.flat_tokens:,} tokens",
            flat,
            seconds,
            "floor: one copy of its columns",
        ),
        _row("pack the same as 32 trees", tree, seconds, f"{ratio:.2f} x fewer tokens to compute"),
    ]


def _linear(work: str, growth: Sequence[tuple[int, float]]) -> Row:
    """Nanoseconds a unit over three sizes."""
    cost = ", ".join(f"{size:,}: {1e9 * spent / size:.3g}" for size, spent in growth)
    return Row(work=f"linear: {work}", ours=growth[-1][1], note=f"ns each at {cost}")


def _print(rows: Sequence[Row]) -> None:
    """A table, by rich where it is installed."""
    titles = ("work", "floor ms", "ours ms", "ratio", "peers ms", "note")
    lines = [
        (
            row.work,
            "-" if row.floor is None else f"{1e3 * row.floor:.2f}",
            f"{1e3 * row.ours:.2f}",
            "-" if row.ratio is None else f"{row.ratio:.2f}",
            ", ".join(f"{name} {1e3 * spent:.1f}" for name, spent in row.peers.items()) or "-",
            row.note,
        )
        for row in rows
    ]
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        width = [max(len(line[column]) for line in (titles, *lines)) for column in range(len(titles))]
        for line in (titles, *lines):
            print("  ".join(cell.ljust(size) for cell, size in zip(line, width, strict=True)).rstrip())
        return
    table = Table(*titles)
    for line in lines:
        table.add_row(*line)
    Console().print(table)


if __name__ == "__main__":
    run()
