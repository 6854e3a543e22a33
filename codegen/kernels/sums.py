"""Sums over any dimension."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ggufc.codegen.cpu.target import Target
from ggufc.codegen.emitter import F32, Emitter, Value, vec
from ggufc.codegen.errors import CodegenError
from ggufc.codegen.kernels.strided import Grid, Strided, for_rows, for_vectors, load_values, row_grid, row_pointer, store_values
from ggufc.ir.dims import IntDim


@dataclass(frozen=True)
class SumRowsExt:
    """out = sum of ``a`` over dimension ``dim`` (1 to 3), one chain in ascending order that starts with the first slice.

    ``a`` is f32, f16 or bf16 with any strides, ``out`` f32 of the shape of ``a`` with 1 in place of ``dim``. One tile per block of rows of
    the result, see ``grid``.
    """

    a: Strided
    dim: int
    out: Strided
    arg_names: ClassVar[tuple[str, ...]] = ("a", "out")

    def __post_init__(self) -> None:
        want = (*self.a.ne[: self.dim], 1, *self.a.ne[self.dim + 1 :])
        if not 1 <= self.dim <= 3 or self.out.ne != want:
            raise CodegenError(f"sum_rows_ext: a sum of {self.a.ne} over dimension {self.dim} does not give {self.out.ne}")

    def _work(self) -> IntDim:
        return self.a.ne[0] * self.a.ne[self.dim]

    def grid(self) -> Grid:
        _, n1, n2, n3 = self.out.ne
        return row_grid(n1 * n2 * n3, self._work())

    def emit(self, e: Emitter) -> None:
        b, a, out = e.b, self.a, self.out
        slices = Strided(a.dtype, out.ne, a.nb, a.offset)
        along = e.dim(a.nb[self.dim])

        def row(index: list[Value]) -> None:
            source = row_pointer(e, e.arg_ptr(0), slices, index, out.ne)
            target = row_pointer(e, e.arg_ptr(1), out, index, out.ne)

            def chunk(i: Value, n: int, mask: Value | None) -> None:
                first = e.at(source, i if a.nb[0] == 1 else b.mul(i, e.dim(a.nb[0])), a.size)
                total = e.var(vec(F32, n), load_values(e, a, first, n, mask))
                with e.for_range(1, e.dim(a.ne[self.dim]), name="slice") as j:
                    total.set(b.fadd(total.get(), load_values(e, a, e.at(first, b.mul(j, along), a.size), n, mask)))
                at = i if out.nb[0] == 1 else b.mul(i, e.dim(out.nb[0]))
                store_values(e, out, total.get(), e.at(target, at, out.size), mask)

            if a.nb[0] == 1 and out.nb[0] == 1:
                for_vectors(e, out.ne[0], chunk)
            else:
                with e.for_lanes(e.dim(out.ne[0])) as i:
                    chunk(i, 1, None)

        for_rows(e, out.ne[1:], self._work(), row)
        e.ret()

    def scratch_bytes(self, target: Target) -> int:
        return 0
