"""Which rollouts a step trains, and with what: agents, groups without signal, overlong rollouts, bounds, credit."""

import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from harnessrl.adapter import Call, Rollout
from harnessrl.config import Advantage, Config, Policy, Task, Update, from_mapping
from harnessrl.errors import ConfigError
from harnessrl.train.batch import Finished, make_batch, make_updates
from harnessrl.train.summary import batch_metrics, histograms, version_age


def config(task=None, agents=None, **update):
    return Config(
        task=Task(inputs="a:b", harness="a:c", group_size=2, **(task or {})),
        policy=Policy(source="x"),
        advantage=Advantage(estimator="dr_grpo"),  # reward minus the group's mean: literal numbers
        update=Update(**update),
        train_agents=agents,
    )


def call(name, prompt, response, agent=""):
    return Call(call_id=name, prompt_ids=prompt, response_ids=response, logprobs=[-1.0] * len(response), agent=agent)


def finished(name, reward, *calls):
    rollout = Rollout(rollout_id=name, group_id=name.partition("-")[0], calls=calls, reward=reward)
    return Finished(rollout=rollout, failure=None, input=None)


def rollouts(rewards, lengths=None):
    """Groups a, b, ... of as many rollouts as their rewards: a-0, a-1, ..., one call each of `lengths` tokens."""
    lengths = lengths or {}
    out = []
    for group, values in rewards.items():
        for member, value in enumerate(values):
            name = f"{group}-{member}"
            out.append(finished(name, value, call("c", [1, 2], [5] * lengths.get(name, 3))))
    return out


def trained(updates):
    """Rollout ids of each update."""
    return [sorted({name for packed in ranks[0] for name in packed.rollout_ids}) for ranks in updates]


def three_agents():
    return [
        finished(
            name,
            reward,
            call("plan", [1, 2], [10, 11], "planner"),
            call("write", [1, 2, 10, 11, 3], [20], "writer"),
            call("check", [1, 2, 10, 11, 3, 20, 4], [30, 31, 32], "checker"),
        )
        for name, reward in (("a-0", 1.0), ("a-1", 0.0))
    ]


def test_calls_of_other_agents_are_context_only():
    batch = make_batch(three_agents(), config(agents=["writer", "checker"]))
    assert len(batch.samples) == 2
    for sample in batch.samples:
        assert sample.token_ids.tolist() == [1, 2, 10, 11, 3, 20, 4, 30, 31, 32]
        assert sample.loss_mask.tolist() == [False] * 5 + [True] + [False] + [True] * 3
        assert [span.call_id for span in sample.spans] == ["write", "check"]
    metrics = batch_metrics(batch, Counter())
    assert metrics["merge/skipped_not_trainable"] == 2
    assert metrics["rollout/trained_token_share"] == pytest.approx(4 / 6)
    everything = make_batch(three_agents(), config())
    assert [sample.loss_mask.sum() for sample in everything.samples] == [6, 6]
    assert "merge/skipped_not_trainable" not in batch_metrics(everything, Counter())


def test_an_agent_that_nobody_names_trains_nothing():
    batch = make_batch(three_agents(), config(agents=["reviewer"]))
    assert batch.samples == [] and batch_metrics(batch, Counter())["merge/skipped_not_trainable"] == 6
    assert make_updates(batch, config(agents=["reviewer"]), seed=0)[0] == []


def test_what_the_harness_marked_stays_untrained():
    item = three_agents()[0]
    calls = [dataclasses.replace(c, trainable=c.agent != "writer") for c in item.rollout.calls]
    item = dataclasses.replace(item, rollout=dataclasses.replace(item.rollout, calls=calls))
    batch = make_batch([item], config(agents=["writer", "checker"]))
    assert [span.call_id for sample in batch.samples for span in sample.spans] == ["check"]


REWARDS = {"a": [1.0, 0.0], "b": [1.0, 1.0], "c": [0.0, 1.0], "d": [0.5], "e": [None, None]}


