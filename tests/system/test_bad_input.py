"""Bad input is one clear message and exit code 2, before anything starts."""

import os
import socket
import subprocess

import pytest

from tests.system.running import ENV, ROOT, harnessrl
from tests.system.toy import command, write_config


def test_an_occupied_port_and_a_missing_name_stop_before_anything_starts(tmp_path):
    config = write_config(tmp_path)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        refused = harnessrl("train", config, f"service.port={port}")
    assert refused.returncode == 2 and f"127.0.0.1:{port}" in refused.stderr and "Traceback" not in refused.stderr
    refused = harnessrl("train", config, "task.harness=tests.system.toy:nothing")
    assert refused.returncode == 2 and "task.harness" in refused.stderr and "nothing" in refused.stderr
    assert not (tmp_path / "runs" / "toy" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "nowhere.yaml"], "nowhere.yaml: no such file"),
        (["train", "experiments/lookup/config.yaml", "lr=1"], "'lr'"),
        (["train", "experiments/lookup/config.yaml", "steps=x"], "steps"),
        (["train", "experiments/lookup/config.yaml", "policy.source=/nowhere"], "/nowhere has no config.json"),
        (["train", "experiments/lookup/config.yaml", "replay=/nowhere.jsonl"], "/nowhere.jsonl: No such file"),
        (
            ["train", "experiments/lookup/config.yaml", "policy.source=json:dumps"],
            "cannot be called as policy(seed, cache",
        ),
        (["ablate", "nowhere.yaml"], "nowhere.yaml: no such file"),
        (["ablate", "ablations/normalization.yaml", "seeds=none"], "seeds must be a whole number"),
        (["ablate", "ablations/normalization.yaml", "loss.foo=1"], "loss.foo"),
    ],
)
def test_bad_input_is_one_clear_message_and_exit_code_2(arguments, words, tmp_path):
    if "lookup" in arguments[1]:
        arguments = [*arguments, f"runs={tmp_path}"]
    done = harnessrl(*arguments)
    assert done.returncode == 2
    assert words in done.stderr and "Traceback" not in done.stderr and len(done.stderr.strip().splitlines()) == 1


def record(folder, lines):
    path = folder / "rollouts.jsonl"
    path.write_text(lines)
    return path


LINE = (
    '{"step": 0, "rollout_id": "%s", "group_id": "g", "reward": 1.0, "calls": [{"call_id": "c", "prompt_ids": [1], '
    '"response_ids": [%d], "logprobs": [-0.5]}]}\n'
)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (LINE % ("a", 2) + (LINE % ("b", 2))[:80], "line 2: the line is cut"),
        (LINE % ("a", 2) + LINE % ("a", 2), "line 2: rollout 'a' is in step 0 twice"),
        (LINE % ("a", 2), "not step 1; give steps=1"),
        ("", "no step 0"),
        (LINE.replace('"reward"', '"is_train": false, "reward"') % ("a", 2), "line 1: rollout 'a' is of a validation"),
        (LINE.replace("[-0.5]", "[-0.5, -0.5]") % ("a", 2), "line 1"),
    ],
)
def test_a_replay_is_read_to_its_end_before_anything_starts(tmp_path, lines, words):
    config = write_config(tmp_path)
    refused = harnessrl("train", config, f"replay={record(tmp_path, lines)}")
    assert refused.returncode == 2 and words in refused.stderr and "Traceback" not in refused.stderr


def test_a_replay_of_another_tokenizer_is_refused_by_call(tmp_path):
    config = write_config(tmp_path)
    refused = harnessrl("train", config, f"replay={record(tmp_path, LINE % ('a', 70000))}", "steps=1")
    assert refused.returncode == 2 and "rollout 'a', call 'c' holds token id 70000" in refused.stderr
    long = LINE.replace('"prompt_ids": [1]', f'"prompt_ids": {[1] * 600}').replace('"g"', "3") % ("a", 5)
    refused = harnessrl("train", config, f"replay={record(tmp_path, long)}", "steps=1")
    assert (
        refused.returncode == 2
        and "rollout 'a', call 'c' has 601 tokens; the policy has 256 positions" in refused.stderr
    )


def test_a_harness_that_cannot_start_is_refused(tmp_path):
    for changes, words in (
        ({"task__harness": None, "task__command": ["no-such-program"]}, "task.command: no-such-program"),
        ({"task__harness": "tests.system.toy:inputs"}, "must be an `async def run(env)`"),
    ):
        refused = harnessrl("train", write_config(tmp_path, **changes))
        assert refused.returncode == 2 and words in refused.stderr and "Traceback" not in refused.stderr


def test_a_reader_that_has_gone_ends_a_command_in_silence():
    """As `harnessrl train keys | head -1` does."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        command("train", "keys"), cwd=ROOT, env=ENV, stdout=writing, stderr=subprocess.PIPE, text=True
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_stream_of_inputs_that_ends_stops_the_run_in_words(tmp_path):
    done = harnessrl("train", write_config(tmp_path, task__inputs="tests.system.toy:few"))
    assert done.returncode == 1 and "few ended: step 1 needs 3 inputs and got 1" in done.stderr
    assert "Traceback" not in done.stderr
