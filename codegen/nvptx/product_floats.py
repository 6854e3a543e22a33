"""Products of several tokens with F32 weights: f32 multiply-adds, since tensor cores would round to tf32.

Sums are the chains of ``products.VectorProduct``: a segment's columns in ascending order, segments in ascending order.

Few tokens, or many with a matrix of few rows (routers): a block takes 16 rows by 16 tokens (8 of a gated product) and reads straight from
global memory; a warp takes a segment, a lane four rows by two tokens (one).

Many tokens: a block takes 64 rows by 64 tokens, staged in shared memory. A thread holds four rows of two groups (gate and up of a gated
product) for four tokens: 32 chains, fed by 16-byte reads of shared memory, a third of the multiply-adds' time. A stage is a piece of 32
columns; it comes by copies that do not wait, in two buffers.
"""

from __future__ import annotations

from ggufc.codegen.emitter import F32, Value, Var
from ggufc.codegen.kernels.matmul import MatMul
from ggufc.codegen.kernels.matmul_id import MatMulId
from ggufc.codegen.weights import weight_format
from ggufc.codegen.weights.base import ROWS

from .emitter import WARP, PtxEmitter
from .product_operands import Tile, units_of
from .products import COLUMNS, TILE_FROM, VectorProduct, segments

GROUPS, TOKENS, THREADS = 4, 64, 128
_GROUP_PITCH = 4 * ROWS * COLUMNS + 32
"""Bytes between the weight groups of a stage: 32 more than there are, so that the eight reads of a warp come from different banks."""
_TOKEN_PITCH = 4 * COLUMNS + 16
"""Bytes between the tokens of a stage: 16 more than there are, likewise."""
_ROWS, _TOKENS = 4, 4
"""Rows of each group and tokens of a thread."""
_APART = TOKENS // _TOKENS
"""A thread's tokens are this far apart: those of neighbouring threads are neighbours."""
_WIDE = 4
"""Columns that one read of activations brings."""
_FULL = 256
"""Blocks that are enough to keep a device busy."""

# Few tokens

FEW_THREADS = 256
_SLOTS = 8
"""Lanes that share the rows of a quarter of a group."""
_AT_ONCE = 8
"""Columns that are loaded before they are multiplied."""


def few_tokens(spec: MatMul | MatMulId) -> int:
    """Tokens of a block: partial sums of all segments must fit into shared memory."""
    return 2 * _SLOTS // spec.unit


