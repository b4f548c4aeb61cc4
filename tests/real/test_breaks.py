"""explain_break on real templates: every kind has a real cause. README.md has the table in words."""

import pytest

from harnessrl.adapter import KINDS, explain_break, merge_calls
from tests.real import make_breaks
from tests.real.causes import CAUSES
from tests.real.families import load
from tests.real.stored import calls_of, data, pieces, rollout

# case: for each break its kind, the first token that differs, and four tokens from there of what was known and found.
# Each was judged by reading; nothing here is computed.
EXPECTED = {
    "qwen3: nothing": [],
    "llama3_1: nothing": [],
    "gemma3: nothing": [],
    "mistral_v3: nothing": [],
    "qwen3: thinking_dropped": [("rewritten", 13, "<think>\nSwifts", "It is the swift")],
    "gpt_oss: thinking_dropped": [("rewritten", 73, "analysis<|message|>Swifts", "final<|message|>It is")],
    "deepseek_v3: thinking_in_text_dropped": [
        ("rewritten", 8, "<think>\nSwifts", "\n\nIt is the"),
        ("rewritten", 28, "<think>\nSwifts", "\n\nThe kiwi"),
    ],
    "qwen3: thinking_kept_in_a_tool_loop_then_dropped": [
        ("rewritten", 151, "<think>\nSwifts", '<tool_call>\n{"name'),
    ],
    "deepseek_v3: opening_not_in_history": [("template", 8, "<think>\n\n</think>", "It is the swift")],
    "qwen3: empty_thinking_dropped": [("template", 13, "<think>\n\n</think>\n\n", "It is the swift")],
    "llama3_1: trimmed": [("template", 40, "\nIt is the", "It is the swift")],
    "gemma3: trimmed": [("template", 14, "\nIt is the", "It is the swift")],
    "gpt_oss: end_token_replaced": [("template", 85, "<|return|>", "<|end|><|start|>user<|message|>")],
    "qwen3: tool_json_spaced": [("rewritten", 164, '":"gulls near', '": "gulls')],
    "llama3_1: tool_json_spaced": [("rewritten", 189, '":"gulls near', '": "gulls')],
    "qwen3: tool_json_unescaped": [("rewritten", 169, " \\u00", ' Öland", "')],
    "llama3_1: tool_json_unescaped": [("rewritten", 194, " \\u00d", ' Öland", "')],
    "qwen3: tool_call_on_one_line": [("template", 152, '{"name": "', '\n{"name":')],
    "gpt_oss: tool_call_in_another_order": [("rewritten", 126, "<|channel|>commentary to", " to=functions.search")],
    "mistral_v3: tool_list_moves_to_the_last_question": [
        ("rewritten", 1, '[AVAILABLE_TOOLS] [{"type', "[INST] Which bird never"),
    ],
    "gpt_oss: midnight": [("rewritten", 35, "01\n\nReasoning", "02\n\nReasoning")],
    "llama3_1: begin_token_doubled": [
        (
            "template",
            1,
            "<|start_header_id|>system<|end_header_id|>\n\n",
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>",
        ),
    ],
    "gemma3: begin_token_doubled": [("template", 1, "<start_of_turn>user\nWhich", "<bos><start_of_turn>user\n")],
    "deepseek_v3: begin_token_doubled": [
        ("template", 1, "<｜User｜>Which bird never", "<｜begin▁of▁sentence｜><｜User｜>Which bird"),
    ],
    "qwen3: tools_left_out_at_the_end": [("rewritten", 1, "system\n# Tools", "user\nWhich bird")],
    "llama3_1: tool_call_repaired": [("rewritten", 202, "}<|eot_id|>", "}}<|eot_id|><|start_header_id|>ipy")],
    "qwen3: summarised": [("summarized", 21, "Which bird never lands", "So far: swift")],
    "llama3_1: summarised": [("summarized", 43, "Which bird never lands", "So far: swift")],
    "gemma3: summarised": [("summarized", 18, "Which bird never lands", "So far: sw")],
    "qwen3: oldest_turns_dropped": [("summarized", 22, " bird never lands?", " of the two lives")],
    "gemma3: oldest_turns_dropped": [("summarized", 19, " bird never lands?", " of the two lives")],
    "qwen3: sampled_twice": [("branched", 13, "It is the swift", "")],
    "mistral_v3: sampled_twice": [("branched", 8, " It is the swift", "")],
    "qwen3: two_results_of_one_call": [("branched", 172, "Three gulls were", "The page cannot be")],
    "llama3_1: two_results_of_one_call": [("branched", 195, '"Three gulls', '"The page cannot be')],
    "qwen3: sub_agent": [("unrelated", 3, "You are a patient", "Find sources for one")],
    "llama3_1: sub_agent": [("unrelated", 25, "You are a patient", "Find sources for one")],
    "gemma3: sub_agent": [("unrelated", 4, "You are a patient", "Find sources for one")],
    "qwen3: other_tokens": [("retokenized", 16, " swift, I", " swift, I am")],
    "llama3_1: other_tokens": [("retokenized", 43, " swift, I", " swift, I am")],
    "gemma3: other_tokens": [("retokenized", 17, " swift, I", " swift, I am")],
    "gpt_oss: other_tokens": [("retokenized", 78, " swift, I", " swift, I am")],
    "qwen3: cut_inside_a_character": [("retokenized", 18, " \ufffd", " \ufffd<|im_end|>\n<|im_start|>")],
    "llama3_1: cut_inside_a_character": [
        ("retokenized", 45, " \ufffd", " \ufffd<|eot_id|><|start_header_id|>user"),
    ],
    "gemma3: cut_inside_a_character": [("retokenized", 19, " \ufffd", " \ufffd<end_of_turn>\n<start_of_turn>")],
    "qwen3: accent_composed": [("retokenized", 18, " e\u0301trange", " étrange.")],
    "qwen3: blank_line_joins_the_prompt": [("retokenized", 12, "\n\nIt is", "\n\nIt is the")],
}


