"""Slow, obvious references: lists and loops, nothing clever, to stand beside the fast functions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from harnessrl.adapter import Call, PackedTree, Rollout, Sample


def context(call: Call) -> list[int]:
    return call.prompt_ids.tolist() + call.response_ids.tolist()


def starts_with(ids: list[int], prefix: list[int]) -> bool:
    return ids[: len(prefix)] == prefix


def common(x: list[int], y: list[int]) -> int:
    """Length of the longest common prefix."""
    return next((i for i, (a, b) in enumerate(zip(x, y, strict=False)) if a != b), min(len(x), len(y)))


def skip_reason(
    call: Call, rollout: Rollout, *, require_logprobs: bool = True, max_sample_tokens: int | None = None
) -> str | None:
    """The first reason not to train a call."""
    tries = [other for other in rollout.calls if other.request_id == call.request_id and other.delivered]
    if len(call.prompt_ids) == 0:
        return "missing_ids"
    if len(call.response_ids) == 0:
        return "empty_response"
    if not call.delivered:
        return "undelivered"
    if call.request_id is not None and call is not tries[-1]:
        return "superseded"
    if call.constrained:
        return "constrained"
    if not call.trainable:
        return "not_trainable"
    if call.logprobs is None and require_logprobs:
        return "missing_logprobs"
    if max_sample_tokens is not None and len(context(call)) > max_sample_tokens:
        return "too_long"
    return None


def merge_order(calls: Sequence[Call]) -> list[Call]:
    return sorted(calls, key=lambda c: (len(c.prompt_ids), c.prompt_ids.tolist(), c.response_ids.tolist(), c.call_id))


def merge(calls: Sequence[Call], strategy: str = "best_effort") -> list[list[Call]]:
    """The calls of each sample: every call looks at every sample, one after the other."""
    samples: list[list[Call]] = []
    for call in calls if strategy == "adjacent" else merge_order(calls):
        open_samples = {"per_call": [], "adjacent": samples[-1:], "best_effort": samples}[strategy]
        fits = [sample for sample in open_samples if starts_with(call.prompt_ids.tolist(), context(sample[-1]))]
        if fits:
            max(fits, key=lambda sample: len(context(sample[-1]))).append(call)  # max keeps the first of equals
        else:
            samples.append([call])
    return samples


def fewest_samples(calls: Sequence[Call]) -> int:
    """Minimum path cover of "a's context is a prefix of b's prompt": calls minus a maximum matching (Kuhn)."""
    after = [[j for j, b in enumerate(calls) if starts_with(b.prompt_ids.tolist(), context(a))] for a in calls]
    before: dict[int, int] = {}  # b -> the a that it continues

    def place(a: int, tried: set[int]) -> bool:
        for b in after[a]:
            if b not in tried:
                tried.add(b)
                if b not in before or place(before[b], tried):
                    before[b] = a
                    return True
        return False

    return len(calls) - sum(place(a, set()) for a in range(len(calls)))


def first_nearest(call: Call, earlier: Sequence[Call]) -> tuple[Call, int]:
    """The first of the earlier calls whose context shares the longest prefix with the prompt, and its length."""
    shared = [common(context(other), call.prompt_ids.tolist()) for other in earlier]
    return earlier[shared.index(max(shared))], max(shared)


def advantages(rewards: Sequence[float], groups: Sequence[int], estimator: str, eps: float) -> list[float]:
    """One rollout after the other, with statistics taken by plain loops over its group or the batch."""
    scored = [i for i, reward in enumerate(rewards) if not math.isnan(reward)]
    centred = {}
    for i in scored:
        group = [rewards[j] for j in scored if groups[j] == groups[i]]
        pool = [rewards[j] for j in scored] if estimator == "reinforce_pp" else group
        centred[i] = rewards[i] - math.fsum(pool) / len(pool) if min(pool) != max(pool) else 0.0
        if estimator == "rloo" and len(group) > 1:
            centred[i] *= len(group) / (len(group) - 1)
    out = []
    for i in range(len(rewards)):
        pool = scored if estimator.startswith("reinforce") else [j for j in scored if groups[j] == groups[i]]
        ddof = 0 if estimator.startswith("reinforce") else 1
        divisor = 1.0
        if estimator not in ("dr_grpo", "rloo") and len(pool) > ddof:
            divisor = math.sqrt(math.fsum(centred[j] ** 2 for j in pool) / (len(pool) - ddof)) + eps
        out.append(centred.get(i, 0.0) / divisor if centred.get(i, 0.0) else 0.0)
    return out


def token_weights(
    lengths: Sequence[int], rollouts: Sequence[int], mode: str, num_rollouts: int | None, scale: float
) -> list[float]:
    """The weight of each trained token, from the definition."""
    trained = [s for s, length in enumerate(lengths) if length > 0]
    R = num_rollouts or len({rollouts[s] for s in trained})
    out = []
    for s, length in enumerate(lengths):
        of_rollout = sum(lengths[t] for t in trained if rollouts[t] == rollouts[s])
        weight = {
            "token_mean": lambda: 1 / sum(lengths),
            "seq_mean": lambda n=length: 1 / (len(trained) * n),
            "rollout_mean": lambda n=of_rollout: 1 / (R * n),
            "constant": lambda: 1 / (R * scale),
        }[mode]
        out.append(weight() if length > 0 else 0.0)
    return out


def tree_nodes(samples: Sequence[Sample]) -> int:
    """Distinct prefixes of each rollout, and one more for each further time that one's last token is trained."""
    times_trained: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for sample in samples:
        ids = sample.token_ids.tolist()
        for at in range(len(ids)):
            times_trained[sample.rollout_id, tuple(ids[: at + 1])] += int(sample.loss_mask[at])
    return sum(max(1, times) for times in times_trained.values())


def path(packed: PackedTree, node: int) -> list[int]:
    """The nodes from a root to this one, by climbing."""
    nodes = []
    while node >= 0:
        nodes.append(node)
        node = int(packed.parent[node])
    return nodes[::-1]
