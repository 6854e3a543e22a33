"""Kernels over rows on the GPU form: rounding of activations, look-ups, rotation, cache stores, norms and the pointwise kernels both
targets share.
"""

from __future__ import annotations

import numpy as np
import pytest

from ggufc.codegen.kernels.cache import StoreRows, row_bytes
from ggufc.codegen.kernels.convolution import SsmConv
from ggufc.codegen.kernels.decode import DecodeRows
from ggufc.codegen.kernels.elementwise import Copy, Elementwise
from ggufc.codegen.kernels.get_rows import GetRows
from ggufc.codegen.kernels.hadamard import Hadamard
from ggufc.codegen.kernels.lists import Blend, Counting, Fill, ListSpans, MaskToIndex
from ggufc.codegen.kernels.quantize import Quantize
from ggufc.codegen.kernels.rope import RopeApply, RopeTable
from ggufc.codegen.kernels.routing import Route
from ggufc.codegen.kernels.rowwise import Norm, RmsNorm
from ggufc.codegen.kernels.select import GetRowsPlain, KqMask
from ggufc.codegen.kernels.softmax import SoftMax, SumRows
from ggufc.codegen.kernels.strided import Strided, contiguous
from ggufc.codegen.kernels.strided_matmul import StridedMatMul
from ggufc.codegen.kernels.sums import SumRowsExt
from ggufc.codegen.weights import q8_record
from ggufc.formats.quants.dequantize import dequantize
from ggufc.formats.quants.quantize import quantize
from ggufc.ir.dims import Dim
from ggufc.ir.ops.routing import gated
from gpu_harness import run
from harness import run as run_on_cpu
from harness import runnable_targets
from products import packed, records, weight_rows, weight_values
from strided_reference import tiles

T = Dim((((("T",)), 1),))
RNG = np.random.default_rng(5)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


# Activations


@pytest.mark.parametrize("mode, k", [("q8_2", 96), ("q8_2", 288), ("q8_k", 512)])
def test_rounding_equals_its_definition(mode, k):
    """Bit for bit, and every word of the record; rows of zeros stay zeros."""
    x = normal(3, k + 8) * np.float32(3)
    x[1, :k] = 0
    x[2, :32] = 1e-42
    out = np.full((3, q8_record(k).stride), 0xEE, np.uint8)
    got = run(Quantize(k, mode, False, 0.0), [x, k + 8, None, out], [3], 3)[3]
    want = records(x[:, :k], mode)
    used = q8_record(k).off_s + k // 8
    assert got[:, :used].tobytes() == want[:, :used].tobytes()


