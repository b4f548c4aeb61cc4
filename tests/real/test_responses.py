"""Real drift: 120 responses that SmolLM2-135M-Instruct sampled at temperature 1, and how they come back."""

import pytest

from harnessrl.adapter import explain_break, merge_calls
from tests.real.make_responses import edits
from tests.real.pieces import pieces_of
from tests.real.stored import data, pieces, rollout

STORED = data("smollm2_responses")
DECODE = pieces("smollm2").decode
DRIFTED = [at for at, response in enumerate(STORED["responses"]) if response["edits"]]
END = STORED["tail"][0]


def prompt_of(response):
    return STORED["prompts"][response["question"]]


def context_of(response):
    """Prompt and sampled content, without the end token."""
    ids = response["ids"]
    return prompt_of(response) + (ids[:-1] if ids[-1] == END else ids)


def came_back(response):
    """The same as the next prompt has it: each edit replaces known[low:high], counted from the end of the prompt."""
    ids, start = context_of(response), len(prompt_of(response))
    for low, high, new in reversed(response["edits"]):
        ids[start + low : start + high] = new
    return ids


def two_calls(response):
    calls = [(prompt_of(response), response["ids"]), (came_back(response) + STORED["tail"], [END])]
    return rollout(calls)


def test_the_sample_is_what_it_says():
    lengths = [len(response["ids"]) for response in STORED["responses"]]
    assert len(lengths) == 120
    assert (min(lengths), max(lengths)) == (8, 64)
    assert sum(lengths) == 6454


def test_a_quarter_of_them_do_not_survive():
    assert len(DRIFTED) == 32
    assert sum(len(response["edits"]) for response in STORED["responses"]) == 44  # 6.8 in 1,000 tokens


def test_what_comes_back_reads_as_what_was_sampled():
    for response in STORED["responses"]:
        assert DECODE(came_back(response)) == DECODE(context_of(response))


def test_a_new_sample_opens_exactly_where_the_prompt_is_encoded_otherwise():
    for response in STORED["responses"]:
        merged = merge_calls(two_calls(response))
        assert len(merged.samples) == (2 if response["edits"] else 1)
        assert len(merged.breaks) == len(merged.samples) - 1
        sampled = [
            sample.token_ids[span.start : span.stop].tolist() for sample in merged.samples for span in sample.spans
        ]
        assert sampled == [response["ids"], [END]]


@pytest.mark.parametrize("at", DRIFTED)
def test_the_break_is_told_as_retokenized_with_both_windows(at):
    response = STORED["responses"][at]
    (broken,) = merge_calls(two_calls(response)).breaks
    drift = explain_break(broken, DECODE)
    first = len(prompt_of(response)) + response["edits"][0][0]
    known, found = prompt_of(response) + response["ids"], came_back(response) + STORED["tail"]
    assert (drift.kind, drift.position) == ("retokenized", first)
    assert drift.known_ids.tolist() == known[max(0, first - 16) : first + 16]
    assert drift.found_ids.tolist() == found[max(0, first - 16) : first + 16]
    assert drift.known_text == DECODE(drift.known_ids) and drift.found_text == DECODE(drift.found_ids)
    assert known[:first] == found[:first] and known[first] != found[first]


def test_substitute_would_hide_every_one_of_them():
    for response in STORED["responses"]:
        (sample,) = merge_calls(two_calls(response), "substitute", tokenizer=pieces("smollm2")).samples
        assert sample.token_ids.tolist() == [*context_of(response), *STORED["tail"], END]


def test_edits_are_found():
    assert edits([1, 2, 3, 4, 5], [1, 9, 4, 5, 6], 1) == [(0, 2, [9]), (4, 4, [6])]
    assert edits([1, 2], [1, 2], 0) == []


@pytest.mark.real
def test_the_tokenizer_gives_what_is_stored(smollm2):
    from harnessrl.service.tokens import TextCodec

    codec = TextCodec(str(smollm2))
    for response in STORED["responses"]:
        content = context_of(response)[len(prompt_of(response)) :]
        said = [(STORED["questions"][response["question"]], "user"), (codec.decode(content), "assistant")]
        said.append((STORED["next"], "user"))
        messages = [{"role": role, "content": text} for text, role in said]
        assert codec.encode(codec.render(messages[:1], None)).tolist() == prompt_of(response)
        assert codec.encode(codec.render(messages, None)).tolist() == came_back(response) + STORED["tail"]
    assert pieces_of(smollm2 / "tokenizer.json", map(int, STORED["pieces"])) == STORED["pieces"]


@pytest.mark.real
@pytest.mark.parametrize(("length", "drifting"), [(8, 7), (16, 14), (32, 21), (64, 32)])
def test_drift_grows_with_length(smollm2, length, drifting):
    """Of the 120 responses cut after so many tokens, as many do not survive decode and encode."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    cut = [response["ids"][:length] for response in STORED["responses"]]
    back = [tokenizer.encode(tokenizer.decode(ids, skip_special_tokens=False)).ids for ids in cut]
    assert sum(ids != again for ids, again in zip(cut, back, strict=True)) == drifting
