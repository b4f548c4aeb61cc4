"""explain_break on small literal texts, one token a piece, so that each kind can be checked by eye."""

import numpy as np
import pytest

from harnessrl.adapter import Call, Rollout, explain_break, merge_calls


class Words:
    """Turns a text, given as pieces, into ids and back; each new piece gets the next id."""

    def __init__(self):
        self.pieces = []

    def ids(self, text):
        pieces = text.split("|")
        self.pieces += [piece for piece in dict.fromkeys(pieces) if piece not in self.pieces]
        return [self.pieces.index(piece) for piece in pieces]

    def decode(self, ids):
        return "".join(self.pieces[index] for index in ids)


WORDS = Words()


def breaks(*calls, agents=()):
    """Breaks of calls given as (prompt, response) in pieces, in order of arrival."""
    made = []
    for index, (prompt, response) in enumerate(calls):
        ids = WORDS.ids(response)
        agent = agents[index] if agents else ""
        fields = {"prompt_ids": WORDS.ids(prompt), "response_ids": ids, "logprobs": [-1.0] * len(ids)}
        made.append(Call(call_id=f"c{index}", agent=agent, **fields))
    return merge_calls(Rollout(rollout_id="r", group_id="g", calls=made)).breaks


def kind(*calls, agents=(), decode=WORDS.decode):
    (broken,) = breaks(*calls, agents=agents)
    return explain_break(broken, decode).kind


CHAT = "<s>|<user>|task|<end>|<bot>"


@pytest.mark.parametrize(
    ("response", "came_back"),
    [
        ("h|aving|<end>", "hav|ing|<end>|<user>|more|<bot>"),
        ("h|aving|<end>", "having|<end>|<user>|more|<bot>"),
        ("having|<end>", "h|a|v|i|n|g|<end>|<user>|more|<bot>"),
        ("hav|ing", "having <|user>|more|<bot>"),  # cut by its limit; the next token runs over the end
        ("<|e|nd|>|x", "<end>|x|<user>|more|<bot>"),  # a special token spelled out
    ],
)
def test_retokenized(response, came_back):
    assert kind((CHAT, response), (f"{CHAT}|{came_back}", "ok")) == "retokenized"


@pytest.mark.parametrize(
    ("response", "came_back"),
    [
        ("yes|\n|<end>", "yes|<end>|<user>|more|<bot>"),  # content trimmed
        (" yes|<end>", "yes|<end>|<user>|more|<bot>"),
        ("yes|</s>", "yes|\nUser: more"),  # markup that history does not have
        ("yes|<end>|<eot>", "yes|<end>|\n|<user>|more|<bot>"),
        ("<think>|\n\n|</think>|yes|<end>", "yes|<end>|<user>|more|<bot>"),  # empty thinking
    ],
)
def test_template(response, came_back):
    assert kind((CHAT, response), (f"{CHAT}|{came_back}", "ok")) == "template"


def test_template_of_a_doubled_first_token():
    assert kind((CHAT, "yes|<end>"), (f"<s>|{CHAT}|yes|<end>|<user>|more|<bot>", "ok")) == "template"


@pytest.mark.parametrize(
    ("response", "came_back"),
    [
        ("<think>|hm|</think>|yes|<end>", "yes|<end>|<user>|more|<bot>"),  # reasoning dropped
        ('{"a":|1}|<end>', '{"a": |1}|<end>|<user>|more|<bot>'),  # JSON written anew
        ("{call|<end>", "{call}|<end>|<user>|more|<bot>"),  # tool call repaired
    ],
)
def test_rewritten(response, came_back):
    assert kind((CHAT, response), (f"{CHAT}|{came_back}", "ok")) == "rewritten"


def test_rewritten_where_an_old_observation_was_masked():
    seen = f"{CHAT}|look|<end>|<tool>|a very long page|<end>|<bot>"
    masked = f"{CHAT}|look|<end>|<tool>|...|<end>|<bot>|found|<end>|<user>|more|and more|<bot>"
    assert kind((CHAT, "look|<end>"), (seen, "found|<end>"), (masked, "ok")) == "rewritten"


