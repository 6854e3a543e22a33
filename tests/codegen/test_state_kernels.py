"""Kernels of families with state: convolution with carried inputs, turning back, lists of compressed entries, tables of indices."""

from __future__ import annotations

import numpy as np
import pytest

from ggufc.codegen.errors import CodegenError
from ggufc.codegen.kernels.convolution import SsmConv
from ggufc.codegen.kernels.indexer import ENTRIES, IndexerScores, IndexerSelect
from ggufc.codegen.kernels.rope import RopeApply, RopeTable
from ggufc.codegen.kernels.strided import Strided, contiguous
from ggufc.codegen.lower import lower
from ggufc.formats.abi import COMMON, PARAMS
from ggufc.ir import Graph, Sym, TensorType
from harness import build, run, runnable_targets
from strided_reference import tiles

T = Sym("T")
C = contiguous
CONVOLUTIONS = [
    SsmConv(C("f32", (2 + T, 37)), C("f32", (3, 37)), C("f32", (37, T))),
    SsmConv(Strided("f32", (T + 3, 5), (5, 1), 2), Strided("f16", (4, 5), (5, 1)), C("f32", (5, T))),
]
TABLES = [RopeTable(18, 10000.0, inverse=back) for back in (False, True)]
APPLY = RopeApply(24, 2, 18, "neox")
SCORES = [IndexerScores(16, 3, "f32", symbol) for symbol in ("R", "E4")]
SELECTS = [IndexerSelect(4, entries=symbol) for symbol in ("R", "E4")]


@pytest.fixture(scope="module", params=runnable_targets(), ids=lambda t: t.level)
def loaded(request):
    return request.param, build([*CONVOLUTIONS, *TABLES, APPLY, *SCORES, *SELECTS], request.param)


@pytest.mark.parametrize("n", [1, 2, 9, 40])
def test_convolution(loaded, n):  # S69
    target, image = loaded
    rng = np.random.default_rng(n)
    for spec in CONVOLUTIONS:
        taps, channels = spec.w.ne[:2]
        x = rng.standard_normal((channels, taps - 1 + n)).astype(np.float32)
        w = rng.standard_normal((channels, taps)).astype(np.float32)
        stored = w.astype(np.float16) if spec.w.dtype == "f16" else w
        if spec.x.nb[0] == 1:
            args = [x, stored]
        else:
            args = [np.concatenate([np.zeros(2, np.float32), x.T.reshape(-1)]), np.ascontiguousarray(stored.T)]
        got = run(spec, target, [*args, np.zeros((n, channels), np.float32)], tiles(spec.grid(), {"T": n}), loaded=image, T=n)[2]
        want = sum(x[:, i : i + n].astype(np.float64) * stored[:, i : i + 1].astype(np.float64) for i in range(taps)).T
        assert np.allclose(got, want, rtol=1e-6, atol=1e-6)


def test_convolution_of_parts_has_the_bits_of_the_whole(loaded):  # S69
    target, image = loaded
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal((37, n)).astype(np.float32) for n in (2 + 20, 3))

    def convolved(first: int, n: int) -> np.ndarray:
        part = np.ascontiguousarray(x[:, first : first + n + 2])
        out = np.zeros((n, 37), np.float32)
        return run(CONVOLUTIONS[0], target, [part, w, out], tiles(CONVOLUTIONS[0].grid(), {"T": n}), loaded=image, T=n)[2]

    assert np.array_equal(np.concatenate([convolved(0, 7), convolved(7, 1), convolved(8, 12)]), convolved(0, 20))


def test_turning_back_restores(loaded):  # S50
    target, image = loaded
    positions = np.array([0, 3, 700], np.int32)
    x = np.random.default_rng(0).standard_normal((3, 2, 24)).astype(np.float32)
    y = x
    for spec in TABLES:
        table = run(spec, target, [positions, None, np.zeros((3, 18), np.float32)], 3, loaded=image, T=3)[2]
        y = run(APPLY, target, [y, 48, table, None, np.zeros_like(x), 48, None], 3, loaded=image, T=3)[4]
    assert np.abs(y - x).max() < 1e-5


def test_turning_back_negates_sines_only(loaded):  # S50
    target, image = loaded
    positions = np.array([0, 3, 700], np.int32)
    forth, back = (run(t, target, [positions, None, np.zeros((3, 18), np.float32)], 3, loaded=image, T=3)[2] for t in TABLES)
    assert np.array_equal(back[:, 0::2], forth[:, 0::2])
    assert np.array_equal(back[:, 1::2], -forth[:, 1::2])
    assert forth[1, 1] != 0