def test_groups_without_signal_can_be_left_out():
    batch = make_batch(rollouts(REWARDS), config())
    assert batch.advantages.tolist() == [0.5, -0.5, 0, 0, -0.5, 0.5, 0, 0, 0]
    updates, metrics = make_updates(batch, config(), seed=0)
    assert trained(updates) == [["a-0", "a-1", "b-0", "b-1", "c-0", "c-1", "d-0"]]
    assert metrics["update/filtered_groups"] == 0
    updates, metrics = make_updates(batch, config(filter_zero_signal=True), seed=0)
    assert trained(updates) == [["a-0", "a-1", "c-0", "c-1"]]
    assert metrics["update/filtered_groups"] == 2  # b and d; e was never scored
    (packed,) = updates[0][0]
    assert packed.weights[packed.loss_mask].tolist() == pytest.approx([1 / 12] * 12)  # of 4 rollouts, 3 tokens each
    assert batch_metrics(batch, Counter())["advantage/zero_signal_groups"] == 2  # b and d


def test_where_no_group_has_signal_there_is_no_update():
    batch = make_batch(rollouts({"b": [1.0, 1.0]}), config())
    updates, metrics = make_updates(batch, config(filter_zero_signal=True), seed=0)
    assert updates == [] and metrics["update/filtered_groups"] == 1 and metrics["perf/rank_balance"] == 1


def test_replaced_groups_are_counted_and_neither_trained_nor_compared_with():
    items = rollouts({"a": [1.0, 0.0], "b": [1.0, 1.0], "c": [0.0, 1.0]})
    items = [dataclasses.replace(item, resampled=item.rollout.group_id == "b") for item in items]
    batch = make_batch(items, config())
    updates, metrics = make_updates(batch, config(), seed=0)
    assert trained(updates) == [["a-0", "a-1", "c-0", "c-1"]] and metrics["update/filtered_groups"] == 0
    (packed,) = updates[0][0]
    assert packed.weights[packed.loss_mask].tolist() == pytest.approx([1 / 12] * 12)  # of 4 rollouts, 3 tokens each
    told = batch_metrics(batch, Counter())
    assert (told["rollout/resampled"], told["rollout/resampled_groups"], told["rollout/count"]) == (2, 1, 6)
    assert told["reward/mean"] == pytest.approx(4 / 6)
    whole = dataclasses.replace(config(), advantage=Advantage(estimator="reinforce_pp", eps=0.0))
    # over the four that are trained: mean 1/2, deviation 1/2
    assert make_batch(items, whole).advantages.tolist() == pytest.approx([1, -1, 0, 0, -1, 1])


def credited(credit, **settings):
    """One group of two. Samples, by the length of their first prompt: z of a-0, x and y of a-0, x of a-1; y of a-1 is empty."""
    calls = [call("x", [1, 2], [5, 6]), call("y", [1, 2, 5, 6, 3], [7]), call("z", [9], [4, 4, 4])]
    items = [
        dataclasses.replace(finished("a-0", 1.0, *calls), call_rewards={"x": 0.6, "z": -0.3}),
        dataclasses.replace(
            finished("a-1", 0.0, call("x", [1, 2], [5]), call("y", [1], [])), call_rewards={"x": 4.0, "y": 1.0}
        ),
    ]
    chosen = dataclasses.replace(config(), advantage=Advantage(estimator="dr_grpo", credit=credit, **settings))
    batch = make_batch(items, chosen)
    updates, _ = make_updates(batch, chosen, seed=0)
    return batch, updates[0][0][0]


def test_identical_credit_gives_every_token_its_rollouts_advantage():
    batch, packed = credited("identical")
    assert set(packed.advantages[packed.loss_mask].tolist()) == {0.5, -0.5}
    assert batch.unused_call_rewards == 4


def test_mean_preserving_credit_moves_it_between_calls_and_keeps_rollouts_equally_weighted():
    batch, packed = credited("mean_preserving")
    # a-0: A = .5, six tokens with the mean reward (2 * .6 + 1 * 0 - 3 * .3) / 6 = .05; a-1 has one trained call
    by_sample = [value[sample.loss_mask].tolist() for value, sample in zip(batch.credit, batch.samples, strict=True)]
    assert by_sample == [pytest.approx([0.15] * 3), pytest.approx([1.05, 1.05, 0.45]), pytest.approx([-0.5])]
    assert float((packed.weights * packed.advantages).sum()) == pytest.approx(0, abs=1e-15)
    for name, advantage in (("a-0", 0.5), ("a-1", -0.5)):
        own = [index for index, sample in enumerate(batch.samples) if sample.rollout_id == name]
        mine = packed.loss_mask & np.isin(packed.sample_index, own)
        assert packed.weights[mine].sum() == pytest.approx(0.5)
        assert packed.advantages[mine].mean() == pytest.approx(advantage)
    assert batch.unused_call_rewards == 1  # y of a-1, whose response is empty


