"""Single operators at every feature level over the sizes, strides and special rows where an implementation may go wrong.

Rows whose length is a symbol run at any length with the same code, so all sizes of an operator cost one compilation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from ggufc.codegen.kernels.attention_cpu import FlashAttn
from ggufc.codegen.kernels.cache import StoreRows
from ggufc.codegen.kernels.convolution import CarriedConv, SsmConv
from ggufc.codegen.kernels.elementwise import Copy, Elementwise
from ggufc.codegen.kernels.lists import Blend, ListSpans, MaskToIndex
from ggufc.codegen.kernels.rope import RopeApply, RopeTable
from ggufc.codegen.kernels.select import TopK
from ggufc.codegen.kernels.softmax import SoftMax, SumRows
from ggufc.codegen.kernels.strided import Strided, contiguous
from ggufc.codegen.kernels.strided_matmul import StridedMatMul
from ggufc.codegen.kernels.sums import SumRowsExt
from ggufc.formats.activations import round_bf16
from ggufc.ir import Graph, TensorType, interpret
from ggufc.ir.dims import Sym
from harness import build, run, runnable_targets
from strided_reference import buffer, tiles, values, view

T, KV = Sym("T"), Sym("KV")
C = contiguous
LENGTHS = [*range(1, 70), *range(127, 4096, 331), 1023, 1024, 1025, 4095, 4096]

SUMS = {
    "f32": SumRowsExt(C("f32", (KV, 3, 2)), 1, C("f32", (KV, 1, 2))),
    "f16": SumRowsExt(C("f16", (KV, 3, 2)), 1, C("f32", (KV, 1, 2))),
    "f32 strided": SumRowsExt(Strided("f32", (KV, 3, 2), (1, 2 * KV, 7 * KV), 5), 2, C("f32", (KV, 3))),
    "f16 across": SumRowsExt(Strided("f16", (KV, 3, 2), (6, 2, 1)), 1, C("f32", (KV, 1, 2))),
}
ROW_SUMS = {
    "f32": SumRows(C("f32", (KV, 3)), C("f32", (1, 3))),
    "f16 strided": SumRows(Strided("f16", (KV, 3), (1, 2 * KV), 3), C("f32", (1, 3))),
    "f32 across": SumRows(Strided("f32", (KV, 3), (3, 1)), C("f32", (1, 3))),
}
COLUMNS = 40


@dataclass(frozen=True)
class InPlace(Blend):
    """The result takes the place of the source: the last argument is the first."""

    arg_names: ClassVar[tuple[str, ...]] = Blend.arg_names[:-1]

    def emit(self, e):
        pointer = e.arg_ptr
        e.arg_ptr = lambda i: pointer(0 if i == 2 else i)
        super().emit(e)


MASKED = MaskToIndex(C("f32", (COLUMNS, T)), COLUMNS)
SPANS = ListSpans(COLUMNS)
BLENDS = [Blend(C("f32", (COLUMNS, T)), C("i32", (COLUMNS, T)), value, C("f32", (COLUMNS, T))) for value in (0.0, -1e30, 2.5)]
OVERWRITTEN = [InPlace(spec.a, spec.idx, spec.value, spec.out) for spec in BLENDS]
SORTS = {(order, ties): TopK(C("f32", (KV, T)), KV, order, ties) for order in ("asc", "desc") for ties in ("lowest", "highest")}
FIRST = TopK(C("f32", (KV, T)), 40)
NUMBERS = [Copy(C("i32", (KV, T)), C("i32", (KV, T))), Copy(Strided("i32", (KV, T), (T, 1)), C("i32", (KV, T)))]
CASTS = [
    Copy(source, C(to, (KV, T)))
    for to in ("f32", "f16", "bf16")
    for source in (C("f32", (KV, T)), Strided("f32", (KV, T), (T, 1)), Strided("f32", (KV, T), (1, 2 * KV), 3))
]
TAPS = [2, 3, 4]
CONVOLUTIONS = {taps: SsmConv(C("f32", (T + (taps - 1), 37)), C("f32", (taps, 37)), C("f32", (37, T))) for taps in TAPS}
CARRIED = {taps: CarriedConv(37, taps) for taps in TAPS}
OPERANDS = {
    "columns": Strided("f32", (20, T), (1, 40), 20),
    "odd columns": Strided("f32", (20, T), (1, 33), 7),
    "every other row": Strided("f32", (20, T), (1, 40)),
    "transposed": Strided("f32", (20, T), (T, 1)),
    "one row of many": Strided("f32", (20,), (1,), 40),
    "one column of many": Strided("f32", (1, T), (1, 33), 9),
    "whole": C("f32", (20, T)),
}
PAIRS = [(name, "whole") for name in OPERANDS] + [("whole", name) for name in OPERANDS]
SUMMED = {
    (op, *pair): Elementwise((op, 0, 1), C("f32", (20, T)), (OPERANDS[pair[0]], OPERANDS[pair[1]]))
    for op in ("add", "mul")
    for pair in PAIRS
}
MAGNITUDE = 1 / (1 + 0.1 * math.log(2))
"""What makes YaRN's factor for a scale of one half a rotation again."""
TURNS = {back: RopeTable(32, 10000.0, 0.5, 1.0, MAGNITUDE, 32.0, 1.0, 64, inverse=back) for back in (False, True)}
TURNED = [RopeApply(width, 2, 32, mode) for width in (32, 48) for mode in ("norm", "neox")]
D, HEADS = 32, 4
DENSE = [
    StridedMatMul(C("f32", (D, COLUMNS)), Strided("f32", (D, T, HEADS), (1, D * HEADS, D)), C("f32", (COLUMNS, T, HEADS))),
    SoftMax(C("f32", (COLUMNS, T, HEADS)), C("f32", (COLUMNS, T, HEADS)), 0.2, C("f32", (COLUMNS, T))),
    StridedMatMul(Strided("f32", (COLUMNS, D), (D, 1)), C("f32", (COLUMNS, T, HEADS)), C("f32", (D, T, HEADS))),
]
LISTED = FlashAttn(D, D, HEADS, 1, "f32", "f32", 0.2)
STORE = StoreRows(37, "f32")
ALL = [
    *SUMS.values(), *ROW_SUMS.values(), MASKED, SPANS, *BLENDS, *OVERWRITTEN, *SORTS.values(), FIRST, *NUMBERS, *CASTS,
    *CONVOLUTIONS.values(), *CARRIED.values(), *SUMMED.values(), *TURNS.values(), *TURNED, *DENSE, LISTED, STORE,
]  # fmt: skip


