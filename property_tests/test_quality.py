"""The strategies reach what they are meant to reach; a property over inputs that never drift proves nothing."""

from __future__ import annotations

from collections import Counter

import pytest

from harnessrl.adapter import SKIP_REASONS, explain_break, merge_calls, pack_tree
from property_tests.reference import context, path, starts_with
from property_tests.searching import drawn
from property_tests.strategies import answers, conversations, forests, rollouts
from property_tests.toy import ToyTokenizer

COUNT = 300
TOKENIZER = ToyTokenizer()


@pytest.fixture(scope="module")
def id_rollouts():
    return drawn(rollouts(), COUNT)


@pytest.fixture(scope="module")
def text_rollouts():
    return drawn(conversations(), COUNT)


def test_sampled_ids_drift_and_text_would_not():
    sampled = drawn(answers(), COUNT)
    texts = [TOKENIZER.decode(ids) for ids in sampled]
    assert sum(TOKENIZER.encode(text) != ids for text, ids in zip(texts, sampled, strict=True)) > COUNT / 5
    written = [TOKENIZER.encode(text) for text in texts if "\ufffd" not in text]
    assert all(TOKENIZER.encode(TOKENIZER.decode(ids)) == ids for ids in written)


def test_every_reason_to_skip_is_reached(id_rollouts):
    merges = [merge_calls(rollout, max_sample_tokens=9) for rollout in id_rollouts]
    reasons = Counter(skip.reason for merged in merges for skip in merged.skipped)
    assert min(reasons[reason] for reason in SKIP_REASONS) >= 5, reasons


def test_every_kind_of_break_is_reached(text_rollouts):
    breaks = [broken for rollout in text_rollouts for broken in merge_calls(rollout).breaks]
    kinds = Counter(explain_break(broken, TOKENIZER.decode).kind for broken in breaks)
    expected = ("retokenized", "template", "rewritten", "summarized", "branched", "unrelated")
    assert min(kinds[kind] for kind in expected) >= 5, kinds
    assert set(kinds) == set(expected)
    blind = Counter(explain_break(broken).kind for broken in breaks)
    assert min(blind[kind] for kind in ("branched", "unrelated", "diverged")) >= 5, blind
    assert len(blind) == 3


def test_chains_branches_and_late_arrivals_are_reached(id_rollouts):
    seen: Counter[str] = Counter()
    for rollout in id_rollouts:
        samples = merge_calls(rollout).samples
        prompts = [call.prompt_ids.tolist() for call in rollout.calls]
        contexts = [context(call) for call in rollout.calls]
        seen["a sample of three calls"] += any(len(sample.spans) > 2 for sample in samples)
        seen["three samples"] += len(samples) > 2
        seen["equal prompts"] += any(prompts.count(prompt) > 1 for prompt in prompts)
        seen["equal contexts"] += any(contexts.count(ids) > 1 for ids in contexts)
        seen["a late call"] += prompts != sorted(prompts, key=len)
        seen["fewer samples than adjacent merging"] += len(samples) < len(merge_calls(rollout, "adjacent").samples)
        seen["a context that two calls continue"] += any(
            sum(starts_with(prompt, ids) for prompt in prompts) > 1 for ids in contexts
        )
        seen["nothing to train"] += not samples
    assert len(seen) == 8 and min(seen.values()) >= 1, seen
    assert sorted(seen.values())[1] >= 15, seen


def test_responses_are_cut_and_characters_too(text_rollouts):
    calls = [call for rollout in text_rollouts for call in rollout.calls]
    assert sum(call.finish_reason == "length" for call in calls) >= 20
    assert sum("\ufffd" in TOKENIZER.decode(call.response_ids) for call in calls) >= 20


def test_trees_share_deeply():
    seen: Counter[str] = Counter()
    for pick in drawn(forests(), 100):
        packed = pack_tree(pick.samples, pick.order)
        owners = Counter(node for nodes in packed.nodes for node in nodes.tolist())
        children = Counter(packed.parent.tolist())
        prefixes = {(s.rollout_id, tuple(s.token_ids[:n])) for s in map(pick.samples.__getitem__, pick.order)
                    for n in range(1, len(s.token_ids) + 1)}  # fmt: skip
        seen["three samples on one node"] += max(owners.values(), default=0) >= 3
        seen["half of all tokens saved"] += packed.tokens_saved > packed.flat_tokens / 2
        seen["five tokens shared"] += sum(count > 1 for count in owners.values()) >= 5
        seen["a fork below a fork"] += any(
            children[node] > 1 and any(children[above] > 1 for above in path(packed, node)[:-1])
            for node in range(len(packed.parent))
        )
        seen["a token trained twice after one prefix"] += len(packed.token_ids) > len(prefixes)
        seen["a trained node that is context to another"] += any(packed.loss_mask[n] and owners[n] > 1 for n in owners)
        seen["several trees"] += int((packed.parent < 0).sum()) > 1
    assert len(seen) == 7 and min(seen.values()) >= 5, seen
