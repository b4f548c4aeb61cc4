"""`harnessrl inspect`: the numbers, the text and the page of traces small enough to check by hand."""

import gzip
import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from harnessrl import cli
from harnessrl.adapter.drift import KINDS as ALL_KINDS
from harnessrl.adapter.merge import SKIP_REASONS, STRATEGIES
from harnessrl.errors import ConfigError
from harnessrl.inspect import command, words
from harnessrl.inspect.html import ROLLOUTS, page
from harnessrl.inspect.pieces import TokenText, visible
from harnessrl.inspect.report import survey
from harnessrl.inspect.shares import advantages, loss_shares, relative, silent_groups
from harnessrl.trace import Trace

VOCABULARY = [
    "h",
    "a",
    "v",
    "i",
    "n",
    "g",
    "ha",
    "hav",
    "av",
    "in",
    "ing",
    "aving",
    "Ġ",
    "Ċ",
    "<",
    "&",
    "ð",
    "Ł",
    "ĺ",
    "Ģ",
]
H, A, V, I_, N, G, HA, HAV, AV, IN, ING, AVING, SPACE, LINE, LESS, AND, *EMOJI = range(len(VOCABULARY))
END = len(VOCABULARY)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A byte-level tokenizer whose "having" has two spellings, and whose emoji takes four tokens."""
    tool = Tokenizer(models.BPE({token: index for index, token in enumerate(VOCABULARY)}, []))
    tool.decoder = decoders.ByteLevel()
    tool.add_special_tokens([AddedToken("<|end|>", normalized=False)])
    path = tmp_path_factory.mktemp("tokenizer")
    tool.save(str(path / "tokenizer.json"))
    return str(path)


def call(number, prompt, response, **more):
    logprobs = [-0.5] * len(response)
    return {"call_id": f"c{number}", "prompt_ids": prompt, "response_ids": response, "logprobs": logprobs} | more


def rollout(number, calls, reward=None, group="g0", **more):
    return {"rollout_id": f"r{number}", "group_id": group, "reward": reward, "calls": calls} | more


def write(path, *rollouts):
    path.write_text("".join(json.dumps(item) + "\n" for item in rollouts))
    return str(path)


def drifting(number=0, reward=1.0):
    """Sampled h + aving, sent back as hav + ing, then one more turn that fits."""
    return rollout(
        number,
        [
            call(0, [A, LINE], [H, AVING, END]),
            call(1, [A, LINE, HAV, ING, END, LINE], [N, END]),
            call(2, [A, LINE, HAV, ING, END, LINE, N, END, LINE], [G]),
        ],
        reward,
    )


def lengths(number, sizes, reward=1.0, **more):
    """A rollout of unrelated calls that sample the given numbers of tokens."""
    calls = [call(i, [100 + i], [1] * size) for i, size in enumerate(sizes)]
    return rollout(number, calls, reward, **more)


def report_of(path, tokenizer=None, strategy="best_effort", keep=ROLLOUTS):
    return survey(iter(Trace(path)), strategy, tokenizer, keep)


def run(capsys, *argv):
    code = cli.run(["inspect", *argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def as_object(capsys, *argv):
    code, out, _ = run(capsys, *argv, "json=true")
    assert code == 0
    return json.loads(out)


class Page(HTMLParser):
    """What a browser would see: elements, attributes, text, and the text of each token element."""

    def __init__(self, html):
        super().__init__()
        self.names, self.attributes, self.text = set(), [], ""
        self.tokens = {"b": [], "i": [], "u": []}
        self.block, self.inside = 0, None
        self.feed(html)

    def handle_starttag(self, name, attributes):
        values = dict(attributes)
        self.names.add(name)
        self.attributes += attributes
        if name == "div":
            self.block = self.block + 1 if self.block or values.get("class") == "tokens" else 0
        if self.block and name in self.tokens and "title" in values:
            self.inside = (name, values["title"])

    def handle_endtag(self, name):
        if name == "div" and self.block:
            self.block -= 1
        if self.inside and name == self.inside[0]:
            self.inside = None

    def handle_data(self, data):
        self.text += data
        if self.inside:
            self.tokens[self.inside[0]].append((self.inside[1], data))


# The numbers


def test_json_of_a_drifting_rollout(tmp_path, capsys, folder):
    trace = write(tmp_path / "t.jsonl", drifting(0), lengths(1, [4], 0.0))
    found = as_object(capsys, trace, f"tokenizer={folder}")
    assert (found["rollouts"], found["calls"], found["strategy"]) == (2, 4, "best_effort")
    assert found["samples"] == {"per_call": 4, "adjacent": 3, "best_effort": 3, "substitute": 2}
    assert (found["samples_per_rollout"], found["single_sample_share"]) == (1.5, 0.5)
    assert (found["breaks"], found["skipped"]) == ({"retokenized": 1}, {})
    # best_effort: 2 + 3 | 10 | 1 + 4; per_call: 5 + 8 + 10 + 5; one tree shares a and the line break.
    assert found["tokens"] == {"per_call": 28, "adjacent": 20, "best_effort": 20, "substitute": 15}
    assert found["trained_tokens"] == {"per_call": 10, "adjacent": 10, "best_effort": 10, "substitute": 10}
    assert found["tree"] == {"tokens": 18, "saved": 2}
    assert found["sampled_tokens"] == 10
    assert [row["samples"] for row in found["per_rollout"]] == [2, 1]
    assert list(tmp_path.iterdir()) == [tmp_path / "t.jsonl"]


def test_without_a_tokenizer_causes_stay_open(tmp_path, capsys):
    found = as_object(capsys, write(tmp_path / "t.jsonl", drifting()))
    assert found["breaks"] == {"diverged": 1}
    assert set(found["samples"]) == {"per_call", "adjacent", "best_effort"}


def test_the_strategy_decides_what_is_reported(tmp_path, capsys):
    found = as_object(capsys, write(tmp_path / "t.jsonl", drifting()), "strategy=per_call")
    assert found["samples_per_rollout"] == 3.0 and sum(found["breaks"].values()) == 2


def test_every_reason_is_counted_with_its_tokens(tmp_path, capsys):
    calls = [
        call(0, [], [1, 2]),
        call(1, [1], []),
        call(2, [1], [2, 3, 4], delivered=False),
        call(3, [1], [2], request_id="q"),
        call(4, [1], [3], request_id="q"),
        call(5, [1], [5] * 5, constrained=True),
        call(6, [1], [6], trainable=False),
        call(7, [1], [7] * 4) | {"logprobs": None},
    ]
    found = as_object(capsys, write(tmp_path / "t.jsonl", rollout(0, calls, 1.0)))
    tokens = {
        "missing_ids": 2,
        "empty_response": 0,
        "undelivered": 3,
        "superseded": 1,
        "constrained": 5,
        "not_trainable": 1,
        "missing_logprobs": 4,
    }
    assert found["skipped"] == dict.fromkeys(tokens, 1)
    assert found["skipped_tokens"] == tokens
    assert found["sampled_tokens"] == found["trained_tokens"]["best_effort"] + sum(tokens.values()) == 17


def test_shares_of_the_loss_are_those_of_figure_5(tmp_path):
    trace = write(tmp_path / "t.jsonl", lengths(0, [50, 100]), lengths(1, [30, 30, 30]), lengths(2, [40]))
    rows = report_of(trace).rows
    shares = loss_shares(rows)
    assert shares["token_mean"] == pytest.approx([150 / 280, 90 / 280, 40 / 280])
    assert shares["seq_mean"] == pytest.approx([2 / 6, 3 / 6, 1 / 6])
    assert shares["rollout_mean"] == pytest.approx([1 / 3, 1 / 3, 1 / 3])
    assert relative(rows, shares["seq_mean"]) == pytest.approx([1.0, 1.5, 0.5])


def test_shares_and_advantages_are_taken_an_update_at_a_time(tmp_path):
    trace = write(
        tmp_path / "t.jsonl",
        lengths(0, [10], 1.0, step=0),
        lengths(1, [30], 0.0, step=0),
        lengths(2, [10], 4.0, step=1),
        lengths(3, [10], 2.0, step=1),
        lengths(4, [99], None, step=1),
    )
    rows = report_of(trace).rows
    assert loss_shares(rows)["token_mean"] == pytest.approx([0.25, 0.75, 0.5, 0.5, 0.0])
    assert advantages(rows)["dr_grpo"] == pytest.approx([0.5, -0.5, 1.0, -1.0, 0.0])
    assert np.isnan(relative(rows, loss_shares(rows)["token_mean"])[4])
    assert silent_groups(rows) == (0, 2)


def test_without_rewards_all_rollouts_weigh_and_none_has_an_advantage(tmp_path):
    rows = report_of(write(tmp_path / "t.jsonl", lengths(0, [10], None), lengths(1, [30], None))).rows
    assert loss_shares(rows)["token_mean"] == pytest.approx([0.25, 0.75])
    assert advantages(rows) == {}


def test_single_rollouts_a_group_have_no_baseline(tmp_path):
    rows = report_of(write(tmp_path / "t.jsonl", lengths(0, [1], 1.0), lengths(1, [1], 0.0, group="g1"))).rows
    assert advantages(rows) == {} and silent_groups(rows) == (2, 2)


def test_a_rollout_without_samples_is_outside_the_mean(tmp_path, capsys):
    trace = write(tmp_path / "t.jsonl", lengths(0, [1, 1]), rollout(1, [call(0, [1], [])], 0.0))
    found = as_object(capsys, trace)
    assert (found["rollouts"], found["samples_per_rollout"], found["single_sample_share"]) == (2, 2.0, 0.0)
    found = as_object(capsys, write(tmp_path / "u.jsonl", rollout(1, [call(0, [1], [])], 0.0)))
    assert found["samples_per_rollout"] is None and found["skipped"] == {"empty_response": 1}


def test_only_the_first_rollouts_are_kept_whole(tmp_path):
    report = report_of(write(tmp_path / "t.jsonl", *[drifting(number) for number in range(9)]), keep=2)
    assert [shown.rollout.rollout_id for shown in report.shown] == ["r0", "r1"]
    assert report.breaks == {"diverged": 9}
    assert [example.rollout_id for example in report.examples["diverged"]] == ["r0", "r1", "r2"]


def test_words_cover_everything_that_can_happen():
    assert set(words.KINDS) == set(ALL_KINDS)
    assert set(words.REASONS) == set(SKIP_REASONS)
    assert set(words.STRATEGIES) == set(STRATEGIES)


# Tokens as text


def test_pieces_join_what_one_character_is_spread_over(folder):
    pieces = list(TokenText(folder).pieces([H, *EMOJI, SPACE, END]))
    assert pieces == [((H,), "h"), (tuple(EMOJI), "😀"), ((SPACE,), " "), ((END,), "<|end|>")]


def test_an_unfinished_character_is_shown_by_its_ids(folder):
    assert words.token_texts([H, EMOJI[0], A], TokenText(folder)) == [
        ("0", "h"),
        (str(EMOJI[0]), f"‹{EMOJI[0]}›"),
        ("1", "a"),
    ]


def test_pieces_keep_the_space_that_some_decoders_strip(tmp_path):
    tool = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1}, unk_token="▁a"))
    tool.decoder = decoders.Metaspace()
    tool.save(str(tmp_path / "tokenizer.json"))
    assert [text for _, text in TokenText(tmp_path).pieces([0, 1, 0])] == ["a", " b", " a"]


def test_control_characters_are_shown_not_sent():
    assert visible("a\x1b[31m\n\u202eb\x9b\ud800") == "a␛[31m␊\\u202eb\\u009b\\ufffd"


def test_windows_frame_only_what_differs(tmp_path, folder):
    (shown,) = report_of(write(tmp_path / "t.jsonl", drifting()), TokenText(folder)).shown
    known, found = words.windows(shown.drifts[0])
    assert (known.shared, known.differs, known.after) == ([A, LINE], [H, AVING], [END])
    assert (found.shared, found.differs, found.after[:2]) == ([A, LINE], [HAV, ING], [END, LINE])


def test_windows_agree_again_after_the_difference():
    assert words._agree_again([2, 3, 4, 5, 6], [9, 3, 4, 5, 6]) == (1, 1)
    assert words._agree_again([2, 3, 7, 7], [9, 3, 8, 8]) == (4, 4)  # one equal token is chance
    assert words._agree_again([3, 4], [9, 3, 4, 5]) == (0, 1)  # an insertion before the end
    assert words._agree_again([2, 3], [8, 9, 3, 5]) == (1, 2)  # the end itself
    assert words._agree_again([2, 3], [8, 9, 8, 9, 8, 9, 8, 9, 3]) == (2, 9)  # too far to be the end
    assert words._agree_again([5], [8, 9]) == (1, 2)


# Text


def test_text_report_tells_the_break_and_the_weights(tmp_path, capsys, folder):
    trace = write(tmp_path / "t.jsonl", drifting(0, 1.0), lengths(1, [6], 0.0))
    code, out, _ = run(capsys, trace, f"tokenizer={folder}")
    assert code == 0
    saved = (tmp_path / "t.jsonl.txt").read_text()
    assert f"Written: {trace}.html, {trace}.txt" in out
    for text in (" ".join(out.split()), " ".join(saved.split())):
        assert "2 rollouts made 4 calls, which best_effort merges into 3 samples (1.50 a rollout; 50%" in text
        assert "All 12 sampled tokens are trained, each once." in text
        assert "1 retokenized the text came back the same, the token ids did not" in text
        assert "before call 0 (c0) a|␊ [h|aving] <|end|>" in text
        assert "after call 1 (c1) a|␊ [hav|ing] <|end|>|␊" in text
        assert "seq_mean 0.67 1.00 1.33 r0: 2 samples, 6 trained tokens" in text
        assert "Skipped calls: none" in text
    assert "\x1b" not in saved and not re.search(r" $", saved, re.MULTILINE)


def test_text_counts_the_rollouts_that_it_does_not_list(tmp_path, capsys):
    trace = write(tmp_path / "t.jsonl", *[lengths(number, [1], float(number % 2)) for number in range(45)])
    _, out, _ = run(capsys, trace)
    assert "5 further rollouts counted above, not listed here" in out
    assert "r39 " in out and "r40 " not in out


def test_text_of_a_trace_steers_no_terminal(tmp_path, capsys):
    trace = write(tmp_path / "t.jsonl", drifting() | {"rollout_id": "[red]\x1b]0;x\x07"})
    _, out, _ = run(capsys, trace)
    assert "[red]␛]0;x␇" in out and "\x1b" not in out


# The page


def test_the_page_shows_every_token_by_its_kind(tmp_path, folder):
    report = report_of(write(tmp_path / "t.jsonl", drifting()), TokenText(folder))
    found = Page(page(report, "t.jsonl", TokenText(folder)))
    text = lambda kind: [shown for _, shown in found.tokens[kind]]  # noqa: E731
    assert text("b") == ["h", "aving", "<|end|>", "n", "<|end|>", "g"]
    assert text("u") == ["hav", "ing"]
    assert text("i") == ["a", "⏎\n", "a", "⏎\n", "<|end|>", "⏎\n", "⏎\n"]
    assert found.tokens["b"][1][0] == f"id {AVING}, logprob -0.5"
    assert found.tokens["u"][0][0] == f"id {HAV}"
    assert "break · retokenized" in found.text


def test_the_page_without_a_tokenizer_shows_ids(tmp_path):
    found = Page(page(report_of(write(tmp_path / "t.jsonl", drifting())), "t.jsonl", None))
    assert [shown for _, shown in found.tokens["b"]] == [str(i) for i in (H, AVING, END, N, END, G)]


def test_the_page_needs_nothing_and_runs_nothing(tmp_path, folder):
    evil = "<script>alert(1)</script>\"'&<img src=x>"
    spoken = rollout(0, [call(0, [A], [LESS, AND, H], agent=evil, finish_reason=evil)], 1.0, group=evil)
    trace = write(
        tmp_path / "t.jsonl", spoken | {"rollout_id": evil, "calls": [spoken["calls"][0] | {"call_id": evil}]}
    )
    html = page(report_of(trace, TokenText(folder)), evil, TokenText(folder))
    found = Page(html)
    assert [shown for _, shown in found.tokens["b"]] == ["<", "&", "h"]
    assert not found.names & {"script", "img", "link", "iframe", "object", "embed", "base"}
    assert not [name for name, _ in found.attributes if name.startswith("on") or name in ("src", "srcset", "action")]
    assert all(value.startswith("#rollout-") for name, value in found.attributes if name == "href")
    assert not re.search(r"url\(|@import|https?:", html)
    assert evil in found.text
    assert "prefers-color-scheme: dark" in html


def test_long_runs_are_folded_and_every_token_is_accounted_for(tmp_path):
    calls = [call(0, list(range(1000)), [1] * 5000), call(1, [*range(900), 7], [2])]
    found = Page(page(report_of(write(tmp_path / "t.jsonl", rollout(0, calls, 1.0))), "t.jsonl", None))
    left = [int(number.replace(",", "")) for number in re.findall(r"([\d,]+) \w+ tokens left out here", found.text)]
    shared = [int(number) for number in re.findall(r"the first (\d+) tokens are those of sample 0", found.text)]
    # Shorter prompts come first: sample 0 is call 1 (901 + 1), sample 1 is call 0 (1000 + 5000), sharing 900.
    assert left == [901 - 240, 5000 - 2000] and shared == [900 - 30]
    assert len(found.tokens["b"]) == 5001 - 3000
    assert [shown for _, shown in found.tokens["u"]] == [str(number) for number in range(900, 916)]
    assert sum(map(len, found.tokens.values())) + sum(left) + sum(shared) == 6000 + 902


def test_what_the_page_leaves_out_is_said(tmp_path):
    many = [lengths(number, [1], float(number % 2)) for number in range(ROLLOUTS + 6)]
    found = Page(page(report_of(write(tmp_path / "t.jsonl", *many)), "t.jsonl", None))
    assert found.text.count("Rows of 6 further rollouts left out here; every number counts them.") == 2
    assert "Tokens of 6 further rollouts left out here: the page shows at most 64 rollouts" in found.text
    assert len(found.tokens["b"]) == ROLLOUTS


def test_the_page_stops_at_its_budget_of_tokens(tmp_path):
    heavy = [lengths(number, [2000] * 50) for number in range(3)]
    html = page(report_of(write(tmp_path / "t.jsonl", *heavy)), "t.jsonl", None)
    found = Page(html)
    assert len(found.tokens["b"]) == 75 * 2000  # with a prompt of one token each: just over 150,000
    assert "25 further samples of this rollout left out here" in found.text
    assert "Tokens of 1 further rollout left out here" in found.text
    assert html.count('href="#rollout-0"') == 2 and 'href="#rollout-2"' not in html


def test_skipped_calls_stand_with_their_rollout(tmp_path):
    trace = write(tmp_path / "t.jsonl", rollout(0, [call(0, [1], [2]), call(1, [3], [4, 5], delivered=False)], 1.0))
    found = Page(page(report_of(trace), "t.jsonl", None))
    assert "Call 1 (c1) is not trained, 2 sampled tokens. undelivered" in found.text


# The command


def test_the_command_as_a_process_reads_gzip_and_says_where_it_wrote(tmp_path):
    write(tmp_path / "t.jsonl", drifting())
    (tmp_path / "t.jsonl.gz").write_bytes(gzip.compress((tmp_path / "t.jsonl").read_bytes()))
    argv = [sys.executable, "-m", "harnessrl", "inspect", "t.jsonl.gz", "text=out.txt"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "Written: t.jsonl.gz.html, out.txt"
    assert (tmp_path / "out.txt").read_text().startswith("t.jsonl.gz\n")
    assert (tmp_path / "t.jsonl.gz.html").read_text().startswith("<!doctype html>")


def test_json_alone_needs_numpy_alone(tmp_path):
    trace = write(tmp_path / "t.jsonl", drifting())
    code = (
        "import sys; from harnessrl.cli import run; run(['inspect', sys.argv[1], 'json=true']);"
        "print([name for name in ('torch', 'rich', 'tokenizers', 'transformers', 'omegaconf') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, trace], capture_output=True, text=True, timeout=60)
    first, second = done.stdout.splitlines()
    assert json.loads(first)["rollouts"] == 1 and second == "[]"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["absent.jsonl"], "absent.jsonl: No such file"),
        (["t.jsonl", "strategy=best"], "strategy=best: allowed: per_call, adjacent, best_effort, substitute"),
        (["t.jsonl", "strategy=substitute"], "give tokenizer=FOLDER"),
        (["t.jsonl", "json=yes"], "json=yes: allowed: true, false"),
        (["t.jsonl", "colour=red"], "'colour=red': expected key=value; allowed keys: tokenizer, strategy, json, html"),
        (["t.jsonl", "html="], "html: is empty"),
        (["t.jsonl", "tokenizer=nowhere"], "tokenizer=nowhere: no such folder"),
        (["t.jsonl", "tokenizer=t.jsonl"], "t.jsonl is not a tokenizer"),
        (["t.jsonl", "html=no/such/folder.html"], "no/such/folder.html: cannot be written"),
        (["empty.jsonl"], "empty.jsonl: no line holds a rollout"),
        (["bad.jsonl"], "bad.jsonl, line 2: field 'group_id' is missing"),
        (["large.jsonl"], "large.jsonl, line 1: field 'reward' is 1e+301; rewards lie within +-1e+300"),
        (["digits.jsonl", "json=true"], "digits.jsonl, line 1: field 'reward' is 1000"),
    ],
)
def test_bad_input_is_named_and_ends_with_2(tmp_path, monkeypatch, capsys, argv, said):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "t.jsonl", drifting())
    (tmp_path / "empty.jsonl").write_text("\n")
    write(tmp_path / "bad.jsonl", drifting(), {"rollout_id": "r1"})
    write(tmp_path / "large.jsonl", drifting(reward=1e301))
    write(tmp_path / "digits.jsonl", drifting(reward=10**400))
    code, _, err = run(capsys, *argv)
    assert code == 2 and said in err and err.startswith("harnessrl: ")


def test_what_a_reader_has_to_know_is_noted(tmp_path, capsys, folder):
    trace = write(tmp_path / "t.jsonl", drifting(0, None), drifting(1, 1.0))
    with open(trace, "a") as file:
        file.write('{"rollout_id": "r2", "gro')
    _, out, _ = run(capsys, trace)
    text = " ".join(out.split())
    assert "Note: line 3, the last, is cut short and left out" in text
    assert "Note: 1 of 2 rollouts are unscored: outside every baseline, never trained" in text
    assert "Note: without tokenizer=FOLDER tokens are shown as ids" in text
    _, out, _ = run(capsys, trace, "strategy=substitute", f"tokenizer={folder}")
    assert "Note: substitute is not faithful" in " ".join(out.split())


def test_lines_that_repeat_a_rollout_are_noted(tmp_path, capsys):
    again = [lengths(0, [1], step=0), lengths(0, [1], step=1)]  # another step's rollout of the same name
    assert as_object(capsys, write(tmp_path / "t.jsonl", *again))["notes"][0].startswith("without tokenizer")
    found = as_object(capsys, write(tmp_path / "t.jsonl", *again, lengths(0, [2], step=1), lengths(0, [2], step=1)))
    assert found["notes"][0] == "2 lines repeat a rollout_id (r0 first); each line is counted as a rollout"
    assert found["rollouts"] == 4


def test_progress_is_told_off_a_terminal_too(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "QUIET_SECONDS", -1.0)
    list(command.watched(Trace(write(tmp_path / "t.jsonl", drifting(0), drifting(1)))))
    assert re.fullmatch(r"(read \d+%, [12] rollouts\n){2}", capsys.readouterr().err)


def test_options_are_refused_before_anything_is_read():
    with pytest.raises(ConfigError, match="json"):
        command.inspect("absent.jsonl", ["json=maybe"])
