"""Which of the chat templates in the wheel of trl keep every prompt a prefix of the next, by text.

    python -m tests.real.survey

A harness asks, the model answers, the answer goes back as a message. Without breaks each prompt starts the next one, and
what the model wrote (content, reasoning, arguments of calls) stands in it letter by letter. No tokenizer is needed, and
nothing is known of the form in which the model writes: what this finds broken is broken for every model.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harnessrl.service.tokens import TemplateError, TextCodec
from tests.real.packages import templates

DATA = Path(__file__).parent / "data" / "template_survey.json"
LOOKUP = Path(__file__).parents[2] / "experiments" / "lookup" / "tokenizer" / "tokenizer.json"
REASONING = "Swifts sleep on the wing, so they must be it."
CONTENT = "It is the swift, I am quite sure."
ARGUMENTS = {"query": "gulls near Öland", "limit": 3}
TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Find pages about birds.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}}},
    },
}
Messages = list[dict[str, Any]]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(content: str = CONTENT, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    function = {"name": "search", "arguments": arguments}
    calls = [{"id": "call00001", "type": "function", "function": function}]
    return answer("", tool_calls=calls, **more)


RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "search", "content": "Three gulls were seen on Sunday."}
ASK, MORE, LAST = user("Which bird never lands?"), user("And which one never flies?"), user("Thank you.")


def situations(reasoning: Any, arguments: Any) -> dict[str, list[Messages]]:
    """For each situation the messages of every prompt of the harness; reasoning is a function of the content."""
    think = reasoning(CONTENT)
    thoughtful = reasoning("") | {"tool_calls": call(arguments)["tool_calls"]}
    return {
        "plain": [[ASK], [ASK, answer(), MORE], [ASK, answer(), MORE, answer(), LAST]],
        "blanks": [[ASK], [ASK, answer(f" {CONTENT}\n"), MORE]],
        "thinking": [[ASK], [ASK, think, MORE]],
        "tool": [[ASK], called(arguments)],
        "tool_user": [[ASK], called(arguments), [*called(arguments), answer(), MORE]],
        "thinking_tool_user": [[ASK], [ASK, thoughtful, RESULT], [ASK, thoughtful, RESULT, think, MORE]],
    }


def keeps(codec: TextCodec, prompts: Sequence[Messages], written: Sequence[str], tools: list[Any] | None) -> bool:
    """Whether each prompt starts the next one and the last one holds all that was written."""
    texts = [codec.render(messages, tools) for messages in prompts]
    grows = all(longer.startswith(text) for text, longer in itertools.pairwise(texts))
    return grows and all(texts[-1].count(text) >= written.count(text) for text in written)


def as_field(content: str) -> dict[str, Any]:
    return answer(content, reasoning_content=REASONING)


def as_text(content: str) -> dict[str, Any]:
    return answer(f"<think>\n{REASONING}\n</think>\n\n{content}")


def examine(source: str) -> dict[str, bool | None]:
    """For each situation True (keeps the prefix), False (breaks) or None (the template does not know it)."""
    with tempfile.TemporaryDirectory() as folder:
        codec = codec_of(Path(folder), source)
    by_field = any(name in source for name in ("reasoning_content", ".thinking", "['thinking']", ".reasoning"))
    thinks = by_field or "</think>" in source
    arguments = ARGUMENTS if _shows(codec, called(ARGUMENTS)) else json.dumps(ARGUMENTS, ensure_ascii=False)
    calls = _shows(codec, called(arguments))
    shape = _plain if _shows(codec, [user(ARGUMENTS["query"])]) else _blocks
    found: dict[str, bool | None] = {}
    for name, prompts in situations(as_field if by_field else as_text, arguments).items():
        if ("tool" in name and not calls) or ("thinking" in name and not thinks):
            found[name] = None
            continue
        prompts = [shape(messages) for messages in prompts]
        written = [f" {CONTENT}\n"] if name == "blanks" else []
        written += [REASONING] * {"thinking": 1, "thinking_tool_user": 2}.get(name, 0)
        written += [ARGUMENTS["query"]] if "tool" in name else []
        found[name] = keeps(codec, prompts, written, [TOOL] if "tool" in name else None)
    return found


def codec_of(folder: Path, source: str) -> TextCodec:
    """The gateway's own rendering of a template; its tokenizer is any, as only texts are looked at."""
    (folder / "tokenizer.json").write_bytes(LOOKUP.read_bytes())
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
    return TextCodec(str(folder))


def called(arguments: Any) -> Messages:
    return [ASK, call(arguments), RESULT]


def _shows(codec: TextCodec, messages: Messages) -> bool:
    """Whether the words of the query reach the prompt at all."""
    try:
        return ARGUMENTS["query"] in codec.render(messages, [TOOL])
    except TemplateError:
        return False


def _plain(messages: Messages) -> Messages:
    return messages


def _blocks(messages: Messages) -> Messages:
    """Contents as templates of vision models want them."""
    return [message | {"content": [{"type": "text", "text": message["content"]}]} for message in messages]


def main() -> None:
    found = {file.stem: examine(file.read_text(encoding="utf-8")) for file in templates()}
    lines = [f"{json.dumps(name)}: {json.dumps(row)}" for name, row in found.items()]
    DATA.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
