"""Kernels that choose on a GPU: the largest entries of a row, and the visibility mask of unfused attention."""

from __future__ import annotations

from ggufc.codegen.emitter import F32, I32, I64, Value
from ggufc.codegen.kernels.base import symbol
from ggufc.codegen.kernels.select import KqMask, TopK
from ggufc.codegen.kernels.strided import for_rows, row_pointer

from .emitter import WARP, PtxEmitter
from .entry import Entry, Form
from .ranking import BLOCK, Rank, Ranking, float_rank, index_of

_SHORT_ROW, _FEW = 1024, 32
"""Rows up to this length of which no more than ``_FEW`` entries are wanted go to warps."""
_SORTED = 2048
"""Entries sorted at once in shared memory."""


def top_k(spec: TopK) -> Form:
    """Short rows of which little is wanted (routing): a warp takes a row, ``_few``. All others: a block takes a row, ``_many``."""
    length, k = spec.a.ne[0], spec.k
    short = isinstance(length, int) and isinstance(k, int) and length <= _SHORT_ROW and k <= _FEW
    block = 256 if short else BLOCK

    def body(e: PtxEmitter) -> None:
        ranking, ranks = (None, None) if short else (Ranking(e), e.shared(8 * _SORTED, "ranks"))
        e.begin_tiles()

        def row(index: list[Value]) -> None:
            b, a = e.b, spec.a
            source = row_pointer(e, e.arg_ptr(0), a, index, a.ne)
            number = b.add(index[0], b.mul(e.dim(a.ne[1]), b.add(index[1], b.mul(e.dim(a.ne[2]), index[2]))))
            out = e.at(e.arg_ptr(1), b.mul(number, e.dim(spec.k)), 4)

            def rank(i: Value) -> Value:
                value = e.load(F32, e.at(source, b.mul(i, e.dim(a.nb[0])), 4))
                return float_rank(e, value, i, spec.order == "desc", spec.ties)

            n = e.dim(a.ne[0])
            count = n if spec.k == a.ne[0] else e.imin(e.dim(spec.k), n)
            if ranking is None:
                _few(e, spec, rank, n, count, out)
            else:
                _many(e, spec, rank, n, count, out, ranking, ranks)
            with e.for_range(b.add(count, e.lane), e.dim(spec.k), e.group, name="hole") as i:
                e.store(e.i32(-1), e.at(out, i, 4))

        for_rows(e, spec.a.ne[1:], spec.a.ne[0], row)

    return Form((Entry(symbol(spec), block, body, WARP if short else block),))


def _few(e: PtxEmitter, spec: TopK, rank: Rank, n: Value, count: Value, out: Value) -> None:
    """``count`` times the best entry that is worse than the one before."""
    b = e.b
    bound = e.var(I64, e.i64((1 << 63) - 1))
    with e.for_range(0, count, name="place") as place:
        best = e.var(I64)
        best.set(e.i64(-(1 << 63)))
        with e.for_lanes(n) as i:
            r = rank(i)
            better = b.and_(b.icmp_signed("<", r, bound.get()), b.icmp_signed(">", r, best.get()))
            best.set(b.select(better, r, best.get()))
        found = e.reduce(best.get(), "max")
        bound.set(found)
        with e.one_lane():
            e.store(b.trunc(index_of(e, found, spec.ties), I32), e.at(out, place, 4))


def _many(e: PtxEmitter, spec: TopK, rank: Rank, n: Value, count: Value, out: Value, ranking: Ranking, ranks: Value) -> None:
    """The best ``_SORTED``, sorted; then the next ones, below the last of those before."""
    b = e.b
    bound = e.var(I64, e.i64((1 << 63) - 1))
    with e.for_range(0, count, _SORTED, name="first") as first:
        stop = e.imin(b.add(first, e.i64(_SORTED)), count)
        lowest = ranking.threshold(rank, n, stop)
        size = e.var(I64, e.i64(1))
        with e.while_loop("size") as sizes:
            sizes.break_if(b.icmp_signed(">=", size.get(), b.sub(stop, first)))
            size.set(b.shl(size.get(), e.i64(1)))
        with e.for_threads(size.get()) as i:
            e.store(e.i64(-(1 << 63)), e.at(ranks, i, 8))
        e.barrier()

        def chosen(i: Value) -> Value:
            r = rank(i)
            return b.and_(b.icmp_signed(">=", r, lowest), b.icmp_signed("<", r, bound.get()))

        ranking.for_chosen(n, chosen, lambda place, i: e.store(rank(i), e.at(ranks, place, 8)))
        ranking.sort(ranks, size.get())
        with e.for_threads(b.sub(stop, first)) as i:
            e.store(b.trunc(index_of(e, e.load(I64, e.at(ranks, i, 8)), spec.ties), I32), e.at(out, b.add(first, i), 4))
        bound.set(lowest)
        e.barrier()


def kq_mask(spec: KqMask) -> Form:
    def body(e: PtxEmitter) -> None:
        b = e.b
        e.begin_tiles()
        n = e.dim(spec.ne0)
        mask = e.at(e.arg_ptr(2), b.mul(e.tile, n), 4)
        with e.for_threads(n) as i:
            e.store(e.f32(float("-inf")), e.at(mask, i, 4))
        e.barrier()
        triple = e.at(e.arg_ptr(1), e.tile, 12)
        base, lo, hi = (e.sext64(e.load(I32, e.gep(triple, 4 * i))) for i in range(3))
        with e.for_threads(b.sub(hi, lo)) as i:
            cell = e.sext64(e.load(I32, e.at(e.at(e.arg_ptr(0), base, 4), b.add(lo, i), 4)))
            with e.if_(b.icmp_signed("<", cell, n)):
                e.store(e.f32(0.0), e.at(mask, cell, 4))

    return Form((Entry(symbol(spec), 256, body),))
