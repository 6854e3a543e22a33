"""The kernels of unfused graphs: softmax, sums, strided products, row selection, sorting, masks."""

from __future__ import annotations

import numpy as np
import pytest

from ggufc.codegen.errors import CodegenError
from ggufc.codegen.kernels.select import GetRowsPlain, KqMask, TopK
from ggufc.codegen.kernels.softmax import SoftMax, SumRows
from ggufc.codegen.kernels.strided import Strided, contiguous
from ggufc.codegen.kernels.strided_matmul import StridedMatMul
from ggufc.ir.dims import Sym
from harness import build, run, runnable_targets
from strided_reference import buffer, repeated, tiles, values, view

T, KV = Sym("T"), Sym("KV")
C = contiguous
ENV = {"T": 5, "KV": 40, "R": 30}
SOFTMAX = [
    SoftMax(C("f32", (KV, T, 3)), C("f32", (KV, T, 3)), 0.3, C("f32", (KV, T))),
    SoftMax(C("f32", (7, T)), C("f32", (7, T))),
    SoftMax(Strided("f32", (33, 2), (1, 50), 4), C("f32", (33, 2)), 2.0, C("f16", (33,))),
    SoftMax(C("f32", (KV, T, 3)), C("f32", (KV, T, 3)), 0.3, C("f32", (KV, T)), sinks=True),
]
SUMS = [
    SumRows(C("f32", (1, T)), C("f32", (1, T))),
    SumRows(Strided("f16", (4096, 2), (1, 4100)), C("f32", (1, 2))),
    SumRows(Strided("f32", (19, T, 2), (T, 1, 19 * T)), C("f32", (1, T, 2))),
]
# The attention of the unfused llama: K and V views of a cache [D*G, C] with D = 16, G = 2 and H = 6 heads.
PRODUCTS = [
    StridedMatMul(Strided("f16", (16, KV, 2), (1, 32, 16)), Strided("f32", (16, T, 6), (1, 96, 16)), C("f32", (KV, T, 6))),
    StridedMatMul(Strided("f16", (KV, 16, 2), (32, 1, 16)), C("f32", (KV, T, 6)), C("f32", (16, T, 6))),
    StridedMatMul(C("f32", (37, 9)), C("f32", (37, T, 2, 3)), C("f32", (9, T, 2, 3))),
    StridedMatMul(Strided("bf16", (8, 5), (7, 3)), C("f32", (8, T)), Strided("f32", (5, T), (2, 12))),
]
ROWS = [
    GetRowsPlain(C("f32", (50, 9)), C("i32", (T,)), C("f32", (50, T))),
    GetRowsPlain(C("bf16", (16, T)), C("i32", (3,)), C("f32", (16, 3))),
    GetRowsPlain(Strided("f16", (6, 8), (8, 1)), Strided("i32", (T,), (2,)), C("f32", (6, T))),
    GetRowsPlain(C("f32", (1, 8, T)), C("i32", (3, T)), C("f32", (1, 3, T))),
    GetRowsPlain(C("i32", (5, 7)), C("i32", (T,)), C("i32", (5, T))),
]
SORTS = [TopK(C("f32", (n, 2)), n, order) for n in (1, 2, 1023, 1025) for order in ("asc", "desc")]
SORTS += [TopK(C("f32", (60, T)), 4), TopK(Strided("f32", (KV, T), (T, 1)), KV)]
SORTS += [TopK(C("f32", (65536,)), 65536), TopK(C("f32", (32, 3)), 1)]
MASK = KqMask(KV)


@pytest.fixture(scope="module", params=runnable_targets(), ids=lambda t: t.level)
def loaded(request):
    return request.param, build([*SOFTMAX, *SUMS, *PRODUCTS, *ROWS, *SORTS, MASK], request.param)


@pytest.mark.parametrize("spec", SOFTMAX, ids=range(len(SOFTMAX)))
def test_softmax(loaded, spec):
    target, image = loaded
    rng = np.random.default_rng(21)
    a, out = buffer(spec.a, ENV, rng), buffer(spec.out, ENV, rng)
    shape = view(spec.out, out, ENV).shape
    z = values(spec.a, a, ENV).astype(np.float64) * spec.scale
    mask = None
    if spec.mask:
        mask = np.where(buffer(spec.mask, ENV, rng) > 1, -np.inf, 0).astype(np.float16 if spec.mask.dtype == "f16" else np.float32)
        mask[0] = 0
        z = z + repeated(values(spec.mask, mask, ENV), shape)
    sinks = np.array([-2.0, 1.0, 7.0], np.float32)
    with np.errstate(invalid="ignore"):
        top = np.maximum(z.max(-1, keepdims=True), sinks[:, None, None] if spec.sinks else -np.inf)
        p = np.exp(z - top)
        want = p / (p.sum(-1, keepdims=True) + (np.exp(sinks[:, None, None] - top) if spec.sinks else 0))
    got = run(spec, target, [a, out, mask, sinks], tiles(spec.grid(), ENV), loaded=image, **ENV)[1]
    np.testing.assert_allclose(view(spec.out, got, ENV), want, rtol=2e-6, atol=1e-7)


