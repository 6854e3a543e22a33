"""Integer products of 8-bit activation records and interleaved weights.

One output element is, for each block of 32 (or 16) columns in ascending order,

    acc = fma(f32(sum of code * q), scale_w * d, acc);   acc = fma(min_w, s, acc) where the type has minima

with exact integer sums. ``direct`` unpacks weights in registers, ``panel`` reads them from an unpacked copy that serves all tokens:
same operations, same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ggufc.codegen.emitter import F32, I32, Emitter, Value, Var, vec
from ggufc.codegen.weights.activations import q8_record
from ggufc.codegen.weights.base import Cursor, Unpacked, WeightFormat, load_f32, load_word

_UNROLL = 4
"""Chunks of up to this many blocks are unrolled."""


@dataclass
class Int8Product:
    """Emits the accumulation over K for one weight format."""

    format: WeightFormat
    k: int

    @property
    def blocks(self) -> int:
        return self.k // 32

    @property
    def panel(self) -> Panel:
        return Panel(self.format)

    def panel_bytes(self) -> int:
        """Bytes of one unpacked group."""
        return self.blocks * self.panel.block_bytes

    def stride(self) -> int:
        """Bytes between the records of consecutive tokens."""
        return q8_record(self.k).stride

    def direct(self, e: Emitter, group: Value, part: int | Value, rows: Sequence[Value]) -> list[Value]:
        """Accumulators, one vector of weight rows per activation record at ``rows``."""
        acc = self._accumulators(e, len(rows))
        for i, cursor in self._walk(e, group, part):
            self._block(e, self.format.unpack(e, cursor), rows, i, acc, self.format.offset)
        return [a.get() for a in acc]

    def _walk(self, e: Emitter, group: Value, part: int | Value) -> Iterator[tuple[Value, Cursor]]:
        """Inside emitted loops over the group: (number of the block of 32 columns, its addresses)."""
        m = self.format.chunk_blocks(self.k)
        with e.for_range(0, self.blocks // m, name="chunk") as chunk:
            first = e.b.mul(chunk, e.i64(m))
            if m <= _UNROLL:
                for j in range(m):
                    yield e.b.add(first, e.i64(j)), self.format.cursor(e, group, self.k, chunk, j, part)
            else:
                with e.for_range(0, m, name="block") as j:
                    yield e.b.add(first, j), self.format.cursor(e, group, self.k, chunk, j, part)

    def from_panel(self, e: Emitter, panel: Value, part: int | Value, rows: Sequence[Value]) -> list[Value]:
        """As ``direct``, from a group unpacked by ``fill_panel``."""
        acc = self._accumulators(e, len(rows))
        with e.for_range(0, self.blocks, name="k") as i:
            self._block(e, self.panel.read(e, panel, i, part), rows, i, acc, self.panel.offset(e))
        return [a.get() for a in acc]

    def fill_panel(self, e: Emitter, group: Value, panel: Value) -> None:
        """Unpack one group."""
        with e.for_range(0, 16 // e.target.lanes, name="part") as part:
            for i, cursor in self._walk(e, group, part):
                self.panel.write(e, panel, i, part, self.format.unpack(e, cursor), self.format.offset)

    def _accumulators(self, e: Emitter, tokens: int) -> list[Var]:
        floats = vec(F32, e.target.lanes)
        return [e.var(floats, e.const(floats, 0)) for _ in range(tokens)]

    def _block(self, e: Emitter, u: Unpacked, rows: Sequence[Value], i: Value, acc: list[Var], offset: int) -> None:
        for x, a in zip(rows, acc):
            self._block_of_token(e, u, x, i, a, offset)

    def _block_of_token(self, e: Emitter, u: Unpacked, x: Value, i: Value, acc: Var, offset: int) -> None:
        b, lanes = e.b, e.target.lanes
        ints, floats = vec(I32, lanes), vec(F32, lanes)
        at = q8_record(self.k)
        qs = e.at(x, i, 32)
        d = e.splat(e.load(F32, e.at(e.gep(x, at.off_d), i, 4)), lanes)
        n = len(u.scales)
        per = 8 // n
        for g in range(n):
            if offset:
                where = e.at(e.gep(x, at.off_c32), i, 4) if n == 1 else e.gep(e.at(e.gep(x, at.off_c16), i, 8), 4 * g)
                total = e.splat(e.load(I32, where), lanes)
                shift = 7 - (offset.bit_length() - 1)
                if shift:
                    total = b.ashr(total, e.const(ints, shift))
            else:
                total = e.const(ints, 0)
            for j in range(per * g, per * (g + 1)):
                total = e.dot4(total, u.quads[j], e.splat(e.load(I32, e.gep(qs, 4 * j)), lanes), self.format.u_max)
            acc.set(e.fma(b.sitofp(total, floats), b.fmul(u.scales[g], d), acc.get()))
        if len(u.mins) == 1:
            s = e.splat(e.load(F32, e.at(e.gep(x, at.off_s), i, 4)), lanes)
            acc.set(e.fma(u.mins[0], s, acc.get()))
        for g, low in enumerate(u.mins if len(u.mins) > 1 else []):
            # c16 is -128 times the sum of the activations: a power of two, so the factor moves into the minimum without a rounding.
            c = e.splat(e.load(I32, e.gep(e.at(e.gep(x, at.off_c16), i, 8), 4 * g)), lanes)
            acc.set(e.fma(b.fmul(low, e.const(floats, -1 / 128)), b.fmul(d, b.sitofp(c, floats)), acc.get()))


@dataclass
class Panel:
    """An unpacked group: per block of 32 columns eight code quads of 16 rows, then scales and minima in f32.

    Where ``dot4`` takes all unsigned bytes at full speed, codes are moved to offset 128, so that the accumulator starts from a plain
    load.
    """

    format: WeightFormat

    @property
    def numbers(self) -> int:
        return (32 // self.format.group) * (2 if self.format.has_min else 1)

    @property
    def block_bytes(self) -> int:
        return 512 + 64 * self.numbers

    def offset(self, e: Emitter) -> int:
        return 128 if self.format.offset and e.target.vnni else self.format.offset

    def write(self, e: Emitter, panel: Value, i: Value, part: Value, u: Unpacked, offset: int) -> None:
        lanes = e.target.lanes
        at = e.at(e.at(panel, i, self.block_bytes), part, 4 * lanes)
        move = self.offset(e) - offset
        for q, quad in enumerate(u.quads):
            if move:  # bytes stay below 256, so no carry crosses them
                quad = e.b.add(quad, e.const(quad.type, move * 0x01010101))
            e.store(quad, e.gep(at, 64 * q))
        for j, v in enumerate([*u.scales, *u.mins]):
            e.store(v, e.gep(at, 512 + 64 * j))

    def read(self, e: Emitter, panel: Value, i: Value, part: int | Value) -> Unpacked:
        n = 32 // self.format.group
        cursor = Cursor(e.at(panel, i, self.block_bytes), panel, panel, part)
        quads = [load_word(e, cursor, q) for q in range(8)]
        numbers = [load_f32(e, cursor.codes, 512 + 64 * j, part) for j in range(self.numbers)]
        return Unpacked(quads, numbers[:n], numbers[n:])
