"""The figures: what is drawn is read back from matplotlib's artists and compared with numbers worked out by hand."""

import importlib
from pathlib import Path

import pytest
from matplotlib.colors import to_hex
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

import paper_figs
from harnessrl.adapter import Call, Rollout
from harnessrl.results import Results
from paper_figs import curves, drift_by_length, style, traces, tree_savings

ROOT = Path(__file__).parents[1]
REFERENCE = curves.REFERENCE


def module(name):
    return importlib.import_module(f"paper_figs.{name}")


def drawn(name, root=ROOT):
    """The figure as `harnessrl figures` draws it, and the numbers it was drawn from."""
    figure, numbers = style.new_figure(), module(name).numbers(root)
    with style.look():
        module(name).draw(figure, numbers)
    return figure, numbers


def lines(axis):
    """label -> (x, y) of the lines that have one."""
    return {
        line.get_label(): (list(line.get_xdata()), pytest.approx(list(line.get_ydata())))
        for line in axis.lines
        if not line.get_label().startswith("_")
    }


def ends(collection):
    """Low and high ends, by x, of what fill_between drew."""
    points = collection.get_paths()[0].vertices
    return {x: (min(y for at, y in points if at == x), max(y for at, y in points if at == x)) for x in {*points[:, 0]}}


def table(root, task, rewards, drift=0.0, steps=3):
    """Writes an ablation's tables: setting -> one reward a seed; reward grows by .1 a step from it, val is at the ends."""
    results = Results()
    for setting, of_seeds in rewards.items():
        for seed, reward in enumerate(of_seeds):
            head = {"setting": setting, "seed": seed}
            results.runs[setting, seed] = head | {
                "steps": steps,
                "final_reward": reward,
                "drift_share_final": drift,
                "config": "x",
                "commit": "abc",
            }
            results.curves[setting, seed] = [
                head
                | {"step": step, "reward/mean": reward + 0.1 * step, "policy/entropy": 1.0 - 0.2 * step}
                | {"val/reward_mean": reward / 2 if step in (0, steps - 1) else ""}
                | {"rollout/samples_mean": 3.0, "rollout/single_sample_share": 0.25, "rollout/drift_share": 0.125}
                for step in range(steps)
            ]
    results.write(root / "ablations" / "results" / curves.TASKS[task])


FIVE = {"sample+token-mean": [0.1, 0.2, 0.3, 0.4, 0.5], REFERENCE: [0.2, 0.3, 0.4, 0.5, 0.6]}
TWO = {"sample+token-mean": [0.5, 0.7], REFERENCE: [0.4, 0.5]}


def test_every_module_that_draws_is_in_the_list():
    modules = {path.stem for path in (ROOT / "paper_figs").glob("*.py")} - {"__init__"}
    drawing = {name for name in modules if hasattr(module(name), "draw") and hasattr(module(name), "numbers")}
    assert drawing == set(paper_figs.FIGURES)
    assert [name for name in paper_figs.FIGURES if not module(name).__doc__] == []
    readme = (ROOT / "paper_figs" / "README.md").read_text()
    assert [name for name in paper_figs.FIGURES if f"**{name}**" not in readme] == []


def test_figure_3_shows_a_real_break():
    figure, numbers = drawn("fig3_retokenization")
    assert numbers["sampled"][4:6] == [(" cre", "changed"), ("amer", "changed")]
    assert numbers["back"][4:6] == [(" cream", "changed"), ("er", "changed")]
    assert "".join(text for text, _ in numbers["sampled"]) == "".join(text for text, _ in numbers["back"])
    assert numbers["kind"] == "retokenized" and len(numbers["samples"]) == 2
    widths = [patch.get_width() for patch in figure.axes[0].patches]
    assert widths == [len(text) for row in ("sampled", "back") for text, _ in numbers[row]]
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts.index("␣cream") - texts.index("␣cre") == len(numbers["sampled"])  # the same place, a row below


def test_figure_4_draws_the_worked_example():
    figure, numbers = drawn("fig4_baseline")
    assert [numbers[unit]["baseline"] for unit in ("rollout", "sample")] == [0.5, 0.75]
    heights = [[patch.get_height() for patch in axis.patches] for axis in figure.axes]
    assert heights == [[0.5, 0.5, 0.5, -0.5], [0.25, 0.25, 0.25, -0.75]]


