"""Bad input is one clear message and exit code 2, before anything starts."""

import socket

import pytest

from tests.system.running import harnessrl
from tests.system.toy import write_config


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
