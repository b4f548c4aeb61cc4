"""The tokenizer's drift, demonstrations as rows of tokens, and the warm start at tiny size."""

import random
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

pytest.importorskip("minigrid", reason="needs the babyai extra: pip install -e .[babyai]")
pytest.importorskip("minisweagent", reason="needs the babyai extra: pip install -e .[babyai]")

import torch
from transformers import AutoModelForCausalLM

from experiments.babyai import warmstart
from experiments.babyai.demonstrations import Noise, Turn, demonstrate, rows
from experiments.babyai.task import MOST_STEPS, ROOMS, Room, inputs
from experiments.lookup.examples import IGNORE, Encoder

ENCODER = Encoder(warmstart.FOLDER)
TINY = replace(
    warmstart.RECIPE, hidden=16, intermediate=16, phases=((Noise(), 8, 1), (Noise(impossible=0.2), 4, 2)), batch=4
)


def say(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def test_the_bot_always_arrives_and_noise_has_its_rates() -> None:
    tasks = [task["seeds"] for task in islice(inputs(0, "warm"), 30)]
    clean = [demonstrate(seed, Noise(), random.Random(0)) for seed in tasks]
    assert all(reward == pytest.approx(1 - 0.9 * len(turns) / (ROOMS * MOST_STEPS)) for turns, reward in clean)
    rng = random.Random(0)
    noisy = [demonstrate(seed, Noise(impossible=0.1), rng)[0] for seed in tasks]
    calls = sum(len(turns) for turns in noisy)
    dropped = calls - sum(len(turns) for turns, _ in clean)
    assert dropped / calls == pytest.approx(0.1, abs=0.05)


def test_rows_train_every_reply_once_and_a_dropped_reply_starts_a_new_row() -> None:
    head = [say("system", "play"), say("user", "go")]
    turns = [
        Turn(messages=head, reply="turn left"),
        Turn(messages=[*head, say("assistant", "turn left"), say("user", "see wall")], reply="turn"),
        Turn(
            messages=[*head, say("assistant", "turn left"), say("user", "see wall"), say("user", "you cannot")],
            reply="turn right",
        ),
    ]
    made = rows(turns, ENCODER, 0.0, random.Random(0))
    decode = lambda ids: ENCODER.tokenizer.decode(ids, skip_special_tokens=False)  # noqa: E731
    start = "<|system|>play<|end|><|user|>go<|end|><|assistant|>turn left<|end|><|user|>see wall<|end|>"
    assert [decode(row.token_ids) for row in made] == [
        f"{start}<|assistant|>turn<|end|>",
        f"{start}<|user|>you cannot<|end|><|assistant|>turn right<|end|>",
    ]
    trained = [decode([label for label in row.labels if label != IGNORE]) for row in made]
    assert trained == ["turn left<|end|>turn<|end|>", "turn right<|end|>"]


def test_the_tokenizer_drifts_and_never_changes_the_text() -> None:
    rng = random.Random(0)
    commands = [text for task in islice(inputs(0), 200) for seed in task["seeds"] for text in Room(seed).commands()]
    encoded = [ENCODER.reply(text, warmstart.RECIPE.dropout, rng)[:-1] for text in commands]
    assert [ENCODER.tokenizer.decode(ids) for ids in encoded] == commands
    drifting = sum(ENCODER.tokenizer.encode(ENCODER.tokenizer.decode(ids)) != ids for ids in encoded) / len(encoded)
    assert 0.02 < drifting < 0.2
    assert len({tuple(ENCODER.reply("turn left", 0.3, rng)) for _ in range(300)}) >= 6


def test_the_same_seed_gives_the_same_bits_in_a_folder_that_loads(tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    folder = warmstart.policy(0, tmp_path, lambda step, total, loss: steps.append((step, total)), TINY)
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert warmstart.policy(0, tmp_path, None, TINY) == folder
    fresh = warmstart.train(0, TINY).state_dict()
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert all(torch.equal(fresh[name], value) for name, value in loaded.state_dict().items())
    assert not torch.equal(fresh["lm_head.weight"], warmstart.train(1, TINY).state_dict()["lm_head.weight"])


def test_the_real_recipe_is_the_size_that_it_says() -> None:
    model = warmstart.train(0, replace(warmstart.RECIPE, phases=()))
    assert sum(parameter.numel() for parameter in model.parameters()) == 129_728
