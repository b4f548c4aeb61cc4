"""A toy experiment for whole-path tests: a random policy, a two-turn chat, a reward that varies without any training."""

import json
import os
import shutil
import sys
from pathlib import Path

import aiohttp

TOKENIZER = Path(__file__).parent.parent.parent / "experiments" / "lookup" / "tokenizer"


def policy(seed, cache, report=None):
    """A random two-layer policy beside the lookup experiment's tokenizer."""
    import torch
    from tokenizers import Tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = Path(cache) / f"toy-{seed}"
    if folder.exists():
        return folder
    torch.manual_seed(seed)
    vocabulary = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json")).get_vocab_size()
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True,
    )  # fmt: skip
    making = folder.with_name(f".{folder.name}.{os.getpid()}")  # runs of one seed may start together
    LlamaForCausalLM(config).save_pretrained(making)
    for file in TOKENIZER.iterdir():
        shutil.copy(file, making)
    try:
        making.rename(folder)
    except OSError:  # another run was first
        shutil.rmtree(making)
    return folder


def inputs(seed, split="train"):
    index = 500_000 if split == "val" else 0
    while True:
        yield {"number": seed * 1000 + index}
        index += 1


def few(seed, split="train"):
    """A stream that ends, as none should."""
    yield from ({"number": index} for index in range(4))


async def run(env):
    """Two turns; half of the rollouts tidy the first reply, which breaks their token prefix. Reward: even length.

    Every fifth input has reward 1 whatever is said. Each call is given 0.5 if its own reply has an even length.
    """
    headers = {"Authorization": f"Bearer {env['AGL_KEY']}"}
    number = json.loads(env["TOY"])["number"]
    messages = [{"role": "user", "content": "abc"}]
    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=60)) as session:
        for _ in range(2):
            body = {"model": "any", "messages": messages}
            async with session.post(f"{env['AGL_OPENAI_BASE_URL']}/chat/completions", json=body) as response:
                response.raise_for_status()
                answer = await response.json()
            text = answer["choices"][0]["message"]["content"]
            given = {"call_id": answer["id"], "value": 0.5 * (len(text) % 2 == 0)}
            async with session.post(
                env["AGL_EVENT_URL"], json={"event_type": "call_reward", "data": given}
            ) as response:
                response.raise_for_status()
            tidy = text.strip().lower() if number % 2 else text
            messages += [{"role": "assistant", "content": tidy}, {"role": "user", "content": "de"}]
        event = {"event_type": "reward", "data": {"value": float(number % 5 == 4 or len(text) % 2 == 0)}}
        async with session.post(env["AGL_EVENT_URL"], json=event) as response:
            response.raise_for_status()


async def hang(env):
    """A harness that never ends by itself."""
    import asyncio

    await asyncio.Event().wait()


CONFIG = {
    "run": "toy",
    "steps": 2,
    "checkpoint_every": 1,
    "task": {
        "inputs": "tests.system.toy:inputs",
        "harness": "tests.system.toy:run",
        "env_map": {"TOY": "input"},
        "timeout": 60,
        "groups": 3,
        "group_size": 4,
    },
    "policy": {"source": "tests.system.toy:policy", "max_context": 200, "max_response": 6, "max_batch": 16},
    "update": {"lr": 1e-3, "max_tokens": 512},
}


def write_config(folder, **changes):
    """config.yaml in a folder; dotted names change single keys. Runs go to folder/runs."""
    config = json.loads(json.dumps(CONFIG)) | {"runs": str(folder / "runs")}
    for key, value in changes.items():
        *parents, name = key.split("__")
        target = config
        for parent in parents:
            target = target[parent]
        target[name] = value
    path = folder / "config.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    return path


def command(*arguments):
    """argv that runs `harnessrl` from the checkout."""
    return [sys.executable, "-m", "harnessrl", *map(str, arguments)]
