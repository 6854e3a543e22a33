"""Expert routing against its reference: every gate, ties, tails of vectors, and equal bits alone and in a batch."""

from __future__ import annotations

import numpy as np
import pytest

from ggufc.codegen.kernels.routing import Route
from ggufc.codegen.lower import lower
from ggufc.ir import Graph, TensorType
from ggufc.ir.dims import Sym
from ggufc.ir.ops.routing import gated
from harness import build, run, runnable_targets
from strided_reference import tiles

T = Sym("T")
TOKENS = 40
SPECS = [
    Route(64, 8, T, "sigmoid", True, normalise="sum", scale=2.5),
    Route(256, 6, T, "sqrt_softplus", True, normalise="sum", scale=1.5),
    Route(6, 2, T, "softmax", normalise="sum"),
    Route(33, 4, T, "none", normalise="softmax"),
    Route(128, 8, T, "softmax"),
    Route(5, 5, T, "sigmoid", weigh=False),
    Route(48, 3, T, "sqrt_softplus", choose=False, normalise="sum"),
]


@pytest.fixture(scope="module", params=runnable_targets(), ids=lambda t: t.level)
def loaded(request):
    return request.param, build(SPECS, request.param)


def route(loaded, spec, scores, bias, ids):
    target, image = loaded
    n = len(scores)
    padded = np.zeros((n, spec.n + 3), np.float32)
    padded[:, : spec.n] = scores
    args = [padded, spec.n + 3, bias, np.zeros((n, spec.n), np.float32), ids, np.zeros((n, spec.k), np.float32)]
    out = run(spec, target, args, tiles(spec.grid(), {"T": n}), loaded=image, T=n)
    return out[4], out[5]


def case(spec, seed=1):
    rng = np.random.default_rng(seed)
    scores = np.round(rng.normal(size=(TOKENS, spec.n)) * 4).astype(np.float32) / 4  # ties
    scores[1], scores[2] = 0, -40  # nothing but ties, probabilities that vanish
    return (
        scores,
        (np.round(rng.normal(size=spec.n) * 8) / 32).astype(np.float32),
        rng.integers(0, spec.n, (TOKENS, spec.k)).astype(np.int32),
    )


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.gate}-{s.n}")
def test_choice_and_weights(loaded, spec):  # S64
    scores, bias, given = case(spec)
    ids, weights = route(loaded, spec, scores, bias, given.copy())
    p = gated(scores.astype(np.float64), spec.gate)
    if spec.choose:
        c = p.astype(np.float32) + (bias if spec.bias else 0)
        best = np.sort(c, axis=1)[:, ::-1][:, : spec.k]
        # Equal scores have equal probabilities: among those the lowest numbers win, in order.
        np.testing.assert_allclose(np.take_along_axis(c, ids.astype(int), 1), best, rtol=1e-5, atol=1e-6)
        assert ids[1].tolist() == (np.argsort(-bias, kind="stable")[: spec.k] if spec.bias else np.arange(spec.k)).tolist()
        assert all(len(set(row)) == spec.k for row in ids.tolist())
    else:
        assert (ids == given).all()
    if spec.weigh:
        w = np.take_along_axis(p, ids.astype(int), axis=1)
        if spec.normalise == "softmax":
            w = np.exp(w - w.max(axis=1, keepdims=True))
        if spec.normalise != "none":
            w = w / w.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(weights, spec.scale * w, rtol=2e-5, atol=1e-7)


FORMULAS = {"sigmoid": lambda x: 1 / (1 + np.exp(-x)), "sqrt_softplus": lambda x: np.sqrt(np.log1p(np.exp(x)))}


@pytest.mark.parametrize("spec", [SPECS[0], SPECS[1], SPECS[6]], ids=lambda s: f"{s.gate}-{s.n}")
def test_weights_are_those_of_the_formula_from_minus_to_plus_eighty(loaded, spec):  # S48, S88
    """The bias decides who is chosen, also against scores of the other sign, and is no part of the weights."""
    rng = np.random.default_rng(5)
    scores = rng.uniform(-80, 80, (TOKENS, spec.n)).astype(np.float32)
    scores[0], scores[1], scores[2] = -80, 80, np.where(np.arange(spec.n) % 2, 80, -80)
    scores[3] = np.linspace(-80, 80, spec.n)
    scores[4:20] = rng.normal(size=(16, spec.n)) * 3
    bias = (0.29 * (rng.permutation(spec.n) - spec.n // 2)).astype(np.float32)  # no two gates of 0 or 1 tie with it
    given = rng.permuted(np.tile(np.arange(spec.n, dtype=np.int32), (TOKENS, 1)), axis=1)[:, : spec.k].copy()
    ids, weights = route(loaded, spec, scores, bias, given)
    p = FORMULAS[spec.gate](scores.astype(np.float64))
    if spec.choose:
        best = np.argsort(-(p + bias), axis=1, kind="stable")[:, : spec.k]
        assert (np.sort(ids, axis=1) == np.sort(best, axis=1)).all()
        assert (np.sort(best, axis=1) != np.sort(np.argsort(-p, axis=1, kind="stable")[:, : spec.k], axis=1)).any(axis=1).mean() > 0.5
    w = np.take_along_axis(p, ids.astype(int), axis=1)
    assert np.isfinite(weights).all() and (weights[0] > 0).all()
    np.testing.assert_allclose(weights / spec.scale, w / w.sum(axis=1, keepdims=True), rtol=0, atol=1e-6)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.gate}-{s.n}")
def test_a_token_is_routed_alike_alone_and_in_a_batch(loaded, spec):
    scores, bias, given = case(spec, 2)
    ids, weights = route(loaded, spec, scores, bias, given.copy())
    for t in (0, 17, 39):
        alone = route(loaded, spec, scores[t : t + 1], bias, given[t : t + 1].copy())
        assert (alone[0][0] == ids[t]).all() and (alone[1][0].view(np.uint32) == weights[t].view(np.uint32)).all()


def test_scores_that_are_no_numbers_give_numbers_of_experts(loaded):
    scores, bias, given = case(SPECS[0])
    scores[:] = np.nan
    ids, _ = route(loaded, SPECS[0], scores, bias, given)
    assert ((ids >= 0) & (ids < SPECS[0].n)).all()


def test_choice_and_weights_are_one_launch():
    g = Graph("g", symbols=("T", "O", "C", "KV", "R"))
    scores = g.add("relu", g.input("embd", "embd", TensorType("f32", (8, T))), name="scores")
    ids = g.add("expert_choice", scores, g.weight("bias", TensorType("f32", (8,))), k=2, gate="sigmoid", name="ids")
    g.outputs["w"] = g.add("expert_weights", scores, ids, gate="sigmoid", normalise="sum", name="weights")
    (step,) = (s for s in lower(g)[0].steps if isinstance(s.spec, Route))
    assert step.spec == Route(8, 2, T, "sigmoid", True, normalise="sum") and step.writes == (3, 4, 5)
    g.outputs["other"] = g.add("expert_weights", scores, ids, gate="none", name="raw")
    assert sum(isinstance(s.spec, Route) for s in lower(g)[0].steps) == 2
