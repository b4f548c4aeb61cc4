"""What a step's rollouts were like: metrics and histograms of a batch. Replaced groups count, though they are not trained."""

from __future__ import annotations

from collections import Counter

import numpy as np
from tokenizers import Tokenizer

from harnessrl.train.batch import Batch, has_signal


def batch_metrics(batch: Batch, kinds: Counter[str]) -> dict[str, float]:
    """What the rollouts of a step were like; `kinds` counts breaks by cause."""
    counts = np.array([len(merge.samples) for merge in batch.merges])
    trained = np.bincount(batch.owner, [s.loss_mask.sum() for s in batch.samples], minlength=len(counts))
    sampled = sum(len(call.response_ids) for item in batch.finished for call in item.rollout.calls)
    replaced = {item.rollout.group_id for item in batch.finished if item.resampled}
    scored = ~np.isnan(batch.rewards)
    rewards = np.array([item.rollout.reward for item in batch.finished if item.rollout.reward is not None])
    used = counts > 0
    skipped = Counter(item.reason for merge in batch.merges for item in merge.skipped)
    failed = Counter(item.failure for item in batch.finished if item.failure)
    metrics = {
        "reward/mean": _mean(rewards),
        "reward/std": float(rewards.std()) if len(rewards) else float("nan"),
        "rollout/count": float(len(counts)),
        "rollout/overlong": float(batch.overlong.sum()),
        "rollout/resampled": float(batch.resampled.sum()),
        "rollout/resampled_groups": float(len(replaced)),
        "rollout/calls_mean": _mean(np.array([len(item.rollout.calls) for item in batch.finished])),
        "rollout/samples_mean": _mean(counts[used]),
        "rollout/single_sample_share": _mean(counts[used] == 1),
        "rollout/samples_reward_correlation": _correlation(counts[scored & used], batch.rewards[scored & used]),
        "rollout/tokens_mean": _mean(trained[used]),
        "rollout/trained_token_share": float(trained.sum() / sampled) if sampled else float("nan"),
        "sample/tokens_mean": _mean(np.array([len(s.token_ids) for s in batch.samples])),
        "advantage/std": float(batch.advantages[scored].std()) if scored.any() else float("nan"),
        "advantage/zero_signal_groups": float(_zero_signal(batch)),
        "advantage/unused_call_rewards": float(batch.unused_call_rewards),
    }
    metrics |= {f"merge/breaks_{kind}": float(n) for kind, n in kinds.items()}
    metrics |= {f"merge/skipped_{reason}": float(n) for reason, n in skipped.items()}
    metrics |= {f"rollout/failed_{reason}": float(n) for reason, n in failed.items()}
    return metrics


def version_age(batch: Batch, version: int) -> float:
    """Mean over trained tokens of how many versions before `version` each was sampled; NaN if there are none."""
    versions = [sample.policy_version[sample.loss_mask] for sample in batch.samples]
    return version - _mean(np.concatenate(versions)) if versions else float("nan")


def _mean(values: np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else float("nan")


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Pearson's r; NaN where either is constant."""
    if len(a) < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return float("nan")
    return float(np.corrcoef(a, b)[0, 1])


def _zero_signal(batch: Batch) -> int:
    """Groups with a scored rollout, none of whose rollouts has a signal."""
    groups = np.unique([item.rollout.group_id for item in batch.finished], return_inverse=True)[1]
    scored = ~np.isnan(batch.rewards)
    signal = np.bincount(groups, scored & has_signal(batch)) > 0
    return int(((np.bincount(groups, scored) > 0) & ~signal).sum())


def histograms(batch: Batch) -> dict[str, np.ndarray]:
    """Columns for TensorBoard: of rollouts, of samples, and of calls."""
    counts = np.array([len(merge.samples) for merge in batch.merges])
    trained = np.bincount(batch.owner, [s.loss_mask.sum() for s in batch.samples], minlength=len(counts))
    calls = [call for item in batch.finished for call in item.rollout.calls]
    recorded = [call.logprobs for call in calls if call.logprobs is not None]
    return {
        "rollout/reward": batch.rewards[~np.isnan(batch.rewards)],
        "rollout/advantage": batch.advantages[~np.isnan(batch.rewards)],
        "rollout/samples": counts,
        "rollout/tokens": trained,
        "rollout/calls": np.array([len(item.rollout.calls) for item in batch.finished]),
        "sample/tokens": np.array([len(sample.token_ids) for sample in batch.samples]),
        "call/response_tokens": np.array([len(call.response_ids) for call in calls]),
        "call/logprob": np.concatenate(recorded) if recorded else np.empty(0),
    }


def drift_share(batch: Batch, tokenizer: Tokenizer) -> float:
    """Share of non-empty responses whose ids do not survive decode and re-encode; NaN if there are none."""
    ids = [call.response_ids.tolist() for f in batch.finished for call in f.rollout.calls if len(call.response_ids)]
    if not ids:
        return float("nan")
    texts = tokenizer.decode_batch(ids, skip_special_tokens=False)
    again = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return float(np.mean([encoding.ids != row for encoding, row in zip(again, ids, strict=True)]))
