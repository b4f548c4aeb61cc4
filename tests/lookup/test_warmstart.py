"""Demonstrations, their rows of tokens, and the warm start at tiny size."""

import math
import random
from dataclasses import replace
from itertools import islice
from pathlib import Path
from threading import Thread

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.lookup import warmstart
from experiments.lookup.demonstrations import Noise, Turn, demonstrate, right_reply
from experiments.lookup.examples import IGNORE, Encoder
from experiments.lookup.harness import parse
from experiments.lookup.task import inputs

CLEAN, NOISY = (noise for _, noise in warmstart.RECIPE.phases)
TINY = replace(warmstart.RECIPE, hidden=16, intermediate=16, phases=((20, CLEAN), (2, NOISY)), batch=16, warmup=5)
ENCODER = Encoder()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def exchange(call: str, result: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": call}, {"role": "tool", "content": result}]


@pytest.mark.parametrize(
    ("messages", "reply"),
    [
        ([user("follow abc 2 times")], "get abc"),
        ([user("follow abc 2 times"), *exchange("get abc", "cde")], "get cde"),
        ([user("follow abc 2 times"), *exchange("get abd", "no key")], "get abc"),
        ([user("follow abc 2 times"), *exchange("get abc", "cde"), *exchange("cde", "bad call")], "get cde"),
        ([user("follow abc 2 times"), *exchange("get abc", "cde"), *exchange("get cde", "eab")], "say eab"),
        ([user("follow abc 3 times"), user("so far 2 now eab")], "get eab"),
        ([user("follow abc 3 times"), user("so far 2 now eab"), *exchange("get eab", "ddd")], "say ddd"),
        ([user("look up eab")], "get eab"),
        ([user("look up eab"), *exchange("get eab", "ddd")], "say ddd"),
    ],
)
def test_the_player_reads_its_move_from_the_history(messages: list[dict[str, str]], reply: str) -> None:
    assert right_reply(messages) == reply


def test_without_noise_every_episode_is_won_whatever_is_summarised_or_handed_off() -> None:
    rng = random.Random(0)
    runs = [demonstrate(task, Noise(loose=0.2), rng) for task in islice(inputs(0), 300)]
    assert [reward for _, reward in runs] == [1.0] * 300
    histories = [turn.messages for turns, _ in runs for turn in turns]
    assert sum(len(messages) > 1 and messages[1]["content"].startswith("so far") for messages in histories) > 100
    assert sum(messages[0]["content"].startswith("look up") for messages in histories) > 100


def noisy_turns(noise: Noise, verb: str) -> list[tuple[set[str], str, str]]:
    """(keys of the table, right reply, what was replied) of every turn whose right reply is a `verb`."""
    rng = random.Random(0)
    turns = [(task, turn) for task in islice(inputs(0), 800) for turn in demonstrate(task, noise, rng)[0]]
    rows = [(set(task["table"]), right_reply(turn.messages), turn.reply) for task, turn in turns]
    return [row for row in rows if row[1].startswith(verb)]


def test_noise_has_the_rates_that_it_names() -> None:
    calls = noisy_turns(Noise(wrong_key=0.3, malformed=0.1), "get")
    malformed = [reply for _, _, reply in calls if parse(reply) is None]
    missing = [call for table, _, reply in calls if (call := parse(reply)) and call[1] not in table]
    assert len(malformed) / len(calls) == pytest.approx(0.1, abs=0.02)
    assert len(missing) / len(calls) == pytest.approx(0.3 * 0.9, abs=0.02)
    answers = noisy_turns(Noise(wrong_answer=0.4), "say")
    wrong = [reply for _, right, reply in answers if reply != right]
    assert len(wrong) / len(answers) == pytest.approx(0.4 * 124 / 125, abs=0.04)


def test_rows_train_every_reply_once_and_nothing_else() -> None:
    head = [user("follow abc 2 times")]
    turns = [
        Turn(messages=head, reply="Get abc"),
        Turn(messages=[user("look up abc")], reply="get abc"),
        Turn(messages=[*head, *exchange("get abc", "cde")], reply="get cde"),
        Turn(messages=[*head, user("so far 2 now eab")], reply="say eab"),
    ]
    rows = ENCODER.rows(turns, 0.0, random.Random(0))
    texts = [ENCODER.tokenizer.decode(row.token_ids, skip_special_tokens=False) for row in rows]
    assert texts == [
        "<|user|>follow abc 2 times<|end|><|assistant|>Get abc<|end|><|tool|>cde<|end|><|assistant|>get cde<|end|>",
        "<|user|>look up abc<|end|><|assistant|>get abc<|end|>",
        "<|user|>follow abc 2 times<|end|><|user|>so far 2 now eab<|end|><|assistant|>say eab<|end|>",
    ]
    trained = [
        [token for token, label in zip(row.token_ids, row.labels, strict=True) if label != IGNORE] for row in rows
    ]
    assert [ENCODER.tokenizer.decode(ids, skip_special_tokens=False) for ids in trained] == [
        "Get abc<|end|>get cde<|end|>",
        "get abc<|end|>",
        "say eab<|end|>",
    ]
    assert all(label in (token, IGNORE) for row in rows for token, label in zip(row.token_ids, row.labels, strict=True))


def test_the_same_seed_gives_the_same_bits_and_leaves_the_callers_random_state() -> None:
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    first, again, other = (warmstart.train(seed, TINY).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before) and torch.get_num_threads() == threads
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_it_learns_the_forms() -> None:
    losses: list[float] = []
    recipe = replace(warmstart.RECIPE, phases=((60, CLEAN),), batch=16, warmup=20)
    warmstart.train(0, recipe, lambda step, steps, loss: losses.append(loss))
    assert losses[0] == pytest.approx(math.log(len(ENCODER.vocabulary)), abs=0.2)  # a uniform guess
    assert sum(losses[-5:]) / 5 < 2.2


def test_the_folder_is_cached_by_seed_and_recipe_and_loads_as_any_other(tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    report = lambda step, total, loss: steps.append((step, total))  # noqa: E731
    folder = warmstart.policy(0, tmp_path, report, TINY)
    assert steps == [(step, 22) for step in range(1, 23)]
    assert warmstart.policy(0, tmp_path, report, TINY) == folder and len(steps) == 22
    assert warmstart.policy(1, tmp_path, None, TINY) != folder
    assert warmstart.policy(0, tmp_path, None, replace(TINY, dropout=0.2)) != folder
    model = AutoModelForCausalLM.from_pretrained(folder)
    fresh = warmstart.train(0, TINY).state_dict()
    assert model.dtype == torch.float32
    assert all(torch.equal(fresh[name], value) for name, value in model.state_dict().items())
    assert AutoTokenizer.from_pretrained(folder).eos_token_id == model.config.eos_token_id == ENCODER.end


def test_of_two_that_ask_at_once_one_trains_and_the_other_waits(tmp_path: Path) -> None:
    second: list[Path] = []
    trained: list[int] = []
    other = Thread(
        target=lambda: second.append(warmstart.policy(0, tmp_path, lambda step, *_: trained.append(step), TINY))
    )

    def during(step: int, steps: int, loss: float) -> None:
        if step == 1:
            other.start()
        assert not second  # nobody has the folder before it is whole

    first = warmstart.policy(0, tmp_path, during, TINY)
    other.join()
    assert second == [first] and trained == []
    assert visible(tmp_path) == [first]
    AutoModelForCausalLM.from_pretrained(first)


def test_a_training_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(step: int, steps: int, loss: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        warmstart.policy(0, tmp_path, fail, TINY)
    assert visible(tmp_path) == []
    assert warmstart.policy(0, tmp_path, None, TINY).is_dir()  # nor is the lock held


def visible(cache: Path) -> list[Path]:
    """What lies in a cache beside lock files."""
    return [path for path in cache.iterdir() if path.suffix != ".lock"]


def test_the_real_recipe_is_the_size_that_it_says() -> None:
    model = warmstart.train(0, replace(warmstart.RECIPE, phases=()))
    assert sum(parameter.numel() for parameter in model.parameters()) == 115_392