def test_lists_of_entries_are_counted_by_their_own_symbol(loaded):  # S63
    target, image = loaded
    rng = np.random.default_rng(3)
    n, length = 3, 40
    q = rng.standard_normal((n, 3, 16)).astype(np.float32)
    w = rng.standard_normal((n, 3)).astype(np.float32)
    keys = rng.standard_normal((64, 16)).astype(np.float32)
    cells = rng.permutation(64)[:length].astype(np.int32)
    visible = np.array([[0, 0, 3], [0, 0, 40], [10, 2, 25]], np.int32)
    chosen = []
    for scores, select, env in zip(SCORES, SELECTS, ({"R": length, "E4": 7}, {"R": 1, "E4": length})):
        buffer = np.zeros((n, -(-length // 16) * 16), np.float32)
        args = [q, 48, w, 3, keys, cells, visible, buffer]
        buffer = run(scores, target, args, -(-length // ENTRIES), loaded=image, T=n, **env)[7]
        out = np.zeros((n, 4), np.int32)
        chosen.append(run(select, target, [buffer, cells, visible, out], n, loaded=image, T=n, **env)[3])
    assert np.array_equal(chosen[0], chosen[1])
    assert chosen[0][0].tolist() == [*cells[:3].tolist(), -1]


def test_symbols_every_graph_has_come_first():
    assert PARAMS[: len(COMMON)] == COMMON == ("T", "O", "C", "KV", "R")


def experts_by_token(*, choose: str = "ids") -> Graph:
    g = Graph("eval", "toy", ("T", "O", "C", "KV", "R"))
    tokens = g.input("tokens", "tokens", TensorType("i32", (T,)))
    table = g.weight("table", TensorType("i32", (2, 50)))
    ids = g.add("get_rows", table, tokens, name="ids")
    x = g.add("reshape", g.add("get_rows", g.weight("embd", TensorType("f32", (32, 50))), tokens, name="x"), name="x.rows", ne=(32, 1, T))
    y = g.add("mul_mat_id", g.weight("experts", TensorType("f32", (32, 16, 6))), x, ids, name="y")
    g.outputs["y"] = g.add("cast", ids, name="floats", dtype="f32") if choose == "values" else y
    return g


def test_a_table_of_experts_is_stored_as_integers_with_its_bound():  # S39
    _, weights = lower(experts_by_token())
    table = weights.stored["table", "plain"]
    assert (table.dtype, table.below, table.name) == ("i32", 6, "table.i32")


def test_integers_that_are_no_indices_are_refused():
    with pytest.raises(CodegenError, match="more than indices of experts or rows"):
        lower(experts_by_token(choose="values"))


def test_a_compacted_region_is_refused_by_name():
    g = Graph("eval", "toy", ("T", "O", "C", "KV", "R"))
    tokens = g.input("tokens", "tokens", TensorType("i32", (T,)))
    slots = g.add("input", name="slots", kind="kv_slots", type=TensorType("i32", (T,)), region="window")
    x = g.add("get_rows", g.weight("embd", TensorType("f32", (32, 50))), tokens, name="x")
    g.outputs["x"] = g.add("get_rows", x, slots, name="y")
    with pytest.raises(CodegenError, match="'slots': compacted caches are a matter of sessions"):
        lower(g)


def test_rows_of_a_list_that_may_have_holes_are_refused():
    g = Graph("eval", "toy", ("T", "O", "C", "KV", "R"))
    tokens = g.input("tokens", "tokens", TensorType("i32", (T,)))
    x = g.add("get_rows", g.weight("embd", TensorType("f32", (32, 50))), tokens, name="x")
    across = g.add("cont", g.add("transpose", x, name="x.t"), name="across")
    best = g.add("view", g.add("top_k", across, name="best", k=2), name="first", ne=(2,), nb=(1,), offset=0)
    g.outputs["y"] = g.add("get_rows", x, best, name="y")
    with pytest.raises(CodegenError, match=r"may end in -1 \(top_k 'best'\)"):
        lower(g)


def test_a_quantised_matrix_reshaped_into_a_stack_is_packed_matrix_by_matrix():
    g = Graph("eval", "toy", ("T", "O", "C", "KV", "R"))
    tokens = g.input("tokens", "tokens", TensorType("i32", (T,)))
    x = g.add("get_rows", g.weight("embd", TensorType("f32", (96, 50))), tokens, name="x")
    by_group = g.add("permute", g.add("reshape", x, name="x.groups", ne=(32, 3, T)), name="x.turned", axes=(0, 2, 1))
    matrices = g.add("reshape", g.weight("w", TensorType("q8_0", (32, 24))), name="w.matrices", ne=(32, 8, 3))
    g.outputs["y"] = g.add("mul_mat", matrices, by_group, name="y")
    _, weights = lower(g)
    assert weights.stored["w.32x8x3", "packed"].ne == (32, 8, 3)
