"""Choosing tokens: literal distributions, truncation, and noise that belongs to the request alone."""

import numpy as np
import pytest
import torch

from harnessrl.engine.sampling import choose, truncate, uniform
from harnessrl.service.wire import Sampling

# P = (1/2, 1/4, 1/8, 1/8)
LOGITS = torch.log(torch.tensor([[0.5, 0.25, 0.125, 0.125]]))


def test_uniform_repeats_and_differs_by_key_and_position():
    keys = np.array([1, 1, 2, 2**64 - 1], np.uint64)
    u = uniform(keys, np.array([0, 1, 0, 0]))
    assert np.array_equal(u, uniform(keys, np.array([0, 1, 0, 0])))
    assert len(set(u.tolist())) == 4
    assert ((u >= 0) & (u < 1)).all()


def test_uniform_is_uniform():
    u = uniform(np.arange(20_000, dtype=np.uint64), np.zeros(20_000, np.int64))
    counts = np.histogram(u, 10, (0, 1))[0]
    assert ((counts - 2000) ** 2 / 2000).sum() < 27.9  # chi-square, 9 degrees of freedom, p = 0.001
    v = uniform(np.full(20_000, 5, np.uint64), np.arange(20_000))
    assert abs(np.corrcoef(v[:-1], v[1:])[0, 1]) < 0.03


def test_tokens_follow_the_distribution():
    rows = 8000
    samplings = [Sampling(max_tokens=1, noise=i) for i in range(rows)]
    token, logprob = choose(LOGITS.expand(rows, 4), samplings, [0] * rows)
    share = np.bincount(token, minlength=4) / rows
    assert np.abs(share - [0.5, 0.25, 0.125, 0.125]).max() < 0.02
    assert np.allclose(logprob, np.log([0.5, 0.25, 0.125, 0.125])[token], atol=1e-6)


def test_logprobs_are_of_the_tempered_distribution():
    # B17: logits [2, 0] at T = 0.5 give token 0 a logprob of -0.0181499; raw would be -0.1269280.
    _, logprob = choose(torch.tensor([[2.0, 0.0]]), [Sampling(max_tokens=1, temperature=0.5, noise=1)], [0])
    assert logprob[0] == pytest.approx(-0.0181499, abs=1e-6)


def test_greedy_is_untempered():
    token, logprob = choose(torch.tensor([[2.0, 0.0]]), [Sampling(max_tokens=1, temperature=0.0)], [0])
    assert (token[0], logprob[0]) == (0, pytest.approx(-0.1269280, abs=1e-6))


@pytest.mark.parametrize(
    ("top_k", "top_p", "expected"),
    [
        (0, 1.0, [0.5, 0.25, 0.125, 0.125]),
        (2, 1.0, [2 / 3, 1 / 3, 0, 0]),
        (0, 0.5, [1, 0, 0, 0]),
        (0, 0.51, [2 / 3, 1 / 3, 0, 0]),
        (0, 1e-9, [1, 0, 0, 0]),
        (3, 0.6, [2 / 3, 1 / 3, 0, 0]),  # top_p of what top_k left: 4/7 is below 0.6
        (1, 1.0, [1, 0, 0, 0]),
    ],
)
def test_truncation_keeps_and_renormalises(top_k, top_p, expected):
    got = truncate(LOGITS, torch.tensor([top_k]), torch.tensor([top_p])).exp()[0]
    assert np.allclose(got, expected, atol=1e-6)


def test_a_row_does_not_depend_on_the_rest_of_the_batch():
    torch.manual_seed(0)
    logits = torch.randn(6, 50)
    samplings = [Sampling(max_tokens=1, noise=i * 77) for i in range(6)]
    together, _ = choose(logits, samplings, [3] * 6)
    alone = [choose(logits[i : i + 1], [samplings[i]], [3])[0][0] for i in range(6)]
    assert together.tolist() == alone


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_tokens", 0), ("temperature", -1.0), ("temperature", float("nan")), ("temperature", float("inf")),
     ("top_p", 0.0), ("top_p", 1.5), ("top_k", -1), ("noise", -1), ("noise", 2**64)],
)  # fmt: skip
def test_bad_sampling_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        Sampling(**{"max_tokens": 1} | {field: value})