def told(case):
    """Kind, position and what stands there on both sides, of each break."""
    decode = pieces(case.partition(":")[0]).decode
    found = []
    for broken in merge_calls(rollout(calls_of(case))).breaks:
        drift = explain_break(broken, decode)
        sides = (drift.known_ids, drift.found_ids)
        here = min(drift.position, 16)
        found.append((drift.kind, drift.position, *(decode(ids[here : here + 4]) for ids in sides)))
    return found


@pytest.mark.parametrize("case", EXPECTED)
def test_each_cause_is_told(case):
    assert told(case) == EXPECTED[case]


def test_every_kind_has_a_real_cause():
    kinds = {kind for breaks in EXPECTED.values() for kind, *_ in breaks}
    assert kinds | {"diverged"} == set(KINDS)  # diverged is what can be said without text, see below


def test_every_stored_case_is_expected():
    assert set(EXPECTED) == set(data("breaks")["cases"])
    assert set(EXPECTED) == {f"{family}: {cause.__name__}" for cause, names in CAUSES.items() for family in names}


@pytest.mark.parametrize("case", EXPECTED)
def test_every_call_is_trained_behind_its_own_prompt(case):
    made = rollout(calls_of(case))
    merged = merge_calls(made)
    trained = {span.call_id: (sample.token_ids, span) for sample in merged.samples for span in sample.spans}
    assert len(merged.samples) == 1 + len(EXPECTED[case])
    for call in made.calls:
        ids, span = trained[call.call_id]
        assert ids[: span.start].tolist() == call.prompt_ids.tolist()
        assert ids[span.start : span.stop].tolist() == call.response_ids.tolist()


def test_without_text_the_same_breaks_are_told_apart_less():
    kinds = {
        (told_kind, explain_break(broken).kind)
        for case, expected in EXPECTED.items()
        for (told_kind, *_), broken in zip(expected, merge_calls(rollout(calls_of(case))).breaks, strict=True)
    }
    assert {pair for pair in kinds if pair[0] in ("retokenized", "branched")} == {
        ("retokenized", "diverged"),
        ("retokenized", "unrelated"),  # the joint was retokenized, so no sampled token came back as it was
        ("branched", "branched"),
    }


@pytest.mark.real
@pytest.mark.parametrize("family", sorted({name for names in CAUSES.values() for name in names}))
def test_the_packages_still_render_what_is_stored(family):
    try:
        model = load(family)
    except LookupError as error:
        pytest.skip(str(error))
    for cause, names in CAUSES.items():
        if family in names:
            case = f"{family}: {cause.__name__}"
            calls = cause(model)
            assert make_breaks.shorten(calls) == data("breaks")["cases"][case], case
            used = {index for call in calls for ids in call for index in ids}
            assert model.pieces(used).items() <= data("breaks")["pieces"][family].items()
