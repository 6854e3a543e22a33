"""Pointwise kernels: a small expression over strided inputs, and copies with conversion.

An expression is an input number, a float constant, or a tuple ``(operator, operand, ...)``: ``("mul", ("silu", 0), 1)``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from ggufc.codegen.cpu.target import Target
from ggufc.codegen.emitter import F32, I16, I32, Emitter, Value, vec
from ggufc.codegen.errors import CodegenError
from ggufc.codegen.kernels import vmath
from ggufc.codegen.kernels.strided import (
    Grid,
    Strided,
    for_rows,
    for_vectors,
    load_values,
    row_grid,
    row_pointer,
    store_values,
)

Expr = Any
"""``int`` | ``float`` | ``(str, ...)``."""


def _zero(v: Value, e: Emitter) -> Value:
    return e.const(v.type, 0.0)


UNARY: dict[str, Callable[[Emitter, Value], Value]] = {
    "silu": vmath.silu,
    "gelu": vmath.gelu,
    "sigmoid": vmath.sigmoid,
    "tanh": vmath.tanh,
    "exp": vmath.exp,
    "softplus": vmath.softplus,
    "relu": lambda e, v: e.b.select(e.b.fcmp_ordered("<", v, _zero(v, e)), _zero(v, e), v),
    "neg": lambda e, v: e.b.fneg(v),
    "sqrt": lambda e, v: e.fsqrt(v),
}
BINARY = {"add": "fadd", "sub": "fsub", "mul": "fmul", "div": "fdiv"}
WITH_NUMBERS = {"scale": 2, "clamp": 2, "softcap": 1}
"""Operators of one operand and float parameters: scale(x, s, b) = s x + b, clamp(x, min, max), softcap(x, c) = c tanh(x / c)."""


def check(expr: Expr, n_inputs: int) -> None:
    """Raise CodegenError unless ``expr`` is well formed over ``n_inputs`` inputs."""
    if isinstance(expr, float):
        return
    if isinstance(expr, int):
        if not 0 <= expr < n_inputs:
            raise CodegenError(f"elementwise: the expression reads input {expr}, but there are {n_inputs}")
        return
    if not isinstance(expr, tuple) or not expr:
        raise CodegenError(f"elementwise: {expr!r} is not an input number, a float or a tuple (operator, operands...)")
    op, *rest = expr
    operands = 2 if op in BINARY else 1
    count = operands + WITH_NUMBERS.get(op, 0)
    if op not in BINARY and op not in UNARY and op not in WITH_NUMBERS:
        raise CodegenError(f"elementwise: operator {op!r} is unknown; known: {', '.join(sorted([*BINARY, *UNARY, *WITH_NUMBERS]))}")
    if len(rest) != count:
        raise CodegenError(f"elementwise: {op} takes {count} operands, not {len(rest)}")
    for operand in rest[:operands]:
        check(operand, n_inputs)


def evaluate(e: Emitter, expr: Expr, ty: Any, load: Callable[[int], Value]) -> Value:
    """Emit ``expr``; ``load`` gives the inputs as values of type ``ty``."""
    if isinstance(expr, float):
        return e.const(ty, expr)
    if isinstance(expr, int):
        return load(expr)
    op, *rest = expr
    b = e.b
    first = evaluate(e, rest[0], ty, load)
    if op in UNARY:
        return UNARY[op](e, first)
    if op in BINARY:
        return getattr(b, BINARY[op])(first, evaluate(e, rest[1], ty, load))
    if op == "scale":
        scaled = b.fmul(first, e.const(ty, rest[1]))
        return b.fadd(scaled, e.const(ty, rest[2])) if rest[2] else scaled
    if op == "softcap":
        return b.fmul(vmath.tanh(e, b.fmul(first, e.const(ty, 1 / rest[1]))), e.const(ty, rest[1]))
    low, high = e.const(ty, rest[1]), e.const(ty, rest[2])
    first = b.select(b.fcmp_ordered("<", first, low), low, first)
    return b.select(b.fcmp_ordered(">", first, high), high, first)


@dataclass(frozen=True)
class Elementwise:
    """out = expr(inputs), each input repeated to the shape of ``out`` as ggml does; ``out`` may be an input of equal layout.

    Arithmetic is f32. One tile per block of rows, see ``grid``.
    """

    expr: Expr
    out: Strided
    inputs: tuple[Strided, ...]
    arg_names: ClassVar[tuple[str, ...]] = ("out", "a", "b", "c")

    def __post_init__(self) -> None:
        if len(self.inputs) > 3:
            raise CodegenError(f"elementwise: {len(self.inputs)} inputs; split the expression, a kernel takes at most 3")
        check(self.expr, len(self.inputs))

    def grid(self) -> Grid:
        _, n1, n2, n3 = self.out.ne
        return row_grid(n1 * n2 * n3, self.out.ne[0])

    def emit(self, e: Emitter) -> None:
        b, out, ne = e.b, self.out, self.out.ne
        bases = [e.arg_ptr(i) for i in range(len(self.inputs) + 1)]
        adjacent = out.nb[0] == 1 and all(x.ne[0] == 1 or (x.ne[0] == ne[0] and x.nb[0] == 1) for x in self.inputs)

        def row(index: list[Value]) -> None:
            target = row_pointer(e, bases[0], out, index, ne)
            sources = [row_pointer(e, base, x, index, ne) for base, x in zip(bases[1:], self.inputs)]

            def load(k: int, i: Value, n: int, mask: Value | None) -> Value:
                x = self.inputs[k]
                if x.ne[0] == 1:
                    return e.splat(load_values(e, x, sources[k], 1), n)
                if x.nb[0] == 1 and x.ne[0] == ne[0]:
                    return load_values(e, x, e.at(sources[k], i, x.size), n, mask)
                position = i if x.ne[0] == ne[0] else b.urem(i, e.dim(x.ne[0]))
                return load_values(e, x, e.at(sources[k], b.mul(position, e.dim(x.nb[0])), x.size), 1)

            def chunk(i: Value, n: int, mask: Value | None) -> None:
                result = evaluate(e, self.expr, vec(F32, n), lambda k: load(k, i, n, mask))
                at = i if out.nb[0] == 1 else b.mul(i, e.dim(out.nb[0]))
                store_values(e, out, result, e.at(target, at, out.size), mask)

            if adjacent:
                for_vectors(e, ne[0], chunk)
            else:
                with e.for_lanes(e.dim(ne[0])) as i:
                    chunk(i, 1, None)

        for_rows(e, ne[1:], ne[0], row)
        e.ret()

    def scratch_bytes(self, target: Target) -> int:
        return 0


@dataclass(frozen=True)
class Copy:
    """out = a, converted between ``f32 f16 bf16 i32`` and repeated to the shape of ``out``.

    Serves cont, cast, cpy, repeat and the parts of concat. Equal types are copied bit by bit. One tile per block of rows, see ``grid``.
    """

    a: Strided
    out: Strided
    arg_names: ClassVar[tuple[str, ...]] = ("a", "out")

    def grid(self) -> Grid:
        _, n1, n2, n3 = self.out.ne
        return row_grid(n1 * n2 * n3, self.out.ne[0])

    def emit(self, e: Emitter) -> None:
        b, a, out, ne = e.b, self.a, self.out, self.out.ne
        bases = e.arg_ptr(0), e.arg_ptr(1)
        if a.dtype == out.dtype:
            raw = I32 if a.size == 4 else I16

            def move(source: Value, target: Value, n: int, mask: Value | None) -> None:
                if mask is None:
                    e.store(e.load(vec(raw, n), source), target)
                else:
                    e.store_lanes(e.load_lanes(raw, n, source, mask), target, mask)

        else:

            def move(source: Value, target: Value, n: int, mask: Value | None) -> None:
                store_values(e, out, load_values(e, a, source, n, mask), target, mask)

        def row(index: list[Value]) -> None:
            source = row_pointer(e, bases[0], a, index, ne)
            target = row_pointer(e, bases[1], out, index, ne)
            if a.nb[0] == 1 and out.nb[0] == 1 and a.ne[0] == ne[0]:
                for_vectors(e, ne[0], lambda i, n, mask: move(e.at(source, i, a.size), e.at(target, i, out.size), n, mask))
                return
            with e.for_lanes(e.dim(ne[0])) as i:
                position = i if a.ne[0] == ne[0] else b.urem(i, e.dim(a.ne[0]))
                move(e.at(source, b.mul(position, e.dim(a.nb[0])), a.size), e.at(target, b.mul(i, e.dim(out.nb[0])), out.size), 1, None)

        for_rows(e, ne[1:], ne[0], row)
        e.ret()

    def scratch_bytes(self, target: Target) -> int:
        return 0
