"""TRL's GRPO step on the benchmark's samples, called as it is, where trl is installed (tried with 1.16)."""

from __future__ import annotations

import tempfile
import warnings

import numpy as np
import torch
from torch import Tensor

from harnessrl.adapter import Sample
from harnessrl.bench.methods import Step, Work, batches


def trl(work: Work) -> Step | None:
    """TRL's loss and its backward pass on padded batches of the samples as they come; None where trl is not installed.

    Prompts are padded on the left and completions on the right, as TRL does. With loss_type "dapo" and one item in the
    batch its loss is the sum of token losses, so that weight * advantage as the advantage gives our gradient.
    """
    try:
        from datasets import Dataset
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast
        from trl import GRPOConfig, GRPOTrainer
    except ImportError:
        return None
    words = Tokenizer(models.WordLevel({"<pad>": 0, "x": 1}, unk_token="x"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<pad>")
    data = Dataset.from_dict({"prompt": ["x", "x"]})
    fixed = {"loss_type": "dapo", "beta": 0.0, "bf16": False, "per_device_train_batch_size": 2, "num_generations": 2}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = GRPOConfig(folder, use_cpu=True, report_to=[], gradient_checkpointing=False, **fixed)
        trainer = GRPOTrainer(work.model, _no_reward, config, data, processing_class=tokenizer)
    order = np.random.default_rng(work.seed).permutation(len(work.samples))
    inputs = [_rows([work.samples[i] for i in rows], _factors(work, rows)) for rows in batches(work, order)]

    def step() -> None:
        work.model.zero_grad()
        for batch in inputs:
            trainer.compute_loss(work.model, batch).backward()

    return step


def _no_reward(completions: list[str], **_: object) -> list[float]:
    return [0.0] * len(completions)


def _factors(work: Work, rows: np.ndarray) -> Tensor:
    return torch.from_numpy((work.weights * work.advantages)[rows]).float()


def _rows(samples: list[Sample], factors: Tensor) -> dict[str, Tensor]:
    """TRL's columns: a sample's completion begins at its first trained token; later context in it is masked."""
    starts = [max(1, int(np.argmax(sample.loss_mask))) for sample in samples]
    left, right = max(starts), max(len(s.token_ids) - start for s, start in zip(samples, starts, strict=True))
    prompts, prompt_mask = torch.zeros((2, len(samples), left), dtype=torch.int64)
    completions, completion_mask, trained = torch.zeros((3, len(samples), right), dtype=torch.int64)
    for row, (sample, start) in enumerate(zip(samples, starts, strict=True)):
        ids, stop = torch.from_numpy(sample.token_ids.astype(np.int64)), len(sample.token_ids) - start
        prompts[row, left - start :], prompt_mask[row, left - start :] = ids[:start], 1
        completions[row, :stop], completion_mask[row, :stop] = ids[start:], 1
        trained[row, :stop] = torch.tensor(sample.loss_mask[start:])
    return {
        "prompt_ids": prompts,
        "prompt_mask": prompt_mask,
        "completion_ids": completions,
        "completion_mask": completion_mask,
        "tool_mask": trained,
        "advantages": factors[:, None].expand(len(samples), right),
        "num_items_in_batch": torch.tensor(1.0),
    }