def test_softmax_padding_changes_no_bit_and_hidden_rows_are_zero(loaded):
    target, image = loaded
    spec = SOFTMAX[0]
    rng = np.random.default_rng(22)
    a = rng.normal(size=(3, 5, 104)).astype(np.float32)
    mask = np.full((5, 104), -np.inf, np.float32)
    mask[:4, :29] = 0
    results = []
    for kv in (32, 40, 104):
        env = {"T": 5, "KV": kv}
        args = [a[:, :, :kv].copy(), np.zeros((3, 5, kv), np.float32), mask[:, :kv].copy(), None]
        results.append(run(spec, target, args, tiles(spec.grid(), env), loaded=image, **env)[1])
        assert (results[-1][:, :, 29:] == 0).all() and (results[-1][:, 4] == 0).all()
    assert (results[0][:, :, :29].view(np.uint32) == results[1][:, :, :29].view(np.uint32)).all()
    assert (results[0][:, :, :29].view(np.uint32) == results[2][:, :, :29].view(np.uint32)).all()


@pytest.mark.parametrize("spec", SUMS, ids=range(len(SUMS)))
def test_sum_rows(loaded, spec):  # S60
    target, image = loaded
    rng = np.random.default_rng(23)
    a, out = buffer(spec.a, ENV, rng), buffer(spec.out, ENV, rng)
    got = run(spec, target, [a, out], tiles(spec.grid(), ENV), loaded=image, **ENV)[1]
    want = values(spec.a, a, ENV).astype(np.float64).sum(-1, keepdims=True)
    np.testing.assert_allclose(view(spec.out, got, ENV), want, rtol=1e-6)


@pytest.mark.parametrize("spec", PRODUCTS, ids=range(len(PRODUCTS)))
def test_strided_products(loaded, spec):
    target, image = loaded
    rng = np.random.default_rng(24)
    a, b, out = (buffer(x, ENV, rng) for x in (spec.a, spec.b, spec.out))
    got = run(spec, target, [a, b, out], tiles(spec.grid(), ENV), loaded=image, **ENV)[2]
    left, right = values(spec.a, a, ENV).astype(np.float64), values(spec.b, b, ENV).astype(np.float64)
    left = np.repeat(left, right.shape[1] // left.shape[1], 1)
    left = np.repeat(left, right.shape[0] // left.shape[0], 0)
    np.testing.assert_allclose(view(spec.out, got, ENV), right @ np.swapaxes(left, -1, -2), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("spec", ROWS, ids=range(len(ROWS)))
def test_get_rows(loaded, spec):
    target, image = loaded
    rng = np.random.default_rng(25)
    a, idx, out = (buffer(x, ENV, rng) for x in (spec.a, spec.idx, spec.out))
    idx = rng.integers(0, view(spec.a, a, ENV).shape[2], idx.shape).astype(np.int32)
    got = run(spec, target, [a, idx, out], tiles(spec.grid(), ENV), loaded=image, **ENV)[2]
    source, chosen = values(spec.a, a, ENV)[0], view(spec.idx, idx, ENV)[0, 0]
    want = np.stack([source[t][chosen[t]] for t in range(len(source))])[None]
    assert (view(spec.out, got, ENV) == want).all()


@pytest.mark.parametrize("spec", SORTS, ids=lambda s: f"{s.a.ne[0]}-{s.k}-{s.order}")
def test_sorting(loaded, spec):  # S64
    target, image = loaded
    rng = np.random.default_rng(26)
    a = buffer(spec.a, ENV, rng)
    a[:] = np.round(a * 20) / 20  # many ties
    a[rng.random(a.shape) < 0.05] = -0.0
    rows = values(spec.a, a, ENV)
    k = ENV["KV"] if spec.k is KV else spec.k
    out = np.zeros((*rows.shape[:-1], k), np.int32)
    got = run(spec, target, [a, out], tiles(spec.grid(), ENV), loaded=image, **ENV)[1]
    want = np.argsort(-rows if spec.order == "desc" else rows, axis=-1, kind="stable")[..., :k]
    assert (got == want).all()


def test_mask_shows_exactly_the_visible_cells(loaded):
    target, image = loaded
    rng = np.random.default_rng(27)
    cells = rng.permutation(40)[:30].astype(np.int32)
    visible = np.array([[0, 0, 12], [0, 5, 13], [12, 0, 18], [12, 17, 18], [3, 4, 4]], np.int32)
    got = run(MASK, target, [cells, visible, np.ones((5, 40), np.float32)], 5, loaded=image, **ENV)[2]
    want = np.full((5, 40), -np.inf, np.float32)
    for t, (base, lo, hi) in enumerate(visible):
        want[t, cells[base + lo : base + hi]] = 0
    assert (got == want).all()


def test_refusals():
    with pytest.raises(CodegenError, match=r"outside 1\.\.8"):
        TopK(C("f32", (8,)), 9)
    with pytest.raises(CodegenError, match="insert a cont"):
        SoftMax(Strided("f32", (4, 4), (4, 1)), C("f32", (4, 4)))
    with pytest.raises(CodegenError, match="not a multiple"):
        StridedMatMul(C("f32", (4, 4, 2)), C("f32", (4, 4, 3)), C("f32", (4, 4, 3)))
    with pytest.raises(CodegenError, match="do not give"):
        GetRowsPlain(C("f32", (4, 4)), C("i32", (2,)), C("f32", (4, 3)))
