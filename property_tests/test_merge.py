"""merge_calls keeps its contract: faithful, conserving, minimal, pure, and equal to the slow reference."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, note
from hypothesis import strategies as st

import harnessrl.adapter.merge as merge_module
from harnessrl.adapter import STRATEGIES, Rollout, merge_calls
from property_tests import reference
from property_tests.searching import counterexample
from property_tests.strategies import conversations, rollouts
from property_tests.toy import ToyTokenizer

ANY_ROLLOUT = st.one_of(rollouts(), conversations())
FAITHFUL = ("per_call", "adjacent", "best_effort")


def kept_calls(rollout, **limits):
    return [call for call in rollout.calls if reference.skip_reason(call, rollout, **limits) is None]


@given(ANY_ROLLOUT, st.sampled_from(FAITHFUL))
def test_each_trained_token_stands_once_behind_its_own_prompt(rollout, strategy):
    merged = merge_calls(rollout, strategy)
    calls = {call.call_id: call for call in rollout.calls}
    spans = Counter(span.call_id for sample in merged.samples for span in sample.spans)
    assert spans == Counter(call.call_id for call in kept_calls(rollout))
    for index, sample in enumerate(merged.samples):
        mask = np.zeros(len(sample.token_ids), dtype=bool)
        for span in sample.spans:
            call, place = calls[span.call_id], slice(span.start, span.stop)
            assert sample.token_ids[: span.start].tolist() == call.prompt_ids.tolist()
            assert sample.token_ids[place].tolist() == call.response_ids.tolist()
            assert sample.logprobs[place].tolist() == call.logprobs.tolist()
            assert set(sample.policy_version[place].tolist()) == {call.policy_version}
            mask[place] = True
        assert sample.loss_mask.tolist() == mask.tolist()
        assert not sample.logprobs[~mask].any() and (sample.policy_version[~mask] == -1).all()
        assert len(sample.token_ids) == sample.spans[-1].stop
        assert (sample.index, sample.rollout_id, sample.group_id, sample.faithful) == (index, "r", "g", True)


@given(ANY_ROLLOUT, st.sampled_from(STRATEGIES), st.booleans(), st.one_of(st.none(), st.integers(1, 12)))
def test_sampled_tokens_are_trained_or_skipped_for_the_first_reason_that_holds(rollout, strategy, required, limit):
    limits = {"require_logprobs": required, "max_sample_tokens": limit}
    merged = merge_calls(rollout, strategy, tokenizer=ToyTokenizer(), **limits)
    reasons = [(call.call_id, reference.skip_reason(call, rollout, **limits)) for call in rollout.calls]
    assert [(skip.call_id, skip.reason) for skip in merged.skipped] == [pair for pair in reasons if pair[1]]
    trained = sum(int(sample.loss_mask.sum()) for sample in merged.samples)
    given_tokens = sum(len(call.response_ids) for call in rollout.calls)
    assert trained + sum(skip.tokens for skip in merged.skipped) == given_tokens
    if limit is not None:
        assert all(len(sample.token_ids) <= limit for sample in merged.samples)


@given(ANY_ROLLOUT, st.sampled_from(FAITHFUL))
def test_samples_equal_the_slow_reference(rollout, strategy):
    merged = merge_calls(rollout, strategy)
    found = [[span.call_id for span in sample.spans] for sample in merged.samples]
    slow = reference.merge(kept_calls(rollout), strategy)
    assert found == [[call.call_id for call in sample] for sample in slow]


@given(ANY_ROLLOUT, st.sampled_from(FAITHFUL))
def test_breaks_name_the_nearest_earlier_call_and_the_first_difference(rollout, strategy):
    merged = merge_calls(rollout, strategy)
    order = kept_calls(rollout) if strategy == "adjacent" else reference.merge_order(kept_calls(rollout))
    chains = [[span.call_id for span in sample.spans] for sample in merged.samples]
    assert [broken.sample for broken in merged.breaks] == list(range(1, len(merged.samples)))
    for broken in merged.breaks:
        assert broken.call.call_id == chains[broken.sample][0]
        earlier, shared = reference.first_nearest(broken.call, order[: order.index(broken.call)])
        assert (broken.earlier.call_id, broken.position) == (earlier.call_id, shared)
        chain = next(chain for chain in chains if earlier.call_id in chain)
        before = chain[: chain.index(earlier.call_id)][-1:]
        contexts = {call.call_id: len(reference.context(call)) for call in order}
        assert broken.joint == (contexts[before[0]] if before else 0) <= broken.position or strategy == "adjacent"


@given(ANY_ROLLOUT)
def test_best_effort_gives_the_fewest_samples_possible(rollout):
    """The property that best_effort exists for."""
    assert len(merge_calls(rollout).samples) == reference.fewest_samples(kept_calls(rollout))


def test_taking_calls_in_order_of_arrival_would_not(monkeypatch):
    monkeypatch.setattr(merge_module, "_merge_order", list)
    rollout = counterexample(ANY_ROLLOUT, test_best_effort_gives_the_fewest_samples_possible.hypothesis.inner_test)
    assert [len(call.prompt_ids) for call in rollout.calls] != sorted(len(call.prompt_ids) for call in rollout.calls)


@given(st.data(), ANY_ROLLOUT, st.sampled_from(["per_call", "best_effort"]))
def test_samples_do_not_depend_on_the_order_of_arrival(data, rollout, strategy):
    shuffled = data.draw(st.permutations(rollout.calls))
    ranks: dict[str, list] = {}  # the tries of one request keep their order: the last delivered one is the one kept
    for call in rollout.calls:
        ranks.setdefault(call.request_id, []).append(call)
    calls = [ranks[call.request_id].pop(0) for call in shuffled]
    note(f"arrives as {[call.call_id for call in calls]}")
    assert told(merge_calls(replace(rollout, calls=calls), strategy)) == told(merge_calls(rollout, strategy))


@given(ANY_ROLLOUT, st.sampled_from(STRATEGIES))
def test_merging_is_pure(rollout, strategy):
    before = rollout.to_dict()
    first = merge_calls(rollout, strategy, tokenizer=ToyTokenizer())
    assert rollout.to_dict() == before
    assert told(merge_calls(rollout, strategy, tokenizer=ToyTokenizer())) == told(first)


def told(merged):
    """All that samples say, as plain values."""
    return [
        (s.token_ids.tolist(), s.loss_mask.tolist(), s.logprobs.tolist(), s.policy_version.tolist(), s.spans, s.index)
        for s in merged.samples
    ]


@given(ANY_ROLLOUT)
def test_a_skipped_call_never_breaks_a_chain(rollout):
    kept = kept_calls(rollout)
    assert told(merge_calls(rollout)) == told(merge_calls(replace(rollout, calls=kept)))


@given(conversations())
def test_substitute_merges_no_less_keeps_all_text_and_says_that_it_is_not_faithful(rollout):
    tokenizer = ToyTokenizer()
    merged = merge_calls(rollout, "substitute", tokenizer=tokenizer)
    calls = {call.call_id: call for call in rollout.calls}
    assert all(not sample.faithful for sample in merged.samples)
    assert len(merged.samples) <= len(merge_calls(rollout).samples)
    for sample in merged.samples:
        for span in sample.spans:
            call = calls[span.call_id]
            assert sample.token_ids[span.start : span.stop].tolist() == call.response_ids.tolist()
            assert sample.logprobs[span.start : span.stop].tolist() == call.logprobs.tolist()
            assert tokenizer.decode(sample.token_ids[: span.start]) == tokenizer.decode(call.prompt_ids)


def test_substitute_does_overwrite():
    def never_overwrites(rollout):
        merged = merge_calls(rollout, "substitute", tokenizer=ToyTokenizer())
        calls = {call.call_id: call for call in rollout.calls}
        for sample in merged.samples:
            for span in sample.spans:
                assert sample.token_ids[: span.start].tolist() == calls[span.call_id].prompt_ids.tolist()

    counterexample(conversations(), never_overwrites)


@given(rollouts())
def test_calls_without_logprobs_are_trained_as_nan_where_that_is_allowed(rollout):
    merged = merge_calls(rollout, require_logprobs=False)
    calls = {call.call_id: call for call in rollout.calls}
    for sample in merged.samples:
        for span in sample.spans:
            unknown = np.isnan(sample.logprobs[span.start : span.stop])
            assert unknown.all() if calls[span.call_id].logprobs is None else not unknown.any()


@pytest.mark.parametrize("strategy", ["best", "", "Best_Effort"])
def test_an_unknown_strategy_is_refused_with_the_allowed_ones(strategy):
    with pytest.raises(ValueError, match="allowed: per_call, adjacent, best_effort, substitute"):
        merge_calls(Rollout(rollout_id="r", group_id="g", calls=[]), strategy)
