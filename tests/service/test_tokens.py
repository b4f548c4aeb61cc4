"""Rendering as transformers renders, encoding by pieces as in one go, and where a stop string ends."""

import json
import shutil
import subprocess
import sys

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from harnessrl.service.segments import Segments, can_split
from harnessrl.service.tokens import TemplateError, TextCodec, _compile
from tests.service.conftest import SPECIAL, TEMPLATE
from tests.service.making import ROOT

TOOLS = [{"type": "function", "function": {"name": "look <up>", "parameters": {"é": 1}}}]
TEMPLATES = [
    TEMPLATE,
    "{% for m in messages %}\n  {% if m.role == 'user' %}\n[{{ m.content }}]\n  {% endif %}\n{% endfor %}\n",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% if ns.n > 1 %}{% break %}{% endif %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ ns.n }}",
    "{{ bos_token }}{{ messages | tojson(indent=2) }}{{ messages[0].content.split(' ') | length }}{{ dict(a=1) }}",
    "{% for m in messages %}{{ m.reasoning_content or 'none' }}|{{ 'x' in m }}{% endfor %}{{ add_generation_prompt }}",
]
MESSAGES = [
    {"role": "user", "content": "<b> & é 'q'", "name": None},
    {
        "role": "assistant",
        "content": "so",
        "reasoning": "because",
        "tool_calls": [{"function": {"arguments": {"k": [1]}}}],
    },
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_render_as_in_transformers(template, tokenizer):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_file=f"{tokenizer}/tokenizer.json", bos_token="<s>")
    expected = theirs.apply_chat_template(
        MESSAGES, tools=TOOLS, chat_template=template, add_generation_prompt=True, tokenize=False
    )
    ours = TextCodec(tokenizer)
    ours._template, ours.special = _compile(template), {"bos_token": "<s>"}
    assert ours.render(MESSAGES, TOOLS) == expected


def test_a_template_that_refuses_is_the_callers_mistake(tokenizer):
    codec = TextCodec(tokenizer)
    codec._template = _compile("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TemplateError, match="roles must alternate"):
        codec.render(MESSAGES, None)
    codec._template = _compile("{{ messages.__class__.__mro__ }}")  # the sandbox
    with pytest.raises(TemplateError, match="unsafe"):
        codec.render(MESSAGES, None)


def test_the_codec_of_a_folder(tokenizer):
    codec = TextCodec(tokenizer)
    end = codec.special_id("<|end|>")
    assert codec.stop_ids == (end,)
    assert codec.special_id("end") is None
    text = codec.render([{"role": "user", "content": "the key"}], None)
    assert text == "<|user|>the key<|end|><|assistant|>"
    ids = codec.encode(text)
    assert [ids[0], ids[-2], ids[-1]] == [codec.special_id(name) for name in ("<|user|>", "<|end|>", "<|assistant|>")]
    assert codec.decode(ids) == "the key"
    assert "".join(codec.tokens(ids)) == text


def test_a_tokenizer_saved_with_truncation_cuts_no_prompt(tokenizer, tmp_path):
    tool = Tokenizer.from_file(f"{tokenizer}/tokenizer.json")
    tool.enable_truncation(4)
    tool.enable_padding(length=16)
    tool.save(str(tmp_path / "tokenizer.json"))
    shutil.copy(f"{tokenizer}/tokenizer_config.json", tmp_path)
    for text in ("the key of the door is in the room", "the"):
        assert TextCodec(str(tmp_path)).encode(text).tolist() == TextCodec(tokenizer).encode(text).tolist()


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        TextCodec(str(tmp_path))


def test_generation_config_adds_stop_ids(tokenizer, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"{tokenizer}/{name}", tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 9]}))
    codec = TextCodec(str(tmp_path))
    assert codec.stop_ids == (5, 9, codec.special_id("<|end|>"))
    with pytest.raises(TemplateError, match="no chat template"):
        codec.render(MESSAGES, None)


pieces = st.one_of(st.sampled_from([*SPECIAL, "<|us", "er|>", " ", "\n", "the key", "é", "漢"]), st.text(max_size=8))


@settings(max_examples=200, deadline=None)
@given(parts=st.lists(pieces, max_size=12))
def test_encoding_by_pieces_is_encoding(tokenizer, parts):
    tool = Tokenizer.from_file(f"{tokenizer}/tokenizer.json")
    text = "".join(parts)
    segments = Segments(tool)
    expected = tool.encode(text, add_special_tokens=False).ids
    assert segments.encode(text).tolist() == expected
    assert segments.encode(text).tolist() == expected  # from what was kept


def test_pieces_are_forgotten_beyond_the_budget(tokenizer):
    tool = Tokenizer.from_file(f"{tokenizer}/tokenizer.json")
    segments = Segments(tool, budget=400)
    texts = [f"<|user|>{'ab' * n}<|end|>" for n in range(1, 40)]
    for text in [*texts, *reversed(texts)]:
        assert segments.encode(text).tolist() == tool.encode(text, add_special_tokens=False).ids
        assert segments.size <= 400
    assert segments.size == sum(4 * len(text) + len(ids) for text, ids in segments._kept.items())


def test_tokenizers_whose_pieces_depend_on_their_surroundings_are_not_split():
    def tool(token=None, pre=None):
        made = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
        made.add_special_tokens([token or AddedToken("<s>", normalized=False)])
        if pre is not None:
            made.pre_tokenizer = pre
        return made

    assert can_split(tool())
    assert not can_split(tool(AddedToken("<s>", normalized=False, lstrip=True)))
    assert not can_split(tool(AddedToken("<s>", normalized=True)))
    assert not can_split(tool(pre=pre_tokenizers.Metaspace(prepend_scheme="first")))
    always = tool(pre=pre_tokenizers.Metaspace(prepend_scheme="always"))
    always.normalizer = normalizers.Prepend("_")
    assert can_split(always)


def test_a_stop_string_ends_at_the_token_that_completes_it(tokenizer):
    codec = TextCodec(tokenizer)
    ids = np.concatenate([codec.encode(text) for text in ("the value", " is", " 42", ", no more")])
    whole = codec.decode(ids)
    for stop in ("value 42", "is 4", "lue", "more", "the value is 42, no more"):
        if stop not in whole:
            assert codec.cut(ids, [stop]) is None
            continue
        kept, text = codec.cut(ids, [stop])
        first = next(n for n in range(len(ids) + 1) if stop in codec.decode(ids[:n]))  # the slow, obvious way
        assert (kept, text) == (first, whole[: whole.index(stop)])
    assert codec.cut(ids, []) is None
    kept, text = codec.cut(ids, ["42", "the"])  # several: the first to be completed
    assert (kept, text) == (len(codec.encode("the")), "")


def test_the_service_and_the_worker_run_without_torch():
    code = (
        "import sys; import harnessrl.service.main, harnessrl.service.worker;"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'heavy'"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
    broken = subprocess.run(
        [sys.executable, "-c", "import sys; sys.modules['torch'] = sys;" + code], cwd=ROOT, capture_output=True
    )
    assert b"heavy" in broken.stderr  # the check can fail
