"""Two real ranks, in bfloat16 and with adapters too: the same update as one process makes, no waiting for each other, resumed alike, KL sums too."""

import pytest
import torch

from harnessrl.adapter import Call, Rollout
from harnessrl.config import Lora
from harnessrl.train.batch import Finished, make_batch, make_updates
from harnessrl.train.checkpoint import Checkpoints, Position
from harnessrl.train.loading import load_policy
from harnessrl.train.lora import copy_weights
from harnessrl.train.parallel import whole, world
from harnessrl.train.penalty import reference_packs, rollout_kl
from harnessrl.train.policy import load_model
from harnessrl.train.update import Updater, warmup
from tests.conftest import make_tiny_model
from tests.train.test_loading import run_ranks
from tests.train.test_precision import HALF, updates_of
from tests.train.test_update import config, rollouts

CASES = {
    "float32": {},
    "bfloat16": {"dtype": HALF},
    "lora": {"lora": Lora(rank=4)},
    "both": {"dtype": HALF, "lora": Lora(rank=3, targets=["q_proj", "down_proj"]), "recompute": True},
}

EDGES = {"uneven": 3, "one": 1, "none": 0}
"""Rollouts of one sample of five tokens each, one a pack: what makes ranks wait for each other where they count alone."""

RANK = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from harnessrl.train import checkpoint
from harnessrl.train.parallel import World
from tests.train.test_precision import updates_of
from tests.train.test_two_ranks import CASES, EDGES, Run, edge, kl_of

torch.set_num_threads(1)
rank, meet, folder, results = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"file://{meet}", rank=int(rank), world_size=2)
here = World(rank=int(rank), size=2)
packs = updates_of(2)[0][here.rank]
for case in CASES:
    run, wanted = Run(Path(folder), here, case), torch.load(Path(results) / case / "wanted.pt")
    first = run.step(packs)
    assert (first - wanted["first"]).norm() < 1e-5 * wanted["first"].norm(), (case, first, wanted["first"])
    for key in ("loss/policy", "policy/grad_norm", "policy/entropy"):
        assert abs(run.metrics[key] - wanted[key]) < 1e-5 * max(abs(wanted[key]), 0.1), (case, key)
    for (name, engine), theirs in zip(run.engine().named_parameters(), wanted["engine"], strict=True):
        assert (engine - theirs).abs().max() <= (2e-3 if case in ("bfloat16", "both") else 1e-6), (case, name)
    checkpoint.load(Path(results) / case / "step-00001", *run.parts)
    second = run.step(packs)
    assert (second - wanted["second"]).norm() < 1e-5 * wanted["second"].norm(), (case, second, wanted["second"])
kl, wanted = kl_of(Path(folder), here), torch.load(Path(results) / "kl.pt")
assert kl.keys() == wanted.keys() and all(abs(kl[name] - value) < 1e-4 for name, value in wanted.items()), (kl, wanted)
assert kl_of(Path(folder), here, nothing=True) == {}
for case in EDGES:
    updates, wanted = edge(case, 2), torch.load(Path(results) / f"{case}.pt")
    run = Run(Path(folder), here, "float32")
    found = run.change(lambda: run.updater.step([update[here.rank] for update in updates], version=0))
    assert (found - wanted).norm() <= 1e-5 * wanted.norm(), (case, found, wanted)
    assert (wanted.norm() > 0) == (case != "none")
dist.destroy_process_group()
"""


class Run:
    """A tiny policy, its optimizer, and what a checkpoint holds."""

    def __init__(self, folder, here, case):
        self.folder, self.here, self.options = folder, here, CASES[case]
        self.policy = load_policy(folder, here, **self.options)
        self.trained = [p for p in self.policy.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(self.trained, 0.05, momentum=0.9)
        self.parts = self.policy, optimizer, warmup(optimizer, 0), here
        self.updater = Updater(self.policy, optimizer, None, config(max_tokens=100), here)

    def step(self, packs):
        """One update; the change of the trained weights."""
        return self.change(lambda: self.updater.step([packs], version=0))

    def change(self, step):
        """What a step does to the trained weights."""
        before = [whole(p.detach()).clone() for p in self.trained]
        self.metrics = step().metrics()
        return torch.cat([(whole(p.detach()) - b).flatten() for p, b in zip(self.trained, before, strict=True)])

    def engine(self):
        """The engine's copy of the policy as it is now."""
        model = load_model(self.folder, dtype=self.options.get("dtype", torch.float32))
        copy_weights(self.policy.model, model)
        return model


def edge(case, ranks):
    """[updates][ranks][packs] of a few rollouts beside one that sampled nothing (B33); without any there is no update."""
    rewards = [1.0, 0.5, 0.25][: EDGES[case]]
    calls = [
        [Call(call_id="c", prompt_ids=[3, 4, 5], response_ids=[i, i], logprobs=[-1, -1])] for i in range(len(rewards))
    ]
    items = [
        Finished(rollout=Rollout(rollout_id=f"r{i}", group_id="g", calls=made, reward=reward), failure=None, input=None)
        for i, (made, reward) in enumerate(zip([*calls, []], [*rewards, 0.0], strict=True))
    ]
    settings = config("token_mean", max_tokens=5)
    updates, _ = make_updates(make_batch(items, settings), settings, seed=0, world_size=ranks)
    assert [[len(packs) for packs in update] for update in updates] == [[-(-EDGES[case] // ranks)] * ranks] * bool(
        rewards
    )
    return updates


def kl_of(folder, here, nothing=False):
    """Each rollout's KL to a policy other than the one that sampled; or of no rollouts at all."""
    policy = load_policy(folder, here)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(0.9)
    settings = config(max_tokens=100)
    packs = reference_packs(make_batch([] if nothing else rollouts(), settings), settings, here.size)[here.rank]
    return rollout_kl(policy, packs, 1.0, here)


@pytest.mark.timeout(240)  # three starts of torch, on a machine that others use
def test_two_ranks_do_what_one_does(tmp_path):
    """The same packs have the same gradients in bfloat16 too; they are added in float32, and only their order differs."""
    pytest.importorskip("peft", reason="needs the extra harnessrl[lora]")
    make_tiny_model(seed=0).save_pretrained(tmp_path / "tiny")
    (ranks,) = updates_of(2)
    assert all(len(packs) > 1 for packs in ranks)
    packs = [packed for part in ranks for packed in part]
    with world(dtype=HALF) as here:
        for case in CASES:
            run = Run(tmp_path / "tiny", here, case)
            wanted = {"first": run.step(packs)} | run.metrics
            with Checkpoints(tmp_path / case, *run.parts) as checkpoints:
                checkpoints.save(Position(step=1, version=1, inputs=1))
            wanted |= {"engine": list(run.engine().parameters()), "second": run.step(packs)}
            torch.save(wanted, tmp_path / case / "wanted.pt")
        torch.save(kl_of(tmp_path / "tiny", here), tmp_path / "kl.pt")
        for case in EDGES:
            run = Run(tmp_path / "tiny", here, "float32")
            packs = [update[0] for update in edge(case, 1)]
            torch.save(
                run.change(lambda run=run, packs=packs: run.updater.step(packs, version=0)), tmp_path / f"{case}.pt"
            )
    run_ranks(RANK, tmp_path, tmp_path / "tiny", tmp_path, timeout=220)
