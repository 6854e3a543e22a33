"""The sampling chain: each step on small numbers, and the distribution it draws."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ggufc.runtime import sampling
from ggufc.runtime.errors import RuntimeRefusal
from ggufc.runtime.sampling import GREEDY, Sampler, SamplingOptions

LOGITS = np.log(np.array([0.05, 0.4, 0.1, 0.25, 0.2], np.float32))
OFF = dict(temp=1.0, top_k=0, top_p=1.0, min_p=0.0)


def test_greedy_takes_the_lowest_id_on_ties():
    assert sampling.greedy(np.array([1, 3, 3, 2], np.float32)) == 1
    assert Sampler(GREEDY).sample(LOGITS) == 1


def test_defaults_are_llama_cpps():
    o = SamplingOptions()
    assert (o.temp, o.top_k, o.top_p, o.min_p, o.repeat_penalty, o.repeat_last_n) == (0.8, 40, 0.95, 0.05, 1.0, 64)


def kept(**options) -> list[int]:
    return sampling.distribution(LOGITS, SamplingOptions(**{**OFF, **options}))[0].tolist()


def test_each_step_alone():
    assert kept() == [1, 3, 4, 2, 0]
    assert kept(top_k=2) == [1, 3]
    assert kept(top_p=0.6) == [1, 3]
    assert kept(top_p=0.66) == [1, 3, 4]
    assert kept(top_p=0.0) == [1]
    assert kept(min_p=0.45) == [1, 3, 4]
    assert kept(min_p=1.0) == [1]


def test_top_p_counts_what_top_k_left():
    assert kept(top_k=3, top_p=0.75) == [1, 3]  # 0.4 / 0.85 + 0.25 / 0.85 > 0.75


def test_temperature_comes_last():
    ids, probs = sampling.distribution(LOGITS, SamplingOptions(**{**OFF, "temp": 0.5, "min_p": 0.45}))
    want = np.array([0.4, 0.25, 0.2]) ** 2
    assert ids.tolist() == [1, 3, 4] and np.allclose(probs, want / want.sum())


def test_repeat_penalty_moves_logits_towards_unlikely_once_per_token():
    out = sampling.penalize(np.array([2.0, -2.0, 1.0], np.float32), [0, 0, 1, 7, -3], 2.0)
    assert out.tolist() == [1.0, -4.0, 1.0]
    sampler = Sampler(SamplingOptions(temp=0, repeat_penalty=4.0, repeat_last_n=2))
    logits = np.array([3.0, 2.0, 1.0], np.float32)
    assert [sampler.sample(logits) for _ in range(4)] == [0, 1, 2, 0]
    assert Sampler(SamplingOptions(temp=0, repeat_penalty=4.0, repeat_last_n=0)).sample(logits) == 0
    everything = Sampler(SamplingOptions(temp=0, repeat_penalty=4.0, repeat_last_n=-1))
    everything.accept([0] + [2] * 100)
    assert everything.sample(logits) == 1


def test_draws_follow_the_distribution_and_the_seed():
    a, b = (Sampler(SamplingOptions(**OFF, seed=3)) for _ in range(2))
    draws = [a.sample(LOGITS) for _ in range(4000)]
    assert draws == [b.sample(LOGITS) for _ in range(4000)]
    assert np.allclose(np.bincount(draws, minlength=5) / 4000, np.exp(LOGITS), atol=0.03)


@given(arrays(np.float32, st.integers(1, 40), elements=st.integers(-5, 5).map(float)), st.integers(0, 45))
def test_top_k_is_a_stable_sort(logits, k):
    want = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: k or len(logits)]
    assert sampling.top_k(logits, k).tolist() == want


def test_top_k_of_a_large_vocabulary_takes_the_short_way():
    logits = np.random.default_rng(0).standard_normal(262144).astype(np.float32)
    logits[[5, 300, 262143]] = 9.0  # ties in different blocks
    assert sampling.top_k(logits, 40).tolist() == np.argsort(-logits, kind="stable")[:40].tolist()


@pytest.mark.parametrize(
    "bad", [{"temp": float("nan")}, {"top_p": -0.1}, {"min_p": 1.5}, {"repeat_penalty": 0.0}, {"repeat_last_n": -2}, {"temp": "hot"}]
)
def test_bad_options_are_named(bad):
    with pytest.raises(RuntimeRefusal, match=next(iter(bad))):
        SamplingOptions(**bad)


def test_logits_that_are_not_numbers_are_refused():
    bad = np.full(300, np.nan, np.float32)
    for options in (GREEDY, SamplingOptions(), SamplingOptions(top_k=0)):
        with pytest.raises(RuntimeRefusal, match=r"not finite numbers|not numbers"):
            Sampler(options).sample(bad)
