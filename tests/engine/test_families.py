"""Families of models: the engine samples with the logprobs that the trainer finds, alone and in a pack with others."""

import numpy as np
import pytest
import torch
import transformers

from harnessrl.adapter import Call, Rollout, merge_calls, pack
from harnessrl.attention import use_layouts
from harnessrl.engine.torch_engine import TorchEngine
from harnessrl.service.wire import Sampling
from harnessrl.train.policy import Policy, score

BASE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.3,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 8,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 16}
FAMILIES = {
    "Llama": {},
    "Llama with yarn": {"rope_parameters": YARN},
    "Qwen2": {},
    "Qwen3": {"head_dim": 8},
    "Qwen3Moe": {"head_dim": 8, "num_experts": 4, **EXPERTS},
    "Mixtral": {"num_local_experts": 4},
    "Olmo2": {},
    "Phi3": {},
    "Glm": {"head_dim": 8},
    "GPTNeoX": {"num_key_value_heads": 4},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "DeepseekV3": {**EXPERTS, **LATENT},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_engine_and_trainer_agree(family):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family.split()[0]}Config")(**(BASE | FAMILIES[family]))
    model = use_layouts(transformers.AutoModelForCausalLM.from_config(config)).eval()
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 64, length).tolist() for length in (5, 9, 30)]
    replies = TorchEngine(model, max_batch=2).generate(prompts, [Sampling(max_tokens=12, noise=n) for n in (1, 2, 3)])
    calls = [
        Call(call_id="c", prompt_ids=prompt, response_ids=reply.ids, logprobs=reply.logprobs)
        for prompt, reply in zip(prompts, replies, strict=True)
    ]
    samples = [
        sample
        for name, call in enumerate(calls)
        for sample in merge_calls(Rollout(rollout_id=str(name), group_id="g", calls=[call])).samples
    ]
    with torch.no_grad():
        together = score(Policy(model), pack(samples, [0, 1, 2]), 1.0).logprobs.numpy()
    sampled = np.concatenate([reply.logprobs for reply in replies])
    assert len(sampled) == 36 and sampled.min() < -1.5  # a flat policy would agree with anything
    assert np.abs(together - sampled).max() < 5e-5
