"""Causal depthwise convolution over tokens: by itself, and with the inputs it carries from batch to batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ggufc.codegen.cpu.target import Target
from ggufc.codegen.emitter import F32, I32, Emitter, Value, vec
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


CHANNELS = 16
"""Channels of a tile of ``CarriedConv``."""


@dataclass(frozen=True)
class CarriedConv:
    """y[c, t] = x[c, t] + sum over taps i ascending of w[i, c] * x[c, t - taps + 1 + i]; inputs before the batch come from ``state``.

    ``x`` f32[channels, T] with leading dimension ``ldx``; ``w`` f32[taps, channels] and ``y`` f32[channels, T] contiguous. Row ``reads[0]``
    of ``state`` f32[(taps-1) * channels, ..] holds the last ``taps - 1`` inputs of every channel, oldest first; those after the batch go
    to row ``slots[0]``, which may be the same. The chain of an element is that of ``SsmConv``. Tiles: ``CHANNELS`` channels each.
    """

    channels: int
    taps: int
    arg_names: ClassVar[tuple[str, ...]] = ("x", "ldx", "w", "state", "reads", "slots", "y")

    def __post_init__(self) -> None:
        if self.taps < 2:
            raise CodegenError(f"convolution: {self.taps} taps carry no inputs")

    @property
    def tiles(self) -> int:
        return -(-self.channels // CHANNELS)

    def emit(self, e: Emitter) -> None:
        b, rest = e.b, self.channels % CHANNELS
        first = b.mul(e.tile, e.i64(CHANNELS))
        if not rest:
            self._block(e, first, CHANNELS)
        else:
            with e.if_else(b.icmp_signed("<", e.tile, e.i64(self.tiles - 1))) as (whole, last):
                with whole:
                    self._block(e, first, CHANNELS)
                with last:
                    self._block(e, first, rest)
        e.ret()

    def _block(self, e: Emitter, first: Value, count: int) -> None:
        lanes = e.target.lanes
        for start in range(0, count, lanes):
            self._channels(e, e.b.add(first, e.i64(start)), min(lanes, count - start))

    def _channels(self, e: Emitter, channel: Value, count: int) -> None:
        """All tokens of ``count`` channels side by side."""
        b, lanes, kept = e.b, e.target.lanes, self.taps - 1
        row = 4 * kept * self.channels
        before, after = (e.at(e.arg_ptr(3), e.sext64(e.load(I32, e.arg_ptr(i))), row) for i in (4, 5))
        weights = [self._spread(e, e.at(e.arg_ptr(2), channel, 4 * self.taps), i, self.taps, count) for i in range(self.taps)]
        held = e.at(before, channel, 4 * kept)
        history = [e.var(vec(F32, lanes), self._spread(e, held, i, kept, count)) for i in range(kept)]
        x, y = e.at(e.arg_ptr(0), channel, 4), e.at(e.arg_ptr(6), channel, 4)
        with e.for_range(0, e.param("T"), name="token") as t:
            new = e.load_masked(F32, lanes, e.at(x, b.mul(t, e.arg_int(1)), 4), count)
            values = [*(cell.get() for cell in history), new]
            total = e.const(vec(F32, lanes), 0.0)
            for weight, value in zip(weights, values):
                total = e.fma(weight, value, total)
            e.store_masked(b.fadd(new, total), e.at(y, t, 4 * self.channels), count)
            for cell, value in zip(history, values[1:]):
                cell.set(value)
        target = e.at(after, channel, 4 * kept)
        for i, cell in enumerate(history):
            v = cell.get()
            for lane in range(count):
                e.store(b.extract_element(v, e.i32(lane)), e.gep(target, 4 * (kept * lane + i)))

    @staticmethod
    def _spread(e: Emitter, p: Value, first: int, step: int, count: int) -> Value:
        """A vector of every ``step``-th number from ``first`` on."""
        v = e.const(vec(F32, e.target.lanes), 0.0)
        for lane in range(count):
            v = e.b.insert_element(v, e.load(F32, e.gep(p, 4 * (step * lane + first))), e.i32(lane))
        return v

    def scratch_bytes(self, target: Target) -> int:
        return 0
