"""Matrix products on a GPU, over the weight layout the CPU uses.

The K columns of a row are cut into up to 16 *segments* whose number depends on the format and K alone. A segment is one chain of fused
multiply-adds over its blocks in ascending order (the chain of ``matmul_int8``), and segments are added in ascending order. Few tokens: a
block takes 16 rows, its threads are (row, segment), each weight is unpacked once for up to four tokens. Many tokens (``product_tiles``,
``product_floats``): segments run one after the other. Both add the same numbers in the same order, so a token's result does not depend on
how many tokens there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ggufc.codegen.emitter import F32, I32, Value
from ggufc.codegen.kernels.matmul import MatMul
from ggufc.codegen.kernels.matmul_id import MatMulId
from ggufc.codegen.weights import q8_record, weight_format
from ggufc.codegen.weights.base import ROWS, WeightFormat
from ggufc.codegen.weights.floats import F32Format, FloatFormat

from .emitter import PtxEmitter
from .entry import power_of_two
from .product_operands import Tile

MAX_SEGMENTS, MAX_F32_SEGMENTS = 16, 32
"""F32 weights are small matrices of few rows: more threads must make up for that."""
TILE_FROM = 17
"""From this many rows on products use tiles in shared memory."""
COLUMNS = 32
"""Columns of a piece of float weights."""
_AT_ONCE = 8
"""Columns of float weights that are loaded before they are multiplied."""


@dataclass(frozen=True)
class Segments:
    """The cut of K: ``count`` segments of ``length`` pieces each (the last may be shorter or empty); a piece is a chunk, or 32 columns of
    floats.
    """

    pieces: int
    count: int

    @property
    def length(self) -> int:
        return -(-self.pieces // self.count)


def segments(format: WeightFormat, k: int) -> Segments:
    """How rows of ``k`` columns are cut."""
    pieces = -(-k // COLUMNS) if isinstance(format, FloatFormat) else k // 32 // format.chunk_blocks(k)
    most = MAX_F32_SEGMENTS if isinstance(format, F32Format) else MAX_SEGMENTS
    return Segments(pieces, power_of_two(max(2, min(most, pieces))))


@dataclass
class Activations:
    """What an integer product reads of one block of 32 activations."""

    quads: Sequence[Value]
    d: Value
    starts: Sequence[Value]
    """Initial values of the integer sums: they remove the codes' offset."""
    sums: Sequence[Value]
    """What minima multiply, one per minimum."""


def correction_words(format: WeightFormat) -> int:
    """Words of sums of the codes that a block of 32 activations needs: to remove offsets, or for minima of 16 columns."""
    n = 32 // format.group
    return n if n > 1 and (format.offset or format.has_min) else 1 if format.offset else 0


def load_activations(e: PtxEmitter, format: WeightFormat, k: int, record: Value, i: Value) -> Activations:
    """Block ``i`` of a record (``weights.activations``)."""
    at, n, words = q8_record(k), 32 // format.group, correction_words(format)
    qs = e.at(record, i, 32)
    quads = e.vector_load(I32, 4, qs, 16) + e.vector_load(I32, 4, e.gep(qs, 16), 16)
    d = e.load(F32, e.at(e.gep(record, at.off_d), i, 4))
    where = e.at(e.gep(record, at.off_c16 if n > 1 else at.off_c32), i, 4 * n)
    codes = [e.load(I32, e.gep(where, 4 * g)) for g in range(words)]
    total = [e.load(F32, e.at(e.gep(record, at.off_s), i, 4))] if format.has_min and n == 1 else []
    starts, sums = corrections(e, format, d, codes, total)
    return Activations(quads, d, starts, sums)


def corrections(
    e: PtxEmitter, format: WeightFormat, d: Value, codes: Sequence[Value], total: Sequence[Value]
) -> tuple[list[Value], list[Value]]:
    """What integer sums start from and what minima multiply, from the words of a record."""
    b = e.b
    starts: list[Value] = []
    if format.offset:
        shift = 7 - (format.offset.bit_length() - 1)
        starts = [b.ashr(w, e.i32(shift)) if shift else w for w in codes]
    if format.has_min and not total:
        # The words are -128 times the sums of 16 activations; the factor is a power of two, so no rounding is added.
        return starts, [b.fmul(b.fmul(d, b.sitofp(c, F32)), e.f32(-1 / 128)) for c in codes]
    return starts, list(total)


def accumulate(e: PtxEmitter, quads: Sequence[Value], scales: Sequence[Value], mins: Sequence[Value], x: Activations, acc: Value) -> Value:
    """``acc`` plus one row's product with 32 activations."""
    b, n = e.b, len(scales)
    per = 8 // n
    for g in range(n):
        total = x.starts[g] if x.starts else e.i32(0)
        for j in range(per * g, per * (g + 1)):
            total = e.dot4(total, quads[j], x.quads[j])
        acc = e.fma(b.sitofp(total, F32), b.fmul(scales[g], x.d), acc)
    for low, s in zip(mins, x.sums):
        acc = e.fma(low, s, acc)
    return acc


# Few tokens


