"""Adapters under the laws: ours, through the shim that anybody's needs, and the practice of others re-implemented.

Each of the small ones does what some public trainer does or did, and each breaks a law (test_adapters.py says which).
"""

from __future__ import annotations

import importlib
from typing import Any

from harnessrl.adapter import Call, Rollout, merge_calls
from property_tests.laws import Adapter, Calls, Samples
from property_tests.toy import ToyTokenizer


# The shim: ten lines between lists of token ids and the types of a project. Copy it and put your own merge inside.
def ours(calls: Calls) -> Samples:
    rollout = Rollout(
        rollout_id="r", group_id="g", calls=[Call(call_id=str(i), **call) for i, call in enumerate(calls)]
    )
    merged = merge_calls(rollout, require_logprobs=False)
    return [
        {"token_ids": s.token_ids.tolist(), "loss_mask": s.loss_mask.tolist(), "logprobs": s.logprobs.tolist()}
        for s in merged.samples
    ]


def load(name: str) -> Adapter:
    """The function that ``--adapter MODULE:FUNCTION`` names.

    Raises:
      ValueError: the name has no colon, or the module no such function; ImportError: there is no such module.
    """
    module, colon, function = name.partition(":")
    if not colon or not callable(getattr(importlib.import_module(module), function, None)):
        raise ValueError(f"{name!r} is no function; expected MODULE:FUNCTION")
    return getattr(importlib.import_module(module), function)


def _new(call: dict[str, Any]) -> dict[str, Any]:
    sample: dict[str, Any] = {"token_ids": [], "loss_mask": [], "logprobs": []}
    _extend(sample, call, call["prompt_ids"])
    return sample


def _extend(sample: dict[str, Any], call: dict[str, Any], observed: list[int], missing: float = float("nan")) -> None:
    response, logprobs = call["response_ids"], call["logprobs"]
    sample["token_ids"] += [*observed, *response]
    sample["loss_mask"] += [False] * len(observed) + [True] * len(response)
    sample["logprobs"] += [0.0] * len(observed) + ([missing] * len(response) if logprobs is None else logprobs)


def adjacent(calls: Calls) -> Samples:
    """Extend only the sample of the call before: interleaved agents shatter each other."""
    samples: Samples = []
    for call in calls:
        known = samples[-1]["token_ids"] if samples else None
        if known is not None and call["prompt_ids"][: len(known)] == known:
            _extend(samples[-1], call, call["prompt_ids"][len(known) :])
        else:
            samples.append(_new(call))
    return samples


def in_order_of_arrival(calls: Calls) -> Samples:
    """Extend the sample with the longest fitting context, but take the calls as they arrive: late ones are lost on it."""
    samples: Samples = []
    for call in calls:
        fits = [s for s in samples if call["prompt_ids"][: len(s["token_ids"])] == s["token_ids"]]
        if fits:
            best = max(fits, key=lambda sample: len(sample["token_ids"]))
            _extend(best, call, call["prompt_ids"][len(best["token_ids"]) :])
        else:
            samples.append(_new(call))
    return samples


def one_per_call(calls: Calls) -> Samples:
    """Train every call alone: faithful, and as many samples as calls."""
    return [_new(call) for call in calls]


def without_missing_logprobs(calls: Calls) -> Samples:
    """Leave out calls without logprobs, as ``merge_calls`` does at its defaults: this breaks no law."""
    return ours([call for call in calls if call["logprobs"] is not None])


def forgetful(calls: Calls) -> None:
    """Forget to return the samples."""


def deduplicated_by_prompt(calls: Calls) -> Samples:
    """Keep the last call of equal prompts: a deliberate second sample is taken for a retry and lost."""
    return ours(list({str(call["prompt_ids"]): call for call in calls}.values()))


def missing_logprobs_as_zero(calls: Calls) -> Samples:
    """Write 0.0 where no logprob was recorded: the policy is said to have been certain of those tokens."""
    return ours([{**call, "logprobs": call["logprobs"] or [0.0] * len(call["response_ids"])} for call in calls])


def substituted(calls: Calls) -> Samples:
    """Overwrite history by what was sampled where the text agrees: trained behind a prompt that never was."""
    rollout = Rollout(
        rollout_id="r", group_id="g", calls=[Call(call_id=str(i), **call) for i, call in enumerate(calls)]
    )
    merged = merge_calls(rollout, "substitute", require_logprobs=False, tokenizer=ToyTokenizer())
    return [
        {"token_ids": s.token_ids.tolist(), "loss_mask": s.loss_mask.tolist(), "logprobs": s.logprobs.tolist()}
        for s in merged.samples
    ]


def forced_into_one(calls: Calls) -> Samples:
    """Lay all calls behind the first prompt, whatever their own prompts were."""
    if not calls:
        return []
    sample = _new(calls[0])
    for call in calls[1:]:
        _extend(sample, call, call["prompt_ids"][len(sample["token_ids"]) :])
    return [sample]
