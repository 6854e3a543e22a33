"""The best entries of a row on a GPU, by a block of 256 threads: rows and choices of any length; sums over a block.

An entry's *rank* is an i64 whose signed order is worst first; it holds the entry's index, so no two entries have the same rank.
``threshold`` finds the rank of the ``wanted``-th best entry by counting digits from the top: a digit of eight bits is a pass over the row,
and counting ends at the first digit whose whole bin is wanted, which for distinct values is long before the index's digits.
"""

from __future__ import annotations

from collections.abc import Callable

from ggufc.codegen.emitter import I32, I64, Value

from .emitter import WARP, PtxEmitter

BLOCK = 256
"""Threads of a block, and bins of a digit: each thread owns one."""
_BITS = 8
INDEX_MASK = 0xFFFFFFFF

Rank = Callable[[Value], Value]


def float_rank(e: PtxEmitter, v: Value, index: Value, descending: bool = True, ties: str = "lowest") -> Value:
    """Rank of the f32 ``v`` at ``index`` (i64). Zeros of both signs are equal; of equal values the one with the ``ties`` index wins."""
    b = e.b
    bits = b.bitcast(b.fadd(v, e.f32(0.0)), I32)
    key = b.xor(bits, b.lshr(b.ashr(bits, e.i32(31)), e.i32(1)))
    key = key if descending else b.not_(key)
    tie = index if ties == "highest" else b.sub(e.i64(INDEX_MASK), index)
    return b.or_(b.shl(b.sext(key, I64), e.i64(32)), tie)


def index_of(e: PtxEmitter, rank: Value, ties: str = "lowest") -> Value:
    """The index (i64) in a rank."""
    low = e.b.and_(rank, e.i64(INDEX_MASK))
    return low if ties == "highest" else e.b.sub(e.i64(INDEX_MASK), low)


