"""The laws of merging, for any adapter: lists of token ids in, samples out.

An adapter is a function of one rollout's calls, in order of arrival:

    merge([{"prompt_ids": [1, 2], "response_ids": [3], "logprobs": [-0.5]}, ...])   # logprobs may be None
      -> [{"token_ids": [1, 2, 3], "loss_mask": [0, 0, 1], "logprobs": [0.0, 0.0, -0.5]}, ...]

Calls without logprobs are either all trained, with NaN or None in their places, or all left out.
Every law is a function of an adapter and such calls that raises LawBroken and says what happened. ``LAWS`` names them.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from harnessrl.adapter import Call, Rollout
from property_tests.reference import fewest_samples
from property_tests.stories import Broken

Calls = list[dict[str, Any]]
Samples = list[dict[str, Any]]
Adapter = Callable[[Calls], Samples]

COLUMNS = ("token_ids", "loss_mask", "logprobs")


class LawBroken(Broken):
    """An adapter broke a law."""


def as_calls(rollout: Rollout) -> Calls:
    """The calls of a rollout as plain lists; those that no trainer would train are left out."""
    kept = [call for call in rollout.calls if call.delivered and call.trainable and not call.constrained]
    return [
        {
            "prompt_ids": call.prompt_ids.tolist(),
            "response_ids": call.response_ids.tolist(),
            "logprobs": None if call.logprobs is None else call.logprobs.tolist(),
        }
        for call in kept
        if len(call.prompt_ids) and len(call.response_ids)
    ]


def samples_of(adapter: Adapter, calls: Calls) -> Samples:
    """What an adapter returns, as plain lists; LawBroken where it is something else than samples."""
    found = adapter(calls)
    if not isinstance(found, Sequence):
        raise _unreadable(calls, f"the adapter returned {found!r}, which is no list")
    samples = []
    for index, sample in enumerate(found):
        if not isinstance(sample, Mapping) or not all(name in sample for name in COLUMNS):
            raise _unreadable(calls, f"sample {index} is {sample!r}")
        try:
            columns = {name: list(sample[name]) for name in COLUMNS}
        except TypeError:
            raise _unreadable(calls, f"sample {index} is {sample!r}") from None
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) > 1:
            raise _unreadable(calls, f"the columns of sample {index} have different lengths: {lengths}")
        columns["loss_mask"] = [bool(mask) for mask in columns["loss_mask"]]
        samples.append(columns)
    return samples


def _unreadable(calls: Calls, what: str) -> LawBroken:
    wanted = "a list of {'token_ids': [...], 'loss_mask': [...], 'logprobs': [...]}, of equal lengths"
    return LawBroken("\n".join(["this is no list of samples", *_told(calls), f"  {what}", f"  expected: {wanted}"]))


def due(samples: Samples, calls: Calls) -> Calls:
    """The calls that must be trained: all, or, for an adapter that leaves out calls without logprobs, the others.

    It does so where as many tokens are trained as the others have; which tokens they are is for the laws to say.
    """
    known = [call for call in calls if call["logprobs"] is not None]
    trained = sum(sum(sample["loss_mask"]) for sample in samples)
    return known if trained == sum(len(call["response_ids"]) for call in known) else calls


def every_sampled_token_is_trained_once(adapter: Adapter, calls: Calls) -> None:
    """Sampled tokens in = trained tokens out: none is lost, none is trained twice, none is made up.

    Calls without logprobs may be left out, all of them.
    """
    samples = samples_of(adapter, calls)
    given = Counter(token for call in due(samples, calls) for token in call["response_ids"])
    trained = Counter(
        token
        for sample in samples
        for token, mask in zip(sample["token_ids"], sample["loss_mask"], strict=True)
        if mask
    )
    if given != trained:
        lost, extra = sorted((given - trained).elements()), sorted((trained - given).elements())
        text = f"lost {lost}, extra {extra} (calls without logprobs may be left out, all of them)"
        raise LawBroken(_story("every sampled token is trained once", calls, samples, text))


def each_token_stands_behind_its_own_prompt(adapter: Adapter, calls: Calls) -> None:
    """Every trained run of tokens is the response of some call, behind exactly the prompt it was sampled from."""
    samples = samples_of(adapter, calls)
    if _explain(samples, calls, logprobs=False) is None:
        text = "no assignment of calls to the trained tokens has every call's own prompt in front of its response"
        raise LawBroken(_story("each token stands behind its own prompt", calls, samples, text))


def each_token_keeps_its_own_logprob(adapter: Adapter, calls: Calls) -> None:
    """Logprobs are the engine's own, of that very call; one that was not recorded is NaN or None, never a number."""
    samples = samples_of(adapter, calls)
    if _explain(samples, calls, logprobs=False) is not None and _explain(samples, calls, logprobs=True) is None:
        text = "trained tokens carry logprobs that their call does not have (a call without any may be left out)"
        raise LawBroken(_story("each token keeps its own logprob", calls, samples, text))


