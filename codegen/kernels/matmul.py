"""Matrix products y = W x with what follows them: bias, residual, gated activation.

A tile is a static block of row groups and handles all tokens, so every weight byte is read from memory once per launch. Few tokens
(decode) unpack weights in registers; many tokens (prefill) unpack a group once into scratch. Both compute each element by the same
operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ggufc.codegen.cpu.target import Target
from ggufc.codegen.emitter import F32, Emitter, Value
from ggufc.codegen.errors import CodegenError
from ggufc.codegen.kernels import vmath
from ggufc.codegen.kernels.matmul_float import FloatProduct
from ggufc.codegen.kernels.matmul_id import MatMulId
from ggufc.codegen.kernels.matmul_int8 import Int8Product
from ggufc.codegen.weights import weight_format
from ggufc.codegen.weights.base import ROWS
from ggufc.codegen.weights.floats import FloatFormat

__all__ = ["MatMul", "MatMulId", "grid"]

EPILOGUES = ("none", "add", "silu_glu", "gelu_glu")

_TILE_BYTES = 128 << 10
_MIN_TILES = 16


@dataclass(frozen=True)
class MatMul:
    """y[n, rows] = W[k, n] x[k, rows], W repacked to ``format``.

    ``rows`` is the symbol of the token count (``T``, ``O``) or a number. ``x``: q8 records, or f32 rows ``ldx`` elements apart for
    float formats. ``y``: f32, rows ``ldy`` elements apart. Epilogues after the bias: ``add`` adds ``residual`` (rows ``ldr`` apart; it
    may be ``y`` itself); ``silu_glu`` and ``gelu_glu`` take groups of 16 rows as gate, up, gate, up ... and give n/2 rows act(gate) * up.
    """

    format: str
    k: int
    n: int
    epilogue: str
    bias: bool
    rows: str

    arg_names: ClassVar[tuple[str, ...]] = ("w", "x", "y", "ldx", "ldy", "residual", "ldr", "bias")

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
    def product(self) -> Int8Product | FloatProduct:
        fmt = weight_format(self.format)
        return FloatProduct(fmt, self.k) if isinstance(fmt, FloatFormat) else Int8Product(fmt, self.k)

    def scratch_bytes(self, target: Target) -> int:
        product = self.product
        return product.panel_bytes() * self.unit if isinstance(product, Int8Product) else 0

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
        self.product = spec.product
        self.lanes = e.target.lanes
        self.parts = ROWS // self.lanes
        self.w, self.x, self.y = e.arg_ptr(0), e.arg_ptr(1), e.arg_ptr(2)
        self.ldx = e.b.mul(e.arg_int(3), e.i64(4)) if isinstance(self.product, FloatProduct) else e.i64(self.product.stride())
        self.ldy = e.b.mul(e.arg_int(4), e.i64(4))
        self.tokens = e.i64(int(spec.rows)) if spec.rows.isdigit() else e.param(spec.rows)
        if spec.epilogue == "add":
            self.residual, self.ldr = e.arg_ptr(5), e.b.mul(e.arg_int(6), e.i64(4))
        if spec.bias:
            self.bias = e.arg_ptr(7)

    def emit(self) -> None:
        e, b = self.e, self.e.b
        per = _units_per_tile(self.spec)
        first = b.mul(e.tile, e.i64(per))
        last = e.imin(b.add(first, e.i64(per)), e.i64(_units(self.spec)))
        size = self.product.format.group_bytes(self.spec.k)
        with e.for_range(first, last, name="unit") as unit:
            group = e.at(self.w, unit, size * self.spec.unit)
            groups = [e.gep(group, size * i) for i in range(self.spec.unit)]
            if isinstance(self.product, FloatProduct):
                self._runs(unit, groups, self._token_block, panel=False)
            else:
                with e.if_else(b.icmp_signed("<", self.tokens, e.i64(self.product.format.panel_tokens))) as (few, many):
                    with few:
                        self._runs(unit, groups, self._token_block, panel=False)
                    with many:
                        self._many(unit, groups)
        e.ret()

    @property
    def _token_block(self) -> int:
        """Tokens at a time: 16 vector registers hold the accumulators of half as many."""
        if isinstance(self.product, FloatProduct):
            return 4 if self.lanes == 16 else 2
        return 8 if self.lanes == 16 else 4

    def _many(self, unit: Value, groups: list[Value]) -> None:
        e, product = self.e, self.product
        assert isinstance(product, Int8Product)
        panels = [e.gep(e.scratch, product.panel_bytes() * i) for i in range(len(groups))]
        for group, panel in zip(groups, panels):
            product.fill_panel(e, group, panel)
        self._runs(unit, panels, self._token_block, panel=True)

    def _runs(self, unit: Value, groups: list[Value], block: int, panel: bool) -> None:
        """All tokens in blocks of ``block``, then of half as many, down to one."""
        e, b = self.e, self.e.b
        done: Value = e.i64(0)
        while block:
            stop = b.add(done, b.and_(b.sub(self.tokens, done), e.i64(-block)))
            with e.for_range(0, self.parts, name="part") as part, e.for_range(done, stop, block, name=f"t{block}") as t:
                self._block(unit, groups, part, t, block, panel)
            done = stop
            block //= 2

    def _block(self, unit: Value, groups: list[Value], part: Value, t: Value, tokens: int, panel: bool) -> None:
        e = self.e
        x = e.gep(self.x, e.b.mul(t, self.ldx))
        if isinstance(self.product, FloatProduct):
            rows = [e.gep(x, e.b.mul(self.ldx, e.i64(i))) if i else x for i in range(tokens)]
        else:
            rows = [e.gep(x, self.product.stride() * i) for i in range(tokens)]
        results = []
        for group in groups:
            if panel and isinstance(self.product, Int8Product):
                results.append(self.product.from_panel(e, group, part, rows))
            else:
                results.append(self.product.direct(e, group, part, rows))
        if self.spec.is_glu:
            act = vmath.silu if self.spec.epilogue == "silu_glu" else vmath.gelu
            values = [e.b.fmul(act(e, gate), up) for gate, up in zip(*results)]
        else:
            values = results[0]
        self._store(unit, part, t, values)

    def _store(self, unit: Value, part: Value, t: Value, values: list[Value]) -> None:
        """Bias, residual, and the rows that exist."""
        e, b = self.e, self.e.b
        n_out = self.spec.n // self.spec.unit
        row = b.add(b.mul(unit, e.i64(ROWS)), b.mul(part, e.i64(self.lanes)))
        if n_out % ROWS == 0:
            self._store_rows(row, t, values)
            return
        with e.if_else(b.icmp_signed("<=", row, e.i64(n_out - self.lanes))) as (whole, tail):
            with whole:
                self._store_rows(row, t, values)
            with tail:
                held = e.alloca(4 * self.lanes)
                for i, v in enumerate(values):
                    e.store(v, held)
                    with e.for_range(row, e.i64(n_out), name="tail") as r:
                        self._store_rows(r, b.add(t, e.i64(i)), [e.load(F32, e.at(held, b.sub(r, row), 4))])

    def _store_rows(self, row: Value, t: Value, values: list[Value]) -> None:
        """Values of rows ``row`` on (vectors or scalars) of consecutive tokens."""
        e, b = self.e, self.e.b
        ty = values[0].type
        first = b.mul(row, e.i64(4))
        bias = e.load(ty, e.gep(self.bias, first)) if self.spec.bias else None
        for i, v in enumerate(values):
            token = b.add(t, e.i64(i)) if i else t
            if bias is not None:
                v = b.fadd(v, bias)
            if self.spec.epilogue == "add":
                v = b.fadd(v, e.load(ty, e.gep(e.gep(self.residual, b.mul(token, self.ldr)), first)))
            e.store(v, e.gep(e.gep(self.y, b.mul(token, self.ldy)), first))