def test_discounted_credit_reaches_earlier_calls():
    batch, packed = credited("discounted", discount=0.5)
    # z: .5 - .3 = .2; y: 0 + .5 * .2 = .1; x: .6 + .5 * .1 = .65; and x of a-1: -.5 + 4
    by_sample = [value[sample.loss_mask].tolist() for value, sample in zip(batch.credit, batch.samples, strict=True)]
    assert by_sample == [pytest.approx([0.2] * 3), pytest.approx([0.65, 0.65, 0.1]), pytest.approx([3.5])]
    assert packed.advantages[packed.loss_mask].sum() == pytest.approx(2 * 0.65 + 0.1 + 3 * 0.2 + 3.5)


def test_credit_is_the_same_in_trees():
    chosen = dataclasses.replace(config(tree=True), advantage=Advantage(estimator="dr_grpo", credit="mean_preserving"))
    batch, flat = credited("mean_preserving")
    ((tree,),) = make_updates(batch, chosen, seed=0)[0][0]
    for column in ("advantages", "weights"):
        assert sorted(getattr(tree, column)[tree.loss_mask]) == pytest.approx(
            sorted(getattr(flat, column)[flat.loss_mask])
        )


def test_histograms_hold_the_columns_of_a_step():
    batch, _ = credited("identical")
    columns = {name: sorted(values.tolist()) for name, values in histograms(batch).items()}
    assert columns == {
        "rollout/reward": [0, 1],
        "rollout/advantage": [-0.5, 0.5],
        "rollout/samples": [1, 2],
        "rollout/tokens": [1, 6],
        "rollout/calls": [2, 3],
        "sample/tokens": [3, 4, 6],
        "call/response_tokens": [0, 1, 1, 2, 3],
        "call/logprob": [-1.0] * 7,
    }


def test_padding_is_what_empty_packs_compute():
    batch = make_batch(rollouts({"a": [1.0, 0.0]}), config())
    for ranks, share in ((1, 0.0), (2, 0.0), (3, 1 / 11)):  # two samples of five tokens; the third rank has none
        assert make_updates(batch, config(), seed=0, world_size=ranks)[1]["perf/padding_share"] == pytest.approx(share)


@pytest.mark.parametrize(("limit", "made"), [(None, 3), (2, 2), (1, 1), (5, 3)])
def test_updates_of_a_step_are_bounded_and_counted(limit, made):
    settings = config(rollouts_per_update=2, max_updates=limit)
    batch = make_batch(rollouts({"a": [1, 0], "b": [0, 1], "c": [1, 0]}), settings)
    updates, metrics = make_updates(batch, settings, seed=3)
    assert len(updates) == made and metrics["update/skipped_updates"] == 3 - made
    unbounded = make_updates(batch, config(rollouts_per_update=2), seed=3)[0]
    assert trained(updates) == trained(unbounded)[:made]


LENGTHS = {"a-0": 8, "a-1": 7, "a-2": 9}


def test_overlong_rollouts_are_masked_before_advantages():
    batch = make_batch(rollouts({"a": [1, 0, 1, 0.5]}, LENGTHS), config({"overlong_tokens": 8}))
    assert batch.overlong.tolist() == [False, False, True, False]
    assert batch.rewards[[0, 1, 3]].tolist() == [1, 0, 0.5] and np.isnan(batch.rewards[2])
    assert batch.advantages.tolist() == [0.5, -0.5, 0, 0]
    assert trained(make_updates(batch, config({"overlong_tokens": 8}), seed=0)[0]) == [["a-0", "a-1", "a-3"]]
    metrics = batch_metrics(batch, Counter())
    assert metrics["rollout/overlong"] == 1 and metrics["reward/mean"] == 0.625  # of all four, as they were earned


def test_tokens_that_were_never_delivered_make_no_rollout_overlong():
    lost = dataclasses.replace(call("lost", [1], [6] * 6), delivered=False, finish_reason="abort")
    batch = make_batch([finished("a-0", 0.0, call("c", [1], [5] * 5), lost)], config({"overlong_tokens": 10}))
    assert batch.overlong.tolist() == [False] and batch.rewards.tolist() == [0.0]


