"""Loading into shards: two real processes hold what one plain load holds, and compute the same."""

import subprocess
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

LOADS = """
import sys
from pathlib import Path
import pytest
import torch
import torch.distributed as dist
from harnessrl.adapter import pack
from harnessrl.train import loading
from harnessrl.train.loading import load_policy
from harnessrl.train.parallel import World, whole
from harnessrl.train.policy import Policy, load_model, score
from tests.adapter.making import make_sample

torch.set_num_threads(1)
rank, meet, misfit, *folders = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"file://{meet}", rank=int(rank), world_size=2)
here = World(rank=int(rank), size=2)
packed = pack([make_sample([5, *range(3, 20)], [(2, 15)])], [0])
loads = []
loading.load_model = lambda *arguments: loads.append(arguments) or load_model(*arguments)
for folder in map(Path, folders):
    del loads[:]
    policy, plain = load_policy(folder, here, recompute=folder.name == "tied"), Policy(load_model(folder))
    assert len(loads) == (folder.name == "renamed"), (folder.name, loads)  # who was loaded whole
    ours, expected = dict(policy.named_parameters()), dict(plain.named_parameters())
    assert ours.keys() == expected.keys(), folder.name
    for name, value in expected.items():
        assert ours[name].dtype == torch.float32 and torch.equal(whole(ours[name]), value), (folder.name, name)
        assert len(ours[name].to_local()) < len(value), (folder.name, name)
    found, wanted = score(policy, packed, 1.0), score(plain, packed, 1.0)
    assert (found.logprobs - wanted.logprobs).abs().max() < 1e-5, folder.name
    for scored in (found, wanted):
        scored.logprobs.sum().backward()
    for name, value in expected.items():
        assert (whole(ours[name].grad) - value.grad).norm() <= 1e-5 * value.grad.norm(), (folder.name, name)
with pytest.raises(ValueError, match=r"model.safetensors: model.embed_tokens.weight has shape \\[97, 32\\].*\\[101, 32\\]"):
    load_policy(Path(misfit), here)
dist.destroy_process_group()
"""


def save(folder, *, tied=False, dtype=torch.float32, **keywords):
    """A random model of 97 words: an odd number of rows for two ranks."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder, **keywords)
    return folder


def rename(folder):
    """A file whose tensors have other names than the model's, as those of older checkpoints that transformers converts."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file({name.removeprefix("model."): value for name, value in tensors.items()}, file, metadata={"format": "pt"})
    return folder


def misfit(folder):
    """A configuration that speaks of more words than the weights have."""
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 97', '"vocab_size": 101'))
    return folder


def run_ranks(script, tmp_path, *arguments, timeout=110):
    """Run a script as two ranks in fresh processes; it gets its rank, a file to meet at, and the arguments."""
    command = [sys.executable, "-c", script]
    rest = [str(tmp_path / "meet"), *map(str, arguments)]
    root = Path(__file__).parents[2]
    ranks = [
        subprocess.Popen([*command, str(rank), *rest], cwd=root, stdout=subprocess.PIPE, text=True) for rank in (0, 1)
    ]
    try:
        out = [rank.communicate(timeout=timeout)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], out
        return out
    finally:
        for rank in ranks:
            rank.kill()


def test_two_ranks_load_what_one_loads(tmp_path):
    """Tied and not, in several files, in bfloat16; names that only transformers can resolve; a shape that does not fit."""
    folders = [
        save(tmp_path / "tied", tied=True),
        save(tmp_path / "files", max_shard_size="20KB"),
        save(tmp_path / "half", dtype=torch.bfloat16),
        rename(save(tmp_path / "renamed")),
    ]
    assert len(list((tmp_path / "files").glob("*.safetensors"))) > 2
    run_ranks(LOADS, tmp_path, misfit(save(tmp_path / "misfit")), *folders)


def test_alone_it_is_the_plain_load(tmp_path):
    from harnessrl.train.loading import load_policy
    from harnessrl.train.parallel import World
    from harnessrl.train.policy import load_model

    folder = save(tmp_path / "model")
    ours, plain = load_policy(folder, World()), load_model(folder)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), plain.parameters(), strict=True))
