"""What breaks a prefix in the field, played on real tokenizers and templates: one short conversation a cause."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.real.families import load
from tests.real.survey import TOOL, answer, call, user

Ids = list[int]
Calls = list[tuple[Ids, Ids]]
"""Prompt and response of each call, in order of arrival."""

REASONING = "Swifts sleep on the wing, so they must be it."
SWIFT = "It is the swift, I am quite sure."
GULLS = "Three gulls were seen near the harbour."
KIWI = "The kiwi, among others."
ASK, MORE, LAST = user("Which bird never lands?"), user("And which one never flies?"), user("Thank you.")
SYSTEM = {"role": "system", "content": "You are a patient guide to the birds of the northern coast."}
ARGUMENTS = {"query": "gulls near Öland", "limit": 3}
SPACED = json.dumps(ARGUMENTS, ensure_ascii=False)
RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "search", "content": GULLS}
CALLED = [call(ARGUMENTS), RESULT]
EMPTY = [call({}), RESULT]


def thinks(content: str) -> dict[str, Any]:
    return answer(content, reasoning_content=REASONING)


def nothing(model: Any) -> Calls:
    """Three turns in which every prompt continues the one before."""
    texts = (SWIFT, KIWI, "Gladly.")
    history = [ASK, answer(SWIFT), MORE, answer(KIWI), LAST]
    prompts = [model.prompt(history[:at]) for at in (1, 3, 5)]
    return [(prompt, model.written("plain", content=text)) for prompt, text in zip(prompts, texts, strict=True)]


# ---- what the template does


def thinking_dropped(model: Any) -> Calls:
    first = model.written("thought", reasoning=REASONING, content=SWIFT)
    second = model.prompt([ASK, thinks(SWIFT), MORE])
    return [(model.prompt([ASK]), first), (second, model.written("plain", content=KIWI))]


def thinking_in_text_dropped(model: Any) -> Calls:
    """The harness sends the reasoning back inside the content, and the template cuts it out, in every turn."""
    turns = [answer(f"{REASONING}\n</think>\n\n{text}") for text in (SWIFT, KIWI)]
    written = [model.written("thought", reasoning=REASONING, content=text) for text in (SWIFT, KIWI, "Gladly.")]
    histories = [[ASK], [ASK, turns[0], MORE], [ASK, turns[0], MORE, turns[1], LAST]]
    return [(model.prompt(history), ids) for history, ids in zip(histories, written, strict=True)]


def thinking_kept_in_a_tool_loop_then_dropped(model: Any) -> Calls:
    """Long reasoning before the call, kept while tools run and gone at the next question: the prompt gets shorter."""
    long = " ".join([REASONING] * 8)
    called = call(ARGUMENTS, reasoning_content=long)
    start = f"<think>\n{long}\n</think>\n\n"
    first = model.encode(start) + model.written("call", arguments=SPACED)
    second = model.encode(f"<think>\n{REASONING}\n</think>\n\n{SWIFT}<|im_end|>")
    histories = [[ASK], [ASK, called, RESULT], [ASK, called, RESULT, thinks(SWIFT), MORE]]
    written = [first, second, model.written("plain", content=KIWI)]
    return [(model.prompt(history, [TOOL]), ids) for history, ids in zip(histories, written, strict=True)]


def opening_not_in_history(model: Any) -> Calls:
    """The prompt opens the reasoning, the model closes it at once, and history shows neither."""
    first = model.written("plain", content=SWIFT)
    return [(model.prompt([ASK]), first), (model.prompt([ASK, answer(SWIFT), MORE]), first)]


def empty_thinking_dropped(model: Any) -> Calls:
    first = model.written("thought", reasoning="", content=SWIFT)
    second = model.prompt([ASK, answer(SWIFT), MORE])
    return [(model.prompt([ASK]), first), (second, model.written("plain", content=KIWI))]


def trimmed(model: Any) -> Calls:
    text = f"\n{SWIFT} \n"
    second = model.prompt([ASK, answer(text), MORE])
    return [(model.prompt([ASK]), model.written("plain", content=text)), (second, model.written("plain", content=KIWI))]


def end_token_replaced(model: Any) -> Calls:
    first = model.written("plain", content=SWIFT)
    return [(model.prompt([ASK]), first), (model.prompt([ASK, answer(SWIFT), MORE]), first)]


def tool_json_spaced(model: Any) -> Calls:
    """The model writes compact JSON, the template writes the parsed call with blanks."""
    compact = json.dumps(ARGUMENTS, ensure_ascii=False, separators=(",", ":"))
    first = model.written("call", arguments=compact)
    second = model.prompt([ASK, *CALLED], [TOOL])
    return [(model.prompt([ASK], [TOOL]), first), (second, model.written("plain", content=GULLS))]


def tool_json_unescaped(model: Any) -> Calls:
    """The model escapes what is not ASCII, the template does not."""
    first = model.written("call", arguments=json.dumps(ARGUMENTS))
    second = model.prompt([ASK, *CALLED], [TOOL])
    return [(model.prompt([ASK], [TOOL]), first), (second, model.written("plain", content=GULLS))]


def tool_call_on_one_line(model: Any) -> Calls:
    text = f'<tool_call>{{"name": "search", "arguments": {SPACED}}}</tool_call><|im_end|>'
    second = model.prompt([ASK, *CALLED], [TOOL])
    return [(model.prompt([ASK], [TOOL]), model.encode(text)), (second, model.written("plain", content=GULLS))]


def tool_call_in_another_order(model: Any) -> Calls:
    """The model names the channel before the recipient, the template after it."""
    first = model.written("call", arguments=SPACED)
    second = model.prompt([ASK, *CALLED], [TOOL])
    return [(model.prompt([ASK], [TOOL]), first), (second, model.written("plain", content=GULLS))]


def tool_list_moves_to_the_last_question(model: Any) -> Calls:
    first = model.written("plain", content=SWIFT)
    second = model.prompt([ASK, answer(SWIFT), MORE], [TOOL])
    return [(model.prompt([ASK], [TOOL]), first), (second, model.written("plain", content=KIWI))]


def midnight(model: Any) -> Calls:
    """The template prints the date, and the second call comes a day later."""
    later = load("gpt_oss a day later")
    first = model.encode(f"<|channel|>final<|message|>{SWIFT}<|end|>")
    second = later.prompt([ASK, answer(SWIFT), MORE])
    return [(model.prompt([ASK]), first), (second, model.written("plain", content=KIWI))]


# ---- what the harness does


def begin_token_doubled(model: Any) -> Calls:
    """The second prompt went through an encoder that adds the token that the template had written already."""
    first = model.written("plain", content=SWIFT)
    prompts = [model.prompt([ASK]), model.prompt([ASK, answer(SWIFT), MORE])]
    return [(prompts[0], first), ([prompts[1][0], *prompts[1]], first)]


def tools_left_out_at_the_end(model: Any) -> Calls:
    """A last call without tools, so that the model must answer."""
    first = model.written("plain", content=SWIFT)
    return [(model.prompt([ASK], [TOOL]), first), (model.prompt([ASK, answer(SWIFT), MORE]), first)]


def tool_call_repaired(model: Any) -> Calls:
    """The model forgets a brace; the harness parses what it can."""
    first = model.written("call", arguments=SPACED[:-1])
    second = model.prompt([ASK, *CALLED], [TOOL])
    return [(model.prompt([ASK], [TOOL]), first), (second, model.written("plain", content=GULLS))]


def summarised(model: Any) -> Calls:
    history = [SYSTEM, ASK, answer(SWIFT), MORE, answer(KIWI), user("Tell me more about both of them.")]
    short = [SYSTEM, user("So far: swifts never land and kiwis never fly. Tell me more about both of them.")]
    texts = (SWIFT, KIWI, "Both are birds.", "Gladly.")
    prompts = [model.prompt(messages) for messages in (history[:2], history[:4], history, short)]
    return [(prompt, model.written("plain", content=text)) for prompt, text in zip(prompts, texts, strict=True)]


def oldest_turns_dropped(model: Any) -> Calls:
    history = [SYSTEM, ASK, answer(SWIFT), MORE, answer(KIWI), user("Which of the two lives longer?")]
    texts = [SWIFT, KIWI, "The swift."]
    calls = [(model.prompt(history[:at]), texts[at // 2 - 1]) for at in (2, 4, 6)]
    calls.append((model.prompt([SYSTEM, history[5], answer(texts[2]), LAST]), "Gladly."))
    return [(prompt, model.written("plain", content=text)) for prompt, text in calls]


def sampled_twice(model: Any) -> Calls:
    prompt = model.prompt([ASK])
    return [(prompt, model.written("plain", content=SWIFT)), (prompt, model.written("plain", content="The swift."))]


def two_results_of_one_call(model: Any) -> Calls:
    """The tool is asked again, and both conversations go on."""
    other = RESULT | {"content": "The page cannot be found."}
    first = model.written("call", arguments="{}")
    prompts = [model.prompt([ASK, EMPTY[0], result], [TOOL]) for result in (RESULT, other)]
    return [
        (model.prompt([ASK], [TOOL]), first),
        *((prompt, model.written("plain", content=GULLS)) for prompt in prompts),
    ]


def sub_agent(model: Any) -> Calls:
    """A helper with a conversation of its own; nothing says whose calls these are."""
    helper = {"role": "system", "content": "Find sources for one claim at a time, and answer with their titles only."}
    first = model.written("plain", content=SWIFT)
    second = model.prompt([helper, user("A claim to check: swifts sleep in the air for months.")])
    return [(model.prompt([SYSTEM, ASK]), first), (second, model.written("plain", content="Sleeping on the wing."))]


# ---- what decoding and encoding do


def other_tokens(model: Any) -> Calls:
    """The model spells a word in other tokens than an encoder would."""
    before, after = model.family.plain.format(content=SWIFT).split("ift")
    first = model.encode(before) + model.encode("ift" + after)
    second = model.prompt([ASK, answer(SWIFT), MORE])
    return [(model.prompt([ASK]), first), (second, model.written("plain", content=KIWI))]


def cut_inside_a_character(model: Any) -> Calls:
    """The length limit leaves a part of a bird's bytes; decoding makes it U+FFFD, which is encoded as such."""
    whole = model.encode("It is this one: 𓅓")
    first = whole[:-1]
    second = model.prompt([ASK, answer("It is this one: \ufffd"), MORE])
    return [(model.prompt([ASK]), first), (second, model.written("plain", content=KIWI))]


