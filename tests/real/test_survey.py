"""Which templates of the wheel of trl keep the prefix; README.md has the counts in words."""

import pytest

from tests.real import packages
from tests.real.stored import data
from tests.real.survey import codec_of, examine, situations

SITUATIONS = ("plain", "blanks", "thinking", "tool", "tool_user", "thinking_tool_user")


def broken(situation, training):
    """(templates that break, templates that know the situation)."""
    rows = [row for name, row in data("template_survey").items() if name.endswith("_training") == training]
    known = [row[situation] for row in rows if row[situation] is not None]
    return known.count(False), len(known)


def test_what_breaks_in_41_original_templates():
    assert {name: broken(name, training=False) for name in SITUATIONS} == {
        "plain": (9, 41),
        "blanks": (23, 41),
        "thinking": (20, 22),
        "tool": (5, 28),
        "tool_user": (8, 28),
        "thinking_tool_user": (18, 21),
    }


def test_what_still_breaks_in_31_templates_patched_for_training():
    assert {name: broken(name, training=True) for name in SITUATIONS} == {
        "plain": (6, 31),
        "blanks": (16, 31),
        "thinking": (10, 16),
        "tool": (5, 18),
        "tool_user": (5, 18),
        "thinking_tool_user": (9, 15),
    }


TURN = "{% for message in messages %}<|{{ message.role }}|>CONTENT<|end|>{% endfor %}<|assistant|>"


@pytest.mark.parametrize(
    ("content", "plain", "blanks", "thinking"),
    [
        ("{{ message.content }}", True, True, None),
        ("{{ message.content | trim }}", True, False, None),
        ("{{ '<think>' if loop.last and message.role == 'user' }}{{ message.content }}", False, False, None),
        ("{{ message.reasoning_content }}{{ message.content }}", True, True, True),
        ("{{ message.reasoning_content if loop.last }}{{ message.content }}", True, True, False),
        ("{{ message.content.split('</think>')[-1] }}", True, True, False),
    ],
)
def test_the_survey_tells_templates_apart(content, plain, blanks, thinking):
    found = examine(TURN.replace("CONTENT", content))
    assert (found["plain"], found["blanks"], found["thinking"]) == (plain, blanks, thinking)
    assert found["tool"] is found["tool_user"] is found["thinking_tool_user"] is None


def test_the_survey_sees_a_tool_list_that_moves(tmp_path):
    moves = TURN.replace("CONTENT", "{{ (tools or '') if loop.last }}{{ message.content }}{{ message.tool_calls }}")
    assert examine(moves)["tool"] is False
    assert examine(moves)["plain"] is True
    stays = TURN.replace("CONTENT", "{{ (tools or '') if loop.first }}{{ message.content }}{{ message.tool_calls }}")
    assert examine(stays)["tool"] is True
    prompts = situations(lambda content: {"role": "assistant", "content": content}, {})["tool"]
    assert [len(messages) for messages in prompts] == [1, 3]
    assert codec_of(tmp_path, stays).render(prompts[0], None).endswith("<|end|><|assistant|>")


@pytest.mark.real
def test_the_wheel_of_trl_still_gives_these_results():
    try:
        files = packages.templates()
    except LookupError as error:
        pytest.skip(str(error))
    assert {file.stem: examine(file.read_text(encoding="utf-8")) for file in files} == data("template_survey")
