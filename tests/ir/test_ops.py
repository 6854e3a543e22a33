"""Every operator's reference: its inferred type is the shape computed, and its numbers are those of a formula written out here."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ggufc.ir import OPS, Graph, IRError, interpret, parse_graph, print_graph, verify
from ggufc.ir.storage import PLAIN
from ir_cases import CASES, ENV, LEAVES, SYMBOLS, input_values, inputs, tt, weights_for

RNG = np.random.default_rng(3)


def run(g: Graph, node, weights=None, **values):
    g.outputs["out"] = node
    caches: dict = {}
    return interpret(g, weights_for(g) if weights is None else weights, input_values() | values, caches, ENV)["out"]


def apply(op: str, *arrays: np.ndarray, **attrs) -> np.ndarray:
    """The operator on f32/i32 arrays given in numpy order."""
    g = Graph("g", symbols=SYMBOLS)
    nodes = [g.weight(f"w{i}", tt("i32" if a.dtype.kind == "i" else "f32", *a.shape[::-1])) for i, a in enumerate(arrays)]
    return run(g, g.add(op, *nodes, **attrs), {f"w{i}": a for i, a in enumerate(arrays)})


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def close(a, b, tol=2e-6):
    np.testing.assert_allclose(a, b, rtol=tol, atol=tol)


def test_every_operator_has_a_case():
    assert set(CASES) == set(OPS) - LEAVES


@pytest.mark.parametrize("op", sorted(CASES))
def test_inferred_type_is_the_shape_computed(op):
    @settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)
    @given(st.data())
    def check(data):
        g = Graph("g", symbols=SYMBOLS)
        node = CASES[op](data.draw, g, op)
        assert node.op.name == op
        verify(g)
        out = run(g, node)
        assert out.shape == node.type.shape(ENV)
        # Decoded values of bf16 and quantised results are f32.
        assert out.dtype == (np.float32 if node.dtype not in PLAIN or node.dtype == "bf16" else PLAIN[node.dtype])
        back = parse_graph(print_graph(g))
        assert np.array_equal(run(back, back.outputs["out"]), out, equal_nan=True)

    check()


X = np.array([[-3.0, -1.0, -0.5, 0.0, 0.25, 1.0, 4.0, 30.0]], dtype=np.float32)


@pytest.mark.parametrize(
    ("op", "formula"),
    [
        ("silu", lambda x: x / (1 + math.exp(-x))),
        ("gelu", lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))),
        ("relu", lambda x: max(x, 0.0)),
        ("sigmoid", lambda x: 1 / (1 + math.exp(-x))),
        ("tanh", math.tanh),
        ("exp", math.exp),
        ("neg", lambda x: -x),
        ("softplus", lambda x: math.log1p(math.exp(x))),
    ],
)
def test_functions_of_one_element(op, formula):
    close(apply(op, X), [[formula(float(x)) for x in X[0]]])


def test_functions_survive_extreme_arguments():
    x = np.array([[-1e30, -200.0, 200.0, 1e30]], dtype=np.float32)
    assert np.isfinite(apply("silu", x)).all() and apply("silu", x)[0, 0] == 0
    assert apply("sigmoid", x).tolist() == [[0.0, pytest.approx(0, abs=1e-30), 1.0, 1.0]]
    assert apply("softplus", x)[0, 2:].tolist() == x[0, 2:].tolist()


def test_arithmetic_repeats_the_second_operand():
    a, row, matrix = normal(2, 3, 4), normal(4), normal(3, 1)
    close(apply("add", a, row), a + row)
    close(apply("sub", a, matrix), a - matrix)
    close(apply("mul", a, normal(1) * 0 + 2), a * 2)
    close(apply("div", a, np.float32([2, 4])[[0, 1, 0, 1]]), a / np.float32([2, 4, 2, 4]))
    close(apply("add", normal(1, 4) * 0, np.float32([1, 2])), [[1, 2, 1, 2]])


def test_scale_softcap_clamp_fill_repeat():
    close(apply("scale", X, s=2.0, b=1.0), 2 * X + 1)
    close(apply("softcap", X, cap=5.0), 5 * np.tanh(X / 5))
    close(apply("clamp", X, min=-1.0, max=1.0), np.clip(X, -1, 1))
    assert (apply("fill", X, value=-np.inf) == -np.inf).all()
    close(apply("repeat", X, ne=(16, 3)), np.tile(X, (3, 2)))


def test_glu_multiplies_the_activated_gate():
    gate, up = normal(2, 5), normal(2, 5)
    close(apply("glu", gate, up, fn="silu"), gate / (1 + np.exp(-gate)) * up)
    close(apply("glu", gate, up, fn="gelu"), apply("gelu", gate) * up, 1e-5)


def test_norms():
    a, w = normal(3, 6), normal(6)
    rms = a / np.sqrt(np.mean(a.astype(np.float64) ** 2, axis=1, keepdims=True) + 1e-5)
    close(apply("rms_norm", a, eps=1e-5), rms)
    close(apply("rms_norm_mul", a, w, eps=1e-5), rms * w)
    close(apply("norm", a, eps=1e-5), (a - a.mean(1, keepdims=True)) / np.sqrt(a.var(1, keepdims=True) + 1e-5), 1e-5)


def test_sums():  # S60
    a = normal(2, 3, 4)
    close(apply("sum_rows", a), a.sum(-1, keepdims=True))
    for dim in range(3):
        close(apply("sum_rows_ext", a, dim=dim), a.sum(2 - dim, keepdims=True))


def test_hadamard_is_its_own_inverse_and_orthonormal():
    a = normal(2, 16)
    once = apply("hadamard", a, n=8)
    h = np.array([[1]])
    for _ in range(3):
        h = np.block([[h, h], [h, -h]])
    close(once, (a.reshape(2, 2, 8) @ h / math.sqrt(8)).reshape(2, 16))
    close(apply("hadamard", once, n=8), a)


def test_products_share_matrices_between_heads():
    a, b = normal(2, 5, 3), normal(6, 4, 3)
    y = apply("mul_mat", a, b)
    for h in range(6):
        close(y[h], b[h] @ a[h // 3].T)


def test_products_with_experts():
    a, b, ids = normal(4, 5, 3), normal(2, 1, 3), np.array([[3, 1], [0, 0]])
    y = apply("mul_mat_id", a, b, ids)
    for t, u in np.ndindex(2, 2):
        close(y[t, u], a[ids[t, u]] @ b[t, 0])
    own = normal(2, 2, 3)
    close(apply("mul_mat_id", a, own, ids)[1, 1], a[0] @ own[1, 1])
    with pytest.raises(IRError, match=r"expert 4 does not exist; there are 4 \(0..3\)"):
        apply("mul_mat_id", a, b, ids + 1)


def test_softmax_scales_then_masks_and_survives_a_fully_masked_row():
    a, mask = normal(2, 3, 4), np.zeros((3, 4), np.float32)
    mask[0, 2:] = mask[2] = -np.inf
    p = apply("soft_max", a, mask, scale=0.5)
    e = np.exp(a * 0.5 + mask)[:, :2]
    close(p[:, :2], e / e.sum(-1, keepdims=True))
    assert not p[:, 2].any()


def test_mask_covers_exactly_the_visible_cells():
    g = Graph("g", symbols=SYMBOLS)
    i = inputs(g)
    mask = run(g, g.add("kq_mask", i["kv_cells"], i["visible"], ne0=8))
    assert [np.flatnonzero(row == 0).tolist() for row in mask] == [[0, 5, 6], [0, 1, 6], [0, 1, 3, 5, 6]]
    assert np.isneginf(mask[mask != 0]).all()
    with pytest.raises(IRError, match=r"token 0 sees cell 6, but only cells 0..5"):
        g.outputs["out"] = g.add("kq_mask", i["kv_cells"], i["visible"], ne0=6)
        run(g, g.outputs["out"])


@pytest.mark.parametrize("mode", ["norm", "neox"])
def test_rope_turns_pairs_by_position(mode):
    a, ff = normal(3, 2, 8), np.float32([1, 2, 4])
    y = apply("rope", a, np.array([2, 3, 4]), ff, mode=mode, n_dims=6, base=100.0, attn_factor=1.5)
    for t, h, i in np.ndindex(3, 2, 3):
        u, v = (2 * i, 2 * i + 1) if mode == "norm" else (i, i + 3)
        angle = (t + 2) * 100.0 ** (-2 * i / 6) / ff[i]
        close(y[t, h, u], 1.5 * (a[t, h, u] * math.cos(angle) - a[t, h, v] * math.sin(angle)))
        close(y[t, h, v], 1.5 * (a[t, h, u] * math.sin(angle) + a[t, h, v] * math.cos(angle)))
    assert np.array_equal(y[..., 6:], a[..., 6:])


@pytest.mark.parametrize(("base", "ctx"), [(10000.0, 128), (10000.0, 4096), (10.0, 692)])
def test_yarn_keeps_fast_frequencies_and_scales_slow_ones(base, ctx):
    """The ramp of the YaRN paper, written out for one head size; the last case meets the upper bound n_dims - 1."""
    g = Graph("g", symbols=SYMBOLS)
    yarn = {"freq_scale": 0.25, "ext_factor": 1.0, "n_ctx_orig": ctx}
    table = run(g, g.add("rope_table", inputs(g)["positions"], n_dims=16, base=base, **yarn))
    corner = [16 * math.log(ctx / (2 * math.pi * beta)) / (2 * math.log(base)) for beta in (32.0, 1.0)]
    lo, hi = max(0, math.floor(corner[0])), min(15, math.ceil(corner[1]))
    magnitude = 1 + 0.1 * math.log(4)
    for t, i in np.ndindex(3, 8):
        keep = 1 - min(1.0, max(0.0, (i - lo) / max(0.001, hi - lo)))
        theta = (t + 2) * base ** (-2 * i / 16)
        phi = 0.25 * theta * (1 - keep) + theta * keep
        close(table[t, 2 * i], magnitude * math.cos(phi))
        close(table[t, 2 * i + 1], magnitude * math.sin(phi))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_rope_is_table_then_apply_bit_for_bit(data):
    g = Graph("g", symbols=SYMBOLS)
    whole = CASES["rope"](data.draw, g, "rope")
    attrs = {k: v for k, v in whole.attrs.items() if k != "mode"}
    table = g.add("rope_table", *whole.operands[1:], **attrs)
    split = g.add("rope_apply", whole.operands[0], table, mode=whole.attrs["mode"], n_dims=whole.attrs["n_dims"])
    assert np.array_equal(run(g, whole), run(g, split))


def test_sorting_breaks_ties_by_the_lowest_index():
    a = np.float32([[2, 1, 2, 3, 1]])
    assert apply("argsort", a).tolist() == [[1, 4, 0, 2, 3]]
    assert apply("argsort", a, order="desc").tolist() == [[3, 0, 2, 1, 4]]
    assert apply("top_k", a, k=3).tolist() == [[3, 0, 2]]


@pytest.mark.parametrize("n", [1, 2, 1023, 1024, 1025, 65536])
def test_sorting_rows_of_any_length(n):  # S64
    a = RNG.integers(0, 100, (2, n)).astype(np.float32)
    order = apply("argsort", a, order="desc")
    for row, values in zip(order, a):
        key = [(-values[i], i) for i in row]
        assert key == sorted(key) and sorted(row) == list(range(n))
    assert np.array_equal(apply("top_k", a, k=min(n, 40)), order[:, :40])


@pytest.mark.parametrize("a", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("b", ["f32", "f16", "bf16"])
def test_sums_of_mixed_float_types(a, b):  # S66
    g = Graph("g")
    x, y = np.float32([1.5, -2, 1024]), np.float32([0.25, 3, 0.5])
    out = run(g, g.add("add", g.weight("x", tt(a, 3)), g.weight("y", tt(b, 3))), {"x": x, "y": y})
    assert out.dtype == np.float32
    assert np.array_equal(out, x + y)


def test_integers_are_copied_exactly_also_when_strided():  # S68
    g = Graph("g")
    numbers = np.array([[2**31 - 1, -(2**31)], [16777217, 3]], np.int32)
    out = run(g, g.add("cont", g.add("transpose", g.weight("w", tt("i32", 2, 2)))), {"w": numbers})
    assert out.dtype == np.int32
    assert np.array_equal(out, numbers.T)


@pytest.mark.parametrize("dim", range(4))
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0"])
def test_concat_appends_stored_rows_unchanged(dtype, dim):  # S67: whole blocks along dimension 0 too
    g = Graph("g")
    parts = [g.weight(n, tt(dtype, 32, 2, 3, 2)) for n in "ab"]
    values = {n: normal(2, 3, 2, 32) for n in "ab"}
    each = [run(g, p, values) for p in parts]
    assert np.array_equal(run(g, g.add("concat", *parts, dim=dim), values), np.concatenate(each, axis=3 - dim))


def test_views_of_rows_broadcast_like_their_copies():  # S71
    g = Graph("g")
    w, m = g.weight("w", tt("f32", 8, 3)), g.weight("m", tt("f32", 4, 3))
    part = g.add("view", w, ne=(4, 3), nb=(1, 8), offset=4)
    values = weights_for(g)
    for op in ("add", "mul"):
        for pair in ((part, m), (m, part)):
            copied = [g.add("cont", n) if n is part else n for n in pair]
            assert np.array_equal(run(g, g.add(op, *pair), values), run(g, g.add(op, *copied), values))


def test_get_rows_and_blend():  # S62
    table = normal(6, 4)
    assert np.array_equal(apply("get_rows", table, np.array([5, 0, 5])), table[[5, 0, 5]])
    batch = normal(2, 3, 4)
    assert np.array_equal(apply("get_rows", batch, np.array([[2], [0]])), batch[[0, 1], [2, 0]][:, None])
    with pytest.raises(IRError, match="row 6 does not exist"):
        apply("get_rows", table, np.array([6]))
    with pytest.raises(IRError, match="row -1 does not exist"):
        apply("get_rows", table, np.array([-1]))
    blended = apply("blend", table[:2], np.array([[0], [3]]), value=9.0)
    expected = table[:2].copy()
    expected[0, 0] = expected[1, 3] = 9
    assert np.array_equal(blended, expected)


def test_concat_along_each_dimension():
    a, b = normal(2, 3, 4), normal(2, 3, 4)
    for dim in range(3):
        assert np.array_equal(apply("concat", a, b, dim=dim), np.concatenate([a, b], axis=2 - dim))
    assert apply("concat", a[0], a[1], dim=2).shape == (2, 3, 4)


@pytest.mark.parametrize("n", range(1, 41))
def test_a_convolution_in_two_parts_is_the_whole(n):  # S69
    """The last K-1 inputs of one part are the taps of the next."""
    x, w = normal(3, 3 + n), normal(3, 4)
    whole = apply("ssm_conv", x, w)
    close(whole, [[sum(w[ch, k] * x[ch, t + k] for k in range(4)) for ch in range(3)] for t in range(n)])
    cut = n // 3
    parts = [apply("ssm_conv", x[:, a : b + 3], w) for a, b in ((0, cut), (cut, n)) if b > a]
    assert np.array_equal(np.concatenate(parts), whole)


def test_convolution_is_causal_with_carried_taps():  # S69
    x, w = normal(3, 3 + 5), normal(3, 4)
    y = apply("ssm_conv", x, w)
    for t, ch in np.ndindex(5, 3):
        close(y[t, ch], sum(w[ch, k] * x[ch, t + k] for k in range(4)))
    assert np.array_equal(apply("ssm_conv", x[:, 2:], w), y[2:])


TYPE_ERRORS = {
    "mul_mat": ([(4, 2), (5, 3)], {}, "differ in dimension 0"),
    "mul_mat heads": ([(4, 2, 2), (4, 3, 3)], {}, "must be multiples"),
    "mul_mat_id": ([(4, 2, 3), (4, 3, 1), (2, 1, "i")], {}, "dimension 1 must be 1 or 2"),
    "add": ([(4,), (3,)], {}, "cannot be repeated"),
    "glu": ([(4,), (1,)], {"fn": "silu"}, "the same shape"),
    "rms_norm": ([(4,)], {"eps": -1.0}, "cannot be negative"),
    "rms_norm_mul": ([(4, 2), (2,)], {"eps": 0.0}, "one factor for each of the 4"),
    "soft_max": ([(4, 2, 2), (4, 3)], {}, "must have dimensions 0 and 1"),
    "softcap": ([(4,)], {"cap": 0.0}, "must be above 0"),
    "clamp": ([(4,)], {"min": 1.0, "max": 0.0}, "lies above max"),
    "concat": ([(4, 2), (3, 2)], {"dim": 1}, "must agree"),
    "concat dim": ([(4, 2), (4, 2)], {"dim": 4}, "must lie in 0..3"),
    "repeat": ([(4,)], {"ne": (6,)}, "cannot be repeated"),
    "top_k": ([(4,)], {"k": 5}, "between 1 and the row length"),
    "sum_rows_ext": ([(4,)], {"dim": 1}, "has no dimension 1"),
    "hadamard": ([(12,)], {"n": 8}, "power of two that divides"),
    "ssm_conv": ([(8, 2), (3, 3)], {}, "number of channels"),
    "ssm_conv short": ([(1, 2), (4, 2)], {}, "shorter than"),
    "blend": ([(4, 2), (1, 3, "i")], {"value": 0.0}, "one list of indices"),
    "get_rows": ([(4, 2, 2), (3, "i")], {}, "one list of rows for each matrix"),
    "cast": ([(4,)], {"dtype": "f33"}, "Dtype 'f33' is unknown"),
    "rope": ([(8, 2, 3), (3, "i")], {"mode": "norm", "n_dims": 10, "base": 1e4}, "exceeds the head size"),
    "rope odd": ([(8, 2, 3), (3, "i")], {"mode": "norm", "n_dims": 3, "base": 1e4}, "must be even"),
    "rope pos": ([(8, 2, 3), (4, "i")], {"mode": "norm", "n_dims": 8, "base": 1e4}, "4 positions are given"),
    "rope ff": ([(8, 2, 3), (3, "i"), (3,)], {"mode": "norm", "n_dims": 8, "base": 1e4}, "at least n_dims/2 = 4"),
    "rope yarn": ([(8, 2, 3), (3, "i")], {"mode": "norm", "n_dims": 8, "base": 1e4, "ext_factor": 1.0}, "needs n_ctx_orig"),
    "rope_apply": ([(8, 2, 3), (6, 3)], {"mode": "norm", "n_dims": 8}, "equal to ne"),
    "set_rows": ([(8, 4), (8, 3), (3, "i")], {}, "must be a version of a cache"),
    "cpy": ([(4,), (4,)], {}, "must be a view of a cache"),
    "flash_attn": ([(8, 3, 3), (16, 9), (16, 9), (5, "i"), (3, 3, "i")], {"scale": 1.0, "n_head_kv": 2}, "cannot share"),
    "flash_attn k": ([(8, 4, 3), (15, 9), (16, 9), (5, "i"), (3, 3, "i")], {"scale": 1.0, "n_head_kv": 2}, "must hold 2 heads of 8"),
    "flash_attn cells": ([(8, 4, 3), (16, 9), (16, 8), (5, "i"), (3, 3, "i")], {"scale": 1.0, "n_head_kv": 2}, "numbers of cells"),
    "flash_attn vis": ([(8, 4, 3), (16, 9), (16, 9), (5, "i"), (3, 2, "i")], {"scale": 1.0, "n_head_kv": 2}, "one column for each"),
    "kq_mask": ([(5, "i"), (2, 3, "i")], {"ne0": 8}, r"holds \(base, lo, hi\)"),
}


@pytest.mark.parametrize("case", TYPE_ERRORS)
def test_shapes_that_do_not_fit_are_refused(case):
    shapes, attrs, message = TYPE_ERRORS[case]
    g = Graph("g")
    nodes = [g.weight(f"w{i}", tt("i32" if "i" in s else "f32", *(d for d in s if d != "i"))) for i, s in enumerate(shapes)]
    with pytest.raises(IRError, match=message):
        g.add(case.split()[0], *nodes, **attrs)
