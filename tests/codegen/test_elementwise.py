"""Pointwise expressions and copies over strided, repeated and symbolic shapes."""

from __future__ import annotations

import numpy as np
import pytest

from ggufc.codegen.errors import CodegenError
from ggufc.codegen.kernels.elementwise import Copy, Elementwise
from ggufc.codegen.kernels.strided import Strided, contiguous, row_grid
from ggufc.ir.dims import Sym, evaluate
from harness import build, run, runnable_targets
from strided_reference import buffer, repeated, tiles, values, view

T, KV = Sym("T"), Sym("KV")
C = contiguous
SPECS = [
    Elementwise(("add", 0, 1), C("f32", (50, T)), (C("f32", (50, T)), C("f32", (50,)))),
    Elementwise(("mul", ("silu", 0), 1), C("f32", (64, T)), (Strided("f32", (64, T), (1, 200)), Strided("f32", (64, T), (1, 200), 100))),
    Elementwise(("mul", ("gelu", 0), 1), C("f32", (3000, T)), (C("f32", (3000, T)), C("f32", (3000, T)))),
    Elementwise(("softcap", 0, 30.0), C("f32", (33, 2)), (C("f32", (33, 2)),)),
    Elementwise(("scale", 0, 1.5, -0.25), C("f32", (KV, 3, T)), (C("f32", (KV, 3, T)),)),
    Elementwise(("clamp", ("sub", 0, 1), -1.0, 0.5), C("f32", (20, 6, 4)), (C("f16", (20, 6, 4)), C("bf16", (20, 3, 2)))),
    Elementwise(("div", ("exp", 0), ("sqrt", ("softplus", 1))), C("f32", (12, T)), (C("f32", (4, T)), Strided("f32", (12, T), (T, 1)))),
    Elementwise(("add", ("mul", 0, 1), ("relu", ("neg", 2))), Strided("f32", (9, T, 2), (2, 18, 18 * T), 3),
                (C("i32", (9, T, 2)), C("f32", (1, T, 2)), C("f16", (9,)))),
    Elementwise(("add", ("tanh", 0), ("add", ("sigmoid", 0), 2.0)), C("f16", (21, 2 * T)), (C("bf16", (21, 2 * T)),)),
    Elementwise(("mul", 0, 1), C("f32", (7, T + 1)), (C("f32", (7, T + 1)), C("f32", (1, T + 1)))),
    Elementwise(1.5, Strided("f32", (21, T), (1, 30)), ()),
]  # fmt: skip
COPIES = [
    Copy(Strided("f32", (16, 5, T), (1, 16 * T, 16)), C("f32", (16, 5, T))),
    Copy(Strided("f32", (T, 7), (7, 1)), C("f32", (T, 7))),
    Copy(C("f32", (37, T)), C("f16", (37, T))),
    Copy(C("f32", (37, T)), C("bf16", (37, T))),
    Copy(C("f16", (16, 2)), Strided("f32", (16, 2), (1, 40), 24)),
    Copy(C("bf16", (19, T)), Strided("f16", (19, T), (3, 60))),
    Copy(Strided("i32", (5, T), (2, 10)), C("i32", (5, T))),
    Copy(C("i32", (17, 3)), C("f32", (17, 3))),
    Copy(C("f32", (17, 3)), C("i32", (17, 3))),
    Copy(C("f32", (4, 1, 2)), C("f32", (12, T, 4))),
    Copy(Strided("f16", (KV, T, 2), (1, KV, KV * T)), C("f16", (KV, T, 2))),
]
_HALF, _WHOLE = Strided("f32", (20, T), (1, 40), 20), C("f32", (20, T))
SLICES = [
    [tuple(Elementwise((op, 0, 1), _WHOLE, pair) for pair in pairs) for op in ("add", "mul")]
    for pairs in (((_HALF, _WHOLE), (_WHOLE, _WHOLE)), ((_WHOLE, _HALF), (_WHOLE, _WHOLE)))
]
"""Per order of operands: (a view of half a row, its copy) for add and mul."""
ENV = {"T": 5, "KV": 40}


@pytest.fixture(scope="module", params=runnable_targets(), ids=lambda t: t.level)
def loaded(request):
    return request.param, build([*SPECS, *COPIES, *{spec for order in SLICES for pair in order for spec in pair}], request.param)


