"""Kernels of sparse attention: indexer, lists, masks, transforms and sums, against their formulas; equal bits whatever shares the batch."""

from __future__ import annotations

import numpy as np
import pytest

from cell_lists import two_lists
from ggufc.codegen.errors import CodegenError
from ggufc.codegen.kernels.decode import DecodeRows
from ggufc.codegen.kernels.hadamard import Hadamard
from ggufc.codegen.kernels.indexer import ENTRIES, IndexerScores, IndexerSelect
from ggufc.codegen.kernels.lists import Blend, Fill, ListSpans, MaskToIndex
from ggufc.codegen.kernels.select import TopK
from ggufc.codegen.kernels.strided import Strided, contiguous
from ggufc.codegen.kernels.sums import SumRowsExt
from ggufc.formats.quants.dequantize import dequantize
from ggufc.formats.quants.quantize import quantize
from ggufc.ir.dims import Sym
from harness import build, run, runnable_targets
from strided_reference import buffer, tiles, values, view

T, KV = Sym("T"), Sym("KV")
C = contiguous
ENV = {"T": 5, "KV": 40, "R": 30}

SCORES = [IndexerScores(32, 8, "f16"), IndexerScores(64, 5, "q8_0"), IndexerScores(16, 1, "f32"), IndexerScores(128, 33, "bf16")]
SELECTS = [IndexerSelect(k, sinks, ties) for k in (1, 8, 40) for sinks in (0, 1) for ties in ("lowest", "highest")] + [IndexerSelect(700)]
TRANSFORMS = [Hadamard(C("f32", (n, 3, T)), n, C("f32", (n, 3, T))) for n in (1, 2, 8, 64, 128, 256, 512)]
TRANSFORMS += [Hadamard(Strided("f32", (64, T), (1, 70), 3), 16, C("f32", (64, T))), Hadamard(C("f16", (32, T)), 32, C("f32", (32, T)))]
SUMS = [
    SumRowsExt(C("f32", (n, 4, T)), 1, C("f32", (n, 1, T))) for n in (1, 15, 16, 4096)
] + [
    SumRowsExt(C("f32", (KV, T, 3)), 2, C("f32", (KV, T, 1))),
    SumRowsExt(Strided("f16", (19, 4, T), (1, 40, 200), 7), 1, C("f32", (19, 1, T))),
    SumRowsExt(Strided("f32", (6, 4, 3), (12, 3, 1)), 2, C("f32", (6, 4, 1))),
    SumRowsExt(C("f32", (5, 2, 3, 4)), 3, C("f32", (5, 2, 3))),
]  # fmt: skip
FILLS = [Fill(-1e30, C("f32", (KV, T))), Fill(0.5, C("f16", (17,)))]
BLENDS = [
    Blend(C("f32", (KV, T)), C("i32", (7, T)), 0.0, C("f32", (KV, T))),
    Blend(Strided("f16", (KV, T), (T, 1)), Strided("i32", (1, T), (1, 3)), 2.5, C("f32", (KV, T))),
]
INDICES = [MaskToIndex(C("f32", (KV, T)), 12), MaskToIndex(C("f16", (KV, T)), 40)]
SPANS = ListSpans(6)
SHORT = [TopK(C("f32", (KV, T)), 64), TopK(C("f32", (KV, T)), 64, "desc", "highest"), TopK(C("f32", (KV, T)), 9, "desc", "highest")]
DECODE = [DecodeRows(64, dtype) for dtype in ("q8_0", "q5_1", "q4_0", "iq4_nl")]
ALL = [*SCORES, *SELECTS, *TRANSFORMS, *SUMS, *FILLS, *BLENDS, *INDICES, SPANS, *SHORT, *DECODE]


@pytest.fixture(scope="module", params=runnable_targets(), ids=lambda t: t.level)
def loaded(request):
    return request.param, build(ALL, request.param)


