"""Bad input stops a run before anything starts, by the key's path, with what is allowed."""

from pathlib import Path

import pytest

from harnessrl.config import Config, describe, from_mapping, load
from harnessrl.errors import ConfigError

GOOD = {"task": {"inputs": "a:b", "harness": "a:c"}, "policy": {"source": "x"}}


def make(*overrides, **changes):
    return from_mapping(GOOD | changes, overrides, Path("some.yaml"))


def test_overrides_are_typed():
    config = make("steps=3", "update.lr=1e-3", "loss.normalizer=seq_mean", "update.rollouts_per_update=32", "run=a/b")
    assert (config.steps, config.update.lr, config.loss.normalizer) == (3, 1e-3, "seq_mean")
    assert config.update.rollouts_per_update == 32
    assert config.folder == Path("runs/a/b")


@pytest.mark.parametrize("name", ["2024_01", "001", "0012", "on", "1e3", "1.0", "~x", "[1]"])
def test_a_text_stays_as_it_is_typed(name):
    assert make(f"run={name}").run == name  # YAML has the numbers 202401 and 1, true, a list
    assert make(f'run="{name}"').run == name
    assert make(f"replay={name}", "policy[name]=5").replay == name
    assert make("replay=null").replay is None


def test_a_file_puts_texts_that_yaml_would_bend_in_quotes():
    with pytest.raises(
        ConfigError, match=r"some\.yaml: run: expected text, got 202401 as YAML reads it; put it in quotes"
    ):
        make(run=202401)
    with pytest.raises(ConfigError, match=r"policy\.name: expected text, got True"):
        make(policy={"source": "x", "name": True})
    assert make(run="202401").run == "202401"
    with pytest.raises(ConfigError, match=r"train_agents: expected text, got True as YAML reads it"):
        make(train_agents=["writer", True])
    with pytest.raises(ConfigError, match=r"task.env_map: expected text, got 1.0"):
        make(task=GOOD["task"] | {"env_map": {"A": 1.0}})


def test_texts_in_lists_and_mappings_stay_too():
    assert make("task.env_map.A=on", "task.env_map.B=input.x").task.env_map == {"A": "on", "B": "input.x"}
    assert make('train_agents=[writer,"on"]').train_agents == ["writer", "on"]
    with pytest.raises(
        ConfigError, match=r"'train_agents=\[on\]': train_agents: expected text|train_agents=\[on\]: train_agents"
    ):
        make("train_agents=[on]")


def test_a_value_may_refer_to_another_key_that_exists():
    assert make("run=s${seed}", "seed=3").run == "s3"
    with pytest.raises(ConfigError, match="nope"):
        make("run=${nope}")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("stpes=3", ["stpes", "allowed: run, runs, seed, "]),
        ("loss.normaliser=seq_mean", ["loss.normaliser", "allowed: normalizer, scale"]),
        ("loss.normalizer=mean", ["loss.normalizer", "token_mean", "rollout_mean"]),
        ("steps=many", ["steps", "Integer"]),
        ("steps=1.5", ["steps", "Integer"]),
        ("steps=0", ["steps", "larger than 0"]),
        ("steps", ["key=value"]),
        ("seed=-1", ["seed", "negative"]),
        ("update=3", ["update=3"]),
        ("schedule=async_separate", ["schedule", "sync"]),
        ("task.command=[python,x.py]", ["exactly one of task.harness"]),
        ("task.env_map={A:b}", ["task.env_map.A:b: has no value (YAML wants a space"]),
        ("task.harness=null", ["exactly one of task.harness"]),
        ("loss.normalizer=constant", ["loss.scale"]),
        ("loss.scale=3", ["loss.scale"]),
        ("update.rollouts_per_update=4", ["update.rollouts_per_update", "group_size=8"]),
        ("policy.train_temperature=0", ["policy.train_temperature"]),
        ("service.port=70000", ["service.port", "0..65535"]),
        ("run=../elsewhere", ["run", "below runs/"]),
        ("run=.", ["run", "below runs/"]),
        ("update.lr=inf", ["update.lr", "finite"]),
        ("task.timeout=inf", ["task.timeout", "finite"]),
        ("task.failure_reward=nan", ["task.failure_reward", "finite"]),
        ("update.betas=[0.9,1.0]", ["update.betas"]),
        ("update.weight_decay=-1", ["update.weight_decay"]),
        ("update.max_sample_tokens=0", ["update.max_sample_tokens"]),
        ("loss.clip_low=2", ["loss.clip_low"]),
        ("loss.kl_in=reward", ["loss.kl_in", "loss.kl_coef"]),
        ("policy.precision=float16", ["policy.precision", "float32", "bfloat16"]),
        ("update.split_rollouts=true", ["update.split_rollouts", "update.rollouts_per_update"]),
        ("task.failure_reward=1e308", ["task.failure_reward", "1e+100"]),
        ("seed=100000000000000000000000", ["seed"]),
        ("threads=100000", ["threads", "1024"]),
        ("policy.lora.rank=100000", ["policy.lora.rank", "4096"]),
        ("update={lr:", ["update={lr:", "YAML"]),
        ("policy.lora.rank=-1", ["policy.lora.rank", "negative"]),
        ("policy.lora.alpha=0", ["policy.lora.alpha", "larger than 0"]),
        ("policy.lora.dropout=0.1", ["policy.lora.dropout", "allowed: rank, alpha, targets"]),
    ],
)
def test_bad_values_are_refused_by_key(override, words):
    with pytest.raises(ConfigError) as error:
        make(override)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml: no such file"):
        load(tmp_path / "none.yaml")
    (tmp_path / "broken.yaml").write_text("a: [1,\nb: 2")
    with pytest.raises(ConfigError, match=r"broken\.yaml.*line 1"):
        load(tmp_path / "broken.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(ConfigError, match=r"list\.yaml: expected a mapping"):
        load(tmp_path / "list.yaml")
    (tmp_path / "missing.yaml").write_text("task: {harness: 'a:b', inputs: 'a:c'}")
    with pytest.raises(ConfigError, match=r"missing\.yaml.*policy\.source|source"):
        load(tmp_path / "missing.yaml")


def test_every_key_is_described():
    rows = describe(Config)
    assert len(rows) > 45
    assert [key for key, _, doc in rows if not doc] == []
    assert (
        "loss.normalizer",
        "rollout_mean",
        "Weights of the trained tokens; see `harnessrl.adapter.token_weights`.",
    ) in rows
