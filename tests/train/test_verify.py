"""Policies whose logprobs here would be others than their own are refused before anything is trained."""

import pytest
import torch
import transformers

from harnessrl.attention import check_independence, use_layouts
from harnessrl.errors import ConfigError
from harnessrl.train.verify import verify
from tests.engine.test_families import BASE, FAMILIES

FULL = {"head_dim": 8, "layer_types": ["full_attention"] * 2}


def make(family, **changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**(BASE | changes))
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_supported_families_pass_and_take_layouts_afterwards(family):
    model = use_layouts(make(family.split()[0], **FAMILIES[family]))
    check_independence(model)
    verify(model)
    assert model.config._attn_implementation == "harnessrl"


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("Bert", {"is_decoder": True}, "logprobs of a pack differ from those of its own forward"),  # a head of its own
        ("Gemma3Text", {**FULL, "use_bidirectional_attention": True}, "differ from those of its own forward"),
        ("Gemma2", {**FULL, "attn_logit_softcapping": None, "final_logit_softcapping": 1.0}, "differ from those of its own"),
        ("Falcon", {}, "attends 0 times in 2 layers"),  # positions counted by itself, and a mask of its own
        ("DiffLlama", {}, "attends 4 times in 2 layers"),
        ("Phimoe", {"sliding_window": 4, "num_local_experts": 4}, "has a sliding window"),
        ("StableLm", {}, "cannot be run with layouts"),
    ],
)  # fmt: skip
def test_others_are_refused(family, changes, words):
    with pytest.raises(ConfigError, match=words):
        model = use_layouts(make(family, **changes))
        check_independence(model)
        verify(model)


def test_a_policy_that_is_not_finite_passes():
    """It is no other policy; the first update names the rollout that reads the weight."""
    model = use_layouts(make("Llama"))
    with torch.no_grad():
        model.get_input_embeddings().weight[:] = float("nan")
    check_independence(model)
    verify(model)