class VectorProduct:
    """Partial sums of (row, segment) threads for up to ``tokens`` activation rows, joined in shared memory."""

    def __init__(self, e: PtxEmitter, type_name: str, k: int, units: int, tokens: int) -> None:
        self.e, self.k, self.units, self.tokens = e, k, units, tokens
        self.format = weight_format(type_name)
        self.cut = segments(self.format, k)
        self.partial = e.shared(4 * ROWS * self.cut.count * units * tokens, "partial")
        self.row = e.b.and_(e.thread, e.i64(ROWS - 1))
        self.segment = e.b.lshr(e.thread, e.i64(4))

    def add_up(self, groups: Sequence[Value], rows: Sequence[Value]) -> None:
        """Partial sums of the weight groups with the activation rows, left in shared memory behind a barrier."""
        e, b = self.e, self.e.b
        acc = [[e.var(F32, e.f32(0.0)) for _ in rows] for _ in groups]
        first = b.mul(self.segment, e.i64(self.cut.length))
        last = e.imin(b.add(first, e.i64(self.cut.length)), e.i64(self.cut.pieces))
        with e.for_range(first, last, name="piece") as piece:
            if isinstance(self.format, FloatFormat):
                self._columns(groups, rows, piece, acc)
            else:
                self._chunk(groups, rows, piece, acc)
        for u, unit in enumerate(acc):
            for t, total in enumerate(unit):
                e.store(total.get(), self.place(u, t, self.segment, self.row))
        e.barrier()

    def place(self, unit: int, token: Value | int, segment: Value, row: Value) -> Value:
        e, b = self.e, self.e.b
        token = e.i64(token) if isinstance(token, int) else token
        plane = b.add(b.mul(token, e.i64(self.units)), e.i64(unit))
        return e.at(self.partial, b.add(b.mul(b.add(b.mul(plane, e.i64(self.cut.count)), segment), e.i64(ROWS)), row), 4)

    def _chunk(self, groups: Sequence[Value], rows: Sequence[Value], chunk: Value, acc: list[list[Any]]) -> None:
        e, b, m = self.e, self.e.b, self.format.chunk_blocks(self.k)
        with e.for_range(0, m, name="block") as j:
            i = b.add(b.mul(chunk, e.i64(m)), j)
            unpacked = [self.format.unpack(e, self.format.cursor(e, group, self.k, chunk, j, self.row)) for group in groups]
            for t, row in enumerate(rows):
                x = load_activations(e, self.format, self.k, row, i)
                for u, w in enumerate(unpacked):
                    acc[u][t].set(accumulate(e, w.quads, w.scales, w.mins, x, acc[u][t].get()))

    def _columns(self, groups: Sequence[Value], rows: Sequence[Value], piece: Value, acc: list[list[Any]]) -> None:
        e, b = self.e, self.e.b
        format = self.format
        assert isinstance(format, FloatFormat)
        first = b.mul(piece, e.i64(COLUMNS))
        n = e.imin(e.i64(COLUMNS), b.sub(e.i64(self.k), first))

        def columns(start: Value, count: int) -> None:
            at = [b.add(b.add(first, start), e.i64(j)) for j in range(count)]
            weights = [[format.column(e, group, k, self.row) for k in at] for group in groups]
            for t, row in enumerate(rows):
                values = [e.load(F32, e.at(row, k, 4)) for k in at]
                for u, mine in enumerate(weights):
                    for w, a in zip(mine, values):
                        acc[u][t].set(e.fma(w, a, acc[u][t].get()))

        whole = b.and_(n, e.i64(-_AT_ONCE))
        with e.for_range(0, whole, _AT_ONCE, name="columns") as j:
            columns(j, _AT_ONCE)
        if self.k % _AT_ONCE:
            with e.for_range(whole, n, name="column") as j:
                columns(j, 1)

    @contextmanager
    def results(self) -> Iterator[tuple[Value, Value, list[Value]]]:
        """(row of the group, token, sums per weight group) over the threads of the block."""
        e, b = self.e, self.e.b
        with e.for_threads(ROWS * self.tokens) as i:
            row, token = b.and_(i, e.i64(ROWS - 1)), b.lshr(i, e.i64(4))
            totals = [e.var(F32, e.f32(0.0)) for _ in range(self.units)]
            with e.for_range(0, self.cut.count, name="segment") as s:
                for u, total in enumerate(totals):
                    total.set(b.fadd(total.get(), e.load(F32, self.place(u, token, s, row))))
            yield row, token, [t.get() for t in totals]


def threads(type_name: str, k: int) -> int:
    """Threads of a block of a ``VectorProduct``."""
    return ROWS * segments(weight_format(type_name), k).count


def vector_body(spec: MatMul | MatMulId, tile_of: Callable[[PtxEmitter], Tile], tokens: int) -> Callable[[PtxEmitter], None]:
    """One unit of groups by ``tokens`` tokens."""

    def body(e: PtxEmitter) -> None:
        product, tile = VectorProduct(e, spec.format, spec.k, spec.unit, tokens), tile_of(e)
        tile.begin()
        product.add_up([tile.group(e.i64(u)) for u in range(spec.unit)], [tile.activations(e.i64(t)) for t in range(tokens)])
        with product.results() as (row, token, sums):
            tile.store(e.i64(0), row, token, sums)

    return body
