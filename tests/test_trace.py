"""Reading trace files: every error names the file, the line and the field; nothing is bent into something else."""

import gzip
import json

import pytest

from harnessrl.errors import ConfigError
from harnessrl.trace import Trace

CALL = {"call_id": "c0", "prompt_ids": [1, 2], "response_ids": [3], "logprobs": [-0.5], "policy_version": 7}
ROLLOUT = {"rollout_id": "r0", "group_id": "g0", "reward": 0.25, "calls": [CALL]}


def write(path, *objects):
    path.write_text("".join(json.dumps(item) + "\n" for item in objects))
    return path


def test_lines_carry_the_rollout_and_what_a_run_adds(tmp_path):
    file = write(tmp_path / "t.jsonl", ROLLOUT, ROLLOUT | {"rollout_id": "r1", "reward": None, "step": 4, "input": "q"})
    first, second = Trace(file)
    assert (first.number, first.rollout.rollout_id, first.rollout.reward) == (1, "r0", 0.25)
    assert first.rollout.calls[0].prompt_ids.tolist() == [1, 2]
    assert first.rollout.calls[0].policy_version == 7
    assert (second.number, second.rollout.reward, second.data["step"], second.data["input"]) == (2, None, 4, "q")


def test_gzip_is_told_by_its_bytes_and_blank_lines_count(tmp_path):
    text = "\n" + json.dumps(ROLLOUT) + "\n\n" + json.dumps(ROLLOUT | {"rollout_id": "r1"}) + "\n"
    (tmp_path / "plain.gz").write_text(text)
    (tmp_path / "zipped").write_bytes(gzip.compress(text.encode()))
    for name in ("plain.gz", "zipped"):
        assert [line.number for line in Trace(tmp_path / name)] == [2, 4]


def test_fraction_goes_from_nothing_to_all(tmp_path):
    trace = Trace(write(tmp_path / "t.jsonl", *[ROLLOUT] * 3000))
    assert trace.fraction == 0.0
    seen = [trace.fraction for _ in trace]
    assert seen == sorted(seen) and 0 < seen[0] < 0.5
    assert trace.fraction == 1.0


def test_an_integer_names_a_call_as_its_text(tmp_path):
    (line,) = Trace(write(tmp_path / "t.jsonl", ROLLOUT | {"calls": [CALL | {"call_id": 12}]}))
    assert line.rollout.calls[0].call_id == "12"


