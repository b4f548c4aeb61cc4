"""The questions of test_tokenizer.py, asked of real vocabularies and templates; tests/real/README.md says what to install.

HARNESSRL_TOKENIZERS=DIR pytest property_tests/test_real_tokenizers.py
"""

from __future__ import annotations

from functools import cache, partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from property_tests.chats import Chat, Drifted, load, stays_a_prefix, survives
from property_tests.searching import counterexample, told
from property_tests.test_tokenizer import merges_faithfully, sampled, stable
from tests.real import packages

pytestmark = pytest.mark.real

# Template in the wheel of trl: its tokenizer, and what can break behind answers of random ordinary tokens.
REAL = {
    "qwen2_5": ("qwen3", {"retokenized"}),
    "qwen3": ("qwen3", {"retokenized"}),
    "llama3_1": ("llama3_1", {"retokenized", "template"}),  # trims
    "gemma3": ("gemma3", {"retokenized", "template"}),  # trims
    "deepseekv3": ("deepseek", {"template"}),  # opens <think> in prompts, and history does not have it
    "gptoss": ("gptoss", {"rewritten"}),  # names a channel that these answers did not name
}
KEEPS = ("qwen2_5",)
BREAKS = ("qwen3", "llama3_1", "gemma3", "deepseekv3")


@cache
def chat(template: str) -> Chat:
    """Skips where a package is missing."""
    try:
        folder, file = packages.tokenizer(REAL[template][0]), packages.package("trl")
    except LookupError as error:
        pytest.skip(str(error))
    return load(str(folder), str(file / "chat_templates" / f"{template}.jinja"))


@pytest.mark.parametrize("template", REAL)
def test_every_real_vocabulary_drifts(template):
    ids = counterexample(sampled(chat(template)), partial(survives, chat(template)))
    with pytest.raises(Drifted, match=r"the prefix broke at token \d of \d: retokenized"):
        survives(chat(template), ids)


@pytest.mark.parametrize("template", REAL)
def test_whatever_drifts_is_merged_faithfully_and_explained(template):
    @settings(max_examples=30)
    @given(st.lists(sampled(chat(template)), min_size=2, max_size=3))
    def merges(answers):
        assert set(merges_faithfully(chat(template), answers)) <= REAL[template][1]

    merges()


@pytest.mark.parametrize("template", KEEPS)
def test_a_template_that_keeps_the_prefix(template):
    @settings(max_examples=50)
    @given(stable(chat(template)))
    def stay(ids):
        assert told(partial(stays_a_prefix, chat(template)), ids) is None

    stay()


@pytest.mark.parametrize("template", BREAKS)
def test_a_template_that_does_not(template):
    ids = counterexample(stable(chat(template)), partial(stays_a_prefix, chat(template)))
    with pytest.raises(Drifted, match=r"the prefix broke at token \d+ of \d+: template"):
        stays_a_prefix(chat(template), ids)
