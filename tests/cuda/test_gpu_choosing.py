"""Choices on the GPU form: the best entries of rows of any length, the indexer's scores and lists; against numpy and the CPU."""

from __future__ import annotations

import numpy as np
import pytest

from cell_lists import two_lists
from ggufc.codegen.errors import CodegenError
from ggufc.codegen.kernels.indexer import ENTRIES, IndexerScores, IndexerSelect
from ggufc.codegen.kernels.select import TopK
from ggufc.codegen.kernels.strided import contiguous
from ggufc.codegen.nvptx import describe
from ggufc.formats import cuda as fmt
from ggufc.formats.quants.dequantize import dequantize
from ggufc.formats.quants.quantize import quantize
from ggufc.ir import Sym
from gpu_harness import run
from harness import run as run_on_cpu
from harness import runnable_targets
from strided_reference import tiles

T, KV = Sym("T"), Sym("KV")


def best(row: np.ndarray, k: int, ties: str) -> np.ndarray:
    """Indices of the ``k`` largest values, largest first."""
    if ties == "lowest":
        return np.argsort(-row, kind="stable")[:k]
    return (len(row) - 1 - np.argsort(-row[::-1], kind="stable"))[:k]


# Rows


@pytest.mark.parametrize("ties", ["lowest", "highest"])
@pytest.mark.parametrize("order", ["desc", "asc"])
@pytest.mark.parametrize("n, k", [(8, 2), (128, 8), (1500, 5), (40, 40)])
def test_top_k(n, k, order, ties):
    """Ties go to the lower index, or the higher; zeros of both signs are equal. Rows of a warp and rows of a block."""
    rng = np.random.default_rng(n)
    a = rng.integers(0, 30, (3, n)).astype(np.float32)
    a[0, 0], a[0, 1] = -0.0, 0.0
    spec = TopK(contiguous("f32", (n, T)), k, order, ties)
    got = run(spec, [a, np.zeros((3, k), np.int32)], [1], tiles(spec.grid(), {"T": 3}), T=3)[1]
    assert got.tolist() == [best(row if order == "desc" else -row, k, ties).tolist() for row in a]


@pytest.mark.parametrize("n", [1, 2, 1023, 1024, 1025])
def test_sorted_rows_around_the_size_of_a_block(n):  # S64
    """Whole rows with many ties, in both orders."""
    a = np.random.default_rng(n).integers(-9, 9, (2, n)).astype(np.float32)
    for order in ("desc", "asc"):
        spec = TopK(contiguous("f32", (n, T)), n, order)
        got = run(spec, [a, np.full((2, n), -7, np.int32)], [1], tiles(spec.grid(), {"T": 2}), T=2)[1]
        assert got.tolist() == [best(row if order == "desc" else -row, n, "lowest").tolist() for row in a]


@pytest.mark.parametrize("n, k", [(2500, 2100), (4097, 4097), (70000, 3)])
def test_long_rows(n, k):  # S64
    """More results than are sorted at once, and more entries than a grid of 65535 has blocks (S73)."""
    rng = np.random.default_rng(k)
    a = rng.integers(-400, 400, (1, n)).astype(np.float32) / 7
    a[0, 5], a[0, 6], a[0, 7] = np.inf, -np.inf, 1e-42
    spec = TopK(contiguous("f32", (n, 1)), k)
    got = run(spec, [a, np.zeros((1, k), np.int32)], [1], 1)[1]
    assert got[0].tolist() == best(a[0], k, "lowest").tolist()


def test_rows_shorter_than_what_is_wanted():
    """Rows of a length known at run time only; holes are -1."""
    a = np.random.default_rng(0).standard_normal((3, 40)).astype(np.float32)
    spec = TopK(contiguous("f32", (KV, T)), 64)
    got = run(spec, [a, np.full((3, 64), 7, np.int32)], [1], tiles(spec.grid(), {"T": 3, "KV": 40}), T=3, KV=40)[1]
    assert got[:, :40].tolist() == [best(row, 40, "lowest").tolist() for row in a] and (got[:, 40:] == -1).all()


# The indexer


