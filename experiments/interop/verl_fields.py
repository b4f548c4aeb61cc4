"""Rollouts as the tensors of verl's DataProto, for a loss that equals ours. Needs torch and harnessrl.adapter, not verl.

verl reduces a loss over rows of a padded batch: `token-mean` is sum(mask * loss) / tokens. The weight of each token rides
in `rollout_is_weights`, by which verl multiplies the loss of every token before it reduces:

    rollout_is_weights = weight * tokens,  so  token-mean of (rollout_is_weights * loss) = sum(weight * loss)

Run: python -m experiments.interop.verl_fields
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from experiments.interop.rows import padded_rows
from harnessrl.adapter import Call, Rollout


def verl_fields(
    rollouts: Sequence[Rollout], pad_id: int, *, estimator: str = "grpo", normalizer: str = "rollout_mean"
) -> dict[str, Tensor]:
    """Build the batch of one optimizer update, one row a sample.

    Set `actor.loss_agg_mode: token-mean`, one mini-batch an update, no advantage estimator and no rollout correction of
    verl's own: both would overwrite what is here. To correct for a stale policy, multiply rollout_is_weights by it.

    Args:
        rollouts: all of the update, whole groups.
        pad_id: the tokenizer's padding token.

    Returns:
        prompts [S, P], responses [S, A], input_ids, attention_mask, position_ids [S, P + A], response_mask [S, A] (1 on
        sampled tokens), old_log_probs, rollout_log_probs, advantages, returns, rollout_is_weights float32 [S, A].
    """
    rows = padded_rows(rollouts, pad_id, estimator=estimator, normalizer=normalizer)
    attention_mask = torch.cat([rows["prompt_mask"], rows["response_attention"]], dim=1)
    return {
        "prompts": rows["prompts"],
        "responses": rows["responses"],
        "input_ids": torch.cat([rows["prompts"], rows["responses"]], dim=1),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(dim=1) - 1).clamp(min=0),
        "response_mask": rows["trained"],
        "old_log_probs": rows["logprobs"],
        "rollout_log_probs": rows["logprobs"],
        "advantages": rows["advantages"],
        "returns": rows["advantages"],
        "rollout_is_weights": rows["weights"] * rows["trained"].sum(),
    }


def main() -> None:
    """Two rollouts, one of which broke into two samples: each weighs one half."""
    first = Call(call_id="a", prompt_ids=[1, 2], response_ids=[3, 4], logprobs=[-0.5, -0.7])
    second = Call(call_id="b", prompt_ids=[1, 2, 9], response_ids=[5], logprobs=[-0.2])
    rollouts = [
        Rollout(rollout_id="r0", group_id="g", calls=[first], reward=1.0),
        Rollout(rollout_id="r1", group_id="g", calls=[first, second], reward=0.0),
    ]
    for name, value in verl_fields(rollouts, pad_id=0).items():
        print(f"{name} {tuple(value.shape)}\n{value}")


if __name__ == "__main__":
    main()
