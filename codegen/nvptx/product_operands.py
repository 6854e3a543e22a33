"""What a tile of a product multiplies, and where its sums go: the part of product kernels that does not depend on how they multiply.

``DenseTile``: rows of a matrix by tokens that follow each other. ``ChoiceTile``: rows of one chosen expert by the token that chose it.
``expert_tiles`` has the third: rows of an expert by tokens that chose it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ggufc.codegen.emitter import F32, I1, I32, Value
from ggufc.codegen.kernels.matmul import MatMul
from ggufc.codegen.kernels.matmul_id import MatMulId
from ggufc.codegen.kernels.matmul_product import gated
from ggufc.codegen.weights import q8_record, weight_format
from ggufc.codegen.weights.base import ROWS
from ggufc.codegen.weights.floats import FloatFormat

from .emitter import PtxEmitter


class Tile(Protocol):
    """Some groups of 16 weight rows (gate and up in turn where the product is gated) by some tokens. All methods but ``begin`` are for use
    inside the tile.
    """

    def begin(self) -> None:
        """Open the loop over tiles."""

    @property
    def count(self) -> Value:
        """How many tokens there are from the tile's first on: those from ``count`` on do not exist."""

    def group(self, i: Value) -> Value:
        """Address of weight group ``i`` of the tile; of some other where there is none."""

    def activations(self, token: Value) -> Value:
        """Address of the activations of a token; of another where it does not exist."""

    def store(self, unit: Value, row: Value, token: Value, sums: Sequence[Value]) -> None:
        """Finish and store the sums (one, or of gate and up) of a row of the unit's groups, if row and token exist."""


def units_of(spec: MatMul | MatMulId) -> int:
    """Groups of 16 rows of the result."""
    rows = spec.n // spec.unit if isinstance(spec, MatMul) else spec.n
    return -(-rows // ROWS)


def row_count(spec: MatMul | MatMulId, e: PtxEmitter) -> Value:
    return e.i64(int(spec.rows)) if spec.rows.isdigit() else e.param(spec.rows)


def _is_float(spec: MatMul | MatMulId) -> bool:
    return isinstance(weight_format(spec.format), FloatFormat)


class DenseTile:
    """``groups`` weight groups by ``tokens`` activation rows of a ``MatMul``."""

    def __init__(self, spec: MatMul, e: PtxEmitter, groups: int, tokens: int) -> None:
        b = e.b
        self.spec, self.e, self.groups, self.tokens = spec, e, groups, tokens
        self.rows = row_count(spec, e)
        self.stride = b.mul(e.arg_int(3), e.i64(4)) if _is_float(spec) else e.i64(q8_record(spec.k).stride)
        self.y, self.ldy = e.arg_ptr(2), e.arg_int(4)

    def begin(self) -> None:
        e, b, spec = self.e, self.e.b, self.spec
        per = self.groups // spec.unit
        row_tiles = e.i64(-(-units_of(spec) // per))
        e.begin_tiles()
        self.first_unit = b.mul(b.urem(e.tile, row_tiles), e.i64(per))
        self.first_token = b.mul(b.udiv(e.tile, row_tiles), e.i64(self.tokens))

    @property
    def count(self) -> Value:
        return self.e.b.sub(self.rows, self.first_token)

    def group(self, i: Value) -> Value:
        e, b, unit = self.e, self.e.b, self.spec.unit
        at = b.add(b.mul(self.first_unit, e.i64(unit)), i)
        if self.groups > unit:
            at = e.imin(at, e.i64(units_of(self.spec) * unit - 1))
        return e.at(e.arg_ptr(0), at, weight_format(self.spec.format).group_bytes(self.spec.k))

    def activations(self, token: Value) -> Value:
        e, b = self.e, self.e.b
        row = e.imin(b.add(self.first_token, token), b.sub(self.rows, e.i64(1)))
        return e.gep(e.arg_ptr(1), b.mul(row, self.stride))

    def store(self, unit: Value, row: Value, token: Value, sums: Sequence[Value]) -> None:
        e, b, spec = self.e, self.e.b, self.spec
        out, at = b.add(b.mul(b.add(self.first_unit, unit), e.i64(ROWS)), row), b.add(self.first_token, token)
        with e.if_(b.and_(b.icmp_signed("<", out, e.i64(spec.n // spec.unit)), b.icmp_signed("<", at, self.rows))):
            (v,) = gated(e, spec.epilogue, [[s] for s in sums])
            if spec.bias:
                v = b.fadd(v, e.load(F32, e.at(e.arg_ptr(7), out, 4)))
            if spec.epilogue == "add":
                v = b.fadd(v, e.load(F32, e.at(e.arg_ptr(5), b.add(b.mul(at, e.arg_int(6)), out), 4)))
            e.store(v, e.at(self.y, b.add(b.mul(at, self.ldy), out), 4))


class ChosenRows:
    """What tiles of a ``MatMulId`` have in common: ``expert`` and ``first_unit`` are those of the tile."""

    expert: Value
    first_unit: Value

    def __init__(self, spec: MatMulId, e: PtxEmitter) -> None:
        self.spec, self.e = spec, e
        self.row_bytes = 4 * spec.k if _is_float(spec) else q8_record(spec.k).stride

    def chosen(self, position: Value) -> Value:
        """The expert (i64) at a position of ``ids``."""
        return self.e.sext64(self.e.load(I32, self.e.at(self.e.arg_ptr(3), position, 4)))

    def group(self, i: Value) -> Value:
        e, b, spec = self.e, self.e.b, self.spec
        matrix = e.arg_ptr(0)
        if spec.is_glu:
            matrix = b.select(b.trunc(i, I1), e.arg_ptr(5), matrix)
            i = b.lshr(i, e.i64(1))
        at = e.imin(b.add(self.first_unit, i), e.i64(units_of(spec) - 1))
        return e.at(e.at(matrix, self.expert, spec.expert_bytes), at, weight_format(spec.format).group_bytes(spec.k))

    def activations_of(self, position: Value) -> Value:
        e, b, spec = self.e, self.e.b, self.spec
        source = b.udiv(position, e.i64(spec.n_used)) if spec.broadcast_x else position
        return e.at(e.arg_ptr(1), source, self.row_bytes)

    def store_at(self, unit: Value, row: Value, position: Value, sums: Sequence[Value]) -> None:
        """As ``Tile.store`` for a position that exists."""
        e, b, spec = self.e, self.e.b, self.spec
        out = b.add(b.mul(b.add(self.first_unit, unit), e.i64(ROWS)), row)
        with e.if_(b.icmp_signed("<", out, e.i64(spec.n))):
            (v,) = gated(e, spec.epilogue, [[s] for s in sums])
            e.store(v, e.at(e.at(e.arg_ptr(2), position, 4 * spec.n), out, 4))


class ChoiceTile(ChosenRows):
    """16 rows of the expert at one position of ``ids`` by the activations it is meant for."""

    def begin(self) -> None:
        e, b, groups = self.e, self.e.b, self.e.i64(units_of(self.spec))
        e.begin_tiles()
        self.first_unit, self.position = b.urem(e.tile, groups), b.udiv(e.tile, groups)
        self.expert = self.chosen(self.position)

    @property
    def count(self) -> Value:
        return self.e.i64(1)

    def activations(self, token: Value) -> Value:
        return self.activations_of(self.position)

    def store(self, unit: Value, row: Value, token: Value, sums: Sequence[Value]) -> None:
        with self.e.if_(self.e.b.icmp_signed("<", token, self.count)):
            self.store_at(unit, row, self.position, sums)
