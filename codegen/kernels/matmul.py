"""Matrix products y = W x with what follows them: bias, residual, gated activation.

A tile is a static block of row groups and handles all tokens, so every weight byte is read from memory once per launch. Many tokens are
taken in runs whose activations stay in the cache while the groups of the tile pass by.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ggufc.codegen.cpu.target import Target
from ggufc.codegen.emitter import Emitter, Value
from ggufc.codegen.errors import CodegenError
from ggufc.codegen.kernels.matmul_product import gated, product, row_count, store_existing
from ggufc.codegen.kernels.matmul_tokens import Tokens, run_tokens
from ggufc.codegen.weights import weight_format
from ggufc.codegen.weights.base import ROWS
from ggufc.codegen.weights.floats import FloatFormat

EPILOGUES = ("none", "add", "silu_glu", "gelu_glu")

_TILE_BYTES = 128 << 10
_MIN_TILES = 16


@dataclass(frozen=True)
class MatMul:
    """y[n, rows] = W[k, n] x[k, rows], W repacked to ``format``.

    ``rows`` is the symbol of the token count (``T``, ``O``) or a number; the argument ``rows`` tells it to the code. ``x``: q8 records,
    or f32 rows ``ldx`` elements apart for float formats. ``y``: f32, rows ``ldy`` elements apart. Epilogues after the bias: ``add`` adds
    ``residual`` (rows ``ldr`` apart; it may be ``y`` itself); ``silu_glu`` and ``gelu_glu`` take groups of 16 rows as gate, up, gate, up
    ... and give n/2 rows act(gate) * up.
    """

    format: str
    k: int
    n: int
    epilogue: str
    bias: bool
    rows: str

    arg_names: ClassVar[tuple[str, ...]] = ("w", "x", "y", "ldx", "ldy", "residual", "ldr", "bias", "rows")

    def __post_init__(self) -> None:
        weight_format(self.format).check_k(self.k)
        if self.epilogue not in EPILOGUES:
            raise CodegenError(f"a product cannot end with {self.epilogue!r}; known are {', '.join(EPILOGUES)}")
        if self.is_glu and (self.n % (2 * ROWS) or self.bias):
            raise CodegenError(f"a gated product takes a multiple of {2 * ROWS} rows without bias, not {self.n}")

    @property
    def is_glu(self) -> bool:
        return self.epilogue.endswith("_glu")

    @property
    def unit(self) -> int:
        """Groups that are computed together: gate and up, or one."""
        return 2 if self.is_glu else 1

    @property
    def code(self) -> MatMul:
        """The product whose code this one uses."""
        return replace(self, rows="T")

    def scratch_bytes(self, target: Target) -> int:
        return product(self.format, self.k, target).scratch_bytes(self.unit)

    def emit(self, e: Emitter) -> None:
        _MatMulEmitter(self, e).emit()


def _units(spec: MatMul) -> int:
    return (spec.n + ROWS * spec.unit - 1) // (ROWS * spec.unit)


def _units_per_tile(spec: MatMul) -> int:
    size = weight_format(spec.format).group_bytes(spec.k) * spec.unit
    return max(1, min(-(-_TILE_BYTES // size), _units(spec) // _MIN_TILES))


def grid(spec: MatMul) -> int:
    """Tiles of one launch."""
    return -(-_units(spec) // _units_per_tile(spec))


class _MatMulEmitter:
    """State of one emission."""

    def __init__(self, spec: MatMul, e: Emitter) -> None:
        self.spec, self.e = spec, e
        self.product = product(spec.format, spec.k, e.target)
        self.w, self.x, self.y = e.arg_ptr(0), e.arg_ptr(1), e.arg_ptr(2)
        floats = isinstance(weight_format(spec.format), FloatFormat)
        self.ldx = e.b.mul(e.arg_int(3), e.i64(4)) if floats else e.i64(self.product.row_bytes())
        self.ldy = e.b.mul(e.arg_int(4), e.i64(4))
        self.tokens = row_count(e, 8)
        if spec.epilogue == "add":
            self.residual, self.ldr = e.arg_ptr(5), e.b.mul(e.arg_int(6), e.i64(4))
        if spec.bias:
            self.bias = e.arg_ptr(7)

    def emit(self) -> None:
        e, b, spec = self.e, self.e.b, self.spec
        per = _units_per_tile(spec)
        first = b.mul(e.tile, e.i64(per))
        last = e.imin(b.add(first, e.i64(per)), e.i64(_units(spec)))
        size = weight_format(spec.format).group_bytes(spec.k)
        run = run_tokens(self.product.row_bytes())
        with e.for_range(0, self.tokens, run, name="run") as start:
            tokens = Tokens(start, e.imin(b.add(start, e.i64(run)), self.tokens), self._rows, adjacent=True)
            self.product.prepare(e, tokens, spec.unit)
            with e.for_range(first, last, name="unit") as unit:
                group = e.at(self.w, unit, size * spec.unit)
                self.product.run(
                    e,
                    [e.gep(group, size * i) for i in range(spec.unit)],
                    tokens,
                    lambda part, t, results: self._finish(unit, part, t, results),
                )
        e.ret()

    def _rows(self, t: Value, n: int) -> list[Value]:
        e = self.e
        x = e.gep(self.x, e.b.mul(t, self.ldx))
        return [e.gep(x, e.b.mul(self.ldx, e.i64(i))) if i else x for i in range(n)]

    def _finish(self, unit: Value, part: Value, t: Value, results: list[list[Value]]) -> None:
        """Gate, bias, residual, and the rows that exist."""
        e, b, spec = self.e, self.e.b, self.spec
        values = gated(e, spec.epilogue, results)
        row = b.add(b.mul(unit, e.i64(ROWS)), b.mul(part, e.i64(e.target.lanes)))

        def store(row: Value, v: Value, i: int) -> None:
            token = b.add(t, e.i64(i)) if i else t
            at = b.mul(row, e.i64(4))
            if spec.bias:
                v = b.fadd(v, e.load(v.type, e.gep(self.bias, at)))
            if spec.epilogue == "add":
                v = b.fadd(v, e.load(v.type, e.gep(e.gep(self.residual, b.mul(token, self.ldr)), at)))
            e.store(v, e.gep(e.gep(self.y, b.mul(token, self.ldy)), at))

        store_existing(e, row, spec.n // spec.unit, values, store)
