"""Packed attention equals the unpacked run, forward and backward, whatever else lies in the pack."""

import numpy as np
import pytest
import torch
import transformers

from harnessrl.attention import Documents, check_independence, use_layouts
from harnessrl.errors import ConfigError
from harnessrl.train.policy import Policy
from tests.conftest import make_tiny_model
from tests.masked import Masked

LENGTHS = [1, 7, 30, 2, 64, 7, 1, 33, 5]


def documents(seed=0):
    rng = np.random.default_rng(seed)
    return [torch.from_numpy(rng.integers(0, 97, n)) for n in LENGTHS]


def packed_hidden(model, docs):
    cu = np.concatenate([[0], np.cumsum([len(d) for d in docs])])
    positions = torch.cat([torch.arange(len(d)) for d in docs])
    return model.base_model(
        input_ids=torch.cat(docs)[None], position_ids=positions[None], use_cache=False, layout=Documents(cu)
    ).last_hidden_state[0].split([len(d) for d in docs])  # fmt: skip


def plain_hidden(model, docs):
    return [model.base_model(input_ids=d[None], use_cache=False).last_hidden_state[0] for d in docs]


def gradients(model, outputs):
    model.zero_grad()
    sum((h * torch.sin(torch.arange(h.numel()).reshape(h.shape))).sum() for h in outputs).backward()
    return torch.cat([p.grad.flatten() for p in model.base_model.parameters()])


def test_packed_equals_unpacked_forward_and_backward():
    docs = documents()
    packed, plain = use_layouts(make_tiny_model(seed=0)), make_tiny_model(seed=0)
    ours, theirs = packed_hidden(packed, docs), plain_hidden(plain, docs)
    assert max((a - b).abs().max() for a, b in zip(ours, theirs, strict=True)) < 1e-5
    a, b = gradients(packed, ours), gradients(plain, theirs)
    assert (a - b).norm() / b.norm() < 1e-5


def test_documents_do_not_see_each_other(tiny_model):
    docs = documents()
    with torch.no_grad():
        before = packed_hidden(tiny_model, docs)
        docs[4] = (docs[4] + 1) % 97
        after = packed_hidden(tiny_model, docs)
    changed = [bool((a != b).any()) for a, b in zip(before, after, strict=True)]
    assert changed == [i == 4 for i in range(len(LENGTHS))]


def test_a_causal_mask_equals_one_document(tiny_model):
    (doc,) = documents()[4:5]
    with torch.no_grad():
        (expected,) = packed_hidden(tiny_model, [doc])
        mask = torch.ones(len(doc), len(doc), dtype=torch.bool).tril()
        got = tiny_model.base_model(
            input_ids=doc[None], position_ids=torch.arange(len(doc))[None], use_cache=False, layout=Masked(mask)
        )
    assert (got.last_hidden_state[0] - expected).abs().max() < 1e-5


BASE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 10000.0}
LONG |= {"original_max_position_embeddings": 16, "factor": 4.0}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("Qwen3_5Text", {"head_dim": 8, **LINEAR, "layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ("Lfm2", {"layer_types": ["conv", "full_attention"]}, "layers of conv"),
        ("FalconH1", {"head_dim": 8, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}, "hybrid"),
        ("Gemma3Text", {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]}, "sliding_attention"),
        ("Llama", {"rope_parameters": DYNAMIC}, "dynamic positions"),
        ("Phi3", {"rope_parameters": LONG, "pad_token_id": 0}, "longrope positions"),
    ],
)  # fmt: skip
def test_models_whose_documents_would_meet_are_refused(family, changes, words):
    """In a pack such a policy's logprobs depend on the neighbours, by up to 3 nats and without an alarm."""
    config = getattr(transformers, f"{family}Config")(**(BASE | changes))
    with pytest.raises(ConfigError, match=rf"policy.source: {family[:4]}\w+ has .*{words}"):
        use_layouts(transformers.AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Mixtral", "GPTNeoX", "Olmo2"])
def test_whether_documents_meet_is_seen_in_their_gradients(family):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**(BASE | {"num_key_value_heads": 4}))
    model = use_layouts(transformers.AutoModelForCausalLM.from_config(config)).eval()
    check_independence(model)
    assert all(parameter.grad is None for parameter in model.parameters())
    mean = lambda module, inputs, output: output + 1e-6 * output.mean(1, keepdim=True)  # noqa: E731
    next(module for module in model.modules() if isinstance(module, torch.nn.Linear)).register_forward_hook(mean)
    with pytest.raises(ConfigError, match="documents of a pack see each other"):
        check_independence(model)


def test_a_policy_of_another_head_or_attention_is_refused():
    window = transformers.MistralForCausalLM(transformers.MistralConfig(**BASE, sliding_window=8))
    with pytest.raises(ConfigError, match="MistralForCausalLM has a sliding window; only full attention"):
        check_independence(use_layouts(window))
    scaled = transformers.CohereForCausalLM(transformers.CohereConfig(**BASE, eos_token_id=2, bos_token_id=1))
    with pytest.raises(ConfigError, match=r"CohereForCausalLM has logit_scale=0.0625, which changes logits"):
        Policy(scaled)


def test_attention_that_layouts_do_not_know_is_refused(tiny_model):
    with pytest.raises(ValueError, match="layer 0: attention with softcap is not supported"):
        tiny_model(input_ids=torch.tensor([[1, 2]]), layout=Documents(np.array([0, 2])), softcap=30.0)


def test_a_forward_without_a_layout_is_refused(tiny_model):
    with pytest.raises(ValueError, match="layout"):
        tiny_model(input_ids=torch.tensor([[1, 2]]))
