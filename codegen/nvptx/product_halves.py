"""Products with F16 and BF16 weights on tensor cores, for any number of tokens.

Weights are multiplied as they are. Activations, f32, are written as ``2^e * (high + low)`` with two numbers of the weights' type; ``e`` is
the exponent of the largest of 32 columns of a token. So 22 bits of each value count for f16, 16 for bf16, nothing overflows, and both parts
are products of one fragment of weights. A block of 32 columns is four ``mma`` (two steps of 16 columns, high then low) on a sum that starts
at zero; it is scaled by ``2^e`` and added to the segment's sum in one fused step, segments as in ``products``. Few tokens and many go
through the same chain, so a token's bits do not depend on how many there are; inside a block tensor cores round in ways of their own.

``_8``: few tokens; a block takes 16 rows (32 of a gated product) of eight tokens, a warp a segment. ``_tile``: 64 rows by 64 tokens, a warp
takes all rows of eight tokens and walks the segments. Weights come to shared memory by copies that do not wait, in two buffers, and from
there transposed by ``ldmatrix``; activations come straight to the lane that splits them, a block ahead.
"""

from __future__ import annotations

from collections.abc import Sequence

from ggufc.codegen.emitter import F32, I16, I32, Value, Var
from ggufc.codegen.kernels.matmul import MatMul
from ggufc.codegen.kernels.matmul_id import MatMulId
from ggufc.codegen.weights import weight_format
from ggufc.codegen.weights.base import ROWS

from .emitter import WARP, PtxEmitter
from .product_operands import Tile
from .products import COLUMNS, VectorProduct, segments

TOKENS = 8
"""Tokens of a warp: the columns of an ``mma``."""
GROUPS, WARPS = 4, 8
"""Weight groups and warps of a tile."""
_GROUP_BYTES = 2 * ROWS * COLUMNS
_STAGE = 2
"""Pieces per stage of a tile."""


def few_threads(spec: MatMul | MatMulId) -> int:
    """Threads of a block of ``few_body``: a warp for each segment."""
    return WARP * segments(weight_format(spec.format), spec.k).count


