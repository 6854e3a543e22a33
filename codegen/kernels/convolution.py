"""Causal depthwise convolution over tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ggufc.codegen.cpu.target import Target
from ggufc.codegen.emitter import F32, Emitter, Value, vec
from ggufc.codegen.errors import CodegenError
from ggufc.codegen.kernels.strided import Grid, Strided, for_rows, load_values, row_grid, row_pointer, store_values


@dataclass(frozen=True)
class SsmConv:
    """out f32[channels, T] = sum over taps i ascending of w[i, channel] * x[t + i, channel], one chain of ``fma`` per element.

    ``x`` [taps-1+T, channels] holds the carried inputs of each channel and then the new ones, ``w`` [taps, channels]; both any float type
    and strides. One tile per block of tokens, see ``grid``.
    """

    x: Strided
    w: Strided
    out: Strided
    arg_names: ClassVar[tuple[str, ...]] = ("x", "w", "out")

    def __post_init__(self) -> None:
        taps, channels = self.w.ne[:2]
        wanted = (channels, self.x.ne[0] - taps + 1, 1, 1)
        if not isinstance(taps, int) or self.x.ne[1:] != (channels, 1, 1) or self.w.ne[2:] != (1, 1) or self.out.ne != wanted:
            raise CodegenError(f"ssm_conv: inputs {self.x.ne} and taps {self.w.ne} do not give {self.out.ne}")

    def grid(self) -> Grid:
        return row_grid(self.out.ne[1], self.out.ne[0])

    def emit(self, e: Emitter) -> None:
        b, x, w, out = e.b, self.x, self.w, self.out
        taps = w.ne[0]
        assert isinstance(taps, int)

        def row(index: list[Value]) -> None:
            target = row_pointer(e, e.arg_ptr(2), out, index, out.ne)
            first = b.add(e.dim(x.offset), b.mul(index[0], e.dim(x.nb[0])))
            with e.for_lanes(e.dim(out.ne[0])) as channel:
                source = b.add(first, b.mul(channel, e.dim(x.nb[1])))
                factor = b.add(e.dim(w.offset), b.mul(channel, e.dim(w.nb[1])))
                total = e.const(vec(F32, 1), 0.0)
                for i in range(taps):
                    value = load_values(e, x, e.at(e.arg_ptr(0), b.add(source, b.mul(e.i64(i), e.dim(x.nb[0]))), x.size), 1)
                    weight = load_values(e, w, e.at(e.arg_ptr(1), b.add(factor, b.mul(e.i64(i), e.dim(w.nb[0]))), w.size), 1)
                    total = e.fma(weight, value, total)
                store_values(e, out, total, e.at(target, b.mul(channel, e.dim(out.nb[0])), out.size))

        for_rows(e, out.ne[1:], out.ne[0], row)
        e.ret()

    def scratch_bytes(self, target: Target) -> int:
        return 0