def test_overlong_rollouts_are_penalised_before_advantages():
    task = {"overlong_tokens": 7, "overlong": "penalise", "overlong_penalty": 0.5}
    batch = make_batch(rollouts({"a": [1, 0, 1, 0.5]}, LENGTHS), config(task))
    assert batch.rewards.tolist() == [0.5, 0, 0.5, 0.5]
    assert batch.advantages.tolist() == [0.125, -0.375, 0.125, 0.125]
    assert trained(make_updates(batch, config(task), seed=0)[0]) == [["a-0", "a-1", "a-2", "a-3"]]
    metrics = batch_metrics(batch, Counter())
    assert metrics["rollout/overlong"] == 2 and metrics["reward/mean"] == 0.625


def test_length_counts_every_sampled_token_of_a_rollout():
    calls = [call("one", [1], [5, 6]), call("two", [1, 9, 9, 9, 9], [7, 8, 9])]
    item = finished("a-0", 1.0, *calls)
    assert make_batch([item], config({"overlong_tokens": 5})).overlong.tolist() == [False]
    assert make_batch([item], config({"overlong_tokens": 4})).overlong.tolist() == [True]
    assert make_batch([item], config()).overlong.tolist() == [False]


def test_one_rollout_a_group_cannot_be_resampled():
    with pytest.raises(ConfigError, match=r"task.resample_zero_signal: needs task.group_size of 2"):
        from_mapping(GOOD, ["task.resample_zero_signal=true", "task.group_size=1"], Path("some.yaml"))


GOOD = {"task": {"inputs": "a:b", "harness": "a:c"}, "policy": {"source": "x"}}


def test_the_choices_are_configuration():
    overrides = ["train_agents=[writer,checker]", "task.overlong_tokens=9", "task.overlong=penalise"]
    overrides += [
        "update.max_updates=2",
        "update.filter_zero_signal=true",
        "update.warmup_steps=3",
        "checkpoint_keep=1",
    ]
    settings = from_mapping(GOOD, overrides, Path("some.yaml"))
    assert settings.train_agents == ["writer", "checker"] and settings.task.overlong_tokens == 9
    assert (settings.update.max_updates, settings.update.filter_zero_signal) == (2, True)
    assert from_mapping(GOOD, [], Path("some.yaml")).train_agents is None


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train_agents=[]", ["train_agents", "at least one"]),
        ("update.max_updates=0", ["update.max_updates", "larger than 0"]),
        ("update.warmup_steps=-1", ["update.warmup_steps", "negative"]),
        ("task.overlong_tokens=0", ["task.overlong_tokens", "larger than 0"]),
        ("task.overlong=drop", ["task.overlong", "mask", "penalise"]),
        ("task.overlong_penalty=-0.5", ["task.overlong_penalty", "negative"]),
        ("checkpoint_keep=0", ["checkpoint_keep", "larger than 0"]),
        ("task.max_resample=0", ["task.max_resample", "larger than 0"]),
        ("validation.every=-1", ["validation.every", "negative"]),
        ("validation.inputs=0", ["validation.inputs", "larger than 0"]),
        ("validation.rollouts=0", ["validation.rollouts", "larger than 0"]),
        ("advantage.credit=equal", ["advantage.credit", "identical", "discounted", "mean_preserving"]),
        ("advantage.discount=1.5", ["advantage.discount", "0..1"]),
    ],
)
def test_impossible_choices_are_refused(override, words):
    with pytest.raises(ConfigError) as error:
        from_mapping(GOOD, [override], Path("some.yaml"))
    assert all(word in str(error.value) for word in words), str(error.value)


def mixed_lengths():
    """Four groups of two; each rollout has two samples, since its second call starts anew."""
    return [
        finished(f"{group}-{member}", float(member), call("one", [1, 2], [5, 6]), call("two", [3], [7]))
        for group in "abcd"
        for member in range(2)
    ]


def test_whole_rollouts_stay_in_one_update_and_split_ones_do_not():
    items = mixed_lengths()
    plan = {"rollouts_per_update": 4, "max_tokens": 100}
    whole, _ = make_updates(make_batch(items, config(**plan)), config(**plan), seed=0)
    assert len(whole) == 2 and not set(trained(whole)[0]) & set(trained(whole)[1])
    split, _ = make_updates(make_batch(items, config(**plan)), config(split_rollouts=True, **plan), seed=0)
    assert len(split) == 2
    assert set(trained(split)[0]) & set(trained(split)[1])
    pieces = sorted((n, s) for u in split for p in u[0] for n, s in zip(p.rollout_ids, p.order.tolist(), strict=True))
    assert len({sample for _, sample in pieces}) == len(pieces) == 16  # every sample once