@pytest.fixture(scope="module", params=runnable_targets(), ids=lambda t: t.level)
def call(request):
    """``call(spec, args, n, T=.., KV=..)``: the arguments after tiles 0..n-1 (None: those of the kernel's grid)."""
    image = build(list(dict.fromkeys(ALL)), request.param)

    def go(spec, args, n=None, **env):
        return run(spec, request.param, args, tiles(spec.grid(), env) if n is None else n, loaded=image, **env)

    return go


def bits(a):
    return np.ascontiguousarray(a).view(np.uint32)


@pytest.mark.parametrize("name", SUMS)
def test_sums_over_any_dimension_equal_a_loop(call, name):  # S60
    spec, rng = SUMS[name], np.random.default_rng(0)
    for n in LENGTHS:
        a, out = (buffer(x, {"KV": n}, rng) for x in (spec.a, spec.out))
        x = np.moveaxis(values(spec.a, a, {"KV": n}), 3 - spec.dim, 0)
        total = np.zeros_like(x[0])
        for part in x:
            total = total + part
        got = view(spec.out, call(spec, [a, out], KV=n)[1], {"KV": n})
        assert np.array_equal(bits(np.squeeze(got, 3 - spec.dim)), bits(total)), n


@pytest.mark.parametrize("name", ROW_SUMS)
def test_sums_of_rows_equal_a_loop(call, name):  # S60
    spec, rng = ROW_SUMS[name], np.random.default_rng(1)
    for n in LENGTHS:
        a = buffer(spec.a, {"KV": n}, rng)
        rows = values(spec.a, a, {"KV": n})[0, 0].astype(np.float64)
        got = call(spec, [a, np.zeros((3, 1), np.float32)], KV=n)[1][:, 0]
        assert (np.abs(got - rows.sum(1)) <= 1e-6 * np.abs(rows).sum(1)).all(), n


def masks(tokens, rng):
    """f32 [tokens, COLUMNS] of 0 and -inf: no column visible, all, one, the first or last only, then any."""
    seen = rng.random((tokens, COLUMNS)) < 0.3
    seen[0], seen[1] = False, True
    seen[2:5] = False
    seen[2, 17] = seen[3, 0] = seen[4, -1] = True
    return np.where(seen, np.float32(0), np.float32(-np.inf)), seen


