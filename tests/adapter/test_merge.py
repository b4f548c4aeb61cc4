"""Merging on literal ids: the public failure modes, each with its kind, and the contract line by line."""

from collections import Counter
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

import harnessrl.adapter.merge as merge_module
from harnessrl.adapter import Call, Rollout, merge_calls
from harnessrl.adapter.prefix import equal_run

F, T = False, True


def call(prompt, response, logprobs=(), call_id=None, **fields):
    name = call_id or f"{prompt}{response}{fields.get('request_id', '')}"
    values = [-1.0] * len(response) if logprobs == () else logprobs
    return Call(**{"call_id": name, "prompt_ids": prompt, "response_ids": response, "logprobs": values} | fields)


def merge(*calls, strategy="best_effort", **options):
    return merge_calls(Rollout(rollout_id="r", group_id="g", calls=calls, reward=1.0), strategy, **options)


def told(merged):
    """(token ids, mask) of each sample."""
    return [(s.token_ids.tolist(), s.loss_mask.astype(int).tolist()) for s in merged.samples]


def reasons(merged):
    return dict(Counter(skip.reason for skip in merged.skipped))


class Texts:
    """Decodes by a table, so that a test says which ids have which text."""

    def __init__(self, **texts):
        self.texts = {int(name[1:]): text for name, text in texts.items()}

    def decode(self, ids):
        return "".join(self.texts[index] for index in ids)


# ---- B01: decoding and encoding give other ids


def test_b01_other_ids_of_the_same_text_open_a_new_sample():
    merged = merge(call([1, 2], [393, 300]), call([1, 2, 53, 9], [4]))
    assert told(merged) == [([1, 2, 393, 300], [0, 0, 1, 1]), ([1, 2, 53, 9, 4], [0, 0, 0, 0, 1])]
    trained = sorted(token for s in merged.samples for token in s.token_ids[s.loss_mask].tolist())
    assert trained == [4, 300, 393]
    (broken,) = merged.breaks
    assert (broken.sample, broken.position, broken.joint) == (1, 2, 0)
    assert broken.earlier.response_ids.tolist() == [393, 300] and broken.call.response_ids.tolist() == [4]


@pytest.mark.parametrize(
    ("came_back", "position"),
    [([1, 2, 53, 9], 2), ([1, 2, 393, 53], 3), ([1, 2, 393], 3), ([1, 7, 393, 300, 9], 1), ([5, 2, 393, 300, 9], 0)],
    ids=["first token", "last token", "cut short", "prompt edited", "first of all"],
)
def test_b01_wherever_the_history_differs(came_back, position):
    first, second = call([1, 2], [393, 300]), call(came_back, [4])
    merged = merge(first, second)
    assert {tuple(ids) for ids, _ in told(merged)} == {(1, 2, 393, 300), (*came_back, 4)}
    assert merged.breaks[0].position == position


def test_b01_a_chain_goes_on_behind_the_ids_that_came_back():
    merged = merge(call([1], [2, 3]), call([1, 23, 4], [5]), call([1, 23, 4, 5, 6], [7]))
    assert told(merged) == [([1, 2, 3], [0, 1, 1]), ([1, 23, 4, 5, 6, 7], [0, 0, 0, 1, 0, 1])]


# ---- B05: a separator that nobody sampled

B05 = call([1, 2], [3, 99], [-0.1, -0.2])


def test_b05_an_unsampled_separator_is_context():
    (sample,) = merge(B05, call([1, 2, 3, 99, 198, 6, 7], [8, 99], [-0.3, -0.4])).samples
    assert sample.token_ids.tolist() == [1, 2, 3, 99, 198, 6, 7, 8, 99]
    assert sample.loss_mask.tolist() == [F, F, T, T, F, F, F, T, T]
    assert sample.logprobs.tolist() == pytest.approx([0, 0, -0.1, -0.2, 0, 0, 0, -0.3, -0.4])


def test_b05_and_is_never_made_up():
    (sample,) = merge(B05, call([1, 2, 3, 99, 6, 7], [8, 99], [-0.3, -0.4])).samples
    assert sample.token_ids.tolist() == [1, 2, 3, 99, 6, 7, 8, 99]
    assert sample.loss_mask.tolist() == [F, F, T, T, F, F, T, T]


