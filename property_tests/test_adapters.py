"""The laws, held to an adapter: ours, or the one that --adapter names; and toy adapters that break them."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from property_tests import adapters
from property_tests.laws import LAWS, LawBroken, as_calls
from property_tests.searching import counterexample, drawn, fails, told
from property_tests.strategies import LOST_LOGPROBS, conversations, rollouts

CALLS = st.one_of(rollouts(flaws=LOST_LOGPROBS), conversations()).map(as_calls)


@pytest.mark.parametrize("law", LAWS)
def test_law(law, adapter):
    """The conformance test: run it on your own with ``--adapter MODULE:FUNCTION``."""

    @given(CALLS)
    def holds(calls):
        story = told(partial(LAWS[law], adapter), calls)
        assert story is None, story

    holds()


# Common practice, and the laws it breaks. What is not listed here it keeps.
BREAKS = {
    "adjacent": {"the_samples_are_the_fewest_possible", "order_of_arrival_does_not_matter"},
    "in_order_of_arrival": {"the_samples_are_the_fewest_possible", "order_of_arrival_does_not_matter"},
    "without_missing_logprobs": set(),
    "forgetful": set(LAWS),
    "one_per_call": {"the_samples_are_the_fewest_possible"},
    "deduplicated_by_prompt": {
        "every_sampled_token_is_trained_once",
        "order_of_arrival_does_not_matter",
        "the_samples_are_the_fewest_possible",
    },
    "missing_logprobs_as_zero": {"each_token_keeps_its_own_logprob"},
    "substituted": {"each_token_stands_behind_its_own_prompt", "the_samples_are_the_fewest_possible"},
    "forced_into_one": {
        "each_token_stands_behind_its_own_prompt",
        "the_samples_are_the_fewest_possible",
        "order_of_arrival_does_not_matter",
    },
}


@pytest.fixture(scope="module")
def examples():
    return drawn(CALLS, 300)


@pytest.mark.parametrize("name", BREAKS)
def test_common_practice_breaks_these_laws_and_keeps_the_others(name, examples):
    practice = getattr(adapters, name)
    broken = {law for law, holds in LAWS.items() if any(fails(partial(holds, practice), calls) for calls in examples)}
    assert broken == BREAKS[name]


def test_the_smallest_counterexample_is_told_as_a_story():
    law = LAWS["each_token_keeps_its_own_logprob"]
    calls = counterexample(CALLS, partial(law, adapters.missing_logprobs_as_zero), shrink=True)
    with pytest.raises(LawBroken) as broken:
        law(adapters.missing_logprobs_as_zero, calls)
    assert str(broken.value) == (
        "law broken: each token keeps its own logprob\n"
        "  calls, in order of arrival:\n"
        "    0: [0] -> [0], logprobs None\n"
        "  samples (trained tokens in brackets):\n"
        "    0 [0], logprobs [0.0, 0.0]\n"
        "  trained tokens carry logprobs that their call does not have (a call without any may be left out)"
    )


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        (None, "the adapter returned None, which is no list"),
        ([None], "sample 0 is None"),
        ([{"token_ids": [1], "loss_mask": [1]}], "sample 0 is {'token_ids': [1], 'loss_mask': [1]}"),
        ([{"token_ids": [1], "loss_mask": [1], "logprobs": 0.5}], "sample 0 is {'token_ids': [1], 'loss_mask': [1], 'logprobs': 0.5}"),
        (
            [{"token_ids": [1], "loss_mask": [1, 0], "logprobs": [0.5]}],
            "the columns of sample 0 have different lengths: {'token_ids': 1, 'loss_mask': 2, 'logprobs': 1}",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("law", LAWS)
def test_what_is_no_sample_is_told_too(law, samples, said):
    with pytest.raises(LawBroken) as broken:
        LAWS[law](lambda calls: samples, [{"prompt_ids": [1], "response_ids": [2], "logprobs": None}])
    assert str(broken.value) == (
        "this is no list of samples\n"
        "  calls, in order of arrival:\n"
        "    0: [1] -> [2], logprobs None\n"
        f"  {said}\n"
        "  expected: a list of {'token_ids': [...], 'loss_mask': [...], 'logprobs': [...]}, of equal lengths"
    )


def test_leaving_out_only_some_calls_without_logprobs_is_told():
    calls = [{"prompt_ids": [i], "response_ids": [i], "logprobs": None} for i in (1, 2)]
    with pytest.raises(
        LawBroken, match=r"lost \[2\], extra \[\] \(calls without logprobs may be left out, all of them"
    ):
        LAWS["every_sampled_token_is_trained_once"](lambda calls: adapters.ours(calls[:1]), calls)


def test_the_option_reports_on_somebody_elses_adapter():
    options = ["-k", "arrival", "--adapter", "property_tests.adapters:adjacent"]
    command = [sys.executable, "-m", "pytest", "-q", "property_tests", *options]
    told = subprocess.run(
        command, capture_output=True, text=True, timeout=100, env=os.environ | {"HYPOTHESIS_PROFILE": "ci"}
    ).stdout
    assert "1 failed" in told
    assert "law broken: order of arrival does not matter" in told
    assert "other samples when they arrive as [1, 0]" in told


@pytest.mark.parametrize("name", ["property_tests.adapters", "property_tests.adapters:nothing"])
def test_an_option_that_names_no_function_is_refused(name):
    with pytest.raises(ValueError, match="expected MODULE:FUNCTION"):
        adapters.load(name)
