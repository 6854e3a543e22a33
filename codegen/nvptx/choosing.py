"""Kernels that choose on a GPU: the largest entries of a row, and the visibility mask of unfused attention."""

from __future__ import annotations

from ggufc.codegen.emitter import F32, I32, I64, Value
from ggufc.codegen.kernels.base import symbol
from ggufc.codegen.kernels.select import KqMask, TopK
from ggufc.codegen.kernels.strided import for_rows, row_pointer

from .emitter import WARP, PtxEmitter
from .entry import Entry, Form

_LONG_ROW = 1024


def top_k(spec: TopK) -> Form:
    """``k`` times the best entry that is worse than the one before; a warp takes a row, the whole block a long one.

    Work grows with k times the length of a row: for routing and short sorts.
    """
    block = 256
    length = spec.a.ne[0]
    group = WARP if isinstance(length, int) and length <= _LONG_ROW else block

    def body(e: PtxEmitter) -> None:
        e.begin_tiles()

        def row(index: list[Value]) -> None:
            b, a = e.b, spec.a
            source = row_pointer(e, e.arg_ptr(0), a, index, a.ne)
            number = b.add(index[0], b.mul(e.dim(a.ne[1]), b.add(index[1], b.mul(e.dim(a.ne[2]), index[2]))))
            _row(e, spec, source, e.at(e.arg_ptr(1), b.mul(number, e.dim(spec.k)), 4))

        for_rows(e, spec.a.ne[1:], spec.a.ne[0], row)

    return Form((Entry(symbol(spec), block, body, group),))


def _row(e: PtxEmitter, spec: TopK, source: Value, out: Value) -> None:
    b, a = e.b, spec.a
    lowest = e.i64(-(1 << 63))

    def rank(i: Value) -> Value:
        """(key, complement of the index) as one i64 whose signed order is worst first; zeros of both signs are equal."""
        v = b.fadd(e.load(F32, e.at(source, b.mul(i, e.dim(a.nb[0])), 4)), e.f32(0.0))
        bits = b.bitcast(v, I32)
        key = b.xor(bits, b.lshr(b.ashr(bits, e.i32(31)), e.i32(1)))
        key = key if spec.order == "desc" else b.not_(key)
        return b.or_(b.shl(b.sext(key, I64), e.i64(32)), b.sub(e.i64(0xFFFFFFFF), i))

    bound = e.var(I64, e.i64((1 << 63) - 1))
    with e.for_range(0, e.dim(spec.k), name="place") as place:
        best = e.var(I64)
        best.set(lowest)
        with e.for_lanes(e.dim(a.ne[0])) as i:
            r = rank(i)
            better = b.and_(b.icmp_signed("<", r, bound.get()), b.icmp_signed(">", r, best.get()))
            best.set(b.select(better, r, best.get()))
        found = e.reduce(best.get(), "max")
        bound.set(found)
        with e.one_lane():
            e.store(b.trunc(b.sub(e.i64(0xFFFFFFFF), b.and_(found, e.i64(0xFFFFFFFF))), I32), e.at(out, place, 4))


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