def test_b05_a_prompt_that_adds_nothing_still_continues():
    assert told(merge(call([1], [2]), call([1, 2], [3]))) == [([1, 2, 3], [0, 1, 1])]


def test_b05_a_response_cut_by_its_limit_gets_no_end_token():
    merged = merge(call([1], [2], finish_reason="length"), call([1, 2, 99, 5], [6]))
    assert told(merged) == [([1, 2, 99, 5, 6], [0, 1, 0, 0, 1])]


# ---- B12: sub-agents in parallel

B12 = (call([1], [2]), call([7], [8]), call([1, 2, 3], [4]), call([7, 8, 9], [10]))


@pytest.mark.parametrize("order", list(permutations(range(4))), ids=str)
def test_b12_interleaved_agents_keep_their_own_samples_in_any_order(order):
    merged = merge(*(B12[index] for index in order))
    assert told(merged) == [([1, 2, 3, 4], [0, 1, 0, 1]), ([7, 8, 9, 10], [0, 1, 0, 1])]


def test_b12_a_shared_start_goes_to_the_agent_that_it_continues():
    merged = merge(call([1], [2]), call([1], [3]), call([1, 3, 5], [6]))
    assert told(merged) == [([1, 2], [0, 1]), ([1, 3, 5, 6], [0, 1, 0, 1])]


def test_b12_adjacent_merging_shatters_them():
    assert [ids for ids, _ in told(merge(*B12, strategy="adjacent"))] == [[1, 2], [7, 8], [1, 2, 3, 4], [7, 8, 9, 10]]


def test_b12_the_longest_context_is_extended():
    merged = merge(call([1], [2]), call([1, 2, 3], [4]), call([1, 2, 3], [5]), call([1, 2, 3, 4, 6], [7]))
    assert [ids for ids, _ in told(merged)] == [[1, 2, 3, 4, 6, 7], [1, 2, 3, 5]]


def test_b12_of_two_equal_contexts_the_first_is_extended():
    merged = merge(call([1], [2], call_id="b"), call([1], [2], call_id="a"), call([1, 2, 3], [4], call_id="c"))
    assert [[span.call_id for span in sample.spans] for sample in merged.samples] == [["a", "c"], ["b"]]


def test_b12_two_calls_continue_one_context():
    merged = merge(call([1], [2]), call([1, 2, 3], [4]), call([1, 2, 5], [6]))
    assert [ids for ids, _ in told(merged)] == [[1, 2, 3, 4], [1, 2, 5, 6]]
    (broken,) = merged.breaks
    assert (broken.earlier.call_id, broken.position, broken.joint) == ("[1][2]", 2, 0)


# ---- B13: equal prompts are not the same call


def test_b13_best_of_two_is_two_samples():
    merged = merge(call([1, 2], [3], request_id="q1"), call([1, 2], [4], request_id="q2"))
    assert [ids for ids, _ in told(merged)] == [[1, 2, 3], [1, 2, 4]]


def test_b13_calls_without_ids_are_two_records():
    merged = merge(call([], [3], call_id="a"), call([], [3], call_id="b"))
    assert merged.samples == () and reasons(merged) == {"missing_ids": 2}
    assert [skip.call_id for skip in merged.skipped] == ["a", "b"]


def test_b13_of_a_retry_the_delivered_try_is_trained():
    lost, kept = (
        call([1], [2], call_id="a", request_id="q", delivered=False),
        call([1], [3], call_id="b", request_id="q"),
    )
    for calls in ((lost, kept), (kept, lost)):
        merged = merge(*calls)
        assert told(merged) == [([1, 3], [0, 1])] and reasons(merged) == {"undelivered": 1}


def test_b13_of_two_delivered_tries_the_last_is_trained():
    merged = merge(call([1], [2], call_id="a", request_id="q"), call([1], [3], call_id="b", request_id="q"))
    assert told(merged) == [([1, 3], [0, 1])] and reasons(merged) == {"superseded": 1}


