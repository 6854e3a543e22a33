"""Kernels that choose: rows by index, the largest entries of a row, and the visibility mask of unfused attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ggufc.codegen.cpu.target import Target
from ggufc.codegen.emitter import F32, I32, I64, Emitter, Value, vec
from ggufc.codegen.errors import CodegenError
from ggufc.codegen.kernels.strided import Grid, Strided, for_rows, for_vectors, load_values, row_grid, row_pointer, store_values
from ggufc.ir.dims import IntDim


@dataclass(frozen=True)
class GetRowsPlain:
    """out[k, u, t] = a[k, idx[u, t], t] for unquantised ``a`` (f32, f16, bf16 -> f32; i32 -> i32), any strides.

    ``a`` [K, N, B], ``idx`` i32[U, B], ``out`` [K, U, B]. Indices are trusted. One tile per block of result rows, see ``grid``.
    """

    a: Strided
    idx: Strided
    out: Strided
    arg_names: ClassVar[tuple[str, ...]] = ("a", "idx", "out")

    def __post_init__(self) -> None:
        if self.idx.dtype != "i32":
            raise CodegenError(f"get_rows: indices are i32, not {self.idx.dtype}")
        if self.a.ne[2] != self.idx.ne[1] or self.out.ne[:3] != (self.a.ne[0], *self.idx.ne[:2]) or self.a.ne[3] != 1:
            raise CodegenError(f"get_rows: shapes {self.a.ne} and {self.idx.ne} do not give {self.out.ne}")

    def grid(self) -> Grid:
        return row_grid(self.out.ne[1] * self.out.ne[2], self.out.ne[0])

    def emit(self, e: Emitter) -> None:
        b, a, out = e.b, self.a, self.out
        raw = a.dtype == out.dtype == "i32"

        def row(index: list[Value]) -> None:
            u, t, _ = index
            position = b.add(b.mul(u, e.dim(self.idx.nb[0])), b.mul(t, e.dim(self.idx.nb[1])))
            chosen = e.sext64(e.load(I32, e.at(e.arg_ptr(1), b.add(e.dim(self.idx.offset), position), 4)))
            start = b.add(e.dim(a.offset), b.add(b.mul(chosen, e.dim(a.nb[1])), b.mul(t, e.dim(a.nb[2]))))
            source = e.at(e.arg_ptr(0), start, a.size)
            target = row_pointer(e, e.arg_ptr(2), out, index, out.ne)

            def move(i: Value, n: int, mask: Value | None) -> None:
                p = e.at(source, b.mul(i, e.dim(a.nb[0])), a.size)
                q = e.at(target, b.mul(i, e.dim(out.nb[0])), out.size)
                if not raw:
                    store_values(e, out, load_values(e, a, p, n, mask), q, mask)
                elif mask is None:
                    e.store(e.load(vec(I32, n), p), q)
                else:
                    e.store_lanes(e.load_lanes(I32, n, p, mask), q, mask)

            if a.nb[0] == 1 and out.nb[0] == 1:
                for_vectors(e, a.ne[0], move)
            else:
                with e.for_lanes(e.dim(a.ne[0])) as i:
                    move(i, 1, None)

        for_rows(e, out.ne[1:], out.ne[0], row)
        e.ret()

    def scratch_bytes(self, target: Target) -> int:
        return 0


@dataclass(frozen=True)
class KqMask:
    """mask f32[ne0, T]: 0 for the cells token t sees, else -inf; ``cells`` i32[R], ``visible`` i32[3, T]; one tile per token."""

    ne0: IntDim
    arg_names: ClassVar[tuple[str, ...]] = ("cells", "visible", "mask")

    def emit(self, e: Emitter) -> None:
        b = e.b
        n = e.dim(self.ne0)
        mask = e.at(e.arg_ptr(2), b.mul(e.tile, n), 4)
        hidden = vec(F32, e.target.lanes)

        def hide(i: Value, lanes: int, lane_mask: Value | None) -> None:
            v, at = e.const(hidden, float("-inf")), e.at(mask, i, 4)
            if lane_mask is None:
                e.store(v, at)
            else:
                e.store_lanes(v, at, lane_mask)

        for_vectors(e, self.ne0, hide)
        triple = e.at(e.arg_ptr(1), e.tile, 12)
        base, lo, hi = (e.sext64(e.load(I32, e.gep(triple, 4 * i))) for i in range(3))
        cells = e.at(e.arg_ptr(0), base, 4)
        with e.for_range(lo, hi) as i:
            cell = e.sext64(e.load(I32, e.at(cells, i, 4)))
            with e.if_(b.icmp_signed("<", cell, n)):
                e.store(e.f32(0.0), e.at(mask, cell, 4))
        e.ret()

    def scratch_bytes(self, target: Target) -> int:
        return 0


@dataclass(frozen=True)
class TopK:
    """out i32[k, ...]: indices of the first ``k`` entries of each row of ``a`` in ``order`` (``desc``: largest first), then -1.

    ``k`` = ne0 sorts the whole row (argsort). Of equal entries the one with the lowest index comes first, or the highest with ``ties``.
    Rows may have any length: the result row itself is the heap. Zeros of both signs are equal, NaNs sort beyond the infinities. One
    tile per block of rows, see ``grid``; ``a`` is f32 with any strides, ``out`` contiguous.
    """

    a: Strided
    k: IntDim
    order: str = "desc"
    ties: str = "lowest"
    arg_names: ClassVar[tuple[str, ...]] = ("a", "out")

    def __post_init__(self) -> None:
        if self.order not in ("asc", "desc"):
            raise CodegenError(f"top_k: order {self.order!r} is unknown; it is asc or desc")
        if self.a.dtype != "f32":
            raise CodegenError(f"top_k: rows are f32, not {self.a.dtype}; insert a cast")
        if self.ties not in ("lowest", "highest"):
            raise CodegenError(f"top_k: ties {self.ties!r} are unknown; they are lowest or highest")
        if isinstance(self.k, int) and isinstance(self.a.ne[0], int) and not 1 <= self.k <= self.a.ne[0]:
            raise CodegenError(f"top_k: k = {self.k} is outside 1..{self.a.ne[0]}, the length of a row")

    def grid(self) -> Grid:
        _, n1, n2, n3 = self.a.ne
        return row_grid(n1 * n2 * n3, self.a.ne[0])

    def emit(self, e: Emitter) -> None:
        b, a = e.b, self.a

        def row(index: list[Value]) -> None:
            source = row_pointer(e, e.arg_ptr(0), a, index, a.ne)
            number = b.add(index[0], b.mul(e.dim(a.ne[1]), b.add(index[1], b.mul(e.dim(a.ne[2]), index[2]))))
            self._row(e, source, e.at(e.arg_ptr(1), b.mul(number, e.dim(self.k)), 4))

        for_rows(e, a.ne[1:], a.ne[0], row)
        e.ret()

    def _row(self, e: Emitter, source: Value, heap: Value) -> None:
        """Heap of the best k with the worst at its root; then the heap is taken apart from the back."""
        b, n, one = e.b, e.dim(self.a.ne[0]), e.i64(1)
        k = e.dim(self.k) if self.k == self.a.ne[0] else e.imin(e.dim(self.k), n)

        def rank(i: Value) -> Value:
            """(key, index) as one i64 whose signed order is worst first."""
            v = b.fadd(e.load(F32, e.at(source, b.mul(i, e.dim(self.a.nb[0])), 4)), e.f32(0.0))
            bits = b.bitcast(v, I32)
            key = b.xor(bits, b.lshr(b.ashr(bits, e.i32(31)), e.i32(1)))
            key = key if self.order == "desc" else b.not_(key)
            tie = i if self.ties == "highest" else b.sub(e.i64(0xFFFFFFFF), i)
            return b.or_(b.shl(b.sext(key, I64), e.i64(32)), tie)

        def entry(i: Value) -> Value:
            return b.zext(e.load(I32, e.at(heap, i, 4)), I64)

        def put(i: Value, v: Value) -> None:
            e.store(b.trunc(v, I32), e.at(heap, i, 4))

        hole = e.var(I64)

        def sift(start: Value, moving: Value, size: Value) -> None:
            """Put ``moving`` into the subtree at ``start``, every parent worse than its children."""
            weight = rank(moving)
            hole.set(start)
            with e.while_loop("sift") as loop:
                at = hole.get()
                left = b.add(b.add(at, at), one)
                loop.break_if(b.icmp_signed(">=", left, size))
                right = b.add(left, one)
                other = b.select(b.icmp_signed("<", right, size), right, left)
                first, second = entry(left), entry(other)
                take_other = b.icmp_signed("<", rank(second), rank(first))
                child, where = b.select(take_other, second, first), b.select(take_other, other, left)
                loop.break_if(b.icmp_signed("<=", weight, rank(child)))
                put(at, child)
                hole.set(where)
            put(hole.get(), moving)

        with e.for_range(0, k) as i:
            put(i, i)
        half = b.ashr(k, one)
        with e.for_range(0, half) as i:
            at = b.sub(b.sub(half, one), i)
            sift(at, entry(at), k)
        with e.for_range(k, n) as i, e.if_(b.icmp_signed(">", rank(i), rank(entry(e.i64(0))))):
            sift(e.i64(0), i, k)
        with e.for_range(0, b.sub(k, one)) as i:
            last = b.sub(b.sub(k, one), i)
            worst, moving = entry(e.i64(0)), entry(last)
            sift(e.i64(0), moving, last)
            put(last, worst)
        with e.for_range(k, e.dim(self.k)) as i:
            put(i, e.i64(-1))

    def scratch_bytes(self, target: Target) -> int:
        return 0
