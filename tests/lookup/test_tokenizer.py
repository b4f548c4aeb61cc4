"""The tokenizer: what it stores, that its template is exact, and that its drift is real."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from experiments.lookup.build_tokenizer import ALPHABET, SPECIAL, VOCABULARY, main
from experiments.lookup.examples import FOLDER, Encoder
from experiments.lookup.task import KEYS, LETTERS

ENCODER = Encoder()
PLAIN = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
TEXTS = st.text(alphabet=ALPHABET, max_size=24)
BODY_IDS = st.lists(st.integers(len(SPECIAL), len(SPECIAL) + VOCABULARY - 1), max_size=16)


def test_building_it_again_gives_the_stored_files(tmp_path) -> None:
    main(tmp_path)
    names = ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(file.name for file in FOLDER.iterdir()) == sorted(file.name for file in tmp_path.iterdir()) == names
    for name in names:
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes()


def test_sizes_and_special_tokens() -> None:
    assert len(ENCODER.vocabulary) == PLAIN.get_vocab_size() == len(SPECIAL) + VOCABULARY
    assert [PLAIN.token_to_id(token) for token in SPECIAL] == list(range(len(SPECIAL)))
    assert (ENCODER.pad, ENCODER.end) == (SPECIAL.index("<|pad|>"), SPECIAL.index("<|end|>"))
    assert ENCODER.tokenizer.unk_token_id == PLAIN.encode("~").ids[0] == SPECIAL.index("<|unk|>")


@given(TEXTS)
def test_text_survives_encoding_and_decoding(text: str) -> None:
    assert PLAIN.decode(PLAIN.encode(text).ids) == text
    assert ENCODER.tokenizer.decode(ENCODER.tokenizer.encode(text)) == text


@given(TEXTS)
def test_no_dropout_is_the_tokenizer_itself(text: str) -> None:
    assert ENCODER.reply(text, 0.0, random.Random(0)) == [*PLAIN.encode(text).ids, ENCODER.end]


@given(TEXTS, st.integers(0, 10))
def test_dropout_changes_tokens_and_never_text(text: str, seed: int) -> None:
    ids = ENCODER.reply(text, 0.5, random.Random(seed))
    assert PLAIN.decode(ids[:-1]) == text
    characters = ENCODER.reply(text, 1.0, random.Random(seed))
    assert characters == [PLAIN.token_to_id(letter) for letter in text] + [ENCODER.end]


@given(st.lists(st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), TEXTS), min_size=1, max_size=6))
@settings(max_examples=50)
def test_the_template_is_markers_and_contents_and_nothing_else(turns: list[tuple[str, str]]) -> None:
    messages = [{"role": role, "content": text} for role, text in turns]
    expected = []
    for role, text in turns:
        expected += [PLAIN.token_to_id(f"<|{role}|>"), *PLAIN.encode(text).ids, ENCODER.end]
    assert ENCODER.prompt(messages) == [*expected, PLAIN.token_to_id("<|assistant|>")]
    text = ENCODER.tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == "".join(f"<|{role}|>{content}<|end|>" for role, content in turns)


def test_a_canonical_reply_is_continued_by_the_next_prompt_and_another_encoding_is_not() -> None:
    head = [{"role": "user", "content": "follow abc 2 times"}]
    later = [*head, {"role": "assistant", "content": "get abc"}, {"role": "tool", "content": "cde"}]
    canonical = ENCODER.prompt(head) + ENCODER.reply("get abc", 0.0, random.Random(0))
    letters = ENCODER.prompt(head) + ENCODER.reply("get abc", 1.0, random.Random(0))
    assert ENCODER.prompt(later)[: len(canonical)] == canonical
    assert ENCODER.prompt(later)[: len(letters)] != letters


def survives(ids: list[int]) -> bool:
    return PLAIN.encode(PLAIN.decode(ids)).ids == ids


def test_random_token_sequences_often_do_not_survive() -> None:
    rng = random.Random(0)
    body = list(range(len(SPECIAL), len(ENCODER.vocabulary)))
    keys = [token for token in body if set(PLAIN.id_to_token(token)) <= set(LETTERS)]
    for tokens, low, high in ((body, 0.15, 0.3), (keys, 0.7, 0.95)):
        sequences = [rng.choices(tokens, k=8) for _ in range(1000)]
        assert low < sum(not survives(sequence) for sequence in sequences) / 1000 < high


@given(BODY_IDS)
def test_one_encoding_settles_what_drifted(ids: list[int]) -> None:
    assert survives(PLAIN.encode(PLAIN.decode(ids)).ids)


def test_a_third_of_the_demonstrated_replies_do_not_survive() -> None:
    rng = random.Random(0)
    replies = [ENCODER.reply(f"get {rng.choice(KEYS)}", 0.15, rng)[:-1] for _ in range(2000)]
    assert 0.25 < sum(not survives(ids) for ids in replies) / 2000 < 0.5


@pytest.mark.parametrize("key", ["abc", "cda", "bba"])
def test_merges_overlap(key: str) -> None:
    """Both halves of a key are tokens somewhere, so the same key has rival encodings."""
    rng = random.Random(0)
    encodings = {tuple(ENCODER.reply(f"say {key}", 0.3, rng)) for _ in range(300)}
    assert len(encodings) >= 6
