"""What would pass unseen: masks that get lost, True taken for 1, overflow, options that mean something else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from harnessrl.adapter import (
    Call,
    Rollout,
    Sample,
    Span,
    assign_credit,
    from_agent_lightning,
    from_vllm_chat,
    from_vllm_completions,
    merge_calls,
    pack,
    pack_tree,
    plan_updates,
    rollout_advantages,
    token_weights,
    tree_items,
    unpack,
    unpack_tree,
)
from tests.adapter.making import make_sample

SAMPLE = make_sample([1, 2, 3], [(1, 3)], rollout="r7")
ROLLOUT = Rollout(rollout_id="r7", group_id="g", calls=[])
HIDDEN = np.ma.array([1, 2], mask=[False, True])


def call(**fields):
    return Call(**{"call_id": "c0", "prompt_ids": [1, 2], "response_ids": [3, 4]} | fields)


def plan(**options):
    arguments = {"lengths": [1, 2], "rollout_index": [0, 1], "num_updates": 1, "world_size": 1, "max_tokens": 9}
    return plan_updates(**arguments | options)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: call(prompt_ids=HIDDEN), "prompt_ids"),
        (lambda: call(response_ids=HIDDEN), "response_ids"),
        (lambda: call(logprobs=-HIDDEN.astype(np.float32)), "logprobs"),
        (lambda: call(policy_version=HIDDEN), "policy_version"),
        (lambda: replace(SAMPLE, loss_mask=np.ma.array([0, 1, 1], mask=[0, 0, 1])), "loss_mask"),
        (lambda: rollout_advantages(HIDDEN, ["a", "a"]), "rewards"),
        (lambda: rollout_advantages([1, 0], HIDDEN), "group_ids"),
        (lambda: assign_credit(1.0, HIDDEN), "call_rewards"),
        (lambda: token_weights(HIDDEN, [0, 1]), "lengths"),
        (lambda: token_weights([1, 1], HIDDEN), "rollout_index"),
        (lambda: plan(lengths=HIDDEN), "lengths"),
        (lambda: plan(rollout_index=HIDDEN), "rollout_index"),
        (lambda: plan(group_index=HIDDEN), "group_index"),
        (lambda: pack([SAMPLE], np.ma.array([0], mask=[False])), "order"),
        (lambda: pack([SAMPLE, SAMPLE], [0], weights=HIDDEN), "weights"),
        (lambda: pack_tree([SAMPLE], [0], advantages=[np.ma.array([0.0, 1, 2])]), "advantages"),
        (lambda: unpack(pack([SAMPLE], [0]), np.ma.array([0.0, 1, 2])), "column"),
        (lambda: unpack_tree(pack_tree([SAMPLE], [0]), np.ma.array([0.0, 1, 2])), "column"),
    ],
)
def test_a_masked_array_is_refused(make, name):
    with pytest.raises(ValueError, match=f"{name} is a masked array, whose mask would be lost"):
        make()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: call(prompt_ids=[2, True]), r"call 'c0': prompt_ids\[1\] is True, among numbers"),
        (lambda: call(response_ids=(False, 4)), r"call 'c0': response_ids\[0\] is False, among numbers"),
        (lambda: call(logprobs=[False, -1.0]), r"call 'c0': logprobs\[0\] is False, among numbers"),
        (lambda: call(policy_version=[1, np.True_]), r"call 'c0': policy_version\[1\] is True, among numbers"),
        (lambda: rollout_advantages([1.0, True], ["a", "a"]), r"rewards\[1\] is True, among numbers"),
        (lambda: rollout_advantages([None, True, 0.5], ["a"] * 3), r"rewards\[1\] is True, among numbers"),
        (lambda: token_weights([2, True], [0, 0]), r"lengths\[1\] is True, among numbers"),
        (lambda: plan(rollout_index=[False, 1]), r"rollout_index\[0\] is False, among numbers"),
        (lambda: pack([SAMPLE, SAMPLE], [True, 0]), r"order\[0\] is True, among numbers"),
    ],
)
def test_truth_values_among_numbers_are_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_zeros_and_ones_are_numbers():
    assert call(prompt_ids=[0, 1, 1], logprobs=[0.0, 0]).prompt_ids.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: assign_credit(1, [1e308, -1e308, 3], "mean_preserving"), "as mean_preserving credit, overflow float64"),
        (lambda: assign_credit(1, [1.0, 2], "mean_preserving", call_tokens=[2**62, 1]), None),
        (lambda: assign_credit(1e308, [1e308], "discounted"), "as discounted credit, overflow float64: entry 0 .* inf"),
        (lambda: token_weights([1], [0], "constant", scale=1e-320), "scale 1e-320 is too small: weights overflow"),
        (lambda: token_weights([1], [0], "constant", scale=1e300, num_rollouts=10**18), "weights of constant come out as 0"),
        (
            lambda: rollout_advantages([1e300, -1e300], "aa", "rloo", unit="sample", samples_per_rollout=[10**10] * 2),
            "rewards, as rloo advantages, overflow float64: entry 0",
        ),
        (lambda: rollout_advantages([10**400, 0], "aa"), "rewards must be a vector of numbers"),
        (lambda: Rollout(rollout_id="r7", group_id="g", calls=[], reward=10**400), "rollout 'r7': reward is beyond float64"),
        (lambda: from_vllm_chat([], rollout_id="r7", group_id="g", reward=10**400), "rollout 'r7': reward is beyond float64"),
        (
            lambda: from_agent_lightning(
                [{"event_type": "reward", "data": {"value": -(10**400)}}], rollout_id="r7", group_id="g"
            ),
            "rollout 'r7', event 0: data.value is beyond float64",
        ),
    ],
)  # fmt: skip
def test_what_float64_cannot_hold_is_refused(make, said):
    if said is None:
        assert np.isfinite(make()).all()
        return
    with pytest.raises(ValueError, match=said):
        make()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_sample_tokens": float("nan")}, "max_sample_tokens must be a whole number, got nan of type float; allowed: 1"),
        ({"max_sample_tokens": 2.5}, "max_sample_tokens must be a whole number, got 2.5"),
        ({"max_sample_tokens": True}, "max_sample_tokens must be a whole number, got True"),
        ({"max_sample_tokens": "3"}, "max_sample_tokens must be a whole number, got '3' of type str"),
        ({"require_logprobs": "no"}, "require_logprobs must be True or False, got 'no'"),
        ({"tokenizer": object()}, r"tokenizer must have decode\(ids\) -> str, got object"),
        ({"strategy": "substitute", "tokenizer": "gpt2"}, r"tokenizer must have decode\(ids\) -> str, got str"),
    ],
)  # fmt: skip
def test_options_of_merging(options, said):
    with pytest.raises(ValueError, match=said):
        merge_calls(ROLLOUT, **options)


def test_what_is_merged_is_a_rollout():
    with pytest.raises(ValueError, match="rollout must be a Rollout, got NoneType"):
        merge_calls(None)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"seed": None}, "seed must be a whole number, got None .* allowed: 0 or more"),
        ({"seed": "a"}, "seed must be a whole number, got 'a'"),
        ({"seed": -1}, "seed is -1; allowed: 0 or more"),
        ({"seed": True}, "seed must be a whole number, got True"),
        ({"cost": 3}, "cost must be a function of lengths or None, got 3"),
        ({"rollout_index": [[0], [1, 2]]}, "rollout_index cannot be read as an array"),
    ],
)
def test_options_of_planning(options, said):
    with pytest.raises(ValueError, match=said):
        plan(**options)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"token_ids": [1, -2, 3]}, r"rollout 'r7', sample 0: token_ids\[1\] is -2; an id cannot be negative"),
        ({"logprobs": [0, -np.inf, -1]}, r"sample 0: logprobs\[1\] is -inf; a logprob is finite and at most 0, or NaN"),
        ({"logprobs": [0, -1, 0.5]}, r"sample 0: logprobs\[2\] is 0.5; a logprob is finite"),
        ({"loss_mask": [1, 1, 1]}, r"sample 0: loss_mask\[0\] is True; it is True inside the spans and nowhere else"),
        ({"loss_mask": [0, 1, 0]}, r"sample 0: loss_mask\[2\] is False; it is True inside the spans"),
        ({"spans": []}, r"sample 0: loss_mask\[1\] is True; it is True inside the spans"),
        ({"spans": [(1, 2)]}, r"sample 0: spans\[0\] must be a Span, got tuple"),
        ({"spans": None}, "sample 0: spans must be a list of Span, got NoneType"),
        ({"spans": [Span(call_id="c", start=1.0, stop=3)]}, r"sample 0: span 1.0..3 of call 'c' is not"),
    ],
)
def test_samples_that_no_calls_could_make(fields, said):
    with pytest.raises(ValueError, match=said):
        replace(SAMPLE, **fields)


def test_what_merging_makes_would_pass_those_checks():
    calls = [call(call_id="c0", logprobs=[-1.0, 0.0]), call(call_id="c1", prompt_ids=[1, 2, 3, 4, 5])]
    (made,) = merge_calls(Rollout(rollout_id="r7", group_id="g", calls=calls), require_logprobs=False).samples
    again = Sample(**{name: getattr(made, name) for name in Sample.__dataclass_fields__})
    for name in ("token_ids", "loss_mask", "logprobs", "policy_version"):
        first, second = getattr(made, name), getattr(again, name)
        assert first.dtype == second.dtype and not first.flags.writeable
        np.testing.assert_array_equal(first, second)
    assert (again.index, again.spans, again.faithful) == (0, made.spans, True)


@pytest.mark.parametrize("make", [pack, pack_tree])
def test_packs_are_made_of_lists(make):
    with pytest.raises(ValueError, match="samples must be a list of Sample, got NoneType"):
        make(None, [0])
    with pytest.raises(ValueError, match="samples must be a list of Sample, got NoneType"):
        tree_items(None)


@pytest.mark.parametrize("line", [None, 3, "r0", [{}]])
def test_lines_are_objects(line):
    with pytest.raises(ValueError, match="a rollout must be an object, got"):
        Rollout.from_dict(line)
    with pytest.raises(ValueError, match="a call must be an object with 'call_id', got"):
        Call.from_dict(line)


def test_logprobs_of_completions_are_a_list():
    choice = {"prompt_token_ids": [1], "token_ids": [2], "logprobs": {"token_logprobs": 3}}
    with pytest.raises(ValueError, match=r"response 0: choices\[0\].logprobs.token_logprobs must be a list .* got int"):
        from_vllm_completions([{"id": "x", "choices": [choice]}], rollout_id="r7", group_id="g")
