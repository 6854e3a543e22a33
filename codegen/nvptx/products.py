"""Matrix products on a GPU, over the weight layout the CPU uses.

The K columns of a row are cut into up to 16 *segments* whose number depends on the format and K alone. A segment is one chain of fused
multiply-adds over its blocks in ascending order (the chain of ``matmul_int8``), and segments are added in ascending order. Few tokens: a
block takes 16 rows, its threads are (row, segment), each weight is unpacked once for up to four tokens. Many tokens (``tiles``): segments
run one after the other. Both add the same numbers in the same order, so a token's result does not depend on how many tokens there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ggufc.codegen.emitter import F32, I32, Value
from ggufc.codegen.kernels.base import symbol
from ggufc.codegen.kernels.matmul import MatMul
from ggufc.codegen.kernels.matmul_id import MatMulId
from ggufc.codegen.kernels.matmul_product import gated
from ggufc.codegen.weights import q8_record, weight_format
from ggufc.codegen.weights.base import ROWS, WeightFormat
from ggufc.codegen.weights.floats import FloatFormat

from .emitter import PtxEmitter
from .entry import Entry, Form, power_of_two, rows_factor

MAX_SEGMENTS = 16
TOKENS = 4
"""Tokens that share an unpacked weight in registers."""
TILE_FROM = 17
"""From this many rows on integer products use tiles in shared memory."""
_FLOAT_COLUMNS = 32


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
    pieces = -(-k // _FLOAT_COLUMNS) if isinstance(format, FloatFormat) else k // 32 // format.chunk_blocks(k)
    return Segments(pieces, power_of_two(max(2, min(MAX_SEGMENTS, pieces))))


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


# -- few tokens ------------------------------------------------------------------------------------------------------


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
        assert isinstance(self.format, FloatFormat)
        first = b.mul(piece, e.i64(_FLOAT_COLUMNS))
        with e.for_range(first, e.imin(b.add(first, e.i64(_FLOAT_COLUMNS)), e.i64(self.k)), name="k") as k:
            weights = [self.format.column(e, group, k, self.row) for group in groups]
            for t, row in enumerate(rows):
                a = e.load(F32, e.at(row, k, 4))
                for u, w in enumerate(weights):
                    acc[u][t].set(e.fma(w, a, acc[u][t].get()))

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


def _threads(type_name: str, k: int) -> int:
    return ROWS * segments(weight_format(type_name), k).count


class Finish:
    """What follows the sums of a ``MatMul``: activation, bias, residual, store."""

    def __init__(self, spec: MatMul, e: PtxEmitter) -> None:
        self.spec, self.e = spec, e
        self.y, self.ldy = e.arg_ptr(2), e.arg_int(4)

    def __call__(self, row: Value, token: Value, sums: Sequence[Value]) -> None:
        e, b, spec = self.e, self.e.b, self.spec
        (v,) = gated(e, spec.epilogue, [[s] for s in sums])
        if spec.bias:
            v = b.fadd(v, e.load(F32, e.at(e.arg_ptr(7), row, 4)))
        if spec.epilogue == "add":
            v = b.fadd(v, e.load(F32, e.at(e.arg_ptr(5), b.add(b.mul(token, e.arg_int(6)), row), 4)))
        e.store(v, e.at(self.y, b.add(b.mul(token, self.ldy), row), 4))


def units_of(spec: MatMul) -> int:
    """Rows of groups of 16 (pairs of groups for gated products)."""
    return -(-spec.n // (ROWS * spec.unit))


def row_count(spec: MatMul, e: PtxEmitter) -> Value:
    return e.i64(int(spec.rows)) if spec.rows.isdigit() else e.param(spec.rows)


def row_stride(spec: MatMul, e: PtxEmitter) -> Value:
    """Bytes between activation rows."""
    if isinstance(weight_format(spec.format), FloatFormat):
        return e.b.mul(e.arg_int(3), e.i64(4))
    return e.i64(q8_record(spec.k).stride)


def _vector_body(spec: MatMul, tokens: int) -> Callable[[PtxEmitter], None]:
    def body(e: PtxEmitter) -> None:
        b = e.b
        product = VectorProduct(e, spec.format, spec.k, spec.unit, tokens)
        count, stride = row_count(spec, e), row_stride(spec, e)
        size = product.format.group_bytes(spec.k)
        finish = Finish(spec, e)
        e.begin_tiles()
        unit = b.urem(e.tile, e.i64(units_of(spec)))
        first = b.mul(b.udiv(e.tile, e.i64(units_of(spec))), e.i64(tokens))
        group = e.at(e.arg_ptr(0), unit, size * spec.unit)
        last = b.sub(count, e.i64(1))
        rows = [e.gep(e.arg_ptr(1), b.mul(e.imin(b.add(first, e.i64(t)), last), stride)) for t in range(tokens)]
        product.add_up([e.gep(group, size * u) for u in range(spec.unit)], rows)
        with product.results() as (row, token, sums):
            out = b.add(b.mul(unit, e.i64(ROWS)), row)
            at = b.add(first, token)
            exists = b.and_(b.icmp_signed("<", out, e.i64(spec.n // spec.unit)), b.icmp_signed("<", at, count))
            with e.if_(exists):
                finish(out, at, sums)

    return body


def matmul(spec: MatMul) -> Form:
    """One row at a time, four at a time, and tiles where there are many (integer formats)."""
    from .product_halves import halves_entries
    from .product_tiles import tile_entry

    name, units, block = symbol(spec), units_of(spec), _threads(spec.format, spec.k)
    floats = isinstance(weight_format(spec.format), FloatFormat)
    fixed = int(spec.rows) if spec.rows.isdigit() else 0
    if spec.format in ("f16", "bf16"):
        return Form(tuple(halves_entries(spec, fixed)))
    found = []
    for suffix, tokens, low, high in (("_1", 1, 0, 1), (f"_{TOKENS}", TOKENS, 2, 0 if floats else TILE_FROM - 1)):
        if fixed and not (low <= fixed and (not high or fixed <= high)):
            continue
        sym = "" if fixed else spec.rows
        entry = Entry(
            name + suffix, block, _vector_body(spec, tokens), grid=rows_factor(spec.rows, tokens, units), sym=sym, low=low, high=high
        )
        found.append(entry)
    if not floats and (not fixed or fixed >= TILE_FROM):
        found.append(tile_entry(spec))
    return Form(tuple(found))


def matmul_id(spec: MatMulId) -> Form:
    """One block per (token, chosen expert, 16 rows)."""
    groups = -(-spec.n // ROWS)

    def body(e: PtxEmitter) -> None:
        b = e.b
        product = VectorProduct(e, spec.format, spec.k, spec.unit, 1)
        floats = isinstance(product.format, FloatFormat)
        stride = 4 * spec.k if floats else q8_record(spec.k).stride
        e.begin_tiles()
        g = b.urem(e.tile, e.i64(groups))
        row = b.udiv(e.tile, e.i64(groups))  # token * n_used + chosen
        expert = e.sext64(e.load(I32, e.at(e.arg_ptr(3), row, 4)))
        matrices = [e.at(e.arg_ptr(i), expert, spec.expert_bytes) for i in ((0, 5) if spec.is_glu else (0,))]
        source = b.udiv(row, e.i64(spec.n_used)) if spec.broadcast_x else row
        size = product.format.group_bytes(spec.k)
        product.add_up([e.at(matrix, g, size) for matrix in matrices], [e.at(e.arg_ptr(1), source, stride)])
        with product.results() as (lane, _, sums):
            out = b.add(b.mul(g, e.i64(ROWS)), lane)
            with e.if_(b.icmp_signed("<", out, e.i64(spec.n))):
                (v,) = gated(e, spec.epilogue, [[s] for s in sums])
                e.store(v, e.at(e.at(e.arg_ptr(2), row, 4 * spec.n), out, 4))

    return Form((Entry(symbol(spec) + "_1", _threads(spec.format, spec.k), body, grid=rows_factor(spec.rows, 1, spec.n_used * groups)),))
