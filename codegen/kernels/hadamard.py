"""The orthonormal Walsh-Hadamard transform of blocks of a row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from ggufc.codegen.cpu.target import Target
from ggufc.codegen.emitter import F32, Emitter, Value, vec
from ggufc.codegen.errors import CodegenError
from ggufc.codegen.kernels.strided import Grid, Strided, for_rows, load_values, row_grid, row_pointer, store_values


@dataclass(frozen=True)
class Hadamard:
    """out = H a for each block of ``n`` adjacent values of a row, ``n`` a power of two; ``out`` may be ``a`` of equal layout.

    Butterflies (x, y) -> (x + y, x - y) at distances 1, 2, 4, .., then the factor n^(-1/2): distances below the vector's length exchange
    lanes, the others whole vectors, so all targets round alike. One tile per block of rows, see ``grid``.
    """

    a: Strided
    n: int
    out: Strided
    arg_names: ClassVar[tuple[str, ...]] = ("a", "out")

    def __post_init__(self) -> None:
        ne0 = self.a.ne[0]
        if self.n < 1 or self.n & (self.n - 1) or not isinstance(ne0, int) or ne0 % self.n:
            raise CodegenError(f"hadamard: {self.n} is no power of two that divides the row length {ne0}")
        if self.a.nb[0] != 1 or self.out.nb[0] != 1:
            raise CodegenError("hadamard: elements of a row must be adjacent; insert a cont")

    def grid(self) -> Grid:
        _, n1, n2, n3 = self.out.ne
        return row_grid(n1 * n2 * n3, self.out.ne[0])

    def emit(self, e: Emitter) -> None:
        a, out = self.a, self.out
        width = min(e.target.lanes, self.n)

        def row(index: list[Value]) -> None:
            source = row_pointer(e, e.arg_ptr(0), a, index, out.ne)
            target = row_pointer(e, e.arg_ptr(1), out, index, out.ne)
            with e.for_range(0, e.dim(out.ne[0]), self.n, name="block") as first:
                parts = [load_values(e, a, e.at(source, self._place(e, first, i, width), a.size), width) for i in range(self.n // width)]
                factor = e.const(vec(F32, width), 1.0 / math.sqrt(self.n))
                for i, v in enumerate(self._transform(e, parts, width)):
                    store_values(e, out, e.b.fmul(v, factor), e.at(target, self._place(e, first, i, width), out.size))

        for_rows(e, out.ne[1:], out.ne[0], row)
        e.ret()

    def _place(self, e: Emitter, first: Value, i: int, width: int) -> Value:
        return e.b.add(first, e.i64(i * width))

    def _transform(self, e: Emitter, parts: list[Value], width: int) -> list[Value]:
        b = e.b
        step = 1
        while step < width:
            lanes = [i ^ step for i in range(width)]
            signs = e.const_vec(F32, [-1.0 if i & step else 1.0 for i in range(width)])
            parts = [b.fadd(e.shuffle(v, None, lanes), b.fmul(v, signs)) for v in parts]
            step *= 2
        while step < self.n:
            distance = step // width
            out = list(parts)
            for i in range(len(parts)):
                if not i & distance:
                    x, y = parts[i], parts[i + distance]
                    out[i], out[i + distance] = b.fadd(x, y), b.fsub(x, y)
            parts, step = out, 2 * step
        return parts

    def scratch_bytes(self, target: Target) -> int:
        return 0