def test_figure_5_draws_the_worked_example():
    figure, _ = drawn("fig5_normalizers")
    widths = [patch.get_width() for patch in figure.axes[0].patches]
    token, sequence, rollout = widths[:6], widths[6:12], widths[12:]
    assert token == pytest.approx([n / 280 for n in (50, 100, 30, 30, 30, 40)])
    assert sequence == pytest.approx([1 / 6] * 6)
    assert rollout == pytest.approx([1 / 9, 2 / 9, 1 / 9, 1 / 9, 1 / 9, 1 / 3])


@pytest.mark.parametrize(
    ("name", "task", "reported"), [("fig7_lookup", "lookup", [25.1, 41.7]), ("fig8_babyai", "babyai", [51.9, 70.2])]
)
def test_figures_7_and_8_draw_training_validation_and_what_is_reported(tmp_path, name, task, reported):
    table(tmp_path, task, FIVE)
    figure, _ = drawn(name, tmp_path)
    training, validation, others = figure.axes
    # five seeds: the interquartile mean leaves out the lowest and highest: (.3 + .4 + .5) / 3, and running means
    assert lines(training) == {"training": ([0, 1, 2], [0.4, 0.45, 0.5])}
    assert lines(validation) == {"validation": ([0, 2], [0.2, 0.2])}
    low, high = ends(validation.collections[0])[0]
    assert 0.1 <= low < 0.2 < high <= 0.3
    assert list(others.lines[0].get_ydata()) == reported and "reported" in others.get_title(loc="left")


def test_few_seeds_are_shown_as_what_they_are(tmp_path):
    table(tmp_path, "lookup", TWO)
    figure, numbers = drawn("fig7_lookup", tmp_path)
    assert ends(figure.axes[0].collections[0]) == {
        step: pytest.approx((0.4 + 0.05 * step, 0.5 + 0.05 * step)) for step in range(3)
    }
    assert [list(line.get_ydata()) for line in figure.axes[0].lines[1:]] == [
        pytest.approx([start + 0.05 * step for step in range(3)]) for start in (0.4, 0.5)
    ]
    assert numbers["note"] == "2 seeds; line: interquartile mean, band: range (thin: single seeds)"
    assert numbers["note"] in [text.get_text() for text in figure.texts]


def test_figure_9_draws_each_setting_and_marks_the_reported_values(tmp_path):
    table(tmp_path, "lookup", FIVE)
    figure, _ = drawn("fig9_ablation", tmp_path)
    reward, validation, entropy, change, change_validation, _, others = figure.axes
    assert lines(reward) == {
        "sample+token-mean": ([0, 1, 2], [0.3, 0.35, 0.4]),
        REFERENCE: ([0, 1, 2], [0.4, 0.45, 0.5]),
    }
    assert lines(validation)[REFERENCE] == ([0, 2], [0.2, 0.2])
    assert lines(entropy)[REFERENCE] == ([0, 1, 2], [1.0, 0.9, 0.8])
    assert [line.get_ydata()[0] for line in others.lines] == [35.0, 33.1, 38.2]
    colour = {line.get_label(): to_hex(line.get_color()) for line in reward.lines}
    assert [to_hex(line.get_color()) for line in others.lines[::2]] == [*colour.values()]
    assert len({(line.get_linestyle(), line.get_marker()) for line in reward.lines}) == 2  # told apart without colour
    # below each: the differences to the reference by windows of ten steps (here all three), of validation one by one
    assert lines(change) == {"sample+token-mean": ([1.0], [-0.1])}
    assert lines(change_validation) == {"sample+token-mean": ([0.0, 2.0], [-0.05, -0.05])}
    assert change.collections[0].get_segments()[0][:, 1].tolist() == pytest.approx([-0.1, -0.1])


def test_differences_are_paired_by_seed_and_step(tmp_path):
    table(tmp_path, "lookup", {"sample+token-mean": [0.5, 0.9, 0.1], REFERENCE: [0.4, 0.5]}, steps=5)
    results = Results.read(tmp_path / "ablations" / "results" / "normalization")
    results.curves["sample+token-mean", 1][1]["reward/mean"] = ""  # a step without a value is left out of the pairs
    results.curves["sample+token-mean", 0][4]["reward/mean"] = "1.9"  # instead of .9, where the reference has .8
    found = curves.paired(results, "sample+token-mean", "reward/mean", 2)
    assert found["steps"] == [0.0, 2.5, 4.0]
    assert found["value"] == pytest.approx([0.25, 0.25, 0.75])  # seeds 0 and 1: (.1 + .4) / 2, then (1.1 + .4) / 2
    assert (found["low"], found["high"]) == (pytest.approx([0.1, 0.1, 0.4]), pytest.approx([0.4, 0.4, 1.1]))


