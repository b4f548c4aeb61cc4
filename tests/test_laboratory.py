"""The synthetic laboratory: exact against brute force and against draws, on the library's own functions."""

import csv
import itertools
import json

import numpy as np
import pytest

from experiments.laboratory.__main__ import RESULTS, main
from experiments.laboratory.draws import draw, updates
from experiments.laboratory.exact import Groups
from experiments.laboratory.flow import follow, rate_for, train
from experiments.laboratory.measure import angle, deviation
from experiments.laboratory.model import CLASS, REWARD, SAMPLES, STATES, TOKENS, Model
from experiments.laboratory.settings import NORMALIZERS, SCALE, SETTINGS, Setting, advantages, weights
from harnessrl.adapter import rollout_advantages, token_weights

TURNED = Model(length_dial=0.5, fragment_dial=-0.3, sighted=True)
GROUPS = Groups()


def plain_update(states, inputs, score, setting, groups):
    """One batch by direct calls of the library: sum over rollouts of weight x advantage x score."""
    classes = CLASS[states]
    samples, tokens = SAMPLES[classes], TOKENS[classes]
    lengths = [int(t // n) for t, n in zip(tokens, samples, strict=True) for _ in range(n)]
    owner = np.repeat(np.arange(len(states)), samples)
    weight_S = token_weights(lengths, owner, setting.normalizer, scale=SCALE)
    group_ids = np.repeat(np.arange(groups), len(states) // groups)
    advantage = rollout_advantages(
        REWARD[classes], group_ids, setting.estimator, unit=setting.unit, samples_per_rollout=samples
    )
    weight = np.array([weight_S[owner == r][0] for r in range(len(states))])
    return (weight * advantage) @ score[inputs, states], float((weight * advantage) @ tokens)


def test_weights_of_two_batches_by_hand():
    samples, tokens = np.array([[1, 4], [1, 1]]), np.array([[24, 96], [24, 24]])
    expected = {
        "token_mean": [[1 / 120, 1 / 120], [1 / 48, 1 / 48]],
        "seq_mean": [[1 / (5 * 24), 1 / (5 * 24)], [1 / 48, 1 / 48]],
        "rollout_mean": [[1 / 48, 1 / 192], [1 / 48, 1 / 48]],
        "constant": [[1 / 192, 1 / 192], [1 / 192, 1 / 192]],
    }
    for normalizer in NORMALIZERS:
        assert weights(samples, tokens, normalizer) == pytest.approx(np.array(expected[normalizer]), rel=1e-14)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_many_batches_in_one_call_equal_a_call_a_batch(setting):
    rng = np.random.default_rng(1)
    states = rng.integers(len(STATES), size=(20, 12))
    inputs = np.repeat(rng.integers(2, size=(20, 3)), 4, axis=1)
    score = TURNED.scores(rng.normal(size=TURNED.size))
    classes = CLASS[states]
    product = weights(SAMPLES[classes], TOKENS[classes], setting.normalizer)
    product = product * advantages(REWARD[classes], SAMPLES[classes], 3, setting)
    together = np.einsum("br,brd->bd", product, score[inputs, states])
    apart = [plain_update(s, x, score, setting, 3)[0] for s, x in zip(states, inputs, strict=True)]
    np.testing.assert_allclose(together, apart, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("sighted", [False, True])
def test_the_true_gradient_is_that_of_the_enumerated_reward(sighted):
    model = Model(length_dial=0.4, fragment_dial=0.7, sighted=sighted)
    theta = np.random.default_rng(2).normal(size=model.size)

    def reward(at):
        return float(model.probabilities(at).mean(0) @ STATES[:, 0])

    assert reward(theta) == pytest.approx(model.reward(theta), rel=1e-14)
    p, score = model.probabilities(theta), model.scores(theta)
    np.testing.assert_allclose(p.sum(1), 1, rtol=1e-14)
    np.testing.assert_allclose(np.einsum("xz,xzd->xd", p, score), 0, atol=1e-15)
    np.testing.assert_allclose(np.einsum("xz,z,xzd->d", p, STATES[:, 0], score) / 2, model.gradient(theta), atol=1e-15)
    step = 1e-6 * np.eye(model.size)
    slope = [(reward(theta + h) - reward(theta - h)) / 2e-6 for h in step]
    np.testing.assert_allclose(slope, model.gradient(theta), atol=1e-9)


def test_a_dial_at_its_end_by_hand():
    model = Model(length_dial=1.0)
    assert model.happens(np.array([0, 0, 1, 1]), np.array([1, 0, 1, 0]), 1.0).tolist() == [0, 0.5, 0.5, 1]
    p = model.probabilities(model.start(0.5, spread=0.0))
    right, long = STATES[:, 0] == 1, STATES[:, 3] == 1
    assert p[0][right & long].sum() == pytest.approx(
        0.5 * 0.25
    )  # half of the successes choose it, half of those get it
    assert p[0][~right & long].sum() == pytest.approx(0.5 * 0.75)
    with pytest.raises(ValueError, match=r"fragment_dial must lie in -1..1, got 1.5"):
        Model(fragment_dial=1.5)


@pytest.mark.parametrize(
    "setting",
    [Setting("grpo", "sample", "token_mean"), Setting("rloo", "rollout", "seq_mean")],
    ids=lambda setting: setting.name,
)
def test_exact_equals_every_batch_of_one_group_of_two(setting):
    theta = TURNED.start(0.4) + 0.1 * np.arange(TURNED.size)
    p, score = TURNED.probabilities(theta), TURNED.scores(theta)
    total, balance = np.zeros(TURNED.size), 0.0
    for x, first, second in itertools.product(range(2), range(32), range(32)):
        update, one = plain_update(np.array([first, second]), np.array([x, x]), score, setting, 1)
        total += p[x, first] * p[x, second] / 2 * update
        balance += p[x, first] * p[x, second] / 2 * one
    exact = Groups(size=2, batch=1).expected(TURNED, theta, setting)
    np.testing.assert_allclose(exact[0], total, atol=1e-15)
    assert exact[1] == pytest.approx(balance, abs=1e-15)


@pytest.mark.parametrize(("size", "batch"), [(2, 2), (4, 1)])
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_exact_equals_every_batch_of_four_rollouts(setting, size, batch):
    theta = TURNED.start(0.4) + 0.1 * np.arange(TURNED.size)
    p, score = TURNED.probabilities(theta), TURNED.scores(theta)
    chance = np.stack([[row[c == CLASS].sum() for c in range(8)] for row in p])
    mean = np.stack([[p[x, c == CLASS] @ score[x, c == CLASS] for c in range(8)] for x in range(2)])
    mean /= chance[:, :, None]
    classes = np.array(list(itertools.product(range(8), repeat=4)))
    product = weights(SAMPLES[classes], TOKENS[classes], setting.normalizer)
    product = product * advantages(REWARD[classes], SAMPLES[classes], batch, setting)
    total = np.zeros(TURNED.size)
    for of_group in itertools.product(range(2), repeat=batch):
        inputs = np.repeat(of_group, size)
        happens = chance[inputs, classes].prod(1) / 2**batch
        total += np.einsum("b,br,brd->d", happens, product, mean[inputs, classes])
    exact, _ = Groups(size=size, batch=batch).expected(TURNED, theta, setting)
    np.testing.assert_allclose(exact, total, atol=1e-15)


@pytest.mark.parametrize("sighted", [False, True])
def test_drawn_batches_agree_with_the_exact_mean(sighted):
    model = Model(length_dial=0.5, fragment_dial=0.8, sighted=sighted)
    theta = model.start(0.7)
    drawn = draw(model, np.tile(theta, (1500, 1)), 16, 8, np.random.default_rng(3))
    for setting in SETTINGS[::5]:
        update, balance, failed = updates(drawn, model.size, setting)
        mean, expected = GROUPS.expected(model, theta, setting)
        assert deviation(update, mean) < 4
        assert abs(balance.mean() - expected) <= 4 * balance.std() / np.sqrt(len(balance)) + 1e-12
        assert 0.2 < failed.mean() < 0.5


def test_only_a_rollout_baseline_with_constant_weights_is_unbiased_everywhere():
    unbiased = {Setting(e, "rollout", "constant") for e in ("dr_grpo", "rloo")}
    worst = dict.fromkeys(SETTINGS, 0.0)
    for dial, sighted in itertools.product((-0.7, 0.6), (False, True)):
        model = Model(length_dial=dial, fragment_dial=0.9 * abs(dial), sighted=sighted)
        theta = model.start(0.3, free=0.4)
        for setting in SETTINGS:
            mean, _ = GROUPS.expected(model, theta, setting)
            worst[setting] = max(worst[setting], angle(mean, model.gradient(theta)))
    assert {setting for setting, degrees in worst.items() if degrees < 1e-9} == unbiased
    assert min(degrees for setting, degrees in worst.items() if setting not in unbiased) > 0.05


def test_weight_times_advantage_sums_to_zero_where_the_units_agree():
    model = Model(length_dial=0.5, fragment_dial=0.5)
    theta = model.start(0.3)
    balance = {setting: GROUPS.expected(model, theta, setting)[1] for setting in SETTINGS}
    agree = {("rollout", "rollout_mean"), ("sample", "seq_mean")}
    for setting, value in balance.items():
        assert (abs(value) < 1e-12) == ((setting.unit, setting.normalizer) in agree), setting
    assert balance[Setting("dr_grpo", "rollout", "token_mean")] == pytest.approx(-0.04824, abs=5e-6)


def test_a_lone_failure_is_punished_half_as_much_when_it_fragments():
    reward, samples = np.array([[0.0, *[1.0] * 7]] * 2), np.array([[1] * 8, [4, *[1] * 7]])
    by_sample = advantages(reward, samples, 1, Setting("grpo", "sample", "token_mean"))
    assert by_sample[:, 0] == pytest.approx([-2.475, -1.261], abs=1e-3)
    assert by_sample[:, 1] == pytest.approx([0.354, 0.721], abs=1e-3)
    by_rollout = advantages(reward, samples, 1, Setting("grpo", "rollout", "token_mean"))
    assert by_rollout[0] == pytest.approx(by_rollout[1]) and by_rollout[0, 0] == pytest.approx(-2.475, abs=1e-3)


def test_a_sample_baseline_shrinks_an_advantage_by_its_own_share():
    """A = (r - mean of the others' samples) (1 - n / sum n): 5/6 = 1 * 5/6, and -1/6 = -1/2 * 1/3, -1/6 = -1/5 * 5/6."""
    by_hand = advantages(
        np.array([[1.0, 0.0, 0.0]]), np.array([[1, 4, 1]]), 1, Setting("dr_grpo", "sample", "constant")
    )
    assert by_hand[0] == pytest.approx([5 / 6, -1 / 6, -1 / 6])


def test_angles_by_hand():
    assert angle(np.array([3.0, 0.0]), np.array([1.0, 0.0])) == 0
    assert angle(np.array([1.0, 1.0]), np.array([5.0, 0.0])) == pytest.approx(45)
    assert angle(np.array([-2.0, 0.0]), np.array([1.0, 0.0])) == pytest.approx(180)


def last(model, setting):
    return list(follow(model, model.start(0.3), setting, GROUPS, until=0.9, steps=200))[-1]


def test_the_flow_fragments_by_setting():
    blind = Model(length_dial=0.5, fragment_dial=0.5)
    assert last(blind, Setting("grpo", "rollout", "rollout_mean"))["drift"] == pytest.approx(0.5, abs=1e-12)
    up = last(blind, Setting("grpo", "sample", "seq_mean"))
    assert up["reward"] >= 0.9 and up["drift"] > 0.6
    sighted = Model(length_dial=0.0, fragment_dial=0.0, sighted=True)
    short = last(sighted, Setting("grpo", "rollout", "rollout_mean"))
    assert short["long_if_right"] < 0.4 and short["long_if_wrong"] > 0.6
    assert short["drift"] == pytest.approx(0.5, abs=1e-12)


def test_training_on_draws_follows_the_expected_update_at_first():
    model, setting = Model(fragment_dial=0.5), Setting("grpo", "sample", "token_mean")
    theta = model.start(0.3)
    rate = rate_for(model, theta, setting, GROUPS, gain=0.01)
    assert rate * GROUPS.expected(model, theta, setting)[0] @ model.gradient(theta) == pytest.approx(0.01, rel=1e-12)
    steps = dict(train(model, theta, setting, GROUPS, runs=400, steps=1, gain=0.01, seed=5))
    assert (steps[0] == theta).all()
    assert deviation(steps[1] - theta, rate * GROUPS.expected(model, theta, setting)[0]) < 4


def test_committed_tables_are_what_the_code_computes():
    with (RESULTS / "bias.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * 13 * len(SETTINGS)
    for row in rows[7::97]:
        model = Model(
            length_dial=float(row["length_dial"]),
            fragment_dial=float(row["fragment_dial"]),
            sighted=row["policy"] == "sighted",
        )
        setting = Setting(row["estimator"], row["unit"], row["normalizer"])
        theta = model.start(float(row["success"]))
        mean, balance = GROUPS.expected(model, theta, setting)
        assert float(row["angle_degrees"]) == pytest.approx(angle(mean, model.gradient(theta)), rel=1e-3, abs=1e-9)
        assert float(row["push_fragment_if_right"]) == pytest.approx(
            mean[-1] / np.linalg.norm(mean), rel=1e-3, abs=1e-9
        )
        assert float(row["weight_advantage_sum"]) == pytest.approx(balance, rel=1e-3, abs=1e-9)
    assert max(float(row["largest_z"]) for row in rows) < 4


def test_the_command_writes_its_tables(tmp_path, monkeypatch):
    for name, value in {"DIALS": (0.5,), "PATH_DIALS": (0.5,), "SUCCESSES": (0.3,), "UNTIL": 0.35}.items():
        monkeypatch.setattr(f"experiments.laboratory.__main__.{name}", value)
    sizes = {"batches": 20, "groups": 2, "size": 2, "runs": 3, "steps": 2, "seed": 4}
    small = [*itertools.chain.from_iterable((f"--{key}", str(value)) for key, value in sizes.items()), "--out"]
    main([*small, str(tmp_path)])
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert (manifest["possible_groups"], manifest["seed"]) == (36, 4)
    with (tmp_path / "training.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows[:2]] == ["0", "2"] and rows[0]["drift"] == "0.5"
    main([*small, str(tmp_path / "again")])
    for name in ("bias", "paths", "training"):
        assert (tmp_path / f"{name}.csv").read_text() == (tmp_path / "again" / f"{name}.csv").read_text()
