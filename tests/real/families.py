"""Model families as a harness meets them: messages to prompt ids, and the text in which the model writes its answers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harnessrl.service.tokens import TextCodec
from tests.real import packages
from tests.real.pieces import pieces_of

Messages = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Family:
    """A template of the wheel of trl with the tokenizer it was written for."""

    template: str
    """Name of the template."""
    tokenizer: str
    """What `packages.tokenizer` takes."""
    plain: str
    """How the model writes {content}."""
    thought: str = ""
    """How it writes {content} after {reasoning}, behind what the prompt has opened."""
    call: str = ""
    """How it writes a call with {arguments}."""


FAMILIES = {
    "qwen3": Family(
        template="qwen3",
        tokenizer="qwen3",
        plain="{content}<|im_end|>",
        thought="<think>\n{reasoning}\n</think>\n\n{content}<|im_end|>",
        call='<tool_call>\n{{"name": "search", "arguments": {arguments}}}\n</tool_call><|im_end|>',
    ),
    "deepseek_v3": Family(
        template="deepseekv3",
        tokenizer="deepseek",
        plain="\n</think>\n\n{content}<｜end▁of▁sentence｜>",
        thought="{reasoning}\n</think>\n\n{content}<｜end▁of▁sentence｜>",
    ),
    "llama3_1": Family(
        template="llama3_1",
        tokenizer="llama3_1",
        plain="{content}<|eot_id|>",
        call='{{"name": "search", "parameters": {arguments}}}<|eot_id|>',
    ),
    "gemma3": Family(template="gemma3", tokenizer="gemma3", plain="{content}<end_of_turn>"),
    "gpt_oss": Family(
        template="gptoss",
        tokenizer="gptoss",
        plain="<|channel|>final<|message|>{content}<|return|>",
        thought="<|channel|>analysis<|message|>{reasoning}<|end|><|start|>assistant"
        "<|channel|>final<|message|>{content}<|return|>",
        call="<|channel|>commentary to=functions.search <|constrain|>json<|message|>{arguments}<|call|>",
    ),
}


class Model:
    """One family, loaded: what the gateway does with it."""

    def __init__(self, family: Family, date: str = "2026-01-01") -> None:
        """date: what the templates that print the day are told."""
        self.family = family
        source = packages.template(family.template).replace('strftime_now("%Y-%m-%d")', f'"{date}"')
        folder = packages.tokenizer(family.tokenizer)
        with tempfile.TemporaryDirectory() as name:
            for file in ("tokenizer.json", "tokenizer_config.json"):
                (Path(name) / file).symlink_to((folder / file).resolve())
            (Path(name) / "chat_template.jinja").write_text(source, encoding="utf-8")
            self._codec = TextCodec(name)
        self._file = folder / "tokenizer.json"

    def prompt(self, messages: Messages, tools: Messages | None = None) -> list[int]:
        return self.encode(self._codec.render(messages, tools))

    def encode(self, text: str) -> list[int]:
        return [int(index) for index in self._codec.encode(text)]

    def written(self, form: str, **fields: str) -> list[int]:
        """The answer as the model writes it, in the tokens an encoder gives; form is plain, thought or call."""
        return self.encode(getattr(self.family, form).format(**fields))

    def pieces(self, ids: set[int]) -> dict[str, str]:
        return pieces_of(self._file, ids)


class Mistral:
    """Version 3 of Mistral's own prompt builder (mistral-common), which is no chat template."""

    def __init__(self) -> None:
        from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

        file = packages.package("mistral_common") / "data" / "mistral_instruct_tokenizer_240323.model.v3"
        self._builder = MistralTokenizer.from_file(str(file))
        self._tokenizer: Any = self._builder.instruct_tokenizer.tokenizer

    def prompt(self, messages: Messages, tools: Messages | None = None) -> list[int]:
        from mistral_common.protocol.instruct.request import ChatCompletionRequest

        request = ChatCompletionRequest.from_openai(messages=messages, tools=tools)
        return list(self._builder.encode_chat_completion(request).tokens)

    def written(self, form: str, **fields: str) -> list[int]:
        assert form == "plain", form
        return [*self._tokenizer.encode(fields["content"], bos=False, eos=True)]

    def pieces(self, ids: set[int]) -> dict[str, str]:
        texts = {index: self._tokenizer.id_to_piece(index).replace("\u2581", " ") for index in sorted(ids)}
        return {str(index): text.encode().decode("latin-1") for index, text in texts.items()}


def load(name: str) -> Any:
    """A family by name.

    Raises:
        LookupError: a package that it needs is not installed.
    """
    loaders: dict[str, Callable[[], Any]] = {key: lambda key=key: Model(FAMILIES[key]) for key in FAMILIES}  # type: ignore[misc]
    loaders |= {"gpt_oss a day later": lambda: Model(FAMILIES["gpt_oss"], "2026-01-02"), "mistral_v3": Mistral}
    if name == "mistral_v3":
        packages.package("mistral_common")
    return loaders[name]()