def test_figure_10_draws_structure_by_setting_and_task(tmp_path):
    table(tmp_path, "lookup", FIVE)
    table(tmp_path, "babyai", FIVE)
    figure, _ = drawn("fig10_samples", tmp_path)
    assert len(figure.axes) == 6
    for row in (figure.axes[:3], figure.axes[3:]):
        for axis, value in zip(row, (0.25, 3.0, 0.125), strict=True):
            assert lines(axis)[REFERENCE] == ([0, 1, 2], [value] * 3)
        assert [len(axis.lines) for axis in row] == [2, 2, 2]  # others' numbers stand in the note: of other tasks
    (note,) = [text.get_text() for text in figure.texts if text.get_gid() == "note"]
    assert "single-sample share 0.36, samples per rollout 2.41" in note


def test_outcomes_are_differences_paired_by_seed(tmp_path):
    other = "rollout+seq-mean"
    table(tmp_path, "lookup", TWO | {other: [0.4, 0.5]})
    table(tmp_path, "babyai", {REFERENCE: [0.3] * 3, other: [0.9] * 3, "sample+token-mean": [0.3, 0.2, 0.2]})
    figure, numbers = drawn("outcomes", tmp_path)
    reward = numbers["outcomes"]["final_reward"]
    assert reward["difference"]["lookup"]["sample+token-mean"] == pytest.approx((0.15, 0.1, 0.2))
    both = (0.15 - 0.2 / 3) / 2  # the mean of the tasks'; -.1, -.1, 0, .1, .2 as one would give 0
    assert reward["difference"]["all tasks"]["sample+token-mean"][0] == pytest.approx(both)
    assert reward["probability"]["lookup"]["sample+token-mean"][0] == 0.875  # .5 against .5 counts half
    assert reward["probability"]["babyai"]["sample+token-mean"][0] == pytest.approx(1 / 6)
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["sample+token-mean", other]
    expected = ([0.15, 0.0], [-0.2 / 3, 0.6], [both, 0.3], [0.875, 0.5])
    for axis, values in zip(figure.axes[:4], expected, strict=True):
        line = axis.lines[0]  # a setting has one row in all panels, whatever the order of a task's table is
        assert dict(zip(map(round, line.get_ydata()), line.get_xdata(), strict=True)) == pytest.approx(
            dict(enumerate(values))
        )
    (note,) = [text.get_text() for text in figure.texts if text.get_gid() == "note"]
    assert note.startswith("Against rollout+rollout-mean; lookup 2 seeds, babyai 3 seeds. Points: interquartile mean")


def test_the_probability_has_an_interval_from_five_seeds_on(tmp_path):
    table(tmp_path, "lookup", FIVE)
    value, low, high = module("outcomes").numbers(tmp_path)["outcomes"]["final_reward"]["probability"]["lookup"][
        "sample+token-mean"
    ]
    assert value == (0 + 0.5 + 1.5 + 2.5 + 3.5) / 25
    assert 0 <= low < value < high <= 0.8


def test_template_breaks_are_those_of_the_survey():
    figure, numbers = drawn("template_breaks")
    original, patched = numbers.values()
    assert original["Qwen 3"]["thinking"] == (1, 1) and patched["Nemotron"]["plain"] == (4, 4)
    rows = [[text.get_text() for text in axis.texts[:6]] for axis in figure.axes]
    assert rows[0] == ["9/41", "23/41", "20/22", "5/28", "8/28", "18/21"]  # counted in tests/real/README.md
    assert rows[1] == ["6/31", "16/31", "10/16", "5/18", "5/18", "9/15"]


def test_a_template_of_no_known_family_is_refused():
    with pytest.raises(ValueError, match="'olmo'"):
        module("template_breaks").family_of("olmo")


def test_substitute_bias_draws_its_tables():
    figure, numbers = drawn("substitute_bias")
    assert len(numbers["responses"]) == 78
    assert list(figure.axes[1].lines[0].get_ydata())[:2] == [0.05669, 0.04235]
    below = figure.axes[2].lines[0]
    assert below.get_xdata()[0] == -11.79 and below.get_ydata()[-1] == 1.0