def test_b13_equal_responses_of_different_requests_are_two_samples():
    merged = merge(call([1], [2], request_id="q1"), call([1], [2], request_id="q2"))
    assert told(merged) == [([1, 2], [0, 1])] * 2


def test_b13_without_request_ids_nothing_is_taken_for_a_retry():
    assert told(merge(call([1], [2], call_id="a"), call([1], [2], call_id="b"))) == [([1, 2], [0, 1])] * 2


# ---- B14: skipped calls are counted and break nothing


def test_b14_an_empty_response_is_skipped_and_the_chain_goes_on():
    merged = merge(call([1], [2]), call([1, 2, 3], [], finish_reason="abort"), call([1, 2, 3], [4]))
    assert told(merged) == [([1, 2, 3, 4], [0, 1, 0, 1])] and reasons(merged) == {"empty_response": 1}


def test_b14_all_empty_gives_no_sample_and_says_why():
    merged = merge(call([1], [], call_id="a"), call([1], [], call_id="b"))
    assert merged.samples == () and merged.breaks == () and reasons(merged) == {"empty_response": 2}


def test_b14_a_rollout_without_calls():
    assert merge().samples == () and merge().skipped == ()


@pytest.mark.parametrize("strategy", ["adjacent", "best_effort"])
@pytest.mark.parametrize(
    "flaw",
    [
        {"delivered": False},
        {"constrained": True},
        {"trainable": False, "agent": "judge"},
        {"logprobs": None},
        {"response_ids": [], "logprobs": []},
        {"prompt_ids": []},
    ],
    ids=lambda flaw: next(iter(flaw)),
)
def test_b14_no_skipped_call_in_between_resets_the_chain(flaw, strategy):
    calls = call([1], [2]), call(**{"prompt": [50], "response": [51]}), call([1, 2, 3], [4])
    middle = Call(**{**{name: getattr(calls[1], name) for name in calls[1].__dataclass_fields__}, **flaw})
    merged = merge(calls[0], middle, calls[2], strategy=strategy)
    assert told(merged) == [([1, 2, 3, 4], [0, 1, 0, 1])] and len(merged.skipped) == 1


def test_b14_a_skipped_call_is_context_where_later_prompts_hold_it():
    merged = merge(call([1], [2]), call([1, 2, 3], [4, 5], trainable=False), call([1, 2, 3, 4, 5, 6], [7]))
    assert told(merged) == [([1, 2, 3, 4, 5, 6, 7], [0, 1, 0, 0, 0, 0, 1])]
    assert [(skip.reason, skip.tokens) for skip in merged.skipped] == [("not_trainable", 2)]


# ---- reasons, in their order


def test_the_first_reason_in_order_is_given():
    flaws = {
        "missing_ids": {"prompt_ids": []},
        "empty_response": {"response_ids": [], "logprobs": []},
        "undelivered": {"delivered": False},
        "superseded": {"request_id": "q"},
        "constrained": {"constrained": True},
        "not_trainable": {"trainable": False},
        "missing_logprobs": {"logprobs": None},
        "too_long": {"prompt_ids": [1] * 9},
    }
    names = list(flaws)
    later = Call(call_id="later", prompt_ids=[1], response_ids=[2], logprobs=[-1], request_id="q")
    for index, reason in enumerate(names):
        fields = {"call_id": "x", "prompt_ids": [1, 1], "response_ids": [2], "logprobs": [-1]}
        for name in reversed(names[index:]):  # this flaw and all that come after it in the order
            fields |= flaws[name]
        if not fields["response_ids"]:
            fields["logprobs"] = []
        merged = merge(Call(**fields), later, max_sample_tokens=5)
        assert [(skip.call_id, skip.reason) for skip in merged.skipped] == [("x", reason)]


def test_undelivered_tries_do_not_supersede():
    tries = [call([1], [token], call_id=str(token), request_id="q", delivered=token != 4) for token in (2, 3, 4)]
    merged = merge(*tries)
    assert told(merged) == [([1, 3], [0, 1])]
    assert [(skip.call_id, skip.reason) for skip in merged.skipped] == [("2", "superseded"), ("4", "undelivered")]


