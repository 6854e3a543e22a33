"""Kernels about lists of indices per row: marking them, reading them off a mask, and their spans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ggufc.codegen.cpu.target import Target
from ggufc.codegen.emitter import F32, I32, I64, Emitter, Value, vec
from ggufc.codegen.errors import CodegenError
from ggufc.codegen.kernels.strided import Grid, Strided, for_rows, for_vectors, load_values, row_grid, row_pointer, store_values
from ggufc.ir.dims import IntDim

UNMASKED_ABOVE = -1e29
"""Mask values above this leave a column visible (``ir.ops.sparse``)."""


def _rows(ne: tuple[IntDim, ...]) -> IntDim:
    return ne[1] * ne[2] * ne[3]


@dataclass(frozen=True)
class Fill:
    """out = ``value`` everywhere; ``out`` is f32, f16 or bf16, contiguous rows. One tile per block of rows, see ``grid``."""

    value: float
    out: Strided
    arg_names: ClassVar[tuple[str, ...]] = ("out",)

    def grid(self) -> Grid:
        return row_grid(_rows(self.out.ne), self.out.ne[0])

    def emit(self, e: Emitter) -> None:
        out = self.out

        def row(index: list[Value]) -> None:
            target = row_pointer(e, e.arg_ptr(0), out, index, out.ne)

            def put(i: Value, n: int, mask: Value | None) -> None:
                store_values(e, out, e.const(vec(F32, n), self.value), e.at(target, i, out.size), mask)

            for_vectors(e, out.ne[0], put)

        for_rows(e, out.ne[1:], out.ne[0], row)
        e.ret()

    def scratch_bytes(self, target: Target) -> int:
        return 0


@dataclass(frozen=True)
class Blend:
    """out = a with ``value`` at the elements ``idx[.., row]`` of each row; negative indices are passed over, others are trusted.

    ``a`` any float type and strides, ``idx`` i32 with adjacent entries, ``out`` f32 contiguous. One tile per block of rows, see ``grid``.
    """

    a: Strided
    idx: Strided
    value: float
    out: Strided
    arg_names: ClassVar[tuple[str, ...]] = ("a", "idx", "out")

    def __post_init__(self) -> None:
        if self.idx.dtype != "i32" or self.idx.nb[0] != 1 or self.idx.ne[1:] != self.out.ne[1:]:
            raise CodegenError(f"blend: indices {self.idx} must be i32 with one list of adjacent entries per row of {self.out.ne}")

    def grid(self) -> Grid:
        return row_grid(_rows(self.out.ne), self.out.ne[0])

    def emit(self, e: Emitter) -> None:
        b, a, idx, out = e.b, self.a, self.idx, self.out

        def row(index: list[Value]) -> None:
            source = row_pointer(e, e.arg_ptr(0), a, index, out.ne)
            target = row_pointer(e, e.arg_ptr(2), out, index, out.ne)
            if a.nb[0] == 1:

                def copy(i: Value, n: int, mask: Value | None) -> None:
                    store_values(e, out, load_values(e, a, e.at(source, i, a.size), n, mask), e.at(target, i, out.size), mask)

                for_vectors(e, out.ne[0], copy)
            else:
                with e.for_lanes(e.dim(out.ne[0])) as i:
                    at = e.at(source, b.mul(i, e.dim(a.nb[0])), a.size)
                    store_values(e, out, load_values(e, a, at, 1), e.at(target, i, out.size))
            entries = row_pointer(e, e.arg_ptr(1), idx, index, out.ne)
            with e.for_range(0, e.dim(idx.ne[0])) as j:
                place = e.sext64(e.load(I32, e.at(entries, j, 4)))
                with e.if_(b.icmp_signed(">=", place, e.i64(0))):
                    e.store(e.f32(self.value), e.at(target, place, out.size))

        for_rows(e, out.ne[1:], out.ne[0], row)
        e.ret()

    def scratch_bytes(self, target: Target) -> int:
        return 0


@dataclass(frozen=True)
class MaskToIndex:
    """out i32[k, T]: the columns each row of ``mask`` [N, T] leaves visible, ascending, then -1; those after the ``k``-th are left out.

    ``mask`` has adjacent columns, ``out`` is contiguous. One tile per block of rows, see ``grid``.
    """

    mask: Strided
    k: int
    arg_names: ClassVar[tuple[str, ...]] = ("mask", "out")

    def __post_init__(self) -> None:
        if self.mask.nb[0] != 1 or self.mask.ne[2:] != (1, 1):
            raise CodegenError(f"mask_to_index: {self.mask} must be a matrix with adjacent columns; insert a cont")

    def grid(self) -> Grid:
        return row_grid(self.mask.ne[1], self.mask.ne[0])

    def emit(self, e: Emitter) -> None:
        b, mask = e.b, self.mask

        def row(index: list[Value]) -> None:
            source = row_pointer(e, e.arg_ptr(0), mask, index, mask.ne)
            target = e.at(e.arg_ptr(1), index[0], 4 * self.k)
            found = e.var(I64, e.i64(0))
            with e.for_range(0, e.dim(mask.ne[0])) as i:
                v = load_values(e, mask, e.at(source, i, mask.size), 1)
                seen = b.and_(b.fcmp_ordered(">", v, e.f32(UNMASKED_ABOVE)), b.icmp_signed("<", found.get(), e.i64(self.k)))
                with e.if_(seen):
                    e.store(b.trunc(i, I32), e.at(target, found.get(), 4))
                    found.set(b.add(found.get(), e.i64(1)))
            with e.for_range(found.get(), self.k) as i:
                e.store(e.i32(-1), e.at(target, i, 4))

        for_rows(e, mask.ne[1:], mask.ne[0], row)
        e.ret()

    def scratch_bytes(self, target: Target) -> int:
        return 0


@dataclass(frozen=True)
class ListSpans:
    """out i32[3, T]: (t*k, 0, n) for contiguous ``lists`` i32[k, T], n without the negative entries at the end. One tile per token."""

    k: int
    arg_names: ClassVar[tuple[str, ...]] = ("lists", "out")

    def emit(self, e: Emitter) -> None:
        b = e.b
        entries, out = e.at(e.arg_ptr(0), e.tile, 4 * self.k), e.at(e.arg_ptr(1), e.tile, 12)
        n = e.var(I64, e.i64(self.k))
        with e.while_loop("holes") as holes:
            holes.break_if(b.icmp_signed("==", n.get(), e.i64(0)))
            last = e.load(I32, e.at(entries, b.sub(n.get(), e.i64(1)), 4))
            holes.break_if(b.icmp_signed(">=", last, e.i32(0)))
            n.set(b.sub(n.get(), e.i64(1)))
        for place, v in enumerate((b.mul(e.tile, e.i64(self.k)), e.i64(0), n.get())):
            e.store(b.trunc(v, I32), e.gep(out, 4 * place))
        e.ret()

    def scratch_bytes(self, target: Target) -> int:
        return 0


@dataclass(frozen=True)
class Counting:
    """out i32[n, T]: 0 .. n-1 for each token. One tile per token."""

    n: int
    arg_names: ClassVar[tuple[str, ...]] = ("out",)

    def emit(self, e: Emitter) -> None:
        out = e.at(e.arg_ptr(0), e.tile, 4 * self.n)
        with e.for_range(0, self.n) as i:
            e.store(e.b.trunc(i, I32), e.at(out, i, 4))
        e.ret()

    def scratch_bytes(self, target: Target) -> int:
        return 0