def test_the_laboratory_draws_its_tables(tmp_path):
    for name in module("laboratory").DATA:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    row = "estimator,unit,normalizer,policy,success,length_dial,fragment_dial,push_fragment_if_right,push_long_if_right,error\n"
    rows = ["grpo,sample,seq_mean,blind,0.9,1,1,0.25,0,9", "grpo,sample,seq_mean,blind,0.9,-1,-1,0.125,0,9"]
    rows += ["rloo,sample,seq_mean,blind,0.9,-1,-1,7,0,9", "grpo,sample,seq_mean,blind,0.9,0,-1,8,0,9"]
    (tmp_path / module("laboratory").DATA[0]).write_text(row + "\n".join(rows) + "\n")
    path = "estimator,unit,normalizer,policy,length_dial,reward,drift,long\ngrpo,rollout,token_mean,sighted,0.5,0.3,0.5,0.75\n"
    (tmp_path / module("laboratory").DATA[1]).write_text(path)
    (tmp_path / module("laboratory").DATA[2]).write_text(
        '{"groups": 16, "size": 8, "batches": 4, "start": 0.3, "until": 0.9}'
    )
    figure, _ = drawn("laboratory", tmp_path)
    assert lines(figure.axes[0]) == {"sample + seq-mean": ([-1.0, 1.0], [0.125, 0.25])}  # both dials, one estimator
    assert lines(figure.axes[5]) == {"rollout + token-mean": ([0.3], [0.75])}


def test_tokens_are_counted_as_each_way_computes_them():
    def call(name, prompt, response):
        return Call(call_id=name, prompt_ids=prompt, response_ids=response, logprobs=[-1.0] * len(response))

    calls = [call("a", [1, 2], [3]), call("b", [1, 2, 3, 4], [5]), call("c", [1, 2, 9], [6])]
    found = tree_savings.count([Rollout(rollout_id="r", group_id="g", calls=calls)])
    # a call each: 3 + 5 + 4; best effort: [1 2 3 4 5] and [1 2 9 6]; tree: 1 2 3 4 5 and 9 6
    assert found == {
        "rollouts": 1,
        "calls": 3,
        "samples": 2,
        "trained": 3,
        "per_call": 12,
        "best_effort": 9,
        "tree": 7,
    }


def test_tree_savings_draws_shares(tmp_path):
    row = {"rollouts": 2, "calls": 6, "samples": 4, "trained": 5, "per_call": 20, "best_effort": 15, "tree": 10}
    traces.replace_rows(tmp_path / tree_savings.DATA[0], {"chats": [row]})
    figure, _ = drawn("tree_savings", tmp_path)
    assert [patch.get_height() for patch in figure.axes[0].patches] == [1.0, 0.75, 0.5]
    assert figure.axes[0].collections[0].get_segments()[0][0][1] == 0.25
    assert "3.00 calls,\n2.00 samples" in figure.axes[0].get_xticklabels()[0].get_text()


