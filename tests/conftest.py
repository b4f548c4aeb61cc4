"""Shared fixtures: a tiny random transformer, bounded threads, no network."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest


@pytest.fixture(scope="session")
def tiny_model():
    """Two layers, grouped key heads, weights large enough that attention matters; takes layouts."""
    import torch

    from harnessrl.attention import use_layouts

    torch.set_num_threads(1)
    return use_layouts(make_tiny_model(seed=0))


def make_tiny_model(seed: int, vocabulary: int = 97):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6)
    return model


def pytest_collection_modifyitems(items):
    """Tests that start processes take longest: first, so that two workers end together (needs --no-loadscope-reorder)."""
    items.sort(key=lambda item: "tests/system/" not in item.nodeid)
