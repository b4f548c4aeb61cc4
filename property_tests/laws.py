"""The laws of merging, for any adapter: lists of token ids in, samples out.

An adapter is a function of one rollout's calls, in order of arrival:

    merge([{"prompt_ids": [1, 2], "response_ids": [3], "logprobs": [-0.5]}, ...])   # logprobs may be None
      -> [{"token_ids": [1, 2, 3], "loss_mask": [0, 0, 1], "logprobs": [0.0, 0.0, -0.5]}, ...]

Every law is a function of an adapter and such calls that raises LawBroken and says what happened. ``LAWS`` names them.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from harnessrl.adapter import Call, Rollout
from property_tests.reference import fewest_samples
from property_tests.stories import Broken

Calls = list[dict[str, Any]]
Samples = list[dict[str, Any]]
Adapter = Callable[[Calls], Samples]


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


def every_sampled_token_is_trained_once(adapter: Adapter, calls: Calls) -> None:
    """Sampled tokens in = trained tokens out: none is lost, none is trained twice, none is made up."""
    given = Counter(token for call in calls for token in call["response_ids"])
    trained = Counter(
        token
        for sample in adapter(calls)
        for token, mask in zip(sample["token_ids"], sample["loss_mask"], strict=True)
        if mask
    )
    if given != trained:
        lost, extra = sorted((given - trained).elements()), sorted((trained - given).elements())
        raise LawBroken(_story("every sampled token is trained once", calls, adapter, f"lost {lost}, extra {extra}"))


def each_token_stands_behind_its_own_prompt(adapter: Adapter, calls: Calls) -> None:
    """Every trained run of tokens is the response of some call, behind exactly the prompt it was sampled from."""
    if _explain(adapter(calls), calls, logprobs=False) is None:
        text = "no assignment of calls to the trained tokens has every call's own prompt in front of its response"
        raise LawBroken(_story("each token stands behind its own prompt", calls, adapter, text))


def each_token_keeps_its_own_logprob(adapter: Adapter, calls: Calls) -> None:
    """Logprobs are the engine's own, of that very call; one that was not recorded is NaN or None, never a number."""
    samples = adapter(calls)
    if _explain(samples, calls, logprobs=False) is not None and _explain(samples, calls, logprobs=True) is None:
        text = "trained tokens carry logprobs that their call does not have (a call without any may be left out)"
        raise LawBroken(_story("each token keeps its own logprob", calls, adapter, text))


def the_samples_are_the_fewest_possible(adapter: Adapter, calls: Calls) -> None:
    """As many samples as a minimum path cover of the prefix order has; fewer cannot be faithful."""
    found, fewest = len(adapter(calls)), fewest_samples([Call(call_id=str(i), **call) for i, call in enumerate(calls)])
    if found != fewest:
        raise LawBroken(_story("the samples are the fewest possible", calls, adapter, f"{found} instead of {fewest}"))


def order_of_arrival_does_not_matter(adapter: Adapter, calls: Calls) -> None:
    """A late call finds its place: the same samples come out whatever the order of arrival."""
    known = _multiset(adapter(calls))
    for other in (calls[::-1], sorted(calls, key=lambda call: (len(call["prompt_ids"]), str(call)))):
        if _multiset(adapter(other)) != known:
            text = f"other samples when they arrive as {[calls.index(call) for call in other]}: {adapter(other)}"
            raise LawBroken(_story("order of arrival does not matter", calls, adapter, text))


def merging_is_pure(adapter: Adapter, calls: Calls) -> None:
    """The input is not touched, and the same input gives the same samples."""
    before = copy.deepcopy(calls)
    first, second = repr(adapter(calls)), repr(adapter(calls))
    if calls != before or first != second:
        what = "the input was changed" if calls != before else f"the second time it gave {second}"
        raise LawBroken(_story("merging is pure", before, adapter, what))


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
        while sample < len(samples) and True not in map(bool, samples[sample]["loss_mask"][at:]):
            sample, at = sample + 1, 0
        if sample == len(samples):
            return []
        at += list(map(bool, samples[sample]["loss_mask"][at:])).index(True)
        for index, call in enumerate(calls):
            if index not in used and _fits(samples[sample], at, call, logprobs):
                rest = place(sample, at + len(call["response_ids"]), used | {index})
                if rest is not None:
                    return [(sample, index), *rest]
        return None

    return place(0, 0, frozenset())


def _fits(sample: dict[str, Any], at: int, call: dict[str, Any], logprobs: bool) -> bool:
    stop = at + len(call["response_ids"])
    if list(sample["token_ids"][:stop]) != call["prompt_ids"] + call["response_ids"] or at != len(call["prompt_ids"]):
        return False
    if not all(sample["loss_mask"][at:stop]):
        return False
    found = sample["logprobs"][at:stop]
    if logprobs and call["logprobs"] is None:
        return all(value is None or math.isnan(value) for value in found)
    return not logprobs or all(math.isclose(x, y, rel_tol=1e-6) for x, y in zip(found, call["logprobs"], strict=True))


def _multiset(samples: Samples) -> Counter[str]:
    """Samples by tokens and masks, whatever their order."""
    return Counter(repr((list(s["token_ids"]), [bool(mask) for mask in s["loss_mask"]])) for s in samples)


def _story(law: str, calls: Calls, adapter: Adapter, what: str) -> str:
    lines = [f"law broken: {law}", "  calls, in order of arrival:"]
    lines += [
        f"    {i}: {c['prompt_ids']} -> {c['response_ids']}, logprobs {c['logprobs']}" for i, c in enumerate(calls)
    ]
    lines += ["  samples (trained tokens in brackets):"]
    for sample in adapter(calls):
        pairs = zip(sample["token_ids"], sample["loss_mask"], strict=True)
        tokens = " ".join(f"[{token}]" if mask else str(token) for token, mask in pairs)
        lines.append(f"    {tokens}, logprobs {sample['logprobs']}")
    return "\n".join([*lines, f"  {what}"])
