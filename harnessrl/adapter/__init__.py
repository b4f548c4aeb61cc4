"""The sample adapter: from the calls of a rollout to the weights and packs that a trainer uses. Needs numpy only."""

from harnessrl.adapter.baselines import assign_credit, rollout_advantages
from harnessrl.adapter.drift import KINDS, Drift, explain_break
from harnessrl.adapter.merge import SKIP_REASONS, STRATEGIES, Tokenizer, merge_calls
from harnessrl.adapter.normalizers import token_weights
from harnessrl.adapter.packer import Origin, Packed, pack, unpack
from harnessrl.adapter.planner import Plan, Update, plan_updates
from harnessrl.adapter.types import Break, Call, Merge, Rollout, Sample, Skip, Span

__all__ = [
    "KINDS",
    "SKIP_REASONS",
    "STRATEGIES",
    "Break",
    "Call",
    "Drift",
    "Merge",
    "Origin",
    "Packed",
    "Plan",
    "Rollout",
    "Sample",
    "Skip",
    "Span",
    "Tokenizer",
    "Update",
    "assign_credit",
    "explain_break",
    "merge_calls",
    "pack",
    "plan_updates",
    "rollout_advantages",
    "token_weights",
    "unpack",
]