def test_missing_logprobs_are_nan_where_they_are_allowed():
    calls = call([1], [2], [-0.5]), call([1, 2, 3], [4, 5], logprobs=None)
    assert reasons(merge(*calls)) == {"missing_logprobs": 1}
    (sample,) = merge(*calls, require_logprobs=False).samples
    np.testing.assert_array_equal(sample.logprobs, np.float32([0, -0.5, 0, np.nan, np.nan]))


def test_a_call_over_the_limit_is_left_out_whole():
    merged = merge(call([1], [2]), call([1, 2, 3], [4]), call([1, 2, 3, 4, 5], [6]), max_sample_tokens=4)
    assert told(merged) == [([1, 2, 3, 4], [0, 1, 0, 1])]
    assert [(skip.reason, skip.tokens) for skip in merged.skipped] == [("too_long", 1)]


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_that_allows_nothing_is_refused(limit):
    with pytest.raises(ValueError, match=rf"max_sample_tokens is {limit}; allowed: 1 or more"):
        merge(max_sample_tokens=limit)


# ---- columns and strategies


def test_versions_go_with_their_tokens():
    (sample,) = merge(call([1], [2, 3], policy_version=[4, 5]), call([1, 2, 3], [6], policy_version=7)).samples
    assert sample.policy_version.tolist() == [-1, 4, 5, 7]
    assert [(span.start, span.stop) for span in sample.spans] == [(1, 3), (3, 4)]


def test_per_call_trains_each_alone_in_merge_order():
    merged = merge(call([1, 2, 3], [4]), call([1], [2]), strategy="per_call")
    assert told(merged) == [([1, 2], [0, 1]), ([1, 2, 3, 4], [0, 0, 0, 1])]
    assert [(b.position, b.joint) for b in merged.breaks] == [(2, 0)]


def test_adjacent_extends_the_previous_call_even_where_another_fits_better():
    merged = merge(call([1], [2, 3]), call([1], [2]), call([1, 2, 3, 4], [5]), strategy="adjacent")
    assert [ids for ids, _ in told(merged)] == [[1, 2, 3], [1, 2, 3, 4, 5]]
    assert merged.samples[1].loss_mask.tolist() == [F, T, F, F, T]


B01_TEXTS = Texts(t1="<u>", t2="<a>", t393="h", t300="aving", t53="having", t9="<u>", t4="ok")


def test_substitute_overwrites_history_and_says_so():
    merged = merge(call([1, 2], [393, 300]), call([1, 2, 53, 9], [4]), strategy="substitute", tokenizer=B01_TEXTS)
    assert told(merged) == [([1, 2, 393, 300, 9, 4], [0, 0, 1, 1, 0, 1])]
    assert not merged.samples[0].faithful
    assert [(span.start, span.stop) for span in merged.samples[0].spans] == [(2, 4), (5, 6)]


def test_substitute_leaves_alone_what_reads_differently():
    texts = Texts(t1="<u>", t2="<a>", t393="h", t300="aving", t53="shaving", t9="<u>", t4="ok")
    merged = merge(call([1, 2], [393, 300]), call([1, 2, 53, 9], [4]), strategy="substitute", tokenizer=texts)
    assert [ids for ids, _ in told(merged)] == [[1, 2, 393, 300], [1, 2, 53, 9, 4]]


def test_substitute_needs_a_token_boundary_where_the_history_ends():
    texts = Texts(t1="<u>", t393="h", t300="aving", t53="having!", t4="ok")
    merged = merge(call([1], [393, 300]), call([1, 53], [4]), strategy="substitute", tokenizer=texts)
    assert [ids for ids, _ in told(merged)] == [[1, 393, 300], [1, 53, 4]]


def test_substitute_carries_an_overwritten_history_on():
    calls = call([1, 2], [393, 300]), call([1, 2, 53, 9], [4]), call([1, 2, 53, 9, 4, 9], [393])
    (sample,) = merge(*calls, strategy="substitute", tokenizer=B01_TEXTS).samples
    assert sample.token_ids.tolist() == [1, 2, 393, 300, 9, 4, 9, 393]


