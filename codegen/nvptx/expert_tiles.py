"""Tiles of products with chosen experts: 64 weight rows of an expert by up to 64 of the positions in ``ids`` that name it.

The positions of an expert, in ascending order, are cut into *batches* of 64. A block first counts who was chosen how often, which gives
each expert's first batch; then it takes (batch, rows) pairs, for each of which it lists the batch's positions. So weights are unpacked once
per 64 positions that use them, without a launch that sorts the choices: ``ids`` is a few kilobytes that stay in the cache. The number of
pairs depends on the choices, so the grid is a fixed number of blocks that share them.
"""

from __future__ import annotations

from collections.abc import Sequence

from ggufc.codegen.emitter import I1, I32, I64, Value
from ggufc.codegen.kernels.matmul_id import MatMulId
from ggufc.formats import cuda as fmt

from .emitter import WARP, PtxEmitter
from .product_operands import ChosenRows, row_count, units_of
from .ranking import BlockSums

BATCH = 64
_BLOCKS = 1024
"""Most blocks of a launch: a few per multiprocessor, which share the cost of counting."""


def tile_from(spec: MatMulId, few: int) -> int:
    """From how many tokens on tiles pay: ``few``, or as many as bring an expert four of them on average."""
    return max(few, -(-4 * spec.n_expert // spec.n_used))


def grid(spec: MatMulId, groups: int) -> tuple[fmt.Factor, ...]:
    return (fmt.Factor("", 1, min(_BLOCKS, spec.n_expert * _row_tiles(spec, groups))),)


def shared_bytes(spec: MatMulId) -> int:
    """Shared memory of an ``ExpertTile``, alignment included."""
    return 4 * (spec.n_expert + 1 + BATCH) + 160


def _row_tiles(spec: MatMulId, groups: int) -> int:
    return -(-units_of(spec) // (groups // spec.unit))


class ExpertTile(ChosenRows):
    """``groups`` weight groups of an expert by a batch of positions; needs all threads of the block where it begins."""

    def __init__(self, spec: MatMulId, e: PtxEmitter, groups: int) -> None:
        super().__init__(spec, e)
        self.groups = groups
        self.starts = e.shared(4 * (spec.n_expert + 1), "starts")
        self.positions = e.shared(4 * BATCH, "positions")
        self.found = e.shared(8, "found")
        self.sums = BlockSums(e)

    def begin(self) -> None:
        e, b, spec = self.e, self.e.b, self.spec
        total = b.mul(row_count(spec, e), e.i64(spec.n_used))
        row_tiles = e.i64(_row_tiles(spec, self.groups))
        batches = self._count(total)
        e.begin_tiles(b.mul(batches, row_tiles))
        batch = b.udiv(e.tile, row_tiles)
        self.first_unit = b.mul(b.urem(e.tile, row_tiles), e.i64(self.groups // spec.unit))
        with e.for_threads(spec.n_expert) as x:
            first, after = (e.sext64(e.load(I32, e.at(self.starts, b.add(x, e.i64(i)), 4))) for i in range(2))
            with e.if_(b.and_(b.icmp_signed("<=", first, batch), b.icmp_signed("<", batch, after))):
                e.store(b.trunc(x, I32), self.found)
                e.store(b.trunc(b.sub(batch, first), I32), e.gep(self.found, 4))
        e.barrier()
        self.expert, number = (e.sext64(e.load(I32, e.gep(self.found, 4 * i))) for i in range(2))
        self._list(total, b.mul(number, e.i64(BATCH)))

    def _count(self, total: Value) -> Value:
        """Leave the number of each expert's first batch in ``starts``, and behind them the number of batches, which is returned."""
        e, b, spec = self.e, self.e.b, self.spec
        with e.for_threads(spec.n_expert) as x:
            e.store(e.i32(0), e.at(self.starts, x, 4))
        e.barrier()
        with e.for_threads(total) as i:
            e.atomic_add(e.at(self.starts, self.chosen(i), 4), e.i32(1))
        e.barrier()

        def batches(x: Value) -> Value:
            return b.lshr(b.add(e.load(I32, e.at(self.starts, x, 4)), e.i32(BATCH - 1)), e.i32(BATCH.bit_length() - 1))

        def put(x: Value, _: Value, before: Value) -> None:
            e.store(b.trunc(before, I32), e.at(self.starts, x, 4))

        every = self.sums.running(e.i64(spec.n_expert), batches, put)
        with e.if_(b.icmp_signed("==", e.thread, e.i64(0))):
            e.store(b.trunc(every, I32), e.gep(self.starts, 4 * spec.n_expert))
        e.barrier()
        return every

    def _list(self, total: Value, passed: Value) -> None:
        """List up to 64 positions that name the expert, after the first ``passed``. A warp takes an even share of ``ids``: it counts, then,
        knowing what lies before its share, puts.
        """
        e, b = self.e, self.e.b
        warps = e.block // WARP
        warp, lane = b.lshr(e.thread, e.i64(5)), b.and_(e.thread, e.i64(WARP - 1))
        share = b.mul(e.ceil_div(total, warps * WARP), e.i64(WARP))
        begin = b.mul(warp, share)
        end = e.imin(b.add(begin, share), total)

        def names(i: Value) -> Value:
            here = e.var(I1, e.const(I1, 0))
            with e.if_(b.icmp_signed("<", i, end)):
                here.set(b.icmp_signed("==", self.chosen(i), self.expert))
            return here.get()

        def members(start: Value) -> Value:
            return e.ballot(names(b.add(start, lane)))

        count = e.var(I32, e.i32(0))
        with e.for_range(begin, end, WARP, name="share") as start:
            count.set(b.add(count.get(), b.ctpop(members(start))))
        before, every = self.sums.of_warps(count.get())
        place = e.var(I64, b.sub(e.sext64(before), passed))
        below = b.sub(b.shl(e.i32(1), b.trunc(lane, I32)), e.i32(1))
        with e.for_range(begin, end, WARP, name="put") as start:
            mask = members(start)
            mine = b.add(place.get(), b.zext(b.ctpop(b.and_(mask, below)), I64))
            is_set = b.and_(b.lshr(mask, b.trunc(lane, I32)), e.i32(1))
            # Unsigned: places of batches before are negative.
            listed = b.and_(b.icmp_signed("!=", is_set, e.i32(0)), b.icmp_unsigned("<", mine, e.i64(BATCH)))
            with e.if_(listed):
                e.store(b.trunc(b.add(start, lane), I32), e.at(self.positions, mine, 4))
            place.set(b.add(place.get(), b.zext(b.ctpop(mask), I64)))
        e.barrier()
        self._count_here = e.imin(b.sub(e.sext64(every), passed), e.i64(BATCH))

    @property
    def count(self) -> Value:
        return self._count_here

    def _position(self, token: Value) -> Value:
        e = self.e
        return e.sext64(e.load(I32, e.at(self.positions, token, 4)))

    def activations(self, token: Value) -> Value:
        e, b = self.e, self.e.b
        return self.activations_of(self._position(e.imin(token, b.sub(self.count, e.i64(1)))))

    def store(self, unit: Value, row: Value, token: Value, sums: Sequence[Value]) -> None:
        with self.e.if_(self.e.b.icmp_signed("<", token, self.count)):
            self.store_at(unit, row, self._position(token), sums)
