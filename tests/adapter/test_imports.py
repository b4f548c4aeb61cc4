"""What importing the adapter costs, and the names that other projects rely on."""

import inspect
import json
import subprocess
import sys
from importlib.metadata import packages_distributions

import pytest

import harnessrl.adapter as adapter

PROBE = """
import json, sys
{first}
import harnessrl.adapter
print(json.dumps(sorted({{name.partition(".")[0] for name in sys.modules}})))
"""


def loaded_beside_numpy(first=""):
    """Packages that `import harnessrl.adapter` loads in a fresh interpreter, numpy and the standard library aside."""
    code = PROBE.format(first=first)
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    installed = set(packages_distributions())
    return {name for name in json.loads(out) if name in installed and name not in sys.stdlib_module_names} - {
        "harnessrl",
        "numpy",
    }


def test_the_adapter_loads_numpy_and_nothing_heavier():
    assert loaded_beside_numpy() <= bare()


def bare():
    """What an interpreter of this environment loads anyway (editable-install hooks, coverage and the like)."""
    code = "import json, sys; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    return set(json.loads(out))


@pytest.mark.parametrize("package", ["pytest", "hypothesis"])
def test_and_this_test_can_fail(package):
    assert package in loaded_beside_numpy(first=f"import {package}") - bare()


PARAMETERS = {
    "Call": "call_id prompt_ids response_ids logprobs policy_version finish_reason agent trainable delivered "
    "constrained request_id",
    "Rollout": "rollout_id group_id calls reward",
    "Span": "call_id start stop",
    "Sample": "rollout_id group_id index token_ids loss_mask logprobs policy_version spans faithful",
    "Skip": "call_id reason tokens",
    "Break": "rollout sample call earlier position joint",
    "Merge": "samples breaks skipped",
    "Drift": "kind position known_call found_call known_ids found_ids known_text found_text",
    "merge_calls": "rollout strategy * require_logprobs max_sample_tokens tokenizer",
    "explain_break": "broken decode",
    "rollout_advantages": "rewards group_ids estimator * unit samples_per_rollout eps",
    "token_weights": "lengths rollout_index mode * num_rollouts scale",
    "plan_updates": "lengths rollout_index * rollouts_per_update num_updates world_size max_tokens group_index oversize "
    "cost seed",
    "pack": "samples order * weights advantages",
    "unpack": "packed column",
    "pack_tree": "samples order * weights advantages",
    "unpack_tree": "packed column",
    "tree_items": "samples",
    "ancestor_mask": "packed",
    "assign_credit": "advantage call_rewards scheme * call_tokens gamma",
    "token_advantages": "sample credit",
    "zero_signal_groups": "rewards group_ids",
    "from_agent_lightning": "events * rollout_id group_id",
    "from_vllm_chat": "responses * rollout_id group_id reward",
    "from_vllm_completions": "responses * rollout_id group_id reward",
}
DEFAULTS = {
    "merge_calls": {
        "strategy": "best_effort",
        "require_logprobs": True,
        "max_sample_tokens": None,
        "tokenizer": None,
    },
    "rollout_advantages": {"estimator": "grpo", "unit": "rollout", "samples_per_rollout": None, "eps": 1e-6},
    "token_weights": {"mode": "rollout_mean", "num_rollouts": None, "scale": None},
    "plan_updates": {"group_index": None, "oversize": "raise", "cost": None, "seed": 0},
    "pack": {"weights": None, "advantages": None},
    "pack_tree": {"weights": None, "advantages": None},
    "assign_credit": {"scheme": "identical", "call_tokens": None, "gamma": 0.99},
    "from_vllm_chat": {"reward": None},
    "from_vllm_completions": {"reward": None},
    "Rollout": {"reward": None},
    "Call": {
        "logprobs": None,
        "policy_version": 0,
        "finish_reason": None,
        "agent": "",
        "trainable": True,
        "delivered": True,
        "constrained": False,
        "request_id": None,
    },
    "Sample": {"faithful": True},
}


def parameters(name):
    found = inspect.signature(getattr(adapter, name)).parameters.values()
    kinds = [parameter.kind is parameter.KEYWORD_ONLY for parameter in found]
    names = [parameter.name for parameter in found]
    if any(kinds) and not all(kinds):
        names.insert(kinds.index(True), "*")
    return " ".join(names)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_names_are_a_promise(name):
    assert parameters(name) == PARAMETERS[name]


def test_the_parameters_of_every_exported_function_are_pinned():
    functions = {name for name in adapter.__all__ if inspect.isfunction(getattr(adapter, name))}
    assert functions <= set(PARAMETERS)


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_are_a_promise(name):
    found = inspect.signature(getattr(adapter, name)).parameters
    assert {key: found[key].default for key in DEFAULTS[name]} == DEFAULTS[name]


def test_call_and_sample_take_keywords_only():
    for kind in (adapter.Call, adapter.Rollout, adapter.Sample, adapter.Span):
        assert {p.kind for p in inspect.signature(kind).parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}


def test_all_that_is_exported_exists_and_is_documented():
    assert adapter.__all__ == sorted(adapter.__all__, key=lambda name: (not name.isupper(), name[0].islower(), name))
    for name in adapter.__all__:
        thing = getattr(adapter, name)
        assert not callable(thing) or thing.__doc__, name
