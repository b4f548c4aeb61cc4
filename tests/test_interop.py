"""The worked examples: another trainer's loss, fed with our tensors, is ours, computed token by token from the definition."""

import math

import pytest
import torch
from torch import Tensor

from experiments.interop.rows import padded_rows
from experiments.interop.verl_fields import verl_fields
from harnessrl.adapter import Call, Rollout, merge_calls, rollout_advantages, token_weights
from tests.conftest import make_tiny_model

PAD = 96
CLIP = 0.2


def call(name, prompt, response, logprobs):
    return Call(call_id=name, prompt_ids=prompt, response_ids=response, logprobs=logprobs)


ROLLOUTS = [
    # one sample, with tokens of the harness (7, 8) between two calls
    Rollout(
        rollout_id="r0",
        group_id="g",
        calls=[call("a", [5, 6], [1, 2], [-4.0, -5.0]), call("b", [5, 6, 1, 2, 7, 8], [3], [-3.5])],
        reward=1.0,
    ),
    # two samples: the history came back with 9 in place of 4
    Rollout(
        rollout_id="r1",
        group_id="g",
        calls=[call("a", [5, 6], [4], [-4.5]), call("b", [5, 6, 9, 7], [1, 1, 2], [-6.0, -4.0, -4.4])],
        reward=0.0,
    ),
    Rollout(rollout_id="r2", group_id="g", calls=[call("a", [5], [8, 8], [-4.7, -4.6])], reward=0.5),
    # lost to infrastructure: outside every statistic, never trained
    Rollout(rollout_id="r3", group_id="g", calls=[call("a", [5], [PAD], [-4.7])], reward=None),
]


def by_hand(model, clip=CLIP):
    """loss = -sum_t w_t * min(ratio_t * A, clip(ratio_t) * A), a sample and a token at a time."""
    rewards = [math.nan if rollout.reward is None else rollout.reward for rollout in ROLLOUTS]
    advantages = rollout_advantages(rewards, ["g"] * len(ROLLOUTS))
    assert advantages == pytest.approx([1.0, -1.0, 0.0, 0.0], abs=1e-5)
    samples = [(r, sample) for r in range(3) for sample in merge_calls(ROLLOUTS[r]).samples]
    lengths, owner = [int(sample.loss_mask.sum()) for _, sample in samples], [r for r, _ in samples]
    assert (lengths, owner) == ([3, 1, 3, 2], [0, 1, 1, 2])
    weights = token_weights(lengths, owner, "rollout_mean")
    assert weights == pytest.approx([1 / 9, 1 / 12, 1 / 12, 1 / 6])
    loss = torch.zeros(())
    for (r, sample), weight in zip(samples, weights, strict=True):
        logits = model(torch.tensor(sample.token_ids)[None].long()).logits[0]
        for t in sample.loss_mask.nonzero()[0].tolist():
            logprob = logits[t - 1].log_softmax(-1)[int(sample.token_ids[t])]
            ratio = (logprob - float(sample.logprobs[t])).exp()
            clipped = ratio.clamp(1 - clip, 1 + clip)
            loss = loss - weight * torch.minimum(ratio * advantages[r], clipped * advantages[r])
    return loss


def test_rows_hold_the_samples_and_nothing_else():
    rows = padded_rows(ROLLOUTS, PAD)
    samples = [sample for rollout in ROLLOUTS[:3] for sample in merge_calls(rollout).samples]
    assert len(rows["prompts"]) == len(samples) == 4
    for s, sample in enumerate(samples):
        ids = [
            *rows["prompts"][s][rows["prompt_mask"][s] == 1],
            *rows["responses"][s][rows["response_attention"][s] == 1],
        ]
        assert [int(token) for token in ids] == sample.token_ids.tolist()
        trained = rows["trained"][s] == 1
        assert rows["responses"][s][trained].tolist() == sample.token_ids[sample.loss_mask].tolist()
        assert rows["logprobs"][s][trained].tolist() == sample.logprobs[sample.loss_mask].tolist()
        for name in ("logprobs", "weights", "advantages"):
            assert rows[name][s][~trained].tolist() == [0.0] * int((~trained).sum())
    assert rows["weights"].sum().item() == pytest.approx(1.0)
    assert rows["prompts"].tolist()[3] == [PAD, PAD, PAD, 5] and rows["trained"].tolist()[0] == [1, 1, 0, 0, 1]