def accent_composed(model: Any) -> Calls:
    """The model writes e and an accent apart; the tokenizer's normalizer joins them."""
    first = model.encode("C'est le martinet e") + model.encode("\u0301") + model.encode("trange.<|im_end|>")
    second = model.prompt([ASK, answer("C'est le martinet e\u0301trange."), MORE])
    return [(model.prompt([ASK]), first), (second, model.written("plain", content=KIWI))]


def blank_line_joins_the_prompt(model: Any) -> Calls:
    """The prompt ends with a line break; a response that begins with another makes both one token."""
    text = f"\n{SWIFT}"
    second = model.prompt([ASK, answer(text), MORE])
    return [(model.prompt([ASK]), model.written("plain", content=text)), (second, model.written("plain", content=KIWI))]


CAUSES: dict[Callable[[Any], Calls], tuple[str, ...]] = {
    nothing: ("qwen3", "llama3_1", "gemma3", "mistral_v3"),
    thinking_dropped: ("qwen3", "gpt_oss"),
    thinking_in_text_dropped: ("deepseek_v3",),
    thinking_kept_in_a_tool_loop_then_dropped: ("qwen3",),
    opening_not_in_history: ("deepseek_v3",),
    empty_thinking_dropped: ("qwen3",),
    trimmed: ("llama3_1", "gemma3"),
    end_token_replaced: ("gpt_oss",),
    tool_json_spaced: ("qwen3", "llama3_1"),
    tool_json_unescaped: ("qwen3", "llama3_1"),
    tool_call_on_one_line: ("qwen3",),
    tool_call_in_another_order: ("gpt_oss",),
    tool_list_moves_to_the_last_question: ("mistral_v3",),
    midnight: ("gpt_oss",),
    begin_token_doubled: ("llama3_1", "gemma3", "deepseek_v3"),
    tools_left_out_at_the_end: ("qwen3",),
    tool_call_repaired: ("llama3_1",),
    summarised: ("qwen3", "llama3_1", "gemma3"),
    oldest_turns_dropped: ("qwen3", "gemma3"),
    sampled_twice: ("qwen3", "mistral_v3"),
    two_results_of_one_call: ("qwen3", "llama3_1"),
    sub_agent: ("qwen3", "llama3_1", "gemma3"),
    other_tokens: ("qwen3", "llama3_1", "gemma3", "gpt_oss"),
    cut_inside_a_character: ("qwen3", "llama3_1", "gemma3"),
    accent_composed: ("qwen3",),
    blank_line_joins_the_prompt: ("qwen3",),
}