def test_ids_that_were_not_recorded_are_empty(tmp_path):
    (line,) = Trace(write(tmp_path / "t.jsonl", ROLLOUT | {"calls": [{"call_id": "c0", "prompt_ids": None}]}))
    assert len(line.rollout.calls[0].prompt_ids) == len(line.rollout.calls[0].response_ids) == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"reward": "0.5"}, "field 'reward' must be a number or null, got a string"),
        ({"reward": True}, "field 'reward' must be a number or null, got true or false"),
        ({"reward": float("inf")}, "field 'reward' is inf"),
        ({"reward": -1e301}, r"field 'reward' is -1e\+301; rewards lie within \+-1e\+300, or are null where unscored"),
        ({"reward": 10**400}, "field 'reward' is 1000+; rewards lie within"),
        ({"call_rewards": {"c0": 10**400}}, r"field 'call_rewards\['c0'\]' is beyond float64"),
        ({"calls": [CALL | {"prompt_ids": [True, 2]}]}, r"call 'c0': prompt_ids\[0\] is True, among numbers"),
        ({"calls": [CALL | {"logprobs": [False]}]}, "call 'c0': logprobs must be a vector of numbers, got .* bool"),
        ({"group_id": None}, "field 'group_id' must be a string, got null"),
        ({"resampled": 1}, "field 'resampled' must be true or false, got a number"),
        ({"call_rewards": [1]}, "field 'call_rewards' must be an object of call ids and numbers, got a list"),
        ({"call_rewards": {"c9": 1}}, "field 'call_rewards' names 'c9', which is no call of this rollout"),
        ({"call_rewards": {"c0": "1"}}, r"field 'call_rewards\['c0'\]' must be a number, got '1'"),
        ({"call_rewards": {"c0": float("nan")}}, r"field 'call_rewards\['c0'\]' must be finite, got nan"),
        ({"calls": {}}, "field 'calls' must be a list, got an object"),
        ({"calls": [CALL, 3]}, r"field 'calls\[1\]' must be an object, got a number"),
        ({"calls": [{"prompt_ids": [1]}]}, r"field 'calls\[0\].call_id' is missing"),
        ({"calls": [CALL | {"prompt_ids": "1 2"}]}, r"field 'calls\[0\].prompt_ids' must be a list of integers"),
        ({"calls": [CALL | {"delivered": None}]}, r"field 'calls\[0\].delivered' must be true or false, got null"),
        ({"calls": [CALL | {"prompt_ids": [1, 2.5]}]}, "rollout 'r0', call 'c0': prompt_ids must be a vector of int"),
        ({"calls": [CALL | {"prompt_ids": [1, -2]}]}, r"call 'c0': prompt_ids\[1\] is -2"),
        ({"calls": [CALL | {"logprobs": [-1.0, -2.0]}]}, "logprobs has length 2, response_ids has length 1"),
        ({"calls": [CALL | {"logprobs": [None]}]}, "call 'c0': logprobs must be a vector of numbers"),
        ({"calls": [CALL, CALL]}, "call_id appears twice"),
        ({"step": "1"}, "field 'step' must be an integer or null, got a string"),
    ],
)
def test_bad_fields_are_named_with_file_and_line(tmp_path, change, said):
    file = write(tmp_path / "t.jsonl", ROLLOUT, ROLLOUT | change)
    with pytest.raises(ConfigError, match=rf"t\.jsonl, line 2: .*{said}"):
        list(Trace(file))


@pytest.mark.parametrize("key", ["rollout_id", "group_id", "calls"])
def test_what_every_rollout_needs(tmp_path, key):
    file = write(tmp_path / "t.jsonl", {name: value for name, value in ROLLOUT.items() if name != key})
    with pytest.raises(ConfigError, match=f"line 1: field '{key}' is missing"):
        list(Trace(file))


def test_a_line_that_is_no_object(tmp_path):
    (tmp_path / "t.jsonl").write_text(json.dumps(ROLLOUT) + "\n[1]\n")
    with pytest.raises(ConfigError, match="line 2: expected an object, got a list"):
        list(Trace(tmp_path / "t.jsonl"))


def test_a_broken_line_is_an_error_but_a_cut_last_line_is_left_out_and_said(tmp_path):
    half = json.dumps(ROLLOUT)[:40]
    (tmp_path / "t.jsonl").write_text(half + "\n" + json.dumps(ROLLOUT) + "\n")
    with pytest.raises(ConfigError, match="line 1: not JSON"):
        list(Trace(tmp_path / "t.jsonl"))
    (tmp_path / "t.jsonl").write_text(json.dumps(ROLLOUT) + "\n" + half)
    trace = Trace(tmp_path / "t.jsonl")
    assert trace.cut_line is None
    assert [line.number for line in trace] == [1]
    assert trace.cut_line == 2


def test_a_whole_last_line_needs_no_newline(tmp_path):
    (tmp_path / "t.jsonl").write_text(json.dumps(ROLLOUT))
    trace = Trace(tmp_path / "t.jsonl")
    assert len(list(trace)) == 1 and trace.cut_line is None


def test_damaged_and_absent_files(tmp_path):
    whole = gzip.compress((json.dumps(ROLLOUT) + "\n").encode())
    (tmp_path / "cut.gz").write_bytes(whole[:-9])
    (tmp_path / "bent.gz").write_bytes(whole[:20] + b"\x00\x00\x00" + whole[23:])
    for name in ("cut.gz", "bent.gz"):
        with pytest.raises(ConfigError, match=rf"{name}, after line \d: the file is damaged"):
            list(Trace(tmp_path / name))
    with pytest.raises(ConfigError, match="absent: No such file"):
        Trace(tmp_path / "absent")
    with pytest.raises(ConfigError, match="Is a directory"):
        Trace(tmp_path)
