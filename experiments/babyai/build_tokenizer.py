"""Build the tokenizer in tokenizer/: `python -m experiments.babyai.build_tokenizer`. Same corpus, same files.

The same kind of BPE as the lookup experiment's (overlapping merges, roles as special tokens), trained on this
experiment's conversations. What the room says is taken apart into things and places first, so that a thing has the same
tokens in the mission and in the view; commands are not taken apart.
"""

from __future__ import annotations

import itertools
import json
import random
import string
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from experiments.babyai.demonstrations import Noise, demonstrate
from experiments.babyai.task import inputs
from experiments.lookup.build_tokenizer import CONFIG, SPECIAL, TEMPLATE

FOLDER = Path(__file__).parent / "tokenizer"
VOCABULARY = 220
PIECES = r" \d(?: (?:left|right) \d)?|, |\. |see |hold |go to the |go to a "
ALPHABET = string.ascii_lowercase + string.digits + " .,"
LONGEST = 512
"""Tokens of a context."""


def corpus(episodes: int = 200) -> list[str]:
    """The contents of the messages and replies of scripted episodes."""
    rng = random.Random("babyai tokenizer")
    texts = []
    for task in itertools.islice(inputs(0, "warm"), episodes):
        for turn in demonstrate(task["seeds"], Noise(wander=0.1, impossible=0.1), rng)[0]:
            texts += [turn.messages[-1]["content"], turn.reply]
    return texts


def build() -> Tokenizer:
    """Train the BPE: VOCABULARY tokens after the special ones."""
    tokenizer = Tokenizer(models.BPE(unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PIECES), "isolated")
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
    (folder / "tokenizer_config.json").write_text(json.dumps({**CONFIG, "model_max_length": LONGEST}, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(TEMPLATE)


if __name__ == "__main__":
    main()