def tile_from(spec: MatMul) -> int:
    """From how many tokens on tiles keep a device busy."""
    row_tiles = -(-units_of(spec) // (GROUPS // spec.unit))
    return max(TILE_FROM, TOKENS * _FULL // row_tiles)


def few_body(spec: MatMul, e: PtxEmitter, tile: Tile) -> None:
    """One unit of groups by ``few_tokens`` tokens."""
    b, k = e.b, spec.k
    tokens = few_tokens(spec)
    product = VectorProduct(e, spec.format, k, spec.unit, tokens)
    cut = product.cut
    warp, lane = b.lshr(e.thread, e.i64(5)), b.and_(e.thread, e.i64(WARP - 1))
    first_row, slot = b.mul(b.and_(lane, e.i64(3)), e.i64(_ROWS)), b.lshr(lane, e.i64(2))
    tile.begin()
    mine = [b.add(slot, e.i64(_SLOTS * i)) for i in range(tokens // _SLOTS)]
    values = [tile.activations(token) for token in mine]
    groups = [e.at(tile.group(e.i64(u)), first_row, 4) for u in range(spec.unit)]
    with e.for_range(warp, cut.count, FEW_THREADS // WARP, name="segment") as segment:
        acc = [[[e.var(F32, e.f32(0.0)) for _ in range(_ROWS)] for _ in mine] for _ in groups]
        begin = b.mul(segment, e.i64(cut.length * COLUMNS))
        stop = e.imax(begin, e.imin(b.add(begin, e.i64(cut.length * COLUMNS)), e.i64(k)))

        def columns(at: Value, count: int, acc: list[list[list[Var]]] = acc) -> None:
            weights = [[e.vector_load(F32, _ROWS, e.at(g, b.add(at, e.i64(j)), 4 * ROWS), 16) for j in range(count)] for g in groups]
            for t, row in enumerate(values):
                xs = [e.load(F32, e.at(row, b.add(at, e.i64(j)), 4)) for j in range(count)]
                for u, loaded in enumerate(weights):
                    for column, x in zip(loaded, xs):
                        for cell, w in zip(acc[u][t], column):
                            cell.set(e.fma(w, x, cell.get()))

        whole = b.add(begin, b.and_(b.sub(stop, begin), e.i64(-_AT_ONCE)))
        with e.for_range(begin, whole, _AT_ONCE, name="columns") as at:
            columns(at, _AT_ONCE)
        if k % _AT_ONCE:
            with e.for_range(whole, stop, name="column") as at:
                columns(at, 1)
        for u, of_unit in enumerate(acc):
            for token, cells in zip(mine, of_unit):
                e.vector_store([cell.get() for cell in cells], product.place(u, token, segment, first_row), 16)
    e.barrier()
    with product.results() as (row, token, sums):
        tile.store(e.i64(0), row, token, sums)


# Many tokens


class _Stage:
    """Shared memory: weights [buffer][group][column][16 rows], activations [buffer][token][column]."""

    def __init__(self, e: PtxEmitter, spec: MatMul | MatMulId, tile: Tile) -> None:
        self.e, self.spec, self.tile = e, spec, tile
        self.weights = e.shared(2 * GROUPS * _GROUP_PITCH, "weights")
        self.values = e.shared(2 * TOKENS * _TOKEN_PITCH, "activations")

    def group(self, buffer: Value, group: Value) -> Value:
        e, b = self.e, self.e.b
        return e.at(self.weights, b.add(b.mul(buffer, e.i64(GROUPS)), group), _GROUP_PITCH)

    def token(self, buffer: Value, token: Value) -> Value:
        e, b = self.e, self.e.b
        return e.at(self.values, b.add(b.mul(buffer, e.i64(TOKENS)), token), _TOKEN_PITCH)

    def copy(self, buffer: Value, piece: Value) -> None:
        """Start copying a piece, as one group of copies; columns beyond K repeat the last."""
        e, b = self.e, self.e.b
        first, last = b.mul(piece, e.i64(COLUMNS)), e.i64(self.spec.k - 1)
        with e.for_threads(GROUPS * COLUMNS * 4) as i:
            group, column, part = b.lshr(i, e.i64(7)), b.and_(b.lshr(i, e.i64(2)), e.i64(COLUMNS - 1)), b.and_(i, e.i64(3))
            source = e.at(self.tile.group(group), e.imin(b.add(first, column), last), 4 * ROWS)
            to = e.at(self.group(buffer, group), column, 4 * ROWS)
            e.copy_async(e.at(to, part, 16), e.at(source, part, 16), 16)
        with e.for_threads(TOKENS * COLUMNS) as i:
            # Neighbouring threads take neighbouring columns of one token.
            token, column = b.lshr(i, e.i64(5)), b.and_(i, e.i64(COLUMNS - 1))
            source = e.at(self.tile.activations(token), e.imin(b.add(first, column), last), 4)
            e.copy_async(e.at(self.token(buffer, token), column, 4), source, 4)
        e.close_copies()


class _Thread:
    """Where a thread stands in its block's product, and its sums [group][row][token]."""

    def __init__(self, e: PtxEmitter, stage: _Stage) -> None:
        b = e.b
        self.e, self.stage = e, stage
        place = b.and_(e.thread, e.i64(7))
        self.first_group, self.first_row = b.mul(b.lshr(place, e.i64(2)), e.i64(2)), b.mul(b.and_(place, e.i64(3)), e.i64(_ROWS))
        self.first_token = b.lshr(e.thread, e.i64(3))
        self.totals, self.acc = self._sums(), self._sums()

    def _sums(self) -> list[list[list[Var]]]:
        return [[[self.e.var(F32) for _ in range(_TOKENS)] for _ in range(_ROWS)] for _ in range(2)]

    def clear(self) -> None:
        for cell in (*_cells(self.totals), *_cells(self.acc)):
            cell.set(self.e.f32(0.0))

    def token(self, i: int) -> Value:
        return self.e.b.add(self.first_token, self.e.i64(_APART * i))

    def columns(self, buffer: Value, at: Value, count: int) -> None:
        """Add ``count`` columns (``_WIDE`` or one) of the piece in ``buffer``, from column ``at`` on."""
        e, b = self.e, self.e.b
        values = []
        for i in range(_TOKENS):
            p = e.at(self.stage.token(buffer, self.token(i)), at, 4)
            values.append(e.vector_load(F32, _WIDE, p, 16) if count == _WIDE else [e.load(F32, p)])
        groups = [e.at(self.stage.group(buffer, b.add(self.first_group, e.i64(u))), at, 4 * ROWS) for u in range(2)]
        for j in range(count):
            for group, cells in zip(groups, self.acc):
                weights = e.vector_load(F32, _ROWS, e.gep(e.at(group, self.first_row, 4), 4 * ROWS * j), 16)
                for w, row in zip(weights, cells):
                    for cell, x in zip(row, values):
                        cell.set(e.fma(w, x[j], cell.get()))

    def close_segment(self) -> None:
        for total, part in zip(_cells(self.totals), _cells(self.acc)):
            total.set(self.e.b.fadd(total.get(), part.get()))
            part.set(self.e.f32(0.0))


def _cells(sums: list[list[list[Var]]]) -> list[Var]:
    return [cell for group in sums for row in group for cell in row]


def tile_body(spec: MatMul | MatMulId, e: PtxEmitter, tile: Tile) -> None:
    """``GROUPS`` groups by ``TOKENS`` tokens."""
    b = e.b
    stage = _Stage(e, spec, tile)
    cut = segments(weight_format(spec.format), spec.k)
    tile.begin()
    thread = _Thread(e, stage)
    thread.clear()
    stage.copy(e.i64(0), e.i64(0))
    with e.for_range(0, cut.pieces, name="piece") as piece:
        # Past the barrier this piece is here, and nobody reads the one before any more.
        e.await_copies()
        e.barrier()
        following, buffer = b.add(piece, e.i64(1)), b.and_(piece, e.i64(1))
        with e.if_(b.icmp_signed("<", following, e.i64(cut.pieces))):
            stage.copy(b.and_(following, e.i64(1)), following)
        n = e.imin(e.i64(COLUMNS), b.sub(e.i64(spec.k), b.mul(piece, e.i64(COLUMNS))))
        # Threads none of whose tokens exist have nothing to multiply.
        n = b.select(b.icmp_signed("<", thread.first_token, tile.count), n, e.i64(0))
        whole = b.and_(n, e.i64(-_WIDE))
        with e.for_range(0, whole, _WIDE, name="columns") as at:
            thread.columns(buffer, at, _WIDE)
        if spec.k % _WIDE:
            with e.for_range(whole, n, name="column") as at:
                thread.columns(buffer, at, 1)
        ends = b.icmp_signed("==", b.urem(following, e.i64(cut.length)), e.i64(0))
        with e.if_(b.or_(ends, b.icmp_signed("==", following, e.i64(cut.pieces)))):
            thread.close_segment()
    for r in range(_ROWS):
        row = b.add(thread.first_row, e.i64(r))
        for t in range(_TOKENS):
            sums = [group[r][t].get() for group in thread.totals]
            for p in range(2 // spec.unit):
                unit = b.udiv(b.add(thread.first_group, e.i64(p)), e.i64(spec.unit))
                tile.store(unit, row, thread.token(t), sums[p * spec.unit : (p + 1) * spec.unit])