def test_drift_is_counted_by_length():
    tokenizer = Tokenizer(BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")]))
    tokenizer.decoder = decoders.Fuse()
    responses = [[0, 1, 1]] * 30 + [[2, 1]] * 30  # "a" "b" comes back as "ab"; "ab" "b" comes back as it was
    assert drift_by_length.count(tokenizer, responses) == [
        {"tokens": 1, "responses": 60, "drifting": 0},
        {"tokens": 2, "responses": 60, "drifting": 30},
    ]


def test_drift_is_drawn_with_its_interval(tmp_path):
    rows = [{"tokens": 1, "responses": 10, "drifting": 0}, {"tokens": 2, "responses": 20, "drifting": 5}]
    traces.replace_rows(tmp_path / drift_by_length.DATA[0], {"model": rows})
    figure, _ = drawn("drift_by_length", tmp_path)
    assert lines(figure.axes[0]) == {"model": ([1, 2], [0.0, 0.25])}
    square = 1.959964**2
    assert ends(figure.axes[0].collections[0])[1] == pytest.approx((0.0, square / (10 + square)))  # Wilson, 0 of 10


def test_rows_of_other_sources_stay(tmp_path):
    path = tmp_path / "t.csv"
    traces.replace_rows(path, {"a": [{"n": 1}], "b": [{"n": 2}, {"n": 3}]})
    traces.replace_rows(path, {"b": [{"n": 4}], "c": [{"n": 5}]})
    assert path.read_text() == "source,n\na,1\nb,4\nc,5\n"


def test_the_committed_tables_are_drawn_as_they_are():
    stored = {(row["source"], row["tokens"]): row for row in traces.read_rows(ROOT / drift_by_length.DATA[0])}
    # tests/real: 7 of 120 do not survive when cut after 8 tokens
    assert stored[drift_by_length.SMOLLM2, "8"] | {"source": ""} == {
        "source": "",
        "tokens": "8",
        "responses": "120",
        "drifting": "7",
    }
    for row in traces.read_rows(ROOT / tree_savings.DATA[0]):
        assert int(row["trained"]) < int(row["tree"]) <= int(row["best_effort"]) <= int(row["per_call"])


def test_training_draws_kl_gradient_norm_and_lengths(tmp_path):
    table(tmp_path, "lookup", TWO)
    folder = tmp_path / "ablations" / "results" / curves.TASKS["lookup"]
    results = Results.read(folder)
    for key, rows in results.curves.items():
        for row in rows:
            row |= {"loss/kl": 0.25, "policy/grad_norm": 0.5}
        count = 3 if key[1] else 1  # of seed 1 and of seed 0
        results.lengths[key] = [
            {"setting": key[0], "seed": key[1], "phase": phase, "quantity": quantity, "from": 1, "below": end, "count": n}
            for phase, quantity, end, n in (
                ("early", "rollout", 64, 5), ("late", "rollout", 8, count), ("late", "rollout", 16, 4),
                ("late", "sample", 32, 2), ("late", "response", 4, 9),
            )
        ]  # fmt: skip
    results.write(folder)
    figure, _ = drawn("training", tmp_path)
    kl, norm, rollout, sample = figure.axes
    assert lines(kl)[REFERENCE] == ([0, 1, 2], [0.25] * 3) and lines(norm)[REFERENCE] == ([0, 1, 2], [0.5] * 3)
    # seeds together: (1 + 3) of (1 + 3) + (4 + 4) rollouts are below 8 tokens
    assert lines(rollout) == {
        "first ten steps": ([8, 16, 64], [0.0, 0.0, 1.0]),  # all lines have the bins of all
        "sample+token-mean": ([8, 16, 64], [1 / 3, 1.0, 1.0]),
        REFERENCE: ([8, 16, 64], [1 / 3, 1.0, 1.0]),
    }
    assert lines(sample)[REFERENCE] == ([32], [1.0])


def test_the_small_ablations_are_drawn_against_their_own_references(tmp_path):
    for name, settings in (("unit", ("sample", "rollout")), ("estimators", ("grpo", "rloo"))):
        (tmp_path / "ablations").mkdir(exist_ok=True)
        (tmp_path / "ablations" / f"{name}.yaml").write_text((ROOT / "ablations" / f"{name}.yaml").read_text())
        results = Results()
        for setting in settings:
            for seed in range(2):
                more = (seed + 1) * (setting in ("sample", "rloo"))  # 1 and 2 more than the reference has
                row = {"setting": setting, "seed": seed, "steps": 3, "config": "x", "commit": "abc"}
                row |= {"final_reward": 0.5 + more / 10, "drift_share_final": 0.25}
                results.runs[setting, seed] = row | {"computed_tokens": 100 * 4**more}
        results.write(tmp_path / "ablations" / "results" / name)
    figure, numbers = drawn("ablations", tmp_path)
    assert list(numbers) == ["estimators", "unit"] and numbers["unit"]["seeds"] == 2
    reward, drift, tokens = figure.axes
    assert [text.get_text() for text in reward.get_yticklabels()] == ["rloo (grpo)", "sample (rollout)"]
    for axis, value in ((reward, 0.15), (drift, 0.0), (tokens, 8.0)):  # 8: the geometric mean of 4, 16
        places = [(line.get_xdata()[0], line.get_ydata()[0]) for line in axis.lines if line.get_linestyle() == "None"]
        assert places == [pytest.approx((value, 0)), pytest.approx((value, 1))]
    ends = [tuple(segment[:, 0]) for segment in tokens.collections[0].get_segments()]
    assert ends == [pytest.approx((4.0, 16.0))]  # two seeds: the range
