"""A GRPO step of TRL whose loss uses our advantages and weights. Tried with trl 1.16.

GRPOTrainer takes advantages of shape [S, A] and, as loss_type "dapo", divides the sum over tokens by num_items_in_batch. With
weight * advantage as the advantage and 1 item in the batch, its clipped loss is sum(weight * token_loss): a weight is
positive, so it passes through the minimum. Nothing of TRL's loss is replaced; only where a batch comes from.

Run: pip install trl && python -m experiments.interop.trl_grpo
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from experiments.interop.rows import padded_rows
from harnessrl.adapter import Call, Rollout


class HarnessGRPOTrainer(GRPOTrainer):
    """GRPO on rollouts that a harness made.

    Args:
        collect: returns all rollouts of the next update, whole groups; called once a step.
    """

    def __init__(self, *args: Any, collect: Callable[[], Sequence[Rollout]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.args.gradient_accumulation_steps != 1 or self.accelerator.num_processes != 1:
            raise ValueError(
                "one batch an update here; elsewhere split padded_rows's rows, their weights stay as they are"
            )
        self.collect = collect

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, torch.Tensor]:
        """Rows of the next update, in place of prompts of the dataset and completions of TRL's own generation."""
        rows = padded_rows(self.collect(), self.processing_class.pad_token_id)
        fields = {
            "prompt_ids": rows["prompts"],
            "prompt_mask": rows["prompt_mask"],
            "completion_ids": rows["responses"],
            "completion_mask": rows["response_attention"],
            "tool_mask": rows["trained"],  # 0 on what the harness added
            "advantages": rows["weights"] * rows["advantages"],
            "old_per_token_logps": rows["logprobs"],
            "num_items_in_batch": torch.tensor(1.0),
        }
        return {name: value.to(self.accelerator.device) for name, value in fields.items()}


def make_trainer(folder: str, collect: Callable[[], Sequence[Rollout]], **settings: Any) -> HarnessGRPOTrainer:
    """A trainer of a tiny random model; `settings` go to GRPOConfig."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=97, **sizes))
    words = Tokenizer(models.WordLevel({"<pad>": 0, "x": 1}, unk_token="x"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<pad>")
    fixed = {"loss_type": "dapo", "beta": 0.0, "bf16": False, "per_device_train_batch_size": 2, "num_generations": 2}
    config = GRPOConfig(folder, max_steps=1, use_cpu=True, report_to=[], **fixed, **settings)
    data, reward = Dataset.from_dict({"prompt": ["x", "x"]}), lambda completions, **_: [0.0] * len(completions)
    return HarnessGRPOTrainer(model, reward, config, data, processing_class=tokenizer, collect=collect)


def main() -> None:
    calls = [Call(call_id="a", prompt_ids=[1, 2], response_ids=[3, 4], logprobs=[-4.0, -5.0])]
    rollouts = [Rollout(rollout_id=f"r{i}", group_id="g", calls=calls, reward=float(i)) for i in range(2)]
    with tempfile.TemporaryDirectory() as folder:
        print(make_trainer(folder, lambda: rollouts, save_strategy="no").train())


if __name__ == "__main__":
    main()