@pytest.mark.parametrize("spec", BLENDS, ids=lambda s: f"{s.value:g}")
@pytest.mark.parametrize("inplace", [False, True])
def test_blend_selects_exactly_what_a_mask_shows(call, spec, inplace):  # S62
    rng = np.random.default_rng(2)
    mask, seen = masks(9, rng)
    a = rng.normal(size=seen.shape).astype(np.float32)
    a[5, :3] = np.nan, np.inf, -0.0  # copied as they are
    chosen = call(MASKED, [mask, np.full((9, COLUMNS), 7, np.int32)], T=9, KV=0)[1]
    want = np.where(seen, np.float32(spec.value), a)
    if inplace:
        got = call(OVERWRITTEN[BLENDS.index(spec)], [a, chosen], T=9)[0]
        assert np.array_equal(bits(got), bits(want))
    else:
        source, _, out = call(spec, [a, chosen, np.full_like(a, 9)], T=9)
        assert np.array_equal(bits(out), bits(want)) and np.array_equal(bits(source), bits(a))
    g = Graph("g")
    lists = g.add("mask_to_index", g.weight("mask", TensorType("f32", (COLUMNS, 9))), k=COLUMNS)
    g.outputs["o"] = g.add("blend", g.weight("a", TensorType("f32", (COLUMNS, 9))), lists, value=spec.value)
    assert np.array_equal(bits(interpret(g, {"a": a, "mask": mask}, {}, {}, {})["o"]), bits(want))


@pytest.mark.parametrize("n", [1, 2, 1023, 1024, 1025, 65536])
@pytest.mark.parametrize("order, ties", SORTS)
def test_sorted_rows_are_permutations_in_order(call, n, order, ties):  # S64
    rng = np.random.default_rng(3)
    rows = rng.integers(-50, 50, (2, n)).astype(np.float32)
    rows[:, ::7] *= 0  # zeros of both signs are equal
    rows[1] = 4
    got = call(SORTS[order, ties], [rows, np.full((2, n), -7, np.int32)], T=2, KV=n)[1]
    for row, found in zip(rows, got):
        assert np.array_equal(np.sort(found), np.arange(n))
        place = np.arange(n) if ties == "lowest" else -np.arange(n)
        assert np.array_equal(found, np.lexsort((place, row if order == "asc" else -row)))
    if (order, ties) == ("desc", "lowest"):
        best = call(FIRST, [rows, np.full((2, 40), -7, np.int32)], T=2, KV=n)[1]
        few = min(n, 40)
        assert np.array_equal(best[:, :few], got[:, :few]) and (best[:, few:] == -1).all()


@pytest.mark.parametrize("n", [1, 3, 16, 37])
def test_copies_and_casts_of_views_are_exact(call, n):  # S68
    rng = np.random.default_rng(4)
    env = {"T": 5, "KV": n}
    for spec in NUMBERS:
        a = rng.integers(-(2**31), 2**31, buffer(spec.a, env, rng).shape, np.int64).astype(np.int32)
        a[:2] = -(2**31), 2**31 - 1
        got = call(spec, [a, np.zeros((5, n), np.int32)], **env)[1]
        assert np.array_equal(got, view(spec.a, a, env)[0, 0])
    for spec in CASTS:
        a = buffer(spec.a, env, rng) * np.float32(10.0 ** rng.integers(-7, 5))
        source = np.ascontiguousarray(values(spec.a, a, env)[0, 0])
        got = values(spec.out, call(spec, [a, buffer(spec.out, env, rng)], **env)[1], env)[0, 0]
        with np.errstate(over="ignore"):
            want = {"f32": source, "f16": source.astype(np.float16).astype(np.float32), "bf16": round_bf16(source)}[spec.out.dtype]
        assert np.array_equal(bits(got), bits(want)), spec


@pytest.mark.parametrize("taps", TAPS)
def test_a_convolution_cut_anywhere_has_the_bits_of_the_whole(call, taps):  # S69
    """All lengths from 1 to 40 with given inputs before them, each cut at every place; then the kernel that carries its inputs itself."""
    rng = np.random.default_rng(taps)
    kept = taps - 1
    w = rng.normal(size=(37, taps)).astype(np.float32)
    x = rng.normal(size=(37, kept + 40)).astype(np.float32)

    def convolved(first, last):
        part = np.ascontiguousarray(x[:, first : last + kept])
        return call(CONVOLUTIONS[taps], [part, w, np.zeros((last - first, 37), np.float32)], T=last - first)[2]

    long = convolved(0, 40)
    direct = sum(x[:, k : k + 40].astype(np.float64) * w[:, k : k + 1] for k in range(taps)).T
    np.testing.assert_allclose(long, direct, rtol=1e-6, atol=1e-6)
    for n in range(1, 41):
        assert np.array_equal(bits(convolved(0, n)), bits(long[:n])), n
        assert np.array_equal(bits(convolved(n - 1, 40)), bits(long[n - 1 :])), n

    def carried(sizes):
        """x + conv(x), batch after batch; the second row of the state is zero, and what a sequence starts from."""
        state, rows, at = np.zeros((2, 37 * kept), np.float32), [], 0
        state[0] = np.nan
        for size in sizes:
            batch = np.ascontiguousarray(x[:, at : at + size].T)
            reads = np.array([0 if at else 1], np.int32)
            args = [batch, 37, w, state, reads, np.zeros(1, np.int32), np.zeros_like(batch)]
            result = call(CARRIED[taps], args, CARRIED[taps].tiles, T=size)
            state, at = result[3], at + size
            rows.append(result[6])
        return np.concatenate(rows)

    whole = carried([40])
    assert np.isfinite(whole).all()
    for n in range(1, 40):
        assert np.array_equal(bits(carried([n, 40 - n])), bits(whole)), n
    assert np.array_equal(bits(carried([1] * 40)), bits(whole))


