"""Matrix products of strided views: unfused attention (K q and V p with GQA broadcast) and other products without a repacked weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ggufc.codegen.cpu.target import Target
from ggufc.codegen.emitter import F32, Emitter, Value, vec
from ggufc.codegen.errors import CodegenError
from ggufc.codegen.kernels.strided import (
    Grid,
    Strided,
    for_rows,
    for_vectors,
    load_values,
    row_grid,
    store_values,
)
from ggufc.ir.dims import IntDim


@dataclass(frozen=True)
class StridedMatMul:
    """out f32[N, T, B2, B3] = sum_k a[k, n, i2 / (B2/b2), i3 / (B3/b3)] b[k, t, i2, i3].

    ``a`` and ``b`` are f32, f16 or bf16 with any strides. Element k of a sum belongs to lane k mod lanes when the k of both operands are
    adjacent, else the sum is one chain; either way trailing zero products change no bit. One tile per block of result rows, see ``grid``.
    """

    a: Strided
    b: Strided
    out: Strided
    arg_names: ClassVar[tuple[str, ...]] = ("a", "b", "out")

    def __post_init__(self) -> None:
        if self.a.ne[0] != self.b.ne[0] or self.out.ne != (self.a.ne[1], *self.b.ne[1:]):
            raise CodegenError(f"mul_mat: shapes {self.a.ne} and {self.b.ne} do not give {self.out.ne}")
        for i in (2, 3):
            self._repeat(i)

    def _repeat(self, i: int) -> int:
        """How many b matrices share one a matrix along dimension ``i``."""
        small, large = self.a.ne[i], self.b.ne[i]
        if small == large:
            return 1
        if isinstance(small, int) and isinstance(large, int) and large % small == 0:
            return large // small
        if small == 1:
            return 0
        raise CodegenError(f"mul_mat: dimension {i} of b ({large}) is not a multiple of that of a ({small})")

    def grid(self) -> Grid:
        _, n1, n2, n3 = self.out.ne
        return row_grid(n1 * n2 * n3, self._work())

    def _work(self) -> IntDim:
        return self.out.ne[0] * self.a.ne[0]

    def emit(self, e: Emitter) -> None:
        b, lanes = e.b, e.target.lanes
        ty = vec(F32, lanes)
        x, y, out = self.a, self.b, self.out
        depth = e.dim(x.ne[0])

        def offset(t: Strided, index: list[Value], first: int) -> Value:
            at = e.dim(t.offset)
            for i, position in enumerate(index, first):
                at = b.add(at, b.mul(position, e.dim(t.nb[i])))
            return at

        def row(index: list[Value]) -> None:
            _, i2, i3 = index
            sharing = (i2, self._repeat(2)), (i3, self._repeat(3))
            shared = [e.i64(0) if n == 0 else v if n == 1 else b.udiv(v, e.i64(n)) for v, n in sharing]
            a_base = e.at(e.arg_ptr(0), offset(x, shared, 2), x.size)
            b_base = e.at(e.arg_ptr(1), offset(y, index, 1), y.size)
            target = e.at(e.arg_ptr(2), offset(out, index, 1), out.size)

            def a_at(k: Value, n: Value) -> Value:
                return e.at(a_base, b.add(b.mul(k, e.dim(x.nb[0])), b.mul(n, e.dim(x.nb[1]))), x.size)

            def b_value(k: Value) -> Value:
                return load_values(e, y, e.at(b_base, b.mul(k, e.dim(y.nb[0])), y.size), 1)

            def put(n: Value, v: Value, mask: Value | None = None) -> None:
                store_values(e, out, v, e.at(target, b.mul(n, e.dim(out.nb[0])), out.size), mask)

            if x.nb[0] == 1 and y.nb[0] == 1:
                acc = e.var(ty)
                with e.for_range(0, e.dim(x.ne[1]), name="n") as n:
                    acc.set(e.const(ty, 0.0))

                    def along_k(k: Value, width: int, mask: Value | None, n: Value = n) -> None:
                        left = load_values(e, x, a_at(k, n), width, mask)
                        acc.set(e.fma(left, load_values(e, y, e.at(b_base, k, y.size), width, mask), acc.get()))

                    for_vectors(e, x.ne[0], along_k)
                    total = e.reduce(acc.get(), "add")
                    with e.one_lane():
                        put(n, total)
            elif x.nb[1] == 1 and out.nb[0] == 1:

                def along_n(n: Value, width: int, mask: Value | None) -> None:
                    acc = e.var(ty, e.const(ty, 0.0))
                    with e.for_range(0, depth, name="k") as k:
                        acc.set(e.fma(e.splat(b_value(k), width), load_values(e, x, a_at(k, n), width, mask), acc.get()))
                    put(n, acc.get(), mask)

                for_vectors(e, x.ne[1], along_n)
            else:
                with e.for_lanes(e.dim(x.ne[1])) as n:
                    total = e.var(F32, e.f32(0.0))
                    with e.for_range(0, depth, name="k") as k:
                        total.set(e.fma(b_value(k), load_values(e, x, a_at(k, n), 1), total.get()))
                    put(n, total.get())

        for_rows(e, out.ne[1:], self._work(), row)
        e.ret()

    def scratch_bytes(self, target: Target) -> int:
        return 0