def test_rows_need_something_to_train():
    with pytest.raises(ValueError, match="no scored rollout has a trained token"):
        padded_rows(ROLLOUTS[3:], PAD)


# verl


def verl_token_mean(losses: Tensor, mask: Tensor, tokens: int, ranks: int) -> Tensor:
    """verl's loss_agg_mode token-mean on one of `ranks`, before the ranks' gradients are averaged; as of verl 0.9."""
    return (losses * mask).sum() / tokens * ranks


def verl_loss(fields, logprobs, rows, tokens, ranks):
    """verl's default policy loss on some rows: clipped surrogate, times rollout_is_weights, reduced."""
    part = {name: value[rows] for name, value in fields.items()}
    ratio = (logprobs[rows] - part["old_log_probs"]).clamp(-20, 20).exp()
    plain, clipped = -part["advantages"] * ratio, -part["advantages"] * ratio.clamp(1 - CLIP, 1 + CLIP)
    losses = torch.maximum(plain, clipped) * part["rollout_is_weights"]
    return verl_token_mean(losses, part["response_mask"], tokens, ranks)


def forward(model, fields):
    """Logprobs of the responses, the way a padded trainer computes them."""
    keys = ("input_ids", "attention_mask", "position_ids")
    logits = model(**{key: fields[key] for key in keys}).logits[:, :-1].log_softmax(-1)
    logprobs = logits.gather(-1, fields["input_ids"][:, 1:, None])[..., 0]
    return logprobs[:, -fields["responses"].shape[1] :]


@pytest.mark.parametrize("splits", [[[0, 1, 2, 3]], [[0, 2], [1, 3]], [[0], [1], [2], [3]]])
def test_verls_loss_and_gradient_are_ours_on_any_number_of_ranks(splits):
    model = make_tiny_model(seed=3)
    ours = by_hand(model)
    ours.backward()
    wanted = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    fields = verl_fields(ROLLOUTS, PAD)
    tokens = int(fields["response_mask"].sum())
    logprobs = forward(model, fields)
    theirs = sum(verl_loss(fields, logprobs, rows, tokens, len(splits)) for rows in splits) / len(splits)
    theirs.backward()
    assert theirs.item() == pytest.approx(ours.item(), rel=1e-5) and abs(ours.item()) > 0.01
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


def test_verls_fields_have_verls_shapes_and_types():
    fields = verl_fields(ROLLOUTS, PAD)
    shapes = {name: tuple(value.shape) for name, value in fields.items()}
    response = dict.fromkeys(
        [
            "responses",
            "response_mask",
            "old_log_probs",
            "rollout_log_probs",
            "advantages",
            "returns",
            "rollout_is_weights",
        ],
        (4, 5),
    )
    whole = dict.fromkeys(["input_ids", "attention_mask", "position_ids"], (4, 9))
    assert shapes == {"prompts": (4, 4)} | whole | response
    integers = {name for name, value in fields.items() if value.dtype == torch.int64}
    assert integers == {"prompts", "responses", "response_mask", *whole}
    assert fields["position_ids"].tolist()[3] == [0, 0, 0, 0, 1, 2, 2, 2, 2]
    # The mean over trained tokens is 1, as of verl's own correction weights.
    assert fields["rollout_is_weights"].sum() / fields["response_mask"].sum() == pytest.approx(1.0)


# TRL


@pytest.mark.real
@pytest.mark.filterwarnings("ignore")  # those of TRL and of what it imports are not ours
def test_a_grpo_step_of_trl_is_ours(tmp_path):
    pytest.importorskip("trl", reason="trl is not installed: pip install trl")
    from experiments.interop.trl_grpo import make_trainer

    rate = 0.5
    settings = {"optim": "sgd", "learning_rate": rate, "max_grad_norm": 0.0, "lr_scheduler_type": "constant"}
    trainer = make_trainer(str(tmp_path), lambda: ROLLOUTS, save_strategy="no", epsilon=CLIP, **settings)
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    ours = by_hand(trainer.model)
    gradients = torch.autograd.grad(ours, list(trainer.model.parameters()))
    result = trainer.train()
    assert result.training_loss == pytest.approx(ours.item(), rel=1e-5) and abs(ours.item()) > 0.01
    for parameter, old, gradient in zip(trainer.model.parameters(), before, gradients, strict=True):
        torch.testing.assert_close(parameter.detach(), old - rate * gradient, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="one batch an update here"):
        make_trainer(str(tmp_path), lambda: ROLLOUTS, gradient_accumulation_steps=2)