def numpy_value(expr, inputs):
    if isinstance(expr, float):
        return np.float64(expr)
    if isinstance(expr, int):
        return inputs[expr].astype(np.float64)
    op, *rest = expr
    x = numpy_value(rest[0], inputs)
    y = numpy_value(rest[1], inputs) if op in ("add", "sub", "mul", "div") else None
    return {
        "add": lambda: x + y, "sub": lambda: x - y, "mul": lambda: x * y, "div": lambda: x / y,
        "scale": lambda: x * rest[1] + rest[2], "clamp": lambda: np.clip(x, rest[1], rest[2]),
        "softcap": lambda: rest[1] * np.tanh(x / rest[1]),
        "silu": lambda: x / (1 + np.exp(-x)), "sigmoid": lambda: 1 / (1 + np.exp(-x)), "tanh": lambda: np.tanh(x),
        "gelu": lambda: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
        "exp": lambda: np.exp(x), "softplus": lambda: np.logaddexp(0, x), "sqrt": lambda: np.sqrt(x), "neg": lambda: -x,
        "relu": lambda: np.maximum(x, 0),
    }[op]()  # fmt: skip


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: str(s.expr))
def test_expression(loaded, spec):  # S66
    target, image = loaded
    rng = np.random.default_rng(11)
    out = buffer(spec.out, ENV, rng)
    inputs = [buffer(x, ENV, rng) for x in spec.inputs]
    before = out.copy()
    got = run(spec, target, [out, *inputs], tiles(spec.grid(), ENV), loaded=image, **ENV)[0]
    shape = view(spec.out, out, ENV).shape
    want = np.zeros(shape) + numpy_value(spec.expr, [repeated(values(x, a, ENV), shape) for x, a in zip(spec.inputs, inputs)])
    rtol = 2e-6 if spec.out.dtype == "f32" else 1e-3
    np.testing.assert_allclose(view(spec.out, got, ENV).astype(np.float32), want, rtol=rtol, atol=2e-6)
    view(spec.out, got, ENV)[...] = view(spec.out, before, ENV)
    assert (got == before).all()  # nothing between the strides was touched


@pytest.mark.parametrize("spec", COPIES, ids=str)
def test_copy(loaded, spec):  # S68, S67
    target, image = loaded
    rng = np.random.default_rng(12)
    a, out = buffer(spec.a, ENV, rng), buffer(spec.out, ENV, rng)
    got = run(spec, target, [a, out], tiles(spec.grid(), ENV), loaded=image, **ENV)[1]
    want = repeated(values(spec.a, a, ENV), view(spec.out, out, ENV).shape)
    result = view(spec.out, got, ENV)
    if spec.out.dtype == "bf16":
        raw = np.ascontiguousarray(want, np.float32).view(np.uint32)
        assert (result == (raw + 0x7FFF + ((raw >> 16) & 1)) >> 16).all()
    else:
        assert (result == want.astype(result.dtype)).all()


@pytest.mark.parametrize("swapped", [False, True])
def test_a_slice_of_rows_broadcasts_like_its_copy(loaded, swapped):  # S71
    """mul and add with a view of half of each row as either operand have the bits of the contiguous copy."""
    target, image = loaded
    rng = np.random.default_rng(13)
    wide, other = (rng.standard_normal((5, n)).astype(np.float32) for n in (40, 20))
    for view_spec, copy_spec in SLICES[swapped]:
        part = np.ascontiguousarray(wide[:, 20:])
        results = []
        for spec, first in ((view_spec, wide), (copy_spec, part)):
            arrays = [np.zeros((5, 20), np.float32), *((other, first) if swapped else (first, other))]
            results.append(run(spec, target, arrays, tiles(spec.grid(), ENV), loaded=image, **ENV)[0])
        assert np.array_equal(results[0], results[1])
        want = part + other if view_spec.expr[0] == "add" else part * other
        assert np.array_equal(results[0], want)


def test_large_integers_are_copied_exactly(loaded):  # S68
    target, image = loaded
    spec = COPIES[6]
    a = np.arange(50, dtype=np.int32) + (1 << 30) + 1
    got = run(spec, target, [a, np.zeros(25, np.int32)], tiles(spec.grid(), ENV), loaded=image, **ENV)[1]
    assert (got.reshape(5, 5) == a[:50].reshape(5, 10)[:, ::2]).all()


@pytest.mark.parametrize("rows", [1, 7, 5000, T, 3 * T, 64 * T, 4099 * T, KV * T, 6 * KV * T, T + 1])
@pytest.mark.parametrize("values_per_row", [1, 64, 5000, KV])
def test_grid_covers_every_row(rows, values_per_row):
    grid = row_grid(rows, values_per_row)
    for env in ({"T": 1, "KV": 32}, {"T": 19, "KV": 96}):
        n, count, per_tile = evaluate(rows, env), tiles(grid, env), evaluate(grid.rows_per_tile, env)
        assert count * per_tile >= n and (count == 1 or grid.sym or (count - 1) * per_tile < n)


def test_refusals():
    x = C("f32", (4,))
    wrong = (((1.0, 0), "unknown"), (("mul", 0), "takes 2"), (3, "reads input 3"), ("silu", "not an input"), (("log2", 0), "log2"))
    for expr, words in wrong:
        with pytest.raises(CodegenError, match=words):
            Elementwise(expr, x, (x,))
    with pytest.raises(CodegenError, match="q4_0"):
        C("q4_0", (32,))
    with pytest.raises(CodegenError, match="at most 3"):
        Elementwise(0, x, (x,) * 4)