class Scoring:
    """Queries, weights and a key cache of an indexer."""

    def __init__(self, spec, seed, n_tokens, length, n_cells=200):
        rng = np.random.default_rng(seed)
        self.spec = spec
        self.q = rng.normal(size=(n_tokens, spec.heads, spec.d)).astype(np.float32)
        self.w = rng.normal(size=(n_tokens, spec.heads)).astype(np.float32)
        self.raw = quantize(spec.dtype, rng.normal(size=(n_cells, spec.d)).astype(np.float32))
        self.keys = dequantize(spec.dtype, self.raw, spec.d)
        self.cells, self.visible = two_lists(rng, n_tokens, length, n_cells)

    def run(self, loaded, tokens=slice(None), move=None):
        target, image = loaded
        q, w, visible = self.q[tokens], self.w[tokens], self.visible[tokens]
        raw, cells = self.raw, self.cells
        if move is not None:
            raw = np.empty_like(self.raw)
            raw[move] = self.raw
            cells = move[cells].astype(np.int32)
        n, length = len(q), len(cells)
        ldq, ldw = self.spec.heads * self.spec.d + 5, self.spec.heads + 3
        padded_q, padded_w = np.zeros((n, ldq), np.float32), np.zeros((n, ldw), np.float32)
        padded_q[:, : ldq - 5], padded_w[:, : ldw - 3] = q.reshape(n, -1), w
        scores = np.full((n, -(-length // 16) * 16), np.nan, np.float32)
        args = [padded_q, ldq, padded_w, ldw, raw, cells, visible, scores]
        return run(self.spec, target, args, -(-length // ENTRIES), loaded=image, T=n, R=length)[7]

    def seen(self, t):
        base, lo, hi = self.visible[t]
        return slice(base + lo, base + hi)

    def reference(self, t):
        rows = self.keys[self.cells[self.seen(t)]].astype(np.float64)
        return self.w[t].astype(np.float64) @ np.maximum(self.q[t].astype(np.float64) @ rows.T, 0)


@pytest.mark.parametrize("spec", SCORES, ids=lambda s: f"{s.d}x{s.heads}-{s.dtype}")
@pytest.mark.parametrize("length", [1, 16, 75])
def test_scores_of_visible_entries(loaded, spec, length):  # S63, S150
    case = Scoring(spec, 1, 7, length)
    got = case.run(loaded)
    for t in range(7):
        np.testing.assert_allclose(got[t, case.seen(t)], case.reference(t), rtol=1e-5, atol=2e-4)


def test_a_score_has_the_same_bits_alone_and_wherever_its_cell_lies(loaded):
    case = Scoring(SCORES[0], 2, 6, 75)
    together = case.run(loaded)
    move = np.random.default_rng(3).permutation(200)
    moved = case.run(loaded, move=move)
    for t in range(6):
        alone = case.run(loaded, tokens=slice(t, t + 1))[0]
        want = together[t, case.seen(t)].view(np.uint32)
        assert (alone[case.seen(t)].view(np.uint32) == want).all() and (moved[t, case.seen(t)].view(np.uint32) == want).all()


@pytest.mark.parametrize("spec", SELECTS, ids=lambda s: f"{s.k}-{s.sinks}-{s.ties}")
def test_choice_of_the_largest_scores_in_list_order(loaded, spec):  # S63, S143
    target, image = loaded
    rng = np.random.default_rng(4)
    length = 2400 if spec.k > 100 else 130
    cells, visible = two_lists(rng, 9, length, length)
    scores = rng.normal(size=(9, -(-length // 16) * 16)).astype(np.float32)
    scores[1] = np.round(scores[1])  # many ties
    scores[2] = 0.0
    scores[2, ::2] = -0.0
    scores[3] *= 1e-42
    out = np.full((9, spec.k), 77, np.int32)
    got = run(spec, target, [scores.copy(), cells, visible, out], 9, loaded=image, T=9, R=length)[3]
    for t, (base, lo, hi) in enumerate(visible):
        mine = scores[t, base + lo : base + hi].astype(np.float64)
        mine[: max(0, spec.sinks - lo)] = np.inf
        order = np.argsort(-mine, kind="stable")
        if spec.ties == "highest":
            order = len(mine) - 1 - np.argsort(-mine[::-1], kind="stable")
        best = np.sort(order[: spec.k])
        want = np.full(spec.k, -1)
        want[: len(best)] = cells[base + lo : base + hi][best]
        assert got[t].tolist() == want.tolist()


@pytest.mark.parametrize("spec", TRANSFORMS, ids=lambda s: f"{s.n}-{s.a.dtype}-{s.a.ne[0]}")
def test_hadamard(loaded, spec):  # S51, S139
    target, image = loaded
    rng = np.random.default_rng(5)
    a, out = buffer(spec.a, ENV, rng), buffer(spec.out, ENV, rng)
    got = view(spec.out, run(spec, target, [a, out], tiles(spec.grid(), ENV), loaded=image, **ENV)[1], ENV)
    x = values(spec.a, a, ENV).astype(np.float64)
    h = np.ones((1, 1))
    while len(h) < spec.n:
        h = np.block([[h, h], [h, -h]])
    want = (x.reshape(*x.shape[:-1], -1, spec.n) @ h / np.sqrt(spec.n)).reshape(x.shape)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    if spec.a == spec.out:
        twice = run(spec, target, [got.copy(), out], tiles(spec.grid(), ENV), loaded=image, **ENV)[1]
        np.testing.assert_allclose(view(spec.out, twice, ENV), x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", SUMS, ids=range(len(SUMS)))
def test_sums_over_any_dimension(loaded, spec):  # S60
    target, image = loaded
    rng = np.random.default_rng(6)
    a, out = buffer(spec.a, ENV, rng), buffer(spec.out, ENV, rng)
    got = view(spec.out, run(spec, target, [a, out], tiles(spec.grid(), ENV), loaded=image, **ENV)[1], ENV)
    x = values(spec.a, a, ENV)
    slices = np.moveaxis(x, 3 - spec.dim, 0)
    total = slices[0].copy()
    for part in slices[1:]:
        total = total + part
    assert (np.squeeze(got, 3 - spec.dim).view(np.uint32) == total.view(np.uint32)).all()


@pytest.mark.parametrize("spec", FILLS, ids=range(len(FILLS)))
def test_fill(loaded, spec):
    target, image = loaded
    out = buffer(spec.out, ENV, np.random.default_rng(7))
    got = run(spec, target, [out], tiles(spec.grid(), ENV), loaded=image, **ENV)[0]
    assert (got == out.dtype.type(spec.value)).all()


@pytest.mark.parametrize("spec", BLENDS, ids=range(len(BLENDS)))
def test_blend(loaded, spec):  # S62
    target, image = loaded
    rng = np.random.default_rng(8)
    a, out, idx = (buffer(x, ENV, rng) for x in (spec.a, spec.out, spec.idx))
    idx = rng.integers(-2, ENV["KV"], idx.shape).astype(np.int32)
    got = view(spec.out, run(spec, target, [a, idx, out], tiles(spec.grid(), ENV), loaded=image, **ENV)[2], ENV)[0, 0]
    want = values(spec.a, a, ENV)[0, 0].copy()
    for row, chosen in zip(want, view(spec.idx, idx, ENV)[0, 0]):
        row[chosen[chosen >= 0]] = spec.value
    assert (got == want).all()


@pytest.mark.parametrize("spec", INDICES, ids=range(len(INDICES)))
def test_indices_of_what_a_mask_shows(loaded, spec):  # S56: rows with none, one and all columns visible
    target, image = loaded
    rng = np.random.default_rng(9)
    mask = np.where(rng.random((5, 40)) < 0.25, 0, -np.inf)
    mask[0], mask[1], mask[2] = -np.inf, -np.inf, 0
    mask[1, 17] = 0
    mask[3, ::3] = -1e30 if spec.mask.dtype == "f32" else -np.inf
    mask = mask.astype(np.float16 if spec.mask.dtype == "f16" else np.float32)
    got = run(spec, target, [mask, np.full((5, spec.k), 5, np.int32)], tiles(spec.grid(), ENV), loaded=image, **ENV)[1]
    for row, found in zip(mask.astype(np.float32), got):
        seen = np.flatnonzero(row > -1e29)[: spec.k]
        assert found.tolist() == [*seen, *[-1] * (spec.k - len(seen))]


def test_spans_end_before_the_holes(loaded):
    target, image = loaded
    entries = np.array([[3, 1, -1, -1, -1, -1], [-1] * 6, [0, 1, 2, 3, 4, 5], [5, -1, 2, -1, -1, -1]], np.int32)
    got = run(SPANS, target, [entries, np.zeros((4, 3), np.int32)], 4, loaded=image, T=4)[1]
    assert got.tolist() == [[0, 0, 2], [6, 0, 0], [12, 0, 6], [18, 0, 3]]


@pytest.mark.parametrize("spec", SHORT, ids=lambda s: f"{s.k}-{s.ties}")
def test_top_k_of_rows_that_may_be_shorter(loaded, spec):  # S64
    target, image = loaded
    rows = np.round(np.random.default_rng(10).normal(size=(5, 40)) * 3).astype(np.float32)
    got = run(spec, target, [rows, np.full((5, spec.k), 9, np.int32)], tiles(spec.grid(), ENV), loaded=image, **ENV)[1]
    order = np.argsort(-rows, axis=-1, kind="stable")
    if spec.ties == "highest":
        order = 39 - np.argsort(-rows[:, ::-1], axis=-1, kind="stable")
    n = min(40, spec.k)
    assert (got[:, :n] == order[:, :n]).all() and (got[:, n:] == -1).all()


@pytest.mark.parametrize("spec", DECODE, ids=lambda s: s.dtype)
def test_decoded_rows(loaded, spec):
    target, image = loaded
    raw = quantize(spec.dtype, np.random.default_rng(11).normal(size=(6, 64)).astype(np.float32))
    got = run(spec, target, [raw, np.zeros((6, 64), np.float32)], 6, loaded=image)[1]
    np.testing.assert_allclose(got, dequantize(spec.dtype, raw, 64), rtol=1e-6, atol=1e-6)


REFUSED = [
    (lambda: Hadamard(C("f32", (12, T)), 12, C("f32", (12, T))), "no power of two"),
    (lambda: Hadamard(Strided("f32", (8, T), (T, 1)), 8, C("f32", (8, T))), "insert a cont"),
    (lambda: SumRowsExt(C("f32", (4, T)), 0, C("f32", (1, T))), "over dimension 0"),
    (lambda: Blend(C("f32", (KV, T)), C("i32", (7,)), 0.0, C("f32", (KV, T))), "one list"),
    (lambda: MaskToIndex(Strided("f32", (KV, T), (T, 1)), 4), "insert a cont"),
    (lambda: IndexerScores(20, 2, "q8_0"), "multiple of 32"),
    (lambda: IndexerSelect(4, ties="any"), "lowest or highest"),
    (lambda: DecodeRows(20, "q8_0"), "whole blocks"),
]


@pytest.mark.parametrize("make, message", REFUSED, ids=range(len(REFUSED)))
def test_specifications_that_do_not_fit_are_refused(make, message):
    with pytest.raises(CodegenError, match=message):
        make()