class Letters:
    """Two tokenizations of one text: 1 is "a", 2 is "b", 3 is "ab"."""

    def decode(self, token_ids):
        return "".join({1: "a", 2: "b", 3: "ab"}.get(token, "?") for token in token_ids)


def test_substitute_overwrites_history_and_is_marked_unfaithful():
    item = finished("a-0", 1.0, call("one", [9], [1, 2]), call("two", [9, 3, 8], [7]))
    exact = make_batch([item], config())
    assert [s.token_ids.tolist() for s in exact.samples] == [[9, 1, 2], [9, 3, 8, 7]]
    batch = make_batch([item], config(strategy="substitute"), Letters())
    assert [s.token_ids.tolist() for s in batch.samples] == [[9, 1, 2, 8, 7]]
    assert not batch.samples[0].faithful and exact.samples[0].faithful


def test_version_age_is_a_mean_over_trained_tokens():
    calls = [
        Call(call_id=str(n), prompt_ids=[n + 1], response_ids=[5] * length, logprobs=[-1.0] * length, policy_version=n)
        for n, length in ((3, 1), (5, 3))
    ]
    batch = make_batch([finished("a-0", 1.0, *calls)], config())
    assert version_age(batch, 5) == (2 * 1 + 0 * 3) / 4
    assert np.isnan(version_age(make_batch([finished("a-0", 1.0)], config()), 5))


def test_replaced_and_unscored_rollouts_do_not_add_split_updates():
    items = mixed_lengths()
    gone = [dataclasses.replace(item, resampled=True) for item in items[:4]] + items[4:]
    plan = {"rollouts_per_update": 4, "split_rollouts": True, "max_tokens": 100}
    updates, _ = make_updates(make_batch(gone, config(**plan)), config(**plan), seed=0)
    assert len(updates) == 1 and len(trained(updates)[0]) == 4


@pytest.mark.parametrize("estimator", ["reinforce_pp", "reinforce_pp_baseline", "grpo", "rloo"])
def test_replaced_groups_have_no_part_in_the_others_advantages(estimator):
    settings = dataclasses.replace(config(), advantage=Advantage(estimator=estimator))
    live = rollouts({"a": [1.0, 0.0]})
    replaced = [dataclasses.replace(item, resampled=True) for item in rollouts({"b": [0.0] * 2, "c": [0.0] * 2})]
    alone, batch = make_batch(live, settings), make_batch(live + replaced, settings)
    assert batch.advantages.tolist() == [*alone.advantages.tolist(), 0, 0, 0, 0] and alone.advantages[0] > 0
    updates, _ = make_updates(batch, settings, seed=0)
    (packed,) = updates[0][0]
    assert abs((packed.weights * packed.advantages).sum()) < 1e-12


def test_a_call_reward_of_an_unscored_rollout_is_no_signal_of_its_group():
    settings = dataclasses.replace(
        config(filter_zero_signal=True), advantage=Advantage(estimator="dr_grpo", credit="discounted")
    )
    items = rollouts({"a": [1.0, 0.0], "b": [1.0, 1.0, None]})
    items[-1] = dataclasses.replace(items[-1], call_rewards={"c": 0.5})
    batch = make_batch(items, settings)
    updates, metrics = make_updates(batch, settings, seed=0)
    assert trained(updates) == [["a-0", "a-1"]] and metrics["update/filtered_groups"] == 1
    assert batch_metrics(batch, Counter())["advantage/zero_signal_groups"] == 1


def test_credit_of_a_call_keeps_its_group_from_the_zero_signal_filter():
    settings = dataclasses.replace(
        config(filter_zero_signal=True), advantage=Advantage(estimator="dr_grpo", credit="discounted")
    )
    items = rollouts({"a": [1.0, 1.0], "b": [0.0, 0.0]})
    items[0] = dataclasses.replace(items[0], call_rewards={"c": 0.5})
    batch = make_batch(items, settings)
    updates, metrics = make_updates(batch, settings, seed=0)
    assert trained(updates) == [["a-0", "a-1"]] and metrics["update/filtered_groups"] == 1
    found = batch_metrics(batch, Counter())
    assert (found["advantage/zero_signal_groups"], found["advantage/unused_call_rewards"]) == (1, 0)
    items[0] = dataclasses.replace(items[0], resampled=True)  # replaced for its rollouts' rewards: the call's is lost
    assert batch_metrics(make_batch(items, settings), Counter())["advantage/unused_call_rewards"] == 1