def test_summarized():
    grown = f"{CHAT}|a|<end>|<user>|b|<end>|<bot>|c|<end>|<user>|d|<end>|<bot>"
    short = f"{CHAT}|so far: a, b|<end>|<bot>"
    assert kind((CHAT, "a|<end>"), (grown, "e|<end>"), (short, "ok")) == "summarized"


def test_summarized_though_the_summary_sorts_before_the_chat():
    chat = f"{CHAT}|a|b|c"
    (broken,) = breaks((chat, "d"), (f"{chat}|d|e", "f"), ("<s>|<user>|task|<end>|note", "ok"))
    drift = explain_break(broken, WORDS.decode)
    assert (drift.kind, drift.known_call, drift.found_call) == ("summarized", "c0", "c2")
    assert broken.call.call_id == "c0"


def test_a_helper_that_starts_alike_is_no_summary_when_the_chat_goes_on():
    grown, helper = f"{CHAT}|a|<end>|<user>|b|<end>|<bot>", "<s>|<user>|task|<end>|<helper>|h"
    more = f"{grown}|c|<end>|<user>|d|<end>|<bot>"
    assert kind((CHAT, "a|<end>"), (grown, "c|<end>"), (helper, "ok"), (more, "yes")) == "unrelated"


@pytest.mark.parametrize("decode", [WORDS.decode, None], ids=["text", "ids"])
@pytest.mark.parametrize(
    "calls",
    [
        [(CHAT, "yes|<end>"), (CHAT, "no|<end>")],
        [(CHAT, "yes|<end>"), (f"{CHAT}|yes|<end>|more", "ok"), (f"{CHAT}|yes|<end>|less", "ok")],
        [(CHAT, "yes|<end>"), (f"{CHAT}|yes|<end>|<user>|more", "ok"), (f"{CHAT}|yes|<end>|<user>|less", "ok")],
        [(f"{CHAT}|yes|<end>", "ok"), (CHAT, "no")],
    ],
    ids=["second sample", "two continuations", "two that begin alike", "back inside the prompt"],
)
def test_branched(calls, decode):
    assert kind(*calls, decode=decode) == "branched"


@pytest.mark.parametrize("decode", [WORDS.decode, None], ids=["text", "ids"])
def test_unrelated(decode):
    other = "<s>|<user>|quite|another|thing|to|do|<bot>"
    assert kind((CHAT, "yes"), (other, "ok"), decode=decode) == "unrelated"
    assert (
        kind((CHAT, "yes"), ("<s>|<user>|task|<end>|<helper>", "ok"), agents=("a", "b"), decode=decode) == "unrelated"
    )


def test_a_grader_that_quotes_an_answer_has_a_conversation_of_its_own():
    grader = "<s>|<system>|grade|this|answer|of|a|pupil|<end>|<user>|yes|<end>|<bot>"
    assert kind((CHAT, "yes|<end>"), (grader, "good|<end>"), agents=("solver", "grader")) == "unrelated"
    assert kind((CHAT, "yes|<end>"), (grader, "good|<end>")) == "rewritten"  # one agent: its history under another head


def test_another_agent_on_the_same_history_rewrites_it():
    seen, masked = f"{CHAT}|look|<end>|<tool>|page|<end>|<bot>", f"{CHAT}|look|<end>|<tool>|...|<end>|<bot>"
    said = (f"{masked}|found|<end>|<bot>", "ok")
    assert kind((CHAT, "look|<end>"), (seen, "found|<end>"), said, agents=("a", "a", "b")) == "rewritten"


def test_without_text_a_difference_is_only_that():
    assert kind((CHAT, "h|aving|<end>"), (f"{CHAT}|hav|ing|<end>|more", "ok"), decode=None) == "diverged"


