"""explain_break names the cause: a harness with one fault only has breaks of that fault's kind only."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from harnessrl.adapter import KINDS, Call, Rollout, explain_break, merge_calls
from property_tests import reference
from property_tests.searching import counterexample
from property_tests.stories import story
from property_tests.strategies import conversations, rollouts
from property_tests.toy import Template, ToyTokenizer

TOKENIZER = ToyTokenizer()
ANY_ROLLOUT = st.one_of(rollouts(), conversations())


def kinds(rollout: Rollout) -> set[str]:
    return {explain_break(broken, TOKENIZER.decode).kind for broken in merge_calls(rollout).breaks}


@given(conversations(template=Template(), events=("answer", "truncate"), drifting=False))
def test_without_any_fault_a_conversation_is_one_sample(rollout):
    assert len(merge_calls(rollout).samples) == 1


# Where each fault is the only one. A template may also turn sampled ids into others, so drift is switched off there.
ONE_FAULT = {
    "retokenized": {"template": Template(), "events": ("answer",)},
    "template": {"template": Template(opening="<think>"), "events": ("answer",), "drifting": False},
    "summarized": {"template": Template(), "events": ("answer", "answer", "summarise"), "drifting": False},
    "branched": {"template": Template(), "events": ("answer", "resample"), "drifting": False},
    "unrelated": {"template": Template(), "events": ("answer", "sub_agent"), "drifting": False},
}


@pytest.mark.parametrize("kind", ONE_FAULT)
def test_one_fault_gives_one_kind_of_break(kind):
    @given(conversations(**ONE_FAULT[kind]))
    def only_this_kind(rollout):
        prompts = [call.prompt_ids.tolist() for call in rollout.calls]
        assume(kind == "branched" or all(prompts.count(prompt) == 1 for prompt in prompts))  # the same again branches
        assert kinds(rollout) <= {kind}

    only_this_kind()


@pytest.mark.parametrize("kind", ONE_FAULT)
def test_and_each_fault_is_found(kind):
    def never(rollout):
        assert kind not in kinds(rollout)

    counterexample(conversations(**ONE_FAULT[kind]), never)


@given(ANY_ROLLOUT)
def test_an_explanation_shows_the_two_sides_of_the_break(rollout):
    calls = {call.call_id: call for call in rollout.calls}
    for broken in merge_calls(rollout).breaks:
        drift = explain_break(broken)
        assert {drift.known_call, drift.found_call} == {broken.call.call_id, broken.earlier.call_id}
        arrival = [call.call_id for call in rollout.calls]
        assert arrival.index(drift.known_call) < arrival.index(drift.found_call)
        known, found = calls[drift.known_call], calls[drift.found_call]
        context, prompt = reference.context(known), found.prompt_ids.tolist()
        at = reference.common(context, prompt)
        assert drift.position == at and at in (broken.position, len(prompt))
        assert drift.known_ids.tolist() == context[max(0, at - 16) : at + 16]
        assert drift.found_ids.tolist() == prompt[max(0, at - 16) : at + 16]
        assert drift.kind == "branched" or at < min(len(context), len(prompt))


@given(ANY_ROLLOUT)
def test_without_text_three_kinds_can_be_told(rollout):
    for broken in merge_calls(rollout).breaks:
        blind = explain_break(broken)
        assert blind.kind in ("branched", "unrelated", "diverged")
        assert blind.known_text is None and blind.found_text is None


@given(conversations())
def test_with_text_none_is_left_at_diverged(rollout):
    for broken in merge_calls(rollout).breaks:
        seen = explain_break(broken, TOKENIZER.decode)
        assert seen.kind in KINDS and seen.kind != "diverged"
        assert seen.known_text == TOKENIZER.decode(seen.known_ids)
        assert seen.found_text == TOKENIZER.decode(seen.found_ids)


def test_the_smallest_drift_is_told_as_a_story():
    def survives(rollout):
        assert "retokenized" not in kinds(rollout)

    rollout = counterexample(conversations(**ONE_FAULT["retokenized"]), survives, shrink=True)
    (broken,) = merge_calls(rollout).breaks
    known = reference.context(broken.earlier)
    told = story(TOKENIZER.decode, known, broken.call.prompt_ids, "retokenized")
    assert len(rollout.calls) == 2 and len(broken.earlier.response_ids) <= 3, told


def test_a_story_reads_well():
    known = [*TOKENIZER.encode("<|user|>no<|end|>\n<|assistant|>"), TOKENIZER.ids[b"h"], TOKENIZER.ids[b"aving"]]
    found = TOKENIZER.encode("<|user|>no<|end|>\n<|assistant|>having<|end|>")
    assert story(TOKENIZER.decode, known, found, "retokenized", window=3) == (
        "the prefix broke at token 5 of 7: retokenized\n"
        "  up to there                 '<|end|>'(5) '\\n'(32) '<|assistant|>'(3)\n"
        "  what was sampled, or sent   'h'(12) 'aving'(40)\n"
        "  what came back              'hav'(39) 'ing'(37) '<|end|>'(5)"
    )


def test_the_older_call_is_told_first_however_the_two_sort():
    # The summarised prompt is the shorter one, so it comes first in merge order; the story still starts with the chat.
    def call(name, text):
        return Call(call_id=name, prompt_ids=TOKENIZER.encode(text), response_ids=[TOKENIZER.end], logprobs=[-1])

    chat = "<|begin|><|user|>needing to go on and on"
    calls = [call("chat", chat), call("more", chat + "<|end|><|user|>done"), call("short", "<|begin|><|user|>need on")]
    (broken,) = merge_calls(Rollout(rollout_id="r", group_id="g", calls=calls)).breaks
    assert (broken.call.call_id, broken.earlier.call_id) == ("chat", "short")
    drift = explain_break(broken, TOKENIZER.decode)
    assert (drift.known_call, drift.found_call, drift.kind) == ("chat", "short", "summarized")
