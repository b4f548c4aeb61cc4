"""Peak memory, measured as the operating system sees it, each time in a fresh process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.test_loading import run_ranks

MiB = 2**20
TILE = 4 * MiB
"""The head's default tile, 2**20 numbers of float32."""

HEAD = """
import sys
import torch
from harnessrl.bench.memory import peak_memory
from harnessrl.train.head import head_logprobs

torch.set_num_threads(1)
TOKENS, WIDTH, VOCABULARY = 1500, 32, 50_000


def plain(hidden, weight, labels, temperature, entropy_gradient):
    logprobs = (hidden @ weight.t() / temperature).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, labels[:, None])[:, 0], entropy if entropy_gradient else entropy.detach()


def run(tokens, vocabulary, head, bonus):
    hidden, weight = torch.randn(tokens, WIDTH, requires_grad=True), torch.randn(vocabulary, WIDTH, requires_grad=True)
    labels = torch.arange(tokens) % vocabulary
    logprobs, entropy = head(hidden, weight, labels, 0.7, entropy_gradient=bonus)
    (logprobs.sum() + (entropy.sum() if bonus else 0)).backward()


head, bonus = {"ours": head_logprobs, "plain": plain}[sys.argv[1]], sys.argv[2] == "bonus"
run(10, 100, head, bonus)
print(peak_memory(lambda: run(TOKENS, VOCABULARY, head, bonus)))
"""


def measure(script, *arguments):
    """Run a script in a fresh process and read the last line it prints."""
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("bonus", ["no bonus", "bonus"])
def test_the_head_needs_a_few_tiles_whatever_the_vocabulary(bonus):
    """1,500 tokens, 50,000 words: logits of 286 MiB in all. Weight and its gradient are 6.1 MiB each."""
    limit = 6 * TILE + 3 * 50_000 * 32 * 4
    assert measure(HEAD, "ours", bonus) < limit
    assert measure(HEAD, "plain", bonus) > 10 * limit  # so the limit can be missed


POLICY = """
import sys
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from harnessrl.adapter import pack
from harnessrl.attention import use_layouts
from harnessrl.bench.memory import peak_memory
from harnessrl.train.policy import Policy, score
from tests.adapter.making import make_sample

torch.set_num_threads(1)
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
policy = Policy(use_layouts(LlamaForCausalLM(LlamaConfig(vocab_size=50_000, **sizes)).eval()))


def run(length):
    samples = [make_sample(range(index, index + length), [(1, length)], index=index) for index in range(10)]
    score(policy, pack(samples, range(10)), 0.7).logprobs.sum().backward()


run(2)
print(peak_memory(lambda: run(151)))
"""


def test_a_policy_never_holds_the_logits_of_a_pack():
    """1,500 trained tokens, 50,000 words: one float32 tensor of logits would be 286 MiB."""
    assert measure(POLICY) < 60 * MiB


LOAD = """
import json
import sys
from pathlib import Path
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from harnessrl.bench.memory import peak_memory
from harnessrl.train.loading import load_policy
from harnessrl.train.parallel import World, shard
from harnessrl.train.policy import Policy, load_model

torch.set_num_threads(1)
rank, meet, folder, how, warm = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"file://{meet}", rank=int(rank), world_size=2)
here = World(rank=int(rank), size=2)


def plain(folder, here):
    policy = Policy(load_model(folder))
    shard(policy, policy.model, here)
    return policy


load = {"shards": load_policy, "plain": plain}[how]
load(Path(warm), here)
kept = []
print(peak_memory(lambda: kept.append(load(Path(folder), here))))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_loading_into_shards_takes_half_a_model_a_rank(tmp_path):
    """134.5 M parameters, 513 MiB: two ranks keep 257 MiB each. A plain load has 513 MiB and the shard in memory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.train.test_loading import save

    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    config = LlamaConfig(vocab_size=49152, num_key_value_heads=3, tie_word_embeddings=True, **sizes)
    model = LlamaForCausalLM(config)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    assert 512 * MiB < whole < 514 * MiB
    model.save_pretrained(tmp_path / "model")
    del model
    warm = save(tmp_path / "warm")
    peaks = {}
    for how in ("shards", "plain"):
        out = run_ranks(LOAD, tmp_path, tmp_path / "model", how, warm)
        peaks[how] = [int(text.splitlines()[-1]) for text in out]
        (tmp_path / "meet").unlink(missing_ok=True)
    assert max(peaks["shards"]) < 0.65 * whole
    assert min(peaks["plain"]) > 1.0 * whole  # so the limit can be missed
