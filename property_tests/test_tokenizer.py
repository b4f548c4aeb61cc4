"""Does a tokenizer drift, does a template rewrite history? On the toy always, on yours with ``--tokenizer PATH``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harnessrl.adapter import KINDS, Call, Rollout, explain_break, merge_calls
from property_tests.chats import Drifted, load, stays_a_prefix, survives, toy_chat
from property_tests.reference import fewest_samples
from property_tests.searching import counterexample, drawn, fails, told
from property_tests.toy import Template


def sampled(chat):
    return st.lists(st.sampled_from(chat.ordinary), min_size=1, max_size=8)


def stable(chat):
    """Answers that survive decode and encode, among them some with an edge that templates like to touch."""
    edges = st.sampled_from(["{}", " {}", "{}\n", "<think>\n{}\n</think>\n\n{}"])
    texts = st.builds(lambda ids, edge: edge.replace("{}", chat.decode(ids)), sampled(chat), edges)
    return texts.map(chat.encode).filter(lambda ids: ids and not fails(partial(survives, chat), ids))


# ---- yours: these tests fail where your ids do not come back, and say how


def test_sampled_ids_survive_decode_and_encode(tokenizer):
    @given(sampled(tokenizer))
    def survive(ids):
        story = told(partial(survives, tokenizer), ids)
        assert story is None, story

    survive()


def test_history_stays_a_prefix(tokenizer):
    if tokenizer.render is None:
        pytest.skip("the tokenizer has no chat template; name one with --template FILE")

    @given(stable(tokenizer))
    def stay(ids):
        story = told(partial(stays_a_prefix, tokenizer), ids)
        assert story is None, story

    stay()


def test_whatever_drifts_is_merged_faithfully_and_explained(tokenizer):
    if tokenizer.render is None:
        pytest.skip("the tokenizer has no chat template; name one with --template FILE")

    @given(st.lists(sampled(tokenizer), min_size=2, max_size=4))
    def merges(answers):
        assert set(merges_faithfully(tokenizer, answers)) <= set(KINDS)

    merges()


def merges_faithfully(chat, answers):
    """A text harness talks: however the ids come back, every one is trained behind its own prompt."""
    messages, calls = [("user", "go on")], []
    for index, ids in enumerate(answers):
        prompt = chat.encode(chat.render(messages))
        calls.append(Call(call_id=f"c{index}", prompt_ids=prompt, response_ids=ids, logprobs=[-1.0] * len(ids)))
        messages += [("assistant", chat.decode(ids)), ("user", "and then")]
    merged = merge_calls(Rollout(rollout_id="r", group_id="g", calls=calls))
    spans = {span.call_id: (sample, span) for sample in merged.samples for span in sample.spans}
    for call in calls:
        sample, span = spans[call.call_id]
        assert sample.token_ids[: span.stop].tolist() == [*call.prompt_ids, *call.response_ids]
    assert len(merged.samples) == fewest_samples(calls)
    return [explain_break(broken, chat.decode).kind for broken in merged.breaks]


# ---- the toy: the questions above can be answered with no and with yes


TOY = toy_chat(Template())


def test_the_toy_drifts_and_two_tokens_are_enough():
    assert len(counterexample(sampled(TOY), partial(survives, TOY), shrink=True)) == 2


def test_the_story_says_where():
    with pytest.raises(Drifted) as drifted:
        survives(TOY, [*TOY.encode("no"), 12, 40])
    assert str(drifted.value) == (
        "sampled 'nohaving', and the prefix broke at token 1 of 3: retokenized\n"
        "  up to there                 'no'(41)\n"
        "  what was sampled, or sent   'h'(12) 'aving'(40)\n"
        "  what came back              'hav'(39) 'ing'(37)"
    )


@given(stable(TOY))
def test_a_template_without_faults_keeps_the_prefix(ids):
    assert told(partial(stays_a_prefix, TOY), ids) is None


@pytest.mark.parametrize(
    "fault",
    [{"trim": True}, {"drop_thinking": True}, {"opening": "<think>"}],
    ids=lambda fault: next(iter(fault)),
)
def test_a_template_with_a_fault_is_found_out(fault):
    chat = toy_chat(Template(**fault))
    ids = counterexample(stable(chat), partial(stays_a_prefix, chat))
    with pytest.raises(Drifted, match=r"the prefix broke at token \d+ of \d+: template"):
        stays_a_prefix(chat, ids)


@given(st.lists(sampled(TOY), min_size=2, max_size=4))
def test_the_toys_drift_is_merged_faithfully(answers):
    kinds = merges_faithfully(TOY, answers)
    assert set(kinds) <= {"retokenized"}


def test_the_toys_drift_is_reached():
    kinds = [merges_faithfully(TOY, answers) for answers in drawn(st.lists(sampled(TOY), min_size=4, max_size=4), 50)]
    assert sum(map(bool, kinds)) >= 5


# ---- the options, on a tokenizer made here


CI = os.environ | {"HYPOTHESIS_PROFILE": "ci"}


@pytest.fixture
def folder(tmp_path):
    """A byte-pair tokenizer of twenty characters and two merges that overlap, and a template that trims."""
    tokenizers = pytest.importorskip("tokenizers")
    pieces = [*"abdeghinorust <>|_\n", "no", "on"]
    vocabulary = {piece: index for index, piece in enumerate(["<unk>", "<|end|>", *pieces])}
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=vocabulary, merges=[("n", "o"), ("o", "n")], unk_token="<unk>", fuse_unk=False)
    )
    tokenizer.add_special_tokens(["<unk>", "<|end|>"])
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    turn = "{{ message['role'] }}>{{ message['content'] | trim }}<|end|>"
    (tmp_path / "trims.jinja").write_text("{% for message in messages %}" + turn + "{% endfor %}assistant>")
    return tmp_path


def test_the_option_tells_the_shrunk_story(folder):
    options = ["--tokenizer", str(folder), "--template", str(folder / "trims.jinja")]
    command = [sys.executable, "-m", "pytest", "-q", "property_tests", *options]
    told = subprocess.run(command, capture_output=True, text=True, timeout=100, env=CI).stdout
    assert "2 failed, 1 passed" in told, told
    assert re.search(r"sampled '[no]+', and the prefix broke at token 0 of \d: retokenized", told), told
    assert re.search(r"what was sampled, or sent   '(n|o|on)'\(", told), told
    assert re.search(r"answered '.+', and the prefix broke at token \d+ of \d+: template", told), told


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    pytest.importorskip("tokenizers")
    with pytest.raises(ValueError, match=r"tokenizer\.json does not exist; expected a tokenizer\.json or a folder"):
        load(str(tmp_path))


def test_without_a_template_only_drift_can_be_asked(folder):
    assert load(str(folder)).render is None
    assert not fails(partial(survives, load(str(folder))), load(str(folder)).encode("no sun"))
