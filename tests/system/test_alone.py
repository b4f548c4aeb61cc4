"""The gateway and a worker started by hand: ready lines, a rollout through both, a clean end; no parent is needed."""

import json
import os
import signal
import subprocess
import urllib.request

from tests.system.running import ENV, ROOT, harnessrl
from tests.system.toy import command


def start(*arguments):
    return subprocess.Popen(
        command(*arguments), cwd=ROOT, env=ENV, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


def end(process):
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 0, err
    assert "Traceback" not in err


def call(url, key, body=None):
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode())
    request.add_header("Authorization", f"Bearer {key}")
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=20) as response:
        return json.loads(response.read())


def test_gateway_and_worker_run_a_harness(tmp_path):
    gateway = start("gateway", f"store={tmp_path}/store.sqlite", "key=k", "upstream=http://127.0.0.1:9/v1", "model=m")
    ready = json.loads(gateway.stdout.readline())
    worker = start("worker", f"controller={ready['controller']}", "capacity=2")
    assert json.loads(worker.stdout.readline())["worker"]
    made = tmp_path / "made"
    local = {"command": ["sh", "-c", 'echo "$WORD" > "$OUT"'], "env_map": {"WORD": "input.word", "OUT": str(made)}}
    spec = {"rollout_id": "r", "input": {"word": "hello"}, "config": {"local": local}}
    call(f"{ready['url']}/api/rollouts", "k", [spec])
    page = call(f"{ready['url']}/api/traces?after=0&limit=10&wait=15", "k")
    (item,) = page["items"]
    assert (item["rollout_id"], item["state"], item["failure"]) == ("r", "succeeded", "no_reward")
    assert made.read_text() == "hello\n"
    end(worker)
    end(gateway)


def test_a_key_of_digits_is_a_text(tmp_path):
    gateway = start(
        "gateway", f"store={tmp_path}/store.sqlite", "key=0123", "upstream=http://127.0.0.1:9/v1", "model=on"
    )
    ready = json.loads(gateway.stdout.readline())
    assert call(f"{ready['url']}/api/traces?after=0&limit=1", "0123")["items"] == []
    end(gateway)


def test_bad_settings_are_refused_by_name(tmp_path):
    for arguments, words in (
        (["gateway", "stor=x"], "stor"),
        (["gateway", f"store={tmp_path}/s", "key=k", "port=many"], "port"),
        (["gateway", "store"], "expected key=value"),
        (["worker", "controller=tcp://127.0.0.1:1", "capacity=0"], "capacity"),
    ):
        done = harnessrl(*arguments)
        assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_every_setting_is_described():
    for name in ("gateway", "worker"):
        done = harnessrl(name, "keys")
        assert (done.returncode == 0 and "Folders to put first" in done.stdout) or "hold_seconds = 100.0" in done.stdout
        assert os.linesep + "    " + os.linesep not in done.stdout
