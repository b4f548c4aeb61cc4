"""Build the tokenizer in tokenizer/: `python -m experiments.lookup.build_tokenizer`. Same corpus, same files.

A BPE without a pre-tokenizer whose merges overlap (`ab`, `bc`, ...): "abc" may be sampled as `ab`+`c` or `a`+`bc`, and
only one of the two survives decoding and encoding. Roles and the end of a turn are special tokens.
"""

from __future__ import annotations

import itertools
import json
import random
import string
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, trainers

from experiments.lookup.demonstrations import Noise, demonstrate
from experiments.lookup.task import inputs

FOLDER = Path(__file__).parent / "tokenizer"
VOCABULARY = 108
ALPHABET = string.ascii_lowercase + string.digits + " .:,GS"
SPECIAL = ["<|pad|>", "<|unk|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": "<|end|>",
    "pad_token": "<|pad|>",
    "unk_token": "<|unk|>",
    "clean_up_tokenization_spaces": False,
    "model_max_length": 256,
}


def corpus(episodes: int = 2000) -> list[str]:
    """The contents of the messages and replies of scripted episodes."""
    rng = random.Random("lookup tokenizer")
    noise = Noise(wrong_key=0.1, malformed=0.1, loose=0.1)
    texts = []
    for task in itertools.islice(inputs(0), episodes):
        for turn in demonstrate(task, noise, rng)[0]:
            texts += [message["content"] for message in turn.messages] + [turn.reply]
    return texts


def build() -> Tokenizer:
    """Train the BPE: VOCABULARY tokens after the special ones."""
    tokenizer = Tokenizer(models.BPE(unk_token="<|unk|>"))
    tokenizer.decoder = decoders.Fuse()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY + len(SPECIAL),
        special_tokens=SPECIAL,
        initial_alphabet=list(ALPHABET),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def main(folder: Path = FOLDER) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(build().to_str(pretty=True) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(TEMPLATE)


if __name__ == "__main__":
    main()