class BlockSums:
    """Sums of i32 over the threads of a block; all methods must be reached by all threads."""

    def __init__(self, e: PtxEmitter) -> None:
        self.e = e
        self.sums = e.shared(4 * (e.block // WARP), "sums")
        self.total = e.shared(4, "total")

    def before(self, v: Value) -> Value:
        """The sum of ``v`` over the threads before this one."""
        e, b = self.e, self.e.b
        lane = b.and_(e.thread, e.i64(WARP - 1))
        total = v
        step = 1
        while step < WARP:
            other = e.shuffle_up(total, step)
            total = b.add(total, b.select(b.icmp_signed(">=", lane, e.i64(step)), other, e.i32(0)))
            step *= 2
        earlier, _ = self._of_warps(total, WARP - 1)
        return b.add(b.sub(total, v), earlier)

    def of_warps(self, v: Value) -> tuple[Value, Value]:
        """Sums of ``v``, one value per warp, over the warps before this one and over all."""
        return self._of_warps(v, 0)

    def _of_warps(self, v: Value, holder: int) -> tuple[Value, Value]:
        """As ``of_warps``; lane ``holder`` has the value of its warp."""
        e, b = self.e, self.e.b
        warp = b.lshr(e.thread, e.i64(5))
        with e.if_(b.icmp_signed("==", b.and_(e.thread, e.i64(WARP - 1)), e.i64(holder))):
            e.store(v, e.at(self.sums, warp, 4))
        e.barrier()
        before = every = e.i32(0)
        for w in range(e.block // WARP):
            part = e.load(I32, e.gep(self.sums, 4 * w))
            before = b.add(before, b.select(b.icmp_signed("<", e.i64(w), warp), part, e.i32(0)))
            every = b.add(every, part)
        e.barrier()
        return before, every

    def running(self, n: Value, value: Callable[[Value], Value], put: Callable[[Value, Value, Value], None]) -> Value:
        """``put(i, v, before)`` for every i of 0..n-1, with v = ``value(i)`` (i32) and ``before`` (i64) the sum of those of smaller i;
        returns the sum of all (i64).
        """
        e, b = self.e, self.e.b
        sum_ = e.var(I64, e.i64(0))
        with e.for_range(0, n, e.block, name="first") as first:
            i = b.add(first, e.thread)
            exists = b.icmp_signed("<", i, n)
            mine = e.var(I32, e.i32(0))
            with e.if_(exists):
                mine.set(value(i))
            v = mine.get()
            before = self.before(v)
            with e.if_(exists):
                put(i, v, b.add(sum_.get(), b.zext(before, I64)))
            with e.if_(b.icmp_signed("==", e.thread, e.i64(e.block - 1))):
                e.store(b.add(before, v), self.total)
            e.barrier()
            sum_.set(b.add(sum_.get(), b.zext(e.load(I32, self.total), I64)))
            e.barrier()
        return sum_.get()


class Ranking:
    """Counting and compaction over the threads of a block; all methods must be reached by all threads."""

    def __init__(self, e: PtxEmitter) -> None:
        self.e = e
        self.bins = e.shared(4 * BLOCK, "bins")
        self.found = e.shared(16, "found")
        self.sums = BlockSums(e)

    def threshold(self, rank: Rank, n: Value, wanted: Value) -> Value:
        """The rank that exactly ``wanted`` of the entries 0..n-1 reach; 1 <= wanted <= n."""
        e, b = self.e, self.e.b
        top = e.i64(-(1 << 63))  # flips signed order to unsigned
        prefix, left, shift = e.var(I64, e.i64(0)), e.var(I64, wanted), e.var(I64, e.i64(64 - _BITS))
        with e.while_loop("digit") as digits:
            e.store(e.i32(0), e.at(self.bins, e.thread, 4))
            e.barrier()
            # What lies above the digit must be the prefix. Two shifts, since one by 64 is undefined.
            above = b.lshr(b.lshr(prefix.get(), shift.get()), e.i64(_BITS))
            with e.for_threads(n) as i:
                pattern = b.xor(rank(i), top)
                here = b.lshr(pattern, shift.get())
                with e.if_(b.icmp_unsigned("==", b.lshr(here, e.i64(_BITS)), above)):
                    e.atomic_add(e.at(self.bins, b.and_(here, e.i64(BLOCK - 1)), 4), e.i32(1))
            e.barrier()
            # Thread t takes bin 255 - t, so that a sum over the threads before it counts what is better.
            bin_ = b.sub(e.i64(BLOCK - 1), e.thread)
            count = e.load(I32, e.at(self.bins, bin_, 4))
            better = self.sums.before(count)
            rest = b.sub(b.trunc(left.get(), I32), better)
            with e.if_(b.and_(b.icmp_signed(">", rest, e.i32(0)), b.icmp_signed("<=", rest, count))):
                e.store(b.trunc(bin_, I32), self.found)
                e.store(rest, e.gep(self.found, 4))
                e.store(count, e.gep(self.found, 8))
            e.barrier()
            digit, rest, count = (e.load(I32, e.gep(self.found, 4 * i)) for i in range(3))
            prefix.set(b.or_(prefix.get(), b.shl(b.zext(digit, I64), shift.get())))
            left.set(b.zext(rest, I64))
            digits.break_if(b.icmp_signed("==", rest, count))
            digits.break_if(b.icmp_signed("==", shift.get(), e.i64(0)))
            shift.set(b.sub(shift.get(), e.i64(_BITS)))
        e.barrier()
        return b.xor(prefix.get(), top)

    def for_chosen(self, n: Value, chosen: Callable[[Value], Value], put: Callable[[Value, Value], None]) -> None:
        """``put(place, i)`` for the entries i of 0..n-1 that ``chosen`` names (an i1); places count up in the order of the entries."""
        e, b = self.e, self.e.b

        def place(i: Value, taken: Value, before: Value) -> None:
            with e.if_(b.icmp_signed("!=", taken, e.i32(0))):
                put(before, i)

        self.sums.running(n, lambda i: b.zext(chosen(i), I32), place)

    def sort(self, ranks: Value, size: Value) -> None:
        """Best first: ``size`` (a power of two) i64 in shared memory at ``ranks``, by a bitonic network."""
        e, b = self.e, self.e.b
        one = e.i64(1)
        length = e.var(I64, e.i64(2))
        with e.while_loop("length") as lengths:
            lengths.break_if(b.icmp_signed(">", length.get(), size))
            apart = e.var(I64, b.lshr(length.get(), one))
            with e.while_loop("apart") as steps:
                steps.break_if(b.icmp_signed("==", apart.get(), e.i64(0)))
                with e.for_threads(b.lshr(size, one)) as pair:
                    # The pair's lower element: its number with a zero put in at the bit of the distance.
                    low = b.and_(pair, b.sub(apart.get(), one))
                    i = b.add(b.shl(b.sub(pair, low), one), low)
                    first, second = e.at(ranks, i, 8), e.at(ranks, b.add(i, apart.get()), 8)
                    x, y = e.load(I64, first), e.load(I64, second)
                    falling = b.icmp_signed("==", b.and_(i, length.get()), e.i64(0))
                    with e.if_(b.icmp_signed("==", falling, b.icmp_signed("<", x, y))):
                        e.store(y, first)
                        e.store(x, second)
                e.barrier()
                apart.set(b.lshr(apart.get(), one))
            length.set(b.shl(length.get(), one))