@pytest.mark.parametrize("op", ["add", "mul"])
def test_views_broadcast_like_their_copies(call, op):  # S71
    env = {"T": 6}
    rng = np.random.default_rng(5)
    storage = {name: rng.normal(size=6 * 40).astype(np.float32) for name in OPERANDS}
    for pair in PAIRS:
        spec = SUMMED[op, *pair]
        arrays = [storage["whole"][:120] + np.float32(1) if name == "whole" else storage[name] for name in pair]
        copies = [np.broadcast_to(values(x, a, env)[0, 0], (6, 20)) for x, a in zip(spec.inputs, arrays)]
        want = copies[0] + copies[1] if op == "add" else copies[0] * copies[1]
        got = call(spec, [np.zeros((6, 20), np.float32), *arrays], **env)[0]
        copied = call(SUMMED[op, "whole", "whole"], [np.zeros((6, 20), np.float32), *map(np.ascontiguousarray, copies)], **env)[0]
        assert np.array_equal(bits(got), bits(copied)) and np.array_equal(bits(got), bits(want)), pair


@pytest.mark.parametrize("spec", TURNED, ids=lambda s: f"{s.d}-{s.mode}")
def test_turning_back_restores_at_any_position(call, spec):  # S50
    positions = np.array([0, 1, 3, 700, 4095, 131071], np.int32)
    n, row = len(positions), 2 * spec.d
    x = np.random.default_rng(6).normal(size=(n, row)).astype(np.float32)
    there_and_back = [x]
    for back in (False, True):
        table = call(TURNS[back], [positions, None, np.zeros((n, 32), np.float32)], n, T=n)[2]
        there_and_back.append(call(spec, [there_and_back[-1], row, table, None, np.zeros_like(x), row, None], n, T=n)[4])
    assert np.abs(there_and_back[1][1:] - x[1:]).max() > 0.5
    assert np.abs(there_and_back[2] - x).max() < 1e-5


def test_attention_over_listed_rows_equals_masked_attention(call):  # S56
    """Tokens that see nothing, one row, and everything, among tokens that see some."""
    n, rng = 45, np.random.default_rng(7)
    mask, seen = masks(n, rng)
    q = rng.normal(size=(n, HEADS * D)).astype(np.float32)
    keys, vals = (rng.normal(size=(COLUMNS, D)).astype(np.float32) for _ in "kv")
    scores = call(DENSE[0], [keys, q, np.zeros((HEADS, n, COLUMNS), np.float32)], T=n)[2]
    p = call(DENSE[1], [scores, scores.copy(), mask, None], T=n)[1]
    dense = call(DENSE[2], [vals, p, np.zeros((HEADS, n, D), np.float32)], T=n)[2].transpose(1, 0, 2).reshape(n, -1)
    lists = call(MASKED, [mask, np.zeros((n, COLUMNS), np.int32)], T=n)[1]
    spans = call(SPANS, [lists, np.zeros((n, 3), np.int32)], n, T=n)[1]
    assert np.array_equal(spans[:, 2] - spans[:, 1], seen.sum(1))
    lists[lists < 0] = 1 << 30  # nothing behind the end of a list may be looked at
    args = [q, HEADS * D, keys, vals, lists.reshape(-1), spans, np.full_like(q, 7), HEADS * D, None, np.zeros(16, np.float32)]
    listed = call(LISTED, args, LISTED.units * -(-n // LISTED.token_block), T=n, R=lists.size)[6]
    np.testing.assert_allclose(listed, dense, rtol=1e-5, atol=1e-5)
    assert not listed[0].any() and not dense[0].any()
    np.testing.assert_allclose(listed[2].reshape(HEADS, D), np.broadcast_to(vals[17], (HEADS, D)), rtol=1e-6)


def test_rows_stored_as_f32_leave_the_others_their_bytes(call):  # S65
    rng = np.random.default_rng(8)
    x = rng.normal(size=(5, 37)).astype(np.float32)
    x[0, :3] = np.nan, -0.0, np.inf
    before = rng.integers(0, 256, (9, 4 * 37), np.uint8)
    slots = np.array([8, 0, 3, 4, 1], np.int32)
    after = call(STORE, [x, 37, before.copy(), slots], 5, T=5)[2]
    want = before.copy()
    want[slots] = x.view(np.uint8)
    assert np.array_equal(after, want)