def test_substitute_never_makes_a_sample_over_the_limit():
    texts = Texts(t1="<u>", t2="a", t3="b", t4="ab", t5=" ", t6="c")
    calls = call([1], [2, 3, 2, 3]), call([1, 4, 4, 5], [6])  # overwritten, the second is 1 2 3 2 3 5 6
    (sample,) = merge(*calls, strategy="substitute", tokenizer=texts, max_sample_tokens=7).samples
    assert sample.token_ids.tolist() == [1, 2, 3, 2, 3, 5, 6]
    for limit in (5, 6):
        merged = merge(*calls, strategy="substitute", tokenizer=texts, max_sample_tokens=limit)
        assert [ids for ids, _ in told(merged)] == [[1, 2, 3, 2, 3], [1, 4, 4, 5, 6]]
        assert not merged.skipped and len(merged.breaks) == 1
    assert reasons(merge(*calls, strategy="substitute", tokenizer=texts, max_sample_tokens=4)) == {"too_long": 2}


def test_substitute_needs_a_tokenizer():
    with pytest.raises(ValueError, match="tokenizer is None; strategy 'substitute'"):
        merge(strategy="substitute")


def test_an_unknown_strategy_is_refused():
    with pytest.raises(
        ValueError, match="strategy is 'trajectory'; allowed: per_call, adjacent, best_effort, substitute"
    ):
        merge(strategy="trajectory")


# ---- many and long


def test_calls_of_one_length_are_ordered_by_ids_then_responses_then_names():
    made = [call(p, r, call_id=n) for p in ([2**20, 1], [3, 700], [3, 65]) for r in ([256], [1], [1, 0]) for n in "ba"]
    named = [replace(item, call_id=f"{item.call_id}{i}") for i, item in enumerate(made)]
    merged = merge(*named, strategy="per_call")
    found = [sample.spans[0].call_id for sample in merged.samples]
    slow = sorted(named, key=lambda c: (c.prompt_ids.tolist(), c.response_ids.tolist(), c.call_id))
    assert found == [item.call_id for item in slow]


def test_many_prompts_of_one_length_that_differ_at_different_places():
    """About n log n comparisons of prompts: with n^2 / 2 of them, 2,000 prompts of 2,000 tokens took 10 s to order."""
    prompts = np.tile(np.arange(600, dtype=np.int32), (600, 1)) + 5 * np.eye(600, dtype=np.int32)
    compared = []

    def counted(x, y):
        compared.append(1)
        return equal_run(x, y)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge_module, "equal_run", counted)
        merged = merge(*[call(prompts[i], [1], call_id=str(i)) for i in range(600)])
    assert [sample.spans[0].call_id for sample in merged.samples] == [str(i) for i in range(599, -1, -1)]
    assert len(compared) < 600 * 10


def test_a_long_interleaved_rollout_with_a_thousand_open_samples():
    # Every call of ten agents is answered in ids that never come back: each opens a sample; all share a long head.
    head, calls = list(range(500)), []
    for turn in range(100):
        for agent in range(10):
            prompt = [*head, 1000 + agent, *[2000] * turn]
            calls.append(call(prompt, [3000 + turn], call_id=f"{agent}.{turn}"))
    merged = merge(*calls)
    assert len(merged.samples) == 1000
    assert {broken.position for broken in merged.breaks if len(broken.call.prompt_ids) == 501} == {500}
    deep = [broken for broken in merged.breaks if len(broken.call.prompt_ids) > 501]
    assert all(broken.position == len(broken.call.prompt_ids) - 1 for broken in deep)


def test_contexts_that_differ_only_past_a_block_are_told_apart():
    ids = np.arange(200_000, dtype=np.int32) % 50_000
    other = ids.copy()
    other[150_000] += 1
    merged = merge(
        call(ids[:100_000], [7], call_id="a"),
        call(np.append(ids[:100_000], [7, 8]), [9], call_id="b"),
        call(ids, [1], call_id="c"),
        call(other, [2], call_id="d"),
    )
    assert [[span.call_id for span in sample.spans] for sample in merged.samples] == [["a", "b"], ["c"], ["d"]]
    assert [broken.position for broken in merged.breaks] == [100_000, 150_000]
