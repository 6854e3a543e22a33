"""Reductions over rows of any length: softmax, as unfused attention and expert routing use it, and sums.

Entry i belongs to lane i mod lanes, lanes are added by halving at the end; masked entries add exact zeros, so padding a row with
masked entries changes no bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ggufc.codegen.cpu.target import Target
from ggufc.codegen.emitter import F32, F64, I32, Emitter, Value, vec
from ggufc.codegen.errors import CodegenError
from ggufc.codegen.kernels import vmath
from ggufc.codegen.kernels.strided import Grid, Strided, for_rows, for_vectors, load_values, row_grid, row_pointer, store_values

_LOWEST = -3.4028234663852886e38


@dataclass(frozen=True)
class SoftMax:
    """out = softmax(scale * a + mask) over ne0; ``mask`` (f32 or f16, 0 or -inf or any bias) repeats over the outer dimensions.

    ``sinks`` f32[ne2]: one more logit for all rows of a head (dimension 2), neither scaled nor masked, whose probability is dropped.
    A row without a finite score becomes zeros. ``out`` may be ``a`` of equal layout. One tile per block of rows, see ``grid``.
    """

    a: Strided
    out: Strided
    scale: float = 1.0
    mask: Strided | None = None
    sinks: bool = False
    arg_names: ClassVar[tuple[str, ...]] = ("a", "out", "mask", "sinks")

    def __post_init__(self) -> None:
        if any(x.nb[0] != 1 for x in (self.a, self.out, self.mask or self.out)):
            raise CodegenError("soft_max: elements of a row must be adjacent; insert a cont")

    def grid(self) -> Grid:
        _, n1, n2, n3 = self.out.ne
        return row_grid(n1 * n2 * n3, self.out.ne[0])

    def emit(self, e: Emitter) -> None:
        b, a, out, ne, lanes = e.b, self.a, self.out, self.out.ne, e.target.lanes
        ty = vec(F32, lanes)
        infinity = e.const(ty, float("-inf"))
        most, sums = e.var(ty), e.var(ty)

        def row(index: list[Value]) -> None:
            source = row_pointer(e, e.arg_ptr(0), a, index, ne)
            target = row_pointer(e, e.arg_ptr(1), out, index, ne)
            mask_row = row_pointer(e, e.arg_ptr(2), self.mask, index, ne) if self.mask else None
            most.set(e.const(ty, _LOWEST))
            sums.set(e.const(ty, 0.0))

            def score(i: Value, n: int, lane_mask: Value | None) -> Value:
                v = b.fmul(load_values(e, a, e.at(source, i, a.size), n, lane_mask), e.const(ty, self.scale))
                if self.mask and mask_row is not None:
                    v = b.fadd(v, load_values(e, self.mask, e.at(mask_row, i, self.mask.size), n, lane_mask))
                return v if lane_mask is None else b.select(lane_mask, v, infinity)

            def find_top(i: Value, n: int, lane_mask: Value | None) -> None:
                most.set(e.fmax(most.get(), score(i, n, lane_mask)))

            for_vectors(e, ne[0], find_top)
            most_seen = e.reduce(most.get(), "max")
            sink = e.load(F32, e.at(e.arg_ptr(3), index[1], 4)) if self.sinks else None
            highest = most_seen if sink is None else e.fmax(most_seen, sink)
            top = e.splat(highest, lanes)

            def exponential(i: Value, n: int, lane_mask: Value | None) -> None:
                p = vmath.exp_flushed(e, b.fsub(score(i, n, lane_mask), top))
                sums.set(b.fadd(sums.get(), p))
                store_values(e, out, p, e.at(target, i, out.size), lane_mask)

            for_vectors(e, ne[0], exponential)
            total = e.reduce(sums.get(), "add")
            if sink is not None:
                total = b.fadd(total, vmath.exp_flushed(e, b.fsub(sink, highest)))
            inverse = b.select(b.fcmp_ordered("==", total, e.f32(0.0)), e.f32(0.0), b.fdiv(e.f32(1.0), total))
            factor = e.splat(inverse, lanes)

            def normalise(i: Value, n: int, lane_mask: Value | None) -> None:
                at = e.at(target, i, out.size)
                store_values(e, out, b.fmul(load_values(e, out, at, n, lane_mask), factor), at, lane_mask)

            for_vectors(e, ne[0], normalise)

        for_rows(e, ne[1:], ne[0], row)
        e.ret()

    def scratch_bytes(self, target: Target) -> int:
        return 0


@dataclass(frozen=True)
class SumRows:
    """out[0, ...] = sum of a over ne0, in f64; ``a`` may be strided. One tile per block of rows, see ``grid``."""

    a: Strided
    out: Strided
    arg_names: ClassVar[tuple[str, ...]] = ("a", "out")

    def grid(self) -> Grid:
        _, n1, n2, n3 = self.a.ne
        return row_grid(n1 * n2 * n3, self.a.ne[0])

    def emit(self, e: Emitter) -> None:
        b, a, lanes = e.b, self.a, e.target.lanes
        wide = vec(F64, lanes)
        sums = e.var(wide)

        def row(index: list[Value]) -> None:
            source = row_pointer(e, e.arg_ptr(0), a, index, a.ne)
            sums.set(e.const(wide, 0.0))
            if a.nb[0] == 1 or e.spmd:

                def add(i: Value, n: int, mask: Value | None) -> None:
                    at = i if a.nb[0] == 1 else b.mul(i, e.dim(a.nb[0]))
                    sums.set(b.fadd(sums.get(), b.fpext(load_values(e, a, e.at(source, at, a.size), n, mask), wide)))

                for_vectors(e, a.ne[0], add)
            else:
                with e.for_range(0, e.dim(a.ne[0])) as i:
                    v = b.fpext(load_values(e, a, e.at(source, b.mul(i, e.dim(a.nb[0])), a.size), 1), F64)
                    lane = b.trunc(b.and_(i, e.i64(lanes - 1)), I32)
                    old = b.extract_element(sums.get(), lane)
                    sums.set(b.insert_element(sums.get(), b.fadd(old, v), lane))
            total = b.fptrunc(e.reduce(sums.get(), "add"), F32)
            with e.one_lane():
                store_values(e, self.out, total, row_pointer(e, e.arg_ptr(1), self.out, index, (1, *a.ne[1:])))

        for_rows(e, a.ne[1:], a.ne[0], row)
        e.ret()

    def scratch_bytes(self, target: Target) -> int:
        return 0
