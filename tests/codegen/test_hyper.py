"""Kernels of hyper-connections against the operators' references, and equal bits whatever shares the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from ggufc.codegen.errors import CodegenError
from ggufc.codegen.kernels.hyper import BLOCK, HcIn, HcMix, HcPost, Sinkhorn
from ggufc.codegen.lower import lower
from ggufc.ir import Graph, TensorType
from ggufc.ir.dims import Sym
from ggufc.ir.ops.hyper import sinkhorn
from harness import build, run, runnable_targets

T = Sym("T")
TOKENS = 5
SITES = [HcIn(64, 4, 20, 0.0), HcIn(37, 2, 4, 1e-6), HcIn(48, 8, 3, 1e-3), HcIn(16, 3, 1, 0.0), HcIn(5, 1, 2, 1e-6), HcIn(0, 4, 6, 1e-6)]
MIXES = [HcMix(64, 4), HcMix(19, 3)]
WRITES = [HcPost(64, 4), HcPost(37, 2, True, 1e-5), HcPost(BLOCK + 24, 3, True, 1e-6), HcPost(2 * BLOCK, 2), HcPost(5, 8)]
MATRICES = [Sinkhorn(4, 20, 0.0), Sinkhorn(3, 3, 1e-6), Sinkhorn(8, 1, 0.0), Sinkhorn(16, 2, 1e-3)]
ALL = [*SITES, *MIXES, *WRITES, *MATRICES]


@pytest.fixture(scope="module", params=runnable_targets(), ids=lambda t: t.level)
def loaded(request):
    return request.param, build(ALL, request.param)


def name(spec):
    return f"{type(spec).__name__}-{spec.streams}"


def bits(a):
    return np.ascontiguousarray(a).view(np.uint32)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gates_of(m, scale, base, spec):
    s = spec.streams
    x = m.astype(np.float64) * np.repeat(scale.astype(np.float64), [s, s, s * s]) + base
    matrix = sinkhorn(x[:, 2 * s :].reshape(-1, s, s), spec.iterations, spec.eps)
    return np.concatenate([sigmoid(x[:, :s]) + spec.eps, 2 * sigmoid(x[:, s : 2 * s]), matrix.reshape(len(m), -1)], axis=1)


def site(spec, seed, tokens=TOKENS):
    rng = np.random.default_rng(seed)
    width = spec.streams * (spec.streams + 2)
    m = rng.normal(size=(tokens, width + 3)).astype(np.float32) * 2
    m[0] *= 20  # saturated gates, one-hot rows
    scale, base = (rng.normal(size=n).astype(np.float32) for n in (3, width))
    x = rng.normal(size=(tokens, spec.streams, spec.n)).astype(np.float32)
    return m, scale, base, x


@pytest.mark.parametrize("spec", SITES, ids=name)
def test_gates_and_what_a_sublayer_reads(loaded, spec):  # S47, S61
    target, image = loaded
    m, scale, base, x = site(spec, 1)
    width = m.shape[1] - 3
    args = [m, m.shape[1], scale, base, x, np.zeros((TOKENS, width), np.float32), np.zeros((TOKENS, spec.n), np.float32)]
    _, _, _, _, _, gates, y = run(spec, target, args, TOKENS, loaded=image)
    want = gates_of(m[:, :width], scale, base, spec)
    np.testing.assert_allclose(gates, want, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(y, np.einsum("ts,tse->te", want[:, : spec.streams], x), rtol=1e-4, atol=1e-5)
    alone = run(spec, target, [m[3:4].copy(), *args[1:4], x[3:4].copy(), args[5][:1], args[6][:1]], 1, loaded=image)
    assert (bits(alone[5][0]) == bits(gates[3])).all() and (bits(alone[6][0]) == bits(y[3])).all()


@pytest.mark.parametrize("tokens", [1, 14, 257])
@pytest.mark.parametrize("spec", [SITES[0], SITES[1]], ids=name)
def test_a_sublayer_equals_its_formula_for_any_number_of_tokens(loaded, spec, tokens):  # S61
    """Gates, what is read, and the streams written, each within 1e-5 of the composed form."""
    target, image = loaded
    post = next(w for w in WRITES if (w.n, w.streams) == (spec.n, spec.streams))
    m, scale, base, x = site(spec, 5, tokens)
    m[0] /= 20
    width = m.shape[1] - 3
    args = [m, m.shape[1], scale, base, x, np.zeros((tokens, width), np.float32), np.zeros((tokens, spec.n), np.float32)]
    gates, read = run(spec, target, args, tokens, loaded=image)[5:7]
    want = gates_of(m[:, :width], scale, base, spec)
    np.testing.assert_allclose(gates, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(read, np.einsum("ts,tse->te", want[:, : spec.streams], x), rtol=1e-5, atol=1e-5)
    rng = np.random.default_rng(6)
    y, w = rng.normal(size=(tokens, spec.n)).astype(np.float32), rng.normal(1, 0.2, size=spec.n).astype(np.float32)
    got = run(post, target, [x, y, spec.n, gates, w, np.zeros_like(x)], tokens * post.blocks, loaded=image)[5]
    if post.norm:
        y = y / np.sqrt((y.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + post.eps) * w
    s = spec.streams
    mixed = np.einsum("tuc,tue->tce", want[:, 2 * s :].reshape(-1, s, s), x)
    np.testing.assert_allclose(got, want[:, s : 2 * s, None] * y[:, None] + mixed, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", MATRICES, ids=name)
def test_matrices_become_doubly_stochastic(loaded, spec):  # S61
    target, image = loaded
    a = np.random.default_rng(2).normal(size=(7, spec.streams, spec.streams)).astype(np.float32) * 3
    got = run(spec, target, [a, np.zeros_like(a)], 7, loaded=image)[1]
    np.testing.assert_allclose(got, sinkhorn(a.astype(np.float64), spec.iterations, spec.eps), rtol=2e-5, atol=2e-6)
    if spec.eps == 0:
        np.testing.assert_allclose(got.sum(axis=1), 1, rtol=1e-5)  # it ends on columns


@pytest.mark.parametrize("spec", MIXES, ids=name)
def test_reading_with_given_gates(loaded, spec):
    target, image = loaded
    rng = np.random.default_rng(3)
    x, gates = rng.normal(size=(TOKENS, spec.streams, spec.n)).astype(np.float32), rng.random((TOKENS, spec.streams + 2)).astype(np.float32)
    got = run(spec, target, [x, gates, spec.streams + 2, np.zeros((TOKENS, spec.n), np.float32)], TOKENS, loaded=image)[3]
    np.testing.assert_allclose(got, np.einsum("ts,tse->te", gates[:, : spec.streams], x), rtol=1e-5, atol=1e-6)


@dataclass(frozen=True)
class InPlace(HcPost):
    """The result takes the place of the streams: the last argument is the first."""

    arg_names: ClassVar[tuple[str, ...]] = HcPost.arg_names[:-1]

    def emit(self, e):
        pointer = e.arg_ptr
        e.arg_ptr = lambda i: pointer(0 if i == 5 else i)
        super().emit(e)


@pytest.mark.parametrize("spec", WRITES, ids=name)
@pytest.mark.parametrize("inplace", [False, True])
def test_streams_after_a_sublayer(loaded, spec, inplace):  # S47, S61
    target, image = loaded
    rng = np.random.default_rng(4)
    s, n = spec.streams, spec.n
    x, y = rng.normal(size=(TOKENS, s, n)).astype(np.float32), rng.normal(size=(TOKENS, n + 1)).astype(np.float32)
    gates, w = rng.normal(size=(TOKENS, s * s + 2 * s)).astype(np.float32), rng.normal(1, 0.2, size=n).astype(np.float32)
    read = y[:, :n].astype(np.float64)
    if spec.norm:
        read = read / np.sqrt((read**2).mean(axis=1, keepdims=True) + spec.eps) * w
    want = gates[:, s : 2 * s, None] * read[:, None] + np.einsum("tuc,tue->tce", gates[:, 2 * s :].reshape(-1, s, s), x.astype(np.float64))

    def go(tokens):
        values = [x[tokens].copy(), y[tokens].copy(), n + 1, gates[tokens].copy(), w, x[tokens].copy()]
        return run(spec, target, values, len(x[tokens]) * spec.blocks, loaded=image)[5]

    if inplace:
        got = run(InPlace(spec.n, s, spec.norm, spec.eps), target, [x, y, n + 1, gates, w], TOKENS * spec.blocks)[0]
    else:
        got = go(slice(None))
        assert (bits(go(slice(2, 3))[0]) == bits(got[2])).all()
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def sublayer(norm=False, chosen=False):
    """Reading, a product, writing."""
    g = Graph("g", symbols=("T", "O", "C", "KV", "R"))
    x = g.add("relu", g.add("reshape", g.input("embd", "embd", TensorType("f32", (128, T))), ne=(32, 4, T)), name="streams")
    m = g.add("mul_mat", g.weight("fn", TensorType("f32", (128, 24))), g.add("reshape", x, ne=(128, T)), name="mixture")
    gates = g.add(
        "hc_pre", m, g.weight("scale", TensorType("f32", (3,))), g.weight("base", TensorType("f32", (24,))), name="gates", streams=4,
        iterations=5,
    )  # fmt: skip
    y = g.add("hc_mix", x, gates, name="read")
    y = g.add("mul_mat", g.weight("w", TensorType("f32", (32, 32))), y, name="sublayer")
    if norm:
        y = g.add("rms_norm_mul", y, g.weight("norm", TensorType("f32", (32,))), eps=1e-5, name="post_norm")
    if chosen:
        gates = g.add("get_rows", gates, g.input("out_ids", "out_ids", TensorType("i32", (Sym("O"),))), name="chosen")
        x = g.add("reshape", g.add("get_rows", g.add("reshape", x, ne=(128, T)), gates.operands[1]), ne=(32, 4, Sym("O")))
        y = g.add("get_rows", y, gates.operands[1])
    g.outputs["o"] = g.add("hc_post", x, y, gates, name="written")
    return g


def kinds(g):
    return [type(step.spec).__name__ for step in lower(g)[0].steps]


def test_a_sublayer_takes_two_launches_beside_its_products():
    assert kinds(sublayer()) == ["Elementwise", "MatMul", "HcIn", "MatMul", "HcPost"]
    assert kinds(sublayer(norm=True)) == ["Elementwise", "MatMul", "HcIn", "MatMul", "HcPost"]
    assert kinds(sublayer(chosen=True)).count("HcIn") == 1


def test_gates_that_something_else_reads_first_are_a_launch_of_their_own():
    g = sublayer()
    (gates,) = g.find("hc_pre")
    g.nodes.insert(g.nodes.index(gates) + 1, g.add("relu", gates, name="early"))
    g.nodes.pop()
    g.outputs["early"] = next(n for n in g.nodes if n.name == "early")
    assert kinds(g) == ["Elementwise", "MatMul", "HcIn", "Elementwise", "HcMix", "MatMul", "HcPost"]


def test_too_many_streams_are_refused():
    with pytest.raises(CodegenError, match="17 residual streams; kernels exist for 1 to 16"):
        HcIn(32, 17, 2, 0.0)