def test_rounding_after_the_norm():
    k = 320
    x, w = normal(4, k), normal(k)
    out = np.zeros((4, q8_record(k).stride), np.uint8)
    got = run(Quantize(k, "q8_2", True, 1e-5), [x, k, w, out], [3], 4)[3]
    rows = (x / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-5) * w).astype(np.float32)
    want = records(rows, "q8_2")
    codes = got[:, :k].view(np.int8).astype(int) - want[:, :k].view(np.int8)
    assert np.abs(codes).max() <= 1 and (codes != 0).mean() < 0.01
    at = q8_record(k).off_d
    assert np.allclose(got[:, at : at + k // 8].view(np.float32), want[:, at : at + k // 8].view(np.float32), rtol=0.01)


# Look-ups


@pytest.mark.parametrize("name", ["q4_1", "q6_k", "q2_k", "iq4_nl", "f16", "bf16", "f32"])
def test_get_rows(name):
    k, n = 256, 40
    raw = weight_rows(name, k, n)
    ids = np.array([39, 0, 17, 17], np.int32)
    got = run(GetRows(name, k), [packed(name, raw, k), ids, np.zeros((4, k), np.float32)], [2], 4)[2]
    assert np.allclose(got, weight_values(name, raw, k)[ids], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("rows, width", [(300, 24), (70000, 1), (2048 * 256, 1)])
def test_gather_of_many_rows(rows, width):
    """S73: more rows than a grid of 65535 blocks would take."""
    a, idx = normal(7, width), RNG.integers(0, 7, rows).astype(np.int32)
    spec = GetRowsPlain(contiguous("f32", (width, 7)), contiguous("i32", (T,)), contiguous("f32", (width, T)))
    got = run(spec, [a, idx, np.zeros((rows, width), np.float32)], [2], tiles(spec.grid(), {"T": rows}), T=rows, races=rows < 1000)[2]
    assert got.tobytes() == a[idx].tobytes()


@pytest.mark.parametrize("n, gate", [(6, "softmax"), (70, "sigmoid"), (256, "sqrt_softplus")])
def test_experts_of_a_token(n, gate):
    spec = Route(n, 4, T, gate, True, normalise="sum", scale=2.5)
    scores, bias = normal(9, n), normal(n)
    args = [scores, n, bias, np.zeros((9, n), np.float32), np.zeros((9, 4), np.int32), np.zeros((9, 4), np.float32)]
    got = run(spec, args, [3, 4, 5], tiles(spec.grid(), {"T": 9}), T=9)
    p = gated(scores.astype(np.float64), gate)
    ids = np.argsort(-(p + bias), axis=1)[:, :4]
    w = np.take_along_axis(p, ids, axis=1)
    assert (got[4] == ids).all() and np.allclose(got[5], 2.5 * w / w.sum(1, keepdims=True), rtol=1e-4)


# Rotation and the cache


def table_of(n_dims: int, positions: np.ndarray, base: float = 10000.0) -> np.ndarray:
    angle = positions[:, None].astype(np.float64) * base ** (-2.0 * np.arange(n_dims // 2) / n_dims)
    return np.stack([np.cos(angle), np.sin(angle)], 2).reshape(len(positions), -1).astype(np.float32)


def test_rope_table():
    positions = np.array([0, 3, 511, 131071], np.int32)
    factors = RNG.uniform(1, 4, 9).astype(np.float32)
    got = run(RopeTable(18, 10000.0), [positions, None, np.zeros((4, 18), np.float32)], [2], 4)[2]
    assert np.abs(got - table_of(18, positions)).max() < 2e-7
    scaled = run(RopeTable(18, 1e6, 0.5, attn_factor=1.5, freq_factors=True), [positions, factors, np.zeros((4, 18), np.float32)], [2], 4)[
        2
    ]
    angle = positions[:, None] * (0.5 * 1e6 ** (-2.0 * np.arange(9) / 18)) / factors
    assert np.abs(scaled[:, ::2] - 1.5 * np.cos(angle)).max() < 3e-7


def rotated(spec: RopeApply, x: np.ndarray, table: np.ndarray, w: np.ndarray) -> np.ndarray:
    v = x.reshape(len(x), spec.n_head, spec.d).astype(np.float64)
    if spec.norm:
        v = v / np.sqrt((v**2).mean(-1, keepdims=True) + spec.eps) * w
    out = v.copy()
    half = spec.n_dims // 2
    first = np.arange(half) if spec.mode == "neox" else 2 * np.arange(half)
    second = first + (half if spec.mode == "neox" else 1)
    cos, sin = table[:, None, ::2], table[:, None, 1::2]
    out[..., first] = v[..., first] * cos - v[..., second] * sin
    out[..., second] = v[..., first] * sin + v[..., second] * cos
    return out.reshape(len(x), -1)


@pytest.mark.parametrize(
    "spec",
    [
        RopeApply(64, 3, 64, "norm"), RopeApply(24, 2, 10, "neox"), RopeApply(24, 9, 10, "norm", norm=True, eps=1e-6),
        RopeApply(16, 3, 8, "neox", store=True, to="f16"), RopeApply(64, 2, 64, "neox", norm=True, eps=1e-6, store=True, to="q8_0"),
        RopeApply(32, 2, 0, "norm", norm=True, eps=1e-6, store=True, to="q4_1"),
    ],
    ids=str,
)  # fmt: skip
def test_rotation(spec):
    row, tokens = spec.d * spec.n_head, 3
    x, w = normal(tokens, row + 4), normal(spec.d)
    table = table_of(spec.n_dims, np.array([1, 9, 500], np.int32)) if spec.n_dims else None
    want = rotated(spec, x[:, :row], np.zeros((tokens, 0)) if table is None else table, w)
    slots = np.array([5, 0, 3], np.int32)
    if not spec.store:
        got = run(spec, [x, row + 4, table, w, np.zeros((tokens, row), np.float32), row, None], [4], tokens)[4]
    else:
        y = np.zeros((6, row_bytes(spec.to, row)), np.uint8)
        stored = run(spec, [x, row + 4, table, w, y, 0, slots], [4], tokens)[4][slots]
        got = dequantize(spec.to, stored, row)
        want = dequantize(spec.to, quantize(spec.to, want.astype(np.float32)), row)
    assert np.abs(got - want).max() < (2e-6 if not spec.store else 0.02 * np.abs(want).max())


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0", "q4_0", "q5_1", "iq4_nl"])
def test_store_rows_as_the_cpu_does(dtype):
    row, slots = 96, np.array([2, 0], np.int32)
    x = normal(2, row)
    spec, empty = StoreRows(row, dtype), np.zeros((3, row_bytes(dtype, row)), np.uint8)
    got = run(spec, [x, row, empty, slots], [2], 2)[2]
    want = run_on_cpu(spec, runnable_targets()[-1], [x, row, empty, slots], 2)[2]
    assert not got[1].any()
    apart = np.abs(dequantize(dtype, got[slots], row) - dequantize(dtype, want[slots], row))
    assert apart.max() < 0.02
    if dtype in ("f32", "f16", "bf16", "q8_0"):
        assert got.tobytes() == want.tobytes()


# Both targets' kernels


@pytest.mark.parametrize("n", [48, 1030])
def test_norms(n):
    x, w, r = normal(3, n), normal(n), normal(3, n)
    wide = x.astype(np.float64)
    want = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * w + r
    got = run(RmsNorm(n, 1e-5, True, True), [x, n, w, r, n, np.zeros_like(x), n], [5], 3)[5]
    assert np.abs(got - want).max() < 2e-6
    plain = run(Norm(n, 1e-5), [x, n, np.zeros_like(x), n], [2], 3)[2]
    centred = wide - wide.mean(1, keepdims=True)
    assert np.abs(plain - centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5)).max() < 3e-6


@pytest.mark.parametrize("n", [5, 200, 2000])
def test_pointwise(n):
    """An expression over operands that repeat, and views."""
    a, b, c = normal(6, n), normal(1, n), normal(6, 1)
    out = contiguous("f32", (n, T))
    spec = Elementwise(("mul", ("silu", 0), ("add", 1, 2)), out, (out, contiguous("f32", (n, 1)), contiguous("f32", (1, T))))
    got = run(spec, [np.zeros((6, n), np.float32), a, b, c], [0], tiles(spec.grid(), {"T": 6}), T=6)[0]
    want = a / (1 + np.exp(-a.astype(np.float64))) * (b + c)
    assert np.abs(got - want).max() < 2e-6


@pytest.mark.parametrize("to", ["f32", "f16", "bf16"])
def test_copy_of_a_transposed_view(to):
    a = normal(40, 24)
    spec = Copy(Strided("f32", (40, 24), (24, 1)), contiguous(to, (40, 24)))
    got = run(spec, [a, np.zeros((24, 40 * (4 if to == "f32" else 2)), np.uint8)], [1], tiles(spec.grid(), {}))[1]
    assert got.tobytes() == quantize(to, np.ascontiguousarray(a.T)).tobytes()


@pytest.mark.parametrize("op", ["add", "mul"])
def test_views_broadcast_like_their_copies(op):  # S71
    """Slices of columns and of rows as either operand: the bits of the contiguous copy."""
    whole, wide = normal(5, 20), normal(5 * 40)
    out = contiguous("f32", (20, T))
    slices = {
        Strided("f32", (20, T), (1, 40), 20): wide.reshape(5, 40)[:, 20:],
        Strided("f32", (20, T), (T, 1)): wide[:100].reshape(20, 5).T,
        Strided("f32", (20,), (1,), 40): np.broadcast_to(wide[40:60], (5, 20)),
    }
    for view, copied in slices.items():
        want = whole + copied if op == "add" else whole * copied
        for pair, arrays in (((view, out), (wide, whole)), ((out, view), (whole, wide))):
            spec = Elementwise((op, 0, 1), out, pair)
            got = run(spec, [np.zeros((5, 20), np.float32), *arrays], [0], tiles(spec.grid(), {"T": 5}), T=5)[0]
            assert got.tobytes() == want.tobytes()


def test_integers_are_copied_exactly():  # S68
    a = np.array([-(2**31), 2**31 - 1, 16777217, -16777219, 0, 5], np.int32)
    for source, want in ((contiguous("i32", (3, 2)), a), (Strided("i32", (3, 2), (2, 1)), a.reshape(3, 2).T.reshape(-1))):
        spec = Copy(source, contiguous("i32", (3, 2)))
        assert run(spec, [a, np.zeros(6, np.int32)], [1], tiles(spec.grid(), {}))[1].tolist() == want.tolist()


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("n", [1, 33, 4096])
def test_sums_over_any_dimension_equal_a_loop(dtype, n):  # S60
    """The second and the third dimension of a tensor with gaps between its rows, in the order of a loop; rows of the first to 1e-6."""
    a = normal(2, 3, 2 * n).astype(np.float16 if dtype == "f16" else np.float32)
    used = a[:, :, :n].astype(np.float32)
    source = Strided(dtype, (n, 3, 2), (1, 2 * n, 6 * n))
    for dim, want in ((1, used[:, 0] + used[:, 1] + used[:, 2]), (2, used[0] + used[1])):
        shape = tuple(1 if i == dim else m for i, m in enumerate((n, 3, 2)))
        spec = SumRowsExt(source, dim, contiguous("f32", shape))
        assert run(spec, [a, np.zeros(want.shape, np.float32)], [1], tiles(spec.grid(), {}))[1].tobytes() == want.tobytes()
    spec = SumRows(source, contiguous("f32", (1, 3, 2)))
    got = run(spec, [a, np.zeros((2, 3), np.float32)], [1], tiles(spec.grid(), {}))[1]
    exact = used.astype(np.float64)
    assert (np.abs(got - exact.sum(2)) <= 1e-6 * np.abs(exact).sum(2)).all()


def test_soft_max_with_mask():
    n, rows = 70, 5
    a, mask = normal(rows, n) * 3, np.where(RNG.random((rows, n)) < 0.3, -np.inf, 0).astype(np.float32)
    mask[2] = -np.inf
    out = contiguous("f32", (n, T))
    spec = SoftMax(out, out, 0.5, out)
    got = run(spec, [a, np.zeros((rows, n), np.float32), mask], [1], tiles(spec.grid(), {"T": rows}), T=rows)[1]
    with np.errstate(invalid="ignore"):
        e = np.exp(0.5 * a.astype(np.float64) + mask - (0.5 * a + mask).max(1, keepdims=True))
    want = e / e.sum(1, keepdims=True)
    want[2] = 0
    assert np.abs(got - want).max() < 1e-6


def test_sums_of_strided_rows():
    a = normal(33, 6)
    spec = SumRows(Strided("f32", (33, 6), (6, 1)), contiguous("f32", (1, 6)))
    got = run(spec, [a, np.zeros(6, np.float32)], [1], tiles(spec.grid(), {}))[1]
    assert np.abs(got - a.sum(0, dtype=np.float64)).max() < 1e-5


@pytest.mark.parametrize("a_layout", ["rows", "columns"])
def test_strided_products(a_layout):
    """K q and V p of unfused attention: adjacent along K, and along N."""
    k, n, t, heads = 20, 7, 3, 4
    a, b = normal(heads // 2, n, k), normal(heads, t, k)
    if a_layout == "rows":
        left, stored = contiguous("f32", (k, n, heads // 2)), a
    else:
        left, stored = Strided("f32", (k, n, heads // 2), (n, 1, k * n)), np.ascontiguousarray(a.transpose(0, 2, 1))
    spec = StridedMatMul(left, contiguous("f32", (k, t, heads)), contiguous("f32", (n, t, heads)))
    got = run(spec, [stored, b, np.zeros((heads, t, n), np.float32)], [2], tiles(spec.grid(), {}))[2]
    assert np.abs(got - np.einsum("hnk,htk->htn", np.repeat(a, 2, axis=0), b)).max() < 1e-5


def test_kernels_that_walk_rows_in_order():
    """CPU bodies run by a thread per row: transforms, blends, lists read off a mask, spans; and sums over an outer dimension."""
    tokens = 5
    a, rows = normal(tokens, 64), contiguous("f32", (64, T))
    env = {"T": tokens}
    spec = Hadamard(rows, 32, rows)
    got = run(spec, [a, np.zeros_like(a)], [1], tiles(spec.grid(), env), **env)[1]
    h = np.array([[(-1) ** bin(i & j).count("1") for j in range(32)] for i in range(32)]) / np.sqrt(32)
    assert np.abs(got.reshape(-1, 32) - a.reshape(-1, 32) @ h).max() < 1e-5

    idx = np.array([[3, -1, 60], [0, 1, 2], [-1, -1, -1], [63, 5, 6], [7, 7, 8]], np.int32)
    spec = Blend(rows, contiguous("i32", (3, T)), -7.5, rows)
    got = run(spec, [a, idx, np.zeros_like(a)], [2], tiles(spec.grid(), env), **env)[2]
    want = a.copy()
    for row, chosen in zip(want, idx):
        row[chosen[chosen >= 0]] = -7.5
    assert got.tobytes() == want.tobytes()

    mask = np.where(RNG.random((tokens, 64)) < 0.1, 0, -np.inf).astype(np.float32)
    spec = MaskToIndex(rows, 6)
    lists = run(spec, [mask, np.zeros((tokens, 6), np.int32)], [1], tiles(spec.grid(), env), **env)[1]
    for found, row in zip(lists, mask):
        visible = np.flatnonzero(row == 0)[:6]
        assert found.tolist() == [*visible, *[-1] * (6 - len(visible))]
    spans = run(ListSpans(6), [lists, np.zeros((tokens, 3), np.int32)], [1], tokens, **env)[1]
    assert spans.tolist() == [[6 * t, 0, int((row >= 0).sum())] for t, row in enumerate(lists)]

    cube = normal(tokens, 4, 33)
    spec = SumRowsExt(contiguous("f32", (33, 4, T)), 1, contiguous("f32", (33, 1, T)))
    got = run(spec, [cube, np.zeros((tokens, 33), np.float32)], [1], tiles(spec.grid(), env), **env)[1]
    assert np.abs(got - cube.sum(1)).max() < 1e-5
    spec = Fill(2.5, rows)
    assert (run(spec, [np.zeros_like(a)], [0], tiles(spec.grid(), env), **env)[0] == 2.5).all()


def test_convolution():
    """S69: taps in order, over strided inputs and weights."""
    channels, taps, tokens = 37, 3, 5
    x, w = normal(channels, taps - 1 + tokens), normal(channels, taps)
    spec = SsmConv(contiguous("f32", (taps - 1 + T, channels)), contiguous("f32", (taps, channels)), contiguous("f32", (channels, T)))
    got = run(spec, [x, w, np.zeros((tokens, channels), np.float32)], [2], tiles(spec.grid(), {"T": tokens}), T=tokens)[2]
    want = np.stack([(x[:, t : t + taps].astype(np.float64) * w).sum(1) for t in range(tokens)])
    assert np.abs(got - want).max() < 1e-6


def test_counting():
    got = run(Counting(9), [np.zeros((3, 9), np.int32)], [0], 3)[0]
    assert (got == np.arange(9)).all()


@pytest.mark.parametrize("dtype", ["q8_0", "q5_0"])
def test_decode_rows(dtype):
    raw = quantize(dtype, normal(3, 96))
    got = run(DecodeRows(96, dtype), [raw, np.zeros((3, 96), np.float32)], [1], 3)[1]
    assert np.abs(got - dequantize(dtype, raw, 96)).max() < 1e-6


def test_visibility_mask():
    cells, visible = np.array([3, 0, 7, 1], np.int32), np.array([[0, 0, 2], [1, 1, 3]], np.int32)
    got = run(KqMask(8), [cells, visible, np.zeros((2, 8), np.float32)], [2], 2)[2]
    want = np.full((2, 8), -np.inf, np.float32)
    want[0, [3, 0]] = 0
    want[1, [7, 1]] = 0
    assert (got == want).all()