def the_samples_are_the_fewest_possible(adapter: Adapter, calls: Calls) -> None:
    """As many samples as a minimum path cover of the prefix order has; fewer cannot be faithful."""
    samples = samples_of(adapter, calls)
    trained = [Call(call_id=str(i), **call) for i, call in enumerate(due(samples, calls))]
    found, fewest = len(samples), fewest_samples(trained)
    if found != fewest:
        raise LawBroken(_story("the samples are the fewest possible", calls, samples, f"{found} instead of {fewest}"))


def order_of_arrival_does_not_matter(adapter: Adapter, calls: Calls) -> None:
    """A late call finds its place: the same samples come out whatever the order of arrival."""
    samples = samples_of(adapter, calls)
    for other in (calls[::-1], sorted(calls, key=lambda call: (len(call["prompt_ids"]), str(call)))):
        found = samples_of(adapter, other)
        if _multiset(found) != _multiset(samples):
            text = f"other samples when they arrive as {[calls.index(call) for call in other]}: {found}"
            raise LawBroken(_story("order of arrival does not matter", calls, samples, text))


def merging_is_pure(adapter: Adapter, calls: Calls) -> None:
    """The input is not touched, and the same input gives the same samples."""
    before = copy.deepcopy(calls)
    first, second = samples_of(adapter, calls), samples_of(adapter, calls)
    if calls != before or repr(first) != repr(second):
        what = "the input was changed" if calls != before else f"the second time it gave {second}"
        raise LawBroken(_story("merging is pure", before, first, what))


LAWS = {
    law.__name__: law
    for law in (
        every_sampled_token_is_trained_once,
        each_token_stands_behind_its_own_prompt,
        each_token_keeps_its_own_logprob,
        the_samples_are_the_fewest_possible,
        order_of_arrival_does_not_matter,
        merging_is_pure,
    )
}


def _explain(samples: Samples, calls: Calls, *, logprobs: bool) -> list[tuple[int, int]] | None:
    """Give each trained position to a call, each call used at most once: (sample, call) pairs, or None.

    A response starts where its prompt ends, so a trained run can only begin with a call whose prompt has that length.
    Calls with equal ids may fit the same place, hence the search.
    """

    def place(sample: int, at: int, used: frozenset[int]) -> list[tuple[int, int]] | None:
        while sample < len(samples) and True not in samples[sample]["loss_mask"][at:]:
            sample, at = sample + 1, 0
        if sample == len(samples):
            return []
        at += samples[sample]["loss_mask"][at:].index(True)
        for index, call in enumerate(calls):
            if index not in used and _fits(samples[sample], at, call, logprobs):
                rest = place(sample, at + len(call["response_ids"]), used | {index})
                if rest is not None:
                    return [(sample, index), *rest]
        return None

    return place(0, 0, frozenset())


def _fits(sample: dict[str, Any], at: int, call: dict[str, Any], logprobs: bool) -> bool:
    stop = at + len(call["response_ids"])
    if sample["token_ids"][:stop] != call["prompt_ids"] + call["response_ids"] or at != len(call["prompt_ids"]):
        return False
    if not all(sample["loss_mask"][at:stop]):
        return False
    found = sample["logprobs"][at:stop]
    if logprobs and call["logprobs"] is None:
        return all(value is None or math.isnan(value) for value in found)
    return not logprobs or all(math.isclose(x, y, rel_tol=1e-6) for x, y in zip(found, call["logprobs"], strict=True))


def _multiset(samples: Samples) -> Counter[str]:
    """Samples by tokens and masks, whatever their order."""
    return Counter(repr((sample["token_ids"], sample["loss_mask"])) for sample in samples)


def _told(calls: Calls) -> list[str]:
    lines = [
        f"    {i}: {c['prompt_ids']} -> {c['response_ids']}, logprobs {c['logprobs']}" for i, c in enumerate(calls)
    ]
    return ["  calls, in order of arrival:", *lines]


def _story(law: str, calls: Calls, samples: Samples, what: str) -> str:
    lines = [f"law broken: {law}", *_told(calls), "  samples (trained tokens in brackets):"]
    for sample in samples:
        pairs = zip(sample["token_ids"], sample["loss_mask"], strict=True)
        tokens = " ".join(f"[{token}]" if mask else str(token) for token, mask in pairs)
        lines.append(f"    {tokens}, logprobs {sample['logprobs']}")
    return "\n".join([*lines, f"  {what}"])
