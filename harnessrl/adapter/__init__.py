"""The sample adapter: from the calls of a rollout to the weights and packs that a trainer uses. Needs numpy only."""

from harnessrl.adapter.baselines import (
    ESTIMATORS,
    SCHEMES,
    UNITS,
    assign_credit,
    rollout_advantages,
    token_advantages,
    zero_signal_groups,
)
from harnessrl.adapter.drift import KINDS, Drift, explain_break
from harnessrl.adapter.importers import from_agent_lightning, from_vllm_chat, from_vllm_completions
from harnessrl.adapter.merge import SKIP_REASONS, STRATEGIES, Tokenizer, merge_calls
from harnessrl.adapter.normalizers import MODES, token_weights
from harnessrl.adapter.packer import IGNORE, Origin, Packed, pack, unpack
from harnessrl.adapter.planner import Plan, Update, plan_updates
from harnessrl.adapter.tree import PackedTree, ancestor_mask, pack_tree, tree_items, unpack_tree
from harnessrl.adapter.types import Break, Call, Merge, Rollout, Sample, Skip, Span

__all__ = [
    "ESTIMATORS",
    "IGNORE",
    "KINDS",
    "MODES",
    "SCHEMES",
    "SKIP_REASONS",
    "STRATEGIES",
    "UNITS",
    "Break",
    "Call",
    "Drift",
    "Merge",
    "Origin",
    "Packed",
    "PackedTree",
    "Plan",
    "Rollout",
    "Sample",
    "Skip",
    "Span",
    "Tokenizer",
    "Update",
    "ancestor_mask",
    "assign_credit",
    "explain_break",
    "from_agent_lightning",
    "from_vllm_chat",
    "from_vllm_completions",
    "merge_calls",
    "pack",
    "pack_tree",
    "plan_updates",
    "rollout_advantages",
    "token_advantages",
    "token_weights",
    "tree_items",
    "unpack",
    "unpack_tree",
    "zero_signal_groups",
]
