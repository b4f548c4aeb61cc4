"""Text to ids and back: a tokenizer folder and its chat template, without transformers (and so without torch).

The template sees what `apply_chat_template` of transformers shows it: a sandboxed Jinja environment with trim_blocks,
lstrip_blocks and loop controls; tojson that escapes nothing; raise_exception, strftime_now; messages without their null
fields; tools, add_generation_prompt and the special tokens.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import jinja2
import numpy as np
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from numpy.typing import NDArray
from tokenizers import Tokenizer

from harnessrl.service.segments import Segments, can_split

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TemplateError(ValueError):
    """The chat template refused the conversation; the message is the template's own."""


class _Generation(Extension):
    """`{% generation %}` marks what the model writes; for rendering it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (as in jinja2)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Scope:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class TextCodec:
    """One model's tokenizer and chat template. Example: ``TextCodec("folder").encode("hello")``"""

    def __init__(self, folder: str) -> None:
        """Load tokenizer.json, tokenizer_config.json, and where they exist chat_template.jinja, generation_config.json.

        Raises:
            ValueError: A file is missing or cannot be read; names it.
        """
        path = Path(folder)
        try:
            self._tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        except Exception as error:  # the tokenizers package raises bare Exception
            raise ValueError(f"{path / 'tokenizer.json'} cannot be read: {error}") from None
        self._tokenizer.no_truncation()  # what was saved with the tokenizer is no reason to cut a prompt
        self._tokenizer.no_padding()
        config = _read_json(path / "tokenizer_config.json")
        self.special = {name: _content(config[name]) for name in _SPECIAL if config.get(name) is not None}
        self.vocabulary = self._tokenizer.get_vocab_size(with_added_tokens=True)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = {token.content: index for index, token in added.items() if token.special}
        self.stop_ids = self._stop_ids(path)
        self._segments = Segments(self._tokenizer) if can_split(self._tokenizer) else None
        self._template = _compile(_template_text(path, config))

    def _stop_ids(self, path: Path) -> tuple[int, ...]:
        """End of text: the tokenizer's eos token, and what generation_config.json adds."""
        ids = set()
        if (
            "eos_token" in self.special
            and (index := self._tokenizer.token_to_id(self.special["eos_token"])) is not None
        ):
            ids.add(index)
        if (path / "generation_config.json").exists():
            more = _read_json(path / "generation_config.json").get("eos_token_id")
            ids |= set(more if isinstance(more, list) else [] if more is None else [more])
        return tuple(sorted(ids))

    def special_id(self, text: str) -> int | None:
        """The id of a special token whose whole text this is, else None."""
        return self._special_ids.get(text)

    def render(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None) -> str:
        """A conversation as text, ending where the model's turn begins.

        Raises:
            TemplateError: The template refuses these messages, or there is no template.
        """
        if self._template is None:
            raise TemplateError("this model's tokenizer has no chat template; use /completions")
        shown = [_shown(message) for message in messages]
        try:
            return self._template.render(messages=shown, tools=tools, add_generation_prompt=True, **self.special)
        except Exception as error:  # a template is a program: on odd messages it may raise anything
            raise TemplateError(f"chat template: {error}") from error

    def encode(self, text: str, *, special: bool = False) -> NDArray[np.int32]:
        """Ids of a text, int32 [P]; `special` lets the tokenizer add its own first and last tokens."""
        if special or self._segments is None:
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
            return np.array(encoding.ids, np.int32)
        return self._segments.encode(text)

    def decode(self, ids: Sequence[int] | NDArray[np.int32]) -> str:
        """Text of some ids, without special tokens."""
        listed = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        return self._tokenizer.decode(listed, skip_special_tokens=True)

    def tokens(self, ids: Sequence[int] | NDArray[np.int32]) -> list[str]:
        """Each id's own text, special tokens included."""
        return [self._tokenizer.decode([int(index)], skip_special_tokens=False) for index in ids]

    def cut(self, ids: NDArray[np.int32], stops: Sequence[str]) -> tuple[int, str] | None:
        """Where the first stop string ends: how many ids complete it, and the text before it. None if none occurs."""
        if not stops or not any(stop in self.decode(ids) for stop in stops):
            return None
        low, high = 0, len(ids)  # decode(ids[:high]) holds a stop string, decode(ids[:low]) does not
        while high - low > 1:
            middle = (low + high) // 2
            text = self.decode(ids[:middle])
            low, high = (low, middle) if any(stop in text for stop in stops) else (middle, high)
        text = self.decode(ids[:high])
        return high, text[: min(at for stop in stops if (at := text.find(stop)) >= 0)]


def _shown(message: dict[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: no null fields, and reasoning under both names that they read."""
    shown = {name: value for name, value in message.items() if value is not None}
    for name in ("reasoning_content", "thinking", "reasoning"):
        if name in shown:
            return {"thinking": shown[name], **shown, "reasoning_content": shown[name]}
    return shown


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return data


def _content(token: Any) -> str:
    """A special token is written as its text, or as an object that holds it."""
    return str(token["content"] if isinstance(token, dict) else token)


def _template_text(path: Path, config: dict[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates; the one for everything is "default"
        template = {item["name"]: item["template"] for item in template}.get("default")
    return template


def _compile(text: str | None) -> jinja2.Template | None:
    if text is None:
        return None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        template = environment.from_string(text)
        template.globals = dict(template.globals)  # copied for each render, which a chain of maps makes slow
        return template
    except jinja2.TemplateError as error:
        raise ValueError(f"chat template cannot be compiled: {error}") from None
