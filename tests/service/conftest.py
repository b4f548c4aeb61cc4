"""A tiny real tokenizer with a chat template, and a toy engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.service.toy_engine import ToyEngine

LINES = [
    "the key of the door is in the room, and the room is behind the door",
    "look up the value of key abc and give the answer",
    "a tool gives the answer: value 42, value 17, no more",
]
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>"]
TEMPLATE = """{% for message in messages %}
<|{{ message.role }}|>{{ message.content }}{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}<|end|>
{%- endfor %}
{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}
{% if add_generation_prompt %}<|assistant|>{% endif %}
"""


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a byte-level BPE of 300 entries whose eos is <|end|>."""
    tool = Tokenizer(models.BPE())
    tool.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tool.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tool.train_from_iterator(LINES, trainer)
    tool.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    tool.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|end|>", "pad_token": {"content": "<|end|>"}, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return str(folder)


@pytest.fixture
def engine() -> Iterator[ToyEngine]:
    """A running toy engine."""
    with ToyEngine() as toy:
        yield toy
