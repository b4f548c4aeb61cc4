"""pack and unpack lose nothing, and no label crosses a sample."""

from __future__ import annotations

from hypothesis import given

from harnessrl.adapter import pack, unpack
from property_tests.strategies import packs

COLUMNS = ("token_ids", "loss_mask", "logprobs", "policy_version")


@given(packs())
def test_unpacking_gives_back_the_samples_own_columns(drawn):
    samples, order = drawn.samples, drawn.order
    packed = pack(samples, order, weights=drawn.weights, advantages=drawn.advantages)
    for name in COLUMNS:
        columns = unpack(packed, name)
        assert [c.tolist() for c in columns] == [getattr(samples[i], name).tolist() for i in sorted(order)]
    for name, values in (("weights", drawn.weights), ("advantages", drawn.advantages)):
        expected = [[values[i] if mask else 0.0 for mask in samples[i].loss_mask] for i in sorted(order)]
        assert [c.tolist() for c in unpack(packed, name)] == expected


@given(packs())
def test_sequences_lie_end_to_end_and_count_from_zero(drawn):
    samples, order = drawn.samples, drawn.order
    packed = pack(samples, order)
    lengths = [len(samples[i].token_ids) for i in order]
    assert packed.cu_seqlens.tolist() == [sum(lengths[:n]) for n in range(len(order) + 1)]
    assert packed.position_ids.tolist() == [position for length in lengths for position in range(length)]
    assert len(packed.token_ids) == sum(lengths)


@given(packs())
def test_a_label_is_the_next_trained_token_of_the_same_sample(drawn):
    samples, order = drawn.samples, drawn.order
    labels = pack(samples, order).labels.tolist()
    expected = []
    for i in order:
        ids, mask = samples[i].token_ids.tolist(), samples[i].loss_mask.tolist()
        expected += [ids[t + 1] if mask[t + 1] else -100 for t in range(len(ids) - 1)] + [-100]
    assert labels == expected


@given(packs())
def test_every_token_knows_where_it_came_from(drawn):
    samples, order = drawn.samples, drawn.order
    packed = pack(samples, order)
    token = 0
    for i in order:
        spans = {t: span.call_id for span in samples[i].spans for t in range(span.start, span.stop)}
        for position in range(len(samples[i].token_ids)):
            origin = packed.origin(token)
            assert (origin.rollout_id, origin.sample) == (samples[i].rollout_id, i)
            assert (origin.call_id, origin.position) == (spans.get(position), position)
            token += 1