class _Lane:
    """What one lane of a warp does for eight tokens: split its activations, multiply, store."""

    def __init__(self, spec: MatMul | MatMulId, e: PtxEmitter) -> None:
        b = e.b
        self.spec, self.e = spec, e
        lane = b.and_(e.thread, e.i64(WARP - 1))
        self.lane, self.g, self.t = lane, b.lshr(lane, e.i64(2)), b.and_(lane, e.i64(3))
        # Where ldmatrix lets this lane point: rows of a fragment are columns of the weights, halves of it 8 rows of a group.
        column = b.add(b.and_(lane, e.i64(7)), b.mul(b.lshr(lane, e.i64(4)), e.i64(8)))
        half = b.and_(b.lshr(lane, e.i64(3)), e.i64(1))
        self.matrix = b.add(b.mul(column, e.i64(2 * ROWS)), b.mul(half, e.i64(16)))

    def load(self, row: Value, piece: Value) -> list[Value]:
        """This lane's eight columns of a piece, as the fragments want them: 2t, 2t + 1 of each eight. Those beyond K are zeros."""
        e, b, k = self.e, self.e.b, self.spec.k
        first = b.add(b.mul(piece, e.i64(COLUMNS)), b.add(self.t, self.t))
        values = []
        for j in range(COLUMNS // 8):
            for i in range(2):
                column = b.add(first, e.i64(8 * j + i))
                v = e.load(F32, e.at(row, e.imin(column, e.i64(k - 1)), 4))
                values.append(v if k % COLUMNS == 0 else b.select(b.icmp_signed("<", column, e.i64(k)), v, e.f32(0.0)))
        return values

    def split(self, values: Sequence[Value]) -> tuple[Value, list[Value], list[Value]]:
        """2^e of the token's 32 columns and the words of high and low parts."""
        e, b = self.e, self.e.b
        top = e.fabs(values[0])
        for v in values[1:]:
            top = e.fmax(top, e.fabs(v))
        for distance in (1, 2):
            top = e.fmax(top, e.shuffle_xor(top, distance))
        exponent = b.lshr(b.bitcast(top, I32), e.i32(23))
        # Powers of two that exist as normal numbers, and whose inverse does.
        exponent = b.select(b.icmp_signed("<", exponent, e.i32(1)), e.i32(1), exponent)
        exponent = b.select(b.icmp_signed(">", exponent, e.i32(253)), e.i32(253), exponent)
        scale = b.bitcast(b.shl(exponent, e.i32(23)), F32)
        inverse = b.bitcast(b.shl(b.sub(e.i32(254), exponent), e.i32(23)), F32)
        scaled = [b.fmul(v, inverse) for v in values]
        high, rest = self._words(scaled)
        low, _ = self._words(rest)
        return scale, high, low

    def _words(self, values: Sequence[Value]) -> tuple[list[Value], list[Value]]:
        """Pairs of values rounded to the weights' type in words, and what rounding left."""
        e, b = self.e, self.e.b
        words, rest = [], []
        for u, v in zip(values[::2], values[1::2]):
            if self.spec.format == "f16":
                word = e.pack_halves(u, v)
                back = [e.f16_to_f32(b.trunc(b.lshr(word, e.i32(shift)), I16)) for shift in (0, 16)]
            else:
                first, second = (b.and_(b.add(b.bitcast(w, I32), e.i32(0x8000)), e.i32(-65536)) for w in (u, v))
                word = e.permute_bytes(first, second, e.i32(0x7632))
                back = [b.bitcast(w, F32) for w in (first, second)]
            words.append(word)
            rest += [b.fsub(w, r) for w, r in zip((u, v), back)]
        return words, rest

    def multiply(
        self, weights: Sequence[Value], scale: Value, high: Sequence[Value], low: Sequence[Value], acc: Sequence[Sequence[Var]]
    ) -> None:
        """Add the piece whose groups lie in shared memory at ``weights``; ``acc``: per group, four cells as ``mma`` gives them."""
        e, b = self.e, self.e.b
        # Columns of the result are tokens 2t and 2t + 1, whose scales lanes 4 (2t) and 4 (2t + 1) hold.
        scales = [e.shuffle_from(scale, b.add(b.mul(self.t, e.i64(8)), e.i64(4 * c))) for c in range(2)]
        for base, cells in zip(weights, acc):
            got = [e.f32(0.0)] * 4
            for step in range(COLUMNS // 16):
                a = e.load_matrices_transposed(e.gep(e.gep(base, self.matrix), 2 * ROWS * 16 * step))
                for part in (high, low):
                    got = e.mma_16bit(self.spec.format, a, part[2 * step : 2 * step + 2], got)
            for i, cell in enumerate(cells):
                cell.set(e.fma(scales[i % 2], got[i], cell.get()))

    def copy(self, group: Value, piece: Value, to: Value, unit: Value) -> None:
        """Start copying 16 bytes of a piece of the group at ``group``: half a column, columns beyond K repeat the last."""
        e, b, k = self.e, self.e.b, self.spec.k
        column = b.add(b.mul(piece, e.i64(COLUMNS)), b.lshr(unit, e.i64(1)))
        if k % COLUMNS:
            column = e.imin(column, e.i64(k - 1))
        half = b.mul(b.and_(unit, e.i64(1)), e.i64(16))
        e.copy_async(e.at(to, unit, 16), e.gep(e.at(group, column, 2 * ROWS), half), 16)

    def cells(self, groups: int) -> list[list[Var]]:
        cells = [[self.e.var(F32) for _ in range(4)] for _ in range(groups)]
        for cell in (c for group in cells for c in group):
            cell.set(self.e.f32(0.0))
        return cells

    def row(self, i: int) -> Value:
        """Row of a group that cell ``i`` belongs to."""
        return self.e.b.add(self.g, self.e.i64(8 * (i // 2)))

    def column(self, i: int) -> Value:
        """Token of the warp that cell ``i`` belongs to."""
        return self.e.b.add(self.e.b.add(self.t, self.t), self.e.i64(i % 2))


class _Ahead:
    """The activations of the next piece, loaded while this one is multiplied."""

    def __init__(self, lane: _Lane, row: Value, piece: Value) -> None:
        self.lane, self.place = lane, row
        self.values = [lane.e.var(F32, v) for v in lane.load(row, piece)]

    def step(self, following: Value) -> list[Value]:
        """This piece's values; those of ``following`` are asked for."""
        now = [v.get() for v in self.values]
        for var, v in zip(self.values, self.lane.load(self.place, following)):
            var.set(v)
        return now


def few_body(spec: MatMul | MatMulId, e: PtxEmitter, tile: Tile) -> None:
    """One unit of groups by ``TOKENS`` tokens."""
    b = e.b
    product = VectorProduct(e, spec.format, spec.k, spec.unit, TOKENS)
    cut, lane = product.cut, _Lane(spec, e)
    segment = b.lshr(e.thread, e.i64(5))
    ring = e.at(e.shared(2 * _GROUP_BYTES * cut.count, "weights"), segment, 2 * _GROUP_BYTES)
    last_piece = e.i64(cut.pieces - 1)
    tile.begin()
    row = tile.activations(lane.g)
    begin = b.mul(segment, e.i64(cut.length))
    stop = e.imin(b.add(begin, e.i64(cut.length)), e.i64(cut.pieces))
    for u in range(spec.unit):
        group = tile.group(e.i64(u))
        (cells,) = lane.cells(1)

        def copy(piece: Value, group: Value = group) -> None:
            to = e.at(ring, b.and_(piece, e.i64(1)), _GROUP_BYTES)
            for i in range(_GROUP_BYTES // 16 // WARP):
                lane.copy(group, piece, to, b.add(lane.lane, e.i64(WARP * i)))
            e.close_copies()

        copy(e.imin(begin, last_piece))
        ahead = _Ahead(lane, row, e.imin(begin, last_piece))
        with e.for_range(begin, stop, name="piece") as piece:
            following = e.imin(b.add(piece, e.i64(1)), last_piece)
            e.await_copies()
            e.group_barrier()
            with e.if_(b.icmp_signed("<", b.add(piece, e.i64(1)), stop)):
                copy(following)
            values = lane.split(ahead.step(following))
            lane.multiply([e.at(ring, b.and_(piece, e.i64(1)), _GROUP_BYTES)], *values, [cells])
        e.await_copies()  # that of a segment without pieces
        if u + 1 < spec.unit:
            e.group_barrier()
        for i, cell in enumerate(cells):
            e.store(cell.get(), product.place(u, lane.column(i), segment, lane.row(i)))
    e.barrier()
    with product.results() as (out, token, sums):
        tile.store(e.i64(0), out, token, sums)


def tile_body(spec: MatMul | MatMulId, e: PtxEmitter, tile: Tile) -> None:
    """``GROUPS`` groups by ``TOKENS`` tokens for each of ``WARPS`` warps."""
    b = e.b
    cut, lane = segments(weight_format(spec.format), spec.k), _Lane(spec, e)
    weights = e.shared(2 * _STAGE * GROUPS * _GROUP_BYTES, "weights")
    per_segment = -(-cut.length // _STAGE)
    last_piece = e.i64(cut.pieces - 1)
    tile.begin()
    first_token = b.mul(b.lshr(e.thread, e.i64(5)), e.i64(TOKENS))
    row = tile.activations(b.add(first_token, lane.g))
    totals, acc = lane.cells(GROUPS), lane.cells(GROUPS)

    def first_piece(stage: Value) -> Value:
        segment, inside = b.udiv(stage, e.i64(per_segment)), b.urem(stage, e.i64(per_segment))
        return b.add(b.mul(segment, e.i64(cut.length)), b.mul(inside, e.i64(_STAGE)))

    def place(stage: Value, piece: Value | int) -> Value:
        """Shared memory of a stage's piece: its groups one after the other."""
        buffer = e.at(weights, b.and_(stage, e.i64(1)), _STAGE * GROUPS * _GROUP_BYTES)
        return e.at(buffer, piece, GROUPS * _GROUP_BYTES)

    def copy(stage: Value) -> None:
        """64 threads for each group; pieces beyond the segment are copied as well and not used."""
        unit, group = b.and_(e.thread, e.i64(63)), b.lshr(e.thread, e.i64(6))
        source = tile.group(group)
        for i in range(_STAGE):
            piece = e.imin(b.add(first_piece(stage), e.i64(i)), last_piece)
            lane.copy(source, piece, e.at(place(stage, i), group, _GROUP_BYTES), unit)
        e.close_copies()

    n_stages = cut.count * per_segment
    copy(e.i64(0))
    ahead = _Ahead(lane, row, e.i64(0))
    with e.for_range(0, n_stages, name="stage") as stage:
        # Past the barrier this stage is here, and nobody reads the one before any more.
        e.await_copies()
        e.barrier()
        with e.if_(b.icmp_signed("<", stage, e.i64(n_stages - 1))):
            copy(b.add(stage, e.i64(1)))
        first = first_piece(stage)
        segment_end = b.mul(b.add(b.udiv(stage, e.i64(per_segment)), e.i64(1)), e.i64(cut.length))
        stop = e.imin(e.imin(segment_end, e.i64(cut.pieces)), b.add(first, e.i64(_STAGE)))
        # Warps none of whose tokens exist have nothing to multiply.
        stop = b.select(b.icmp_signed("<", first_token, tile.count), stop, first)
        with e.for_range(first, stop, name="piece") as piece:
            values = lane.split(ahead.step(e.imin(b.add(piece, e.i64(1)), last_piece)))
            groups = place(stage, b.sub(piece, first))
            lane.multiply([e.gep(groups, _GROUP_BYTES * i) for i in range(GROUPS)], *values, acc)
        with e.if_(b.icmp_signed("==", b.urem(stage, e.i64(per_segment)), e.i64(per_segment - 1))):
            for total, part in zip(*([c for group in cells for c in group] for cells in (totals, acc))):
                total.set(b.fadd(total.get(), part.get()))
                part.set(e.f32(0.0))
    for i in range(4):
        token = b.add(first_token, lane.column(i))
        for p in range(GROUPS // spec.unit):
            tile.store(e.i64(p), lane.row(i), token, [totals[p * spec.unit + u][i].get() for u in range(spec.unit)])