@pytest.mark.parametrize("spec", [IndexerScores(32, 8, "f16"), IndexerScores(64, 5, "q8_0"), IndexerScores(18, 11, "f32"),
                                  IndexerScores(128, 9, "bf16")], ids=str)  # fmt: skip
def test_scores(spec):
    """S63: the CPU's bits, since the chains are the same; so neither other tokens nor the places of cells matter."""
    rng, tokens, length = np.random.default_rng(1), 11, 75
    q, w = (rng.normal(size=(tokens, n)).astype(np.float32) for n in (spec.heads * spec.d + 3, spec.heads + 1))
    raw = quantize(spec.dtype, rng.normal(size=(80, spec.d)).astype(np.float32))
    cells, visible = two_lists(rng, tokens, length, 80)
    scores = np.full((tokens, 80), np.nan, np.float32)
    args = [q, q.shape[1], w, w.shape[1], raw, cells, visible, scores]
    got = run(spec, args, [7], 0, T=tokens, R=length)[7]
    cpu = run_on_cpu(spec, runnable_targets()[-1], args, -(-length // ENTRIES), T=tokens, R=length)[7]
    alone = run(spec, [q[4:5], *args[1:2], w[4:5], *args[3:6], visible[4:5], scores[:1].copy()], [7], 0, T=1, R=length)[7]
    keys = dequantize(spec.dtype, raw, spec.d).astype(np.float64)
    for t, (base, lo, hi) in enumerate(visible):
        seen = slice(base + lo, base + hi)
        rows = keys[cells[seen]]
        heads = q[t, : spec.heads * spec.d].reshape(spec.heads, spec.d).astype(np.float64)
        want = w[t, : spec.heads].astype(np.float64) @ np.maximum(heads @ rows.T, 0)
        np.testing.assert_allclose(got[t, seen], want, rtol=1e-5, atol=2e-4)
        assert got[t, seen].tobytes() == cpu[t, seen].tobytes()
        if t == 4:
            assert alone[0, seen].tobytes() == got[t, seen].tobytes()


@pytest.mark.parametrize(
    "spec", [IndexerSelect(k, sinks, ties) for k in (1, 40) for sinks in (0, 3) for ties in ("lowest", "highest")] + [IndexerSelect(700)],
    ids=str,
)  # fmt: skip
def test_choice_of_the_largest_scores_in_list_order(spec):
    """S63, S143: ties by the rule, sinks before all, short lists whole."""
    rng = np.random.default_rng(4)
    length = 2400 if spec.k > 100 else 330
    cells, visible = two_lists(rng, 9, length, length)
    scores = rng.normal(size=(9, -(-length // 16) * 16)).astype(np.float32)
    scores[1] = np.round(scores[1])  # many ties
    scores[2] = 0.0
    scores[2, ::2] = -0.0
    scores[3] *= 1e-42
    scores[5] = np.float32(1) + np.arange(scores.shape[1]).astype(np.float32) * np.float32(2**-22)  # differ in the last bits only
    got = run(spec, [scores, cells, visible, np.full((9, spec.k), 77, np.int32)], [3], 9, T=9, R=length)[3]
    for t, (base, lo, hi) in enumerate(visible):
        mine = scores[t, base + lo : base + hi].astype(np.float64)
        mine[: max(0, spec.sinks - lo)] = np.inf
        chosen = np.sort(best(mine, spec.k, spec.ties))
        assert got[t].tolist() == [*cells[base + lo : base + hi][chosen], *[-1] * (spec.k - len(chosen))]


def test_grids_of_long_contexts_stay_within_limits():
    """S73: 128 Ki entries times 4 Ki tokens are one dimension of blocks, and any number of blocks computes them."""
    (entry,) = describe(IndexerScores(128, 64, "f16")).entries
    assert fmt.tiles(entry.grid, {"R": 1 << 17, "T": 1 << 12}) == (1 << 12) * (1 << 9) < fmt.MAX_GRID


def test_keys_that_do_not_fit_are_refused():
    with pytest.raises(CodegenError, match="keys of 512 values do not fit"):
        describe(IndexerScores(512, 1, "f16"))
