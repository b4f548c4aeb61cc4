"""A run folder's files, read back: what is damaged is named, what was cut by a crash is left out."""

import pytest

from harnessrl.errors import ConfigError
from harnessrl.metrics import read_jsonl, read_manifest


def test_a_line_cut_by_a_crash_is_left_out_and_a_damaged_one_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n{"st')
    assert read_jsonl(path) == [{"step": 0}, {"step": 1}]
    path.write_text('{"step": 0}\n{"st\n{"step": 2}\n')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl, line 2: damaged, not JSON"):
        read_jsonl(path)


@pytest.mark.parametrize("text", ['{"config": {', "[]", "3", '{"seed": 1}'])
def test_a_damaged_manifest_is_named(tmp_path, text):
    assert read_manifest(tmp_path) == {}
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ConfigError, match=r"manifest\.json: damaged"):
        read_manifest(tmp_path)
