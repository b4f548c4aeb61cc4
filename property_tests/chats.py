"""A tokenizer and a template as one thing to question: the toy, or a user's own (``--tokenizer``, ``--template``).

The two questions are functions of such a chat and of sampled ids, and raise Drifted with the story:

- ``survives``: do sampled ids come back from decode and encode?
- ``stays_a_prefix``: is a prompt, followed by an answer that does survive, a prefix of the next prompt?
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from property_tests.stories import Broken, story
from property_tests.toy import Template, ToyTokenizer

Messages = list[tuple[str, str]]


class Drifted(Broken):
    """Ids did not come back as they went."""


@dataclass(frozen=True, kw_only=True)
class Chat:
    """What a text harness has of a model."""

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    render: Callable[[Messages], str] | None
    """Messages (role, text) to the prompt text for the next answer; None where there is no template."""
    ordinary: Sequence[int]
    """Ids to sample from: each alone survives decode and encode, so what fails is how tokens meet."""


def survives(chat: Chat, ids: list[int]) -> None:
    """Sampled ids come back from decode and encode."""
    back = chat.encode(chat.decode(ids))
    if back != ids:
        raise Drifted(f"sampled {chat.decode(ids)!r}, and " + story(chat.decode, ids, back, "retokenized"))


def stays_a_prefix(chat: Chat, ids: list[int]) -> None:
    """The first prompt and its answer are a prefix of the second prompt; asked only of answers that survive."""
    assert chat.render is not None
    text = chat.decode(ids)
    first = chat.encode(chat.render([("user", "go on")]))
    second = chat.encode(chat.render([("user", "go on"), ("assistant", text), ("user", "and then")]))
    if second[: len(first) + len(ids)] != [*first, *ids]:
        raise Drifted(f"answered {text!r}, and " + story(chat.decode, [*first, *ids], second, "template"))


def toy_chat(template: Template) -> Chat:
    toy = ToyTokenizer()
    stable = [index for index in toy.ordinary if toy.encode(toy.decode([index])) == [index]]
    return Chat(encode=toy.encode, decode=toy.decode, render=template.render, ordinary=stable)


def load(path: str, template: str | None = None) -> Chat:
    """A chat from a tokenizer.json (or its folder) and a jinja file; needs the packages tokenizers and jinja2.

    Raises:
      ValueError: there is no tokenizer.json; OSError: it or the template cannot be read.
    """
    from tokenizers import Tokenizer

    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    file = folder / "tokenizer.json" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise ValueError(f"{file} does not exist; expected a tokenizer.json or a folder that has one")
    tokenizer = Tokenizer.from_file(str(file))
    config_file = folder / "tokenizer_config.json"
    config = json.loads(config_file.read_text()) if config_file.is_file() else {}
    source = Path(template).read_text() if template else _own_template(folder, config)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids), skip_special_tokens=False)

    added = set(tokenizer.get_added_tokens_decoder())
    some = range(0, tokenizer.get_vocab_size(), max(1, tokenizer.get_vocab_size() // 4000))
    ordinary = [i for i in some if i not in added and encode(decode([i])) == [i]]
    render = None if source is None else _renderer(source, config)
    return Chat(encode=encode, decode=decode, render=render, ordinary=ordinary)


def _own_template(folder: Path, config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    named = config.get("chat_template")
    if isinstance(named, list):
        named = next((entry["template"] for entry in named if entry["name"] == "default"), None)
    return named


def _renderer(source: str, config: dict[str, Any]) -> Callable[[Messages], str]:
    """Render a chat template as its model's library would: same whitespace rules, same helper functions."""
    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: "2026-01-01"}
    template = environment.from_string(re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", source))
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    tokens = {name: config.get(name) for name in names}
    tokens = {name: value["content"] if isinstance(value, dict) else value or "" for name, value in tokens.items()}

    def render(messages: Messages) -> str:
        turns = [{"role": role, "content": text} for role, text in messages]
        return template.render(messages=turns, add_generation_prompt=True, tools=None, **tokens)

    return render