def test_an_explanation_carries_both_windows_and_texts():
    (broken,) = breaks((CHAT, "h|aving|<end>"), (f"{CHAT}|hav|ing|<end>|more", "ok"))
    drift = explain_break(broken, WORDS.decode)
    assert (drift.position, drift.known_call, drift.found_call) == (5, "c0", "c1")
    assert drift.known_text == "<s><user>task<end><bot>having<end>"
    assert drift.found_text == "<s><user>task<end><bot>having<end>more"
    assert drift.known_ids.tolist() == WORDS.ids(f"{CHAT}|h|aving|<end>")
    assert drift.found_ids.tolist() == WORDS.ids(f"{CHAT}|hav|ing|<end>|more")


def test_windows_hold_sixteen_tokens_on_either_side():
    first = Call(call_id="a", prompt_ids=np.arange(40), response_ids=np.arange(40, 80), logprobs=-np.ones(40))
    second = Call(call_id="b", prompt_ids=[*range(50), *range(150, 200)], response_ids=[1], logprobs=[-1])
    (broken,) = merge_calls(Rollout(rollout_id="r", group_id="g", calls=[first, second])).breaks
    drift = explain_break(broken)
    assert drift.known_ids.tolist() == list(range(34, 66))
    assert drift.found_ids.tolist() == [*range(34, 50), *range(150, 166)]
    assert (drift.kind, drift.known_text, drift.found_text) == ("diverged", None, None)


def test_half_a_character_is_not_a_difference():
    pieces = [b"a", b"\xc3", b"\xa9", "é".encode(), b"b"]

    def decode(ids):
        return b"".join(pieces[index] for index in ids).decode("utf-8", errors="replace")

    first = Call(call_id="a", prompt_ids=[0], response_ids=[1, 2], logprobs=[-1, -1])
    second = Call(call_id="b", prompt_ids=[0, 3, 4], response_ids=[0], logprobs=[-1])
    (broken,) = merge_calls(Rollout(rollout_id="r", group_id="g", calls=[first, second])).breaks
    assert explain_break(broken, decode).kind == "retokenized"


ROLE = "<s>|<user>|task|<end>|<turn>|assistant|\n"  # the role is a word, so a response does not begin next to markup


@pytest.mark.parametrize(
    ("response", "came_back"),
    [
        ("\n|yes|<end>", "yes|<end>|<turn>|user|\n|more"),  # trimmed
        ("<think>|\n\n|</think>|\n\n|yes|<end>", "yes|<end>|<turn>|user|\n|more"),  # empty thinking
        ("\t|\n", "<end>|<turn>|user|\n|more"),  # nothing but blanks
    ],
)
def test_template_behind_a_role_in_words(response, came_back):
    assert kind((ROLE, response), (f"{ROLE}|{came_back}", "ok")) == "template"


def test_an_accent_that_the_tokenizer_joins_is_retokenized():
    assert kind((CHAT, "caf|e|\u0301|s|<end>"), (f"{CHAT}|caf|é|s|<end>|more", "ok")) == "retokenized"
    assert kind((CHAT, "caf|e|\u0301|s|<end>"), (f"{CHAT}|caf|è|s|<end>|more", "ok")) == "rewritten"


def test_dropped_reasoning_is_no_summary_though_the_prompt_gets_shorter():
    thought = f"{CHAT}|<think>|a|b|c|d|e|f|g|</think>|look|<end>|<tool>|page|<end>|<bot>"
    dropped = f"{CHAT}|look|<end>|<tool>|page|<end>|<bot>|found|<end>|<bot>"
    first = (CHAT, "<think>|a|b|c|d|e|f|g|</think>|look|<end>")
    assert kind(first, (thought, "found|<end>"), (dropped, "ok")) == "rewritten"


def test_what_was_said_is_held_as_a_whole_line():
    seen, masked = f"{CHAT}|look|<end>|<tool>|page one|<end>|<bot>", f"{CHAT}|look|<end>|<tool>|...|<end>|<bot>"
    said = f"{masked}|page|<end>|<user>|more|<bot>"
    assert kind((CHAT, "look|<end>"), (seen, "page|<end>"), (said, "ok")) == "rewritten"
    mentioned = f"{masked}|pages|<end>|<user>|more|<bot>"
    assert kind((CHAT, "look|<end>"), (seen, "page|<end>"), (mentioned, "ok")) == "branched"
