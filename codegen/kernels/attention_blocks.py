"""The cache side of attention for block types: codes and scales apart, so that scores are sums of integers and a scale is applied once.

A block's codes meet the query's in integers (``attention_rounded``), and a value's scale goes into the probability that weighs it
(``attention_weights``). Both take a block's scale once per entry instead of once per element.
"""

from __future__ import annotations

from typing import NamedTuple

from llvmlite import ir

from ggufc.codegen.emitter import F32, I8, I16, I32, Value, vec
from ggufc.codegen.kernels import cache_blocks
from ggufc.codegen.kernels.attention_cells import STEP, CellRows
from ggufc.codegen.kernels.cache_blocks import BLOCKS, VALUES, block_bytes
from ggufc.codegen.weights.tables import lookup16

QUADS = VALUES // 4
"""Vectors of four codes each per block."""


class Keys(NamedTuple):
    """One block of several entries, an entry per lane."""

    quads: list[Value]
    """Vector c holds the codes of values 4c..4c+3 as bytes."""
    scale: Value
    minimum: Value | None


class BlockRows(CellRows):
    """``CellRows`` of a block type; ``load`` gives codes without their scale."""

    @property
    def signed(self) -> bool:
        """Whether ``quads`` are signed bytes; else ``zero`` is the code of 0."""
        return self.e.multiplies_signed and (self.layout.bits == 8 or bool(self.layout.table))

    @property
    def layout(self) -> cache_blocks.Block:
        return BLOCKS[self.dtype]

    @property
    def zero(self) -> int:
        wide = self.layout.bits == 8 or bool(self.layout.table)
        return 0 if self.signed else 128 if wide else self.layout.zero

    @property
    def largest(self) -> int:
        """Bound of the unsigned codes."""
        return 255 if self.layout.table else (1 << self.layout.bits) - 1

    def load(self, row: Value, i: Value, count: int) -> Value:
        """The codes, as f32 lanes around zero, of the values from ``i`` on."""
        e, b = self.e, self.e.b
        return cache_blocks.codes(e, self.dtype, e.target.lanes, self.block_at(row, b.udiv(i, e.i64(VALUES))), b.urem(i, e.i64(VALUES)))

    def block_at(self, row: Value, block: Value) -> Value:
        return self.e.at(row, block, block_bytes(self.dtype))

    def scales(self, first: Value, part: int, block: Value) -> tuple[Value, Value | None]:
        """Scale and minimum (None where the type has none) of block ``block``, one of ``lanes`` entries from ``part`` on per lane."""
        return self._scales([self.block_at(self.row(first, part + j), block) for j in range(self.e.target.lanes)])

    def _scales(self, blocks: list[Value]) -> tuple[Value, Value | None]:
        e, b = self.e, self.e.b
        if not self.layout.low:
            return e.f16_to_f32(self._gathered(blocks, 0, I16)), None
        # The minimum follows the scale: one load for both.
        both, halves = self._gathered(blocks, 0, I32), vec(I16, len(blocks))
        scale, minimum = b.trunc(both, halves), b.trunc(b.lshr(both, e.const(both.type, 16)), halves)
        return e.f16_to_f32(scale), e.f16_to_f32(minimum)

    def _gathered(self, blocks: list[Value], offset: int, element: ir.IntType) -> Value:
        """The numbers at ``offset`` of all blocks."""
        e = self.e
        numbers: Value = e.const(vec(element, len(blocks)), 0)
        for j, block in enumerate(blocks):
            numbers = e.b.insert_element(numbers, e.b.load(e.gep(block, offset), align=2, typ=element), e.i32(j))
        return numbers

    def keys_of(self, first: Value, part: int, block: Value) -> Keys:
        """Block ``block`` of ``lanes`` entries from ``part`` on of the step whose ring index starts at ``first``."""
        e, b, layout = self.e, self.e.b, self.layout
        rows = [self.block_at(self.row(first, part + j), block) for j in range(e.target.lanes)]
        ints = vec(I32, e.target.lanes)
        quads = self._quads(rows, layout.codes)
        if layout.bits == 8:
            quads += self._quads(rows, layout.codes + 16)
            if not self.signed:
                quads = [b.xor(q, e.const(ints, 0x80808080)) for q in quads]
        else:
            nibbles = e.const(ints, 0x0F0F0F0F)
            quads = [b.and_(q, nibbles) for q in quads] + [b.and_(b.lshr(q, e.const(ints, 4)), nibbles) for q in quads]
        if layout.high:
            fifth = self._gathered(rows, layout.high, I32)
            quads = [b.or_(q, self._spread(fifth, 4 * c)) for c, q in enumerate(quads)]
        if layout.table:
            quads = lookup16(e, quads, [v if self.signed else v + 128 for v in layout.table])
        return Keys(quads, *self._scales(rows))

    def _spread(self, bits: Value, shift: int) -> Value:
        """Bits shift..shift+3 of each lane to the fifth bits of its four bytes."""
        e, b = self.e, self.e.b
        four = b.and_(b.lshr(bits, e.const(bits.type, shift)), e.const(bits.type, 15))
        # Four copies, each 7 bits further: bit k of copy k lies at 8k, moved by 4 to the place of a fifth bit.
        copies = b.mul(four, e.const(bits.type, (1 | 1 << 7 | 1 << 14 | 1 << 21) << 4))
        return b.and_(copies, e.const(bits.type, 0x10101010))

    def _quads(self, rows: list[Value], offset: int) -> list[Value]:
        """Sixteen bytes of every row, transposed: vector c holds bytes 4c..4c+3 of all rows."""
        e, n = self.e, len(rows)
        low, high = ([x for q in range(0, n, 4) for x in (q + k, n + q + k, q + k + 1, n + q + k + 1)] for k in (0, 2))
        left, right = ([x for q in range(0, n, 4) for x in (q + k, q + k + 1, n + q + k, n + q + k + 1)] for k in (0, 2))
        # The rows of a vector are four apart, so that transposing within 128-bit lanes leaves them in order.
        v = [self._joined([e.load(vec(I8, 16), e.gep(row, offset)) for row in rows[j::4]]) for j in range(4)]
        t = [e.shuffle(v[0], v[1], low), e.shuffle(v[0], v[1], high), e.shuffle(v[2], v[3], low), e.shuffle(v[2], v[3], high)]
        return [e.shuffle(t[i], t[i + 2], lanes) for i in (0, 1) for lanes in (left, right)]

    def _joined(self, pieces: list[Value]) -> Value:
        while len(pieces) > 1:
            pieces = [self.e.concat(x, y) for x, y in zip(pieces[::2], pieces[1::2])]
        return self.e.b.bitcast(pieces[0], vec(I32, self.e.target.lanes))

    # Steps that several tokens share

    def store_columns(self, first: Value, target: Value) -> None:
        """The step as quads i32[STEP, n / 4], then scales and minima f32[STEP, n / 32] each."""
        e = self.e
        with e.for_range(0, self.n // VALUES, name="block") as block:
            for part in range(0, STEP, e.target.lanes):
                keys = self.keys_of(first, part, block)
                at = e.gep(e.at(target, block, 4 * STEP * QUADS), 4 * part)
                for c, quad in enumerate(keys.quads):
                    e.store(quad, e.gep(at, 4 * STEP * c))
                self._store_scales(keys.scale, keys.minimum, e.gep(target, STEP * self.n), block, part)

    def stored_keys(self, target: Value, part: int, block: Value) -> Keys:
        """What ``store_columns`` has stored of block ``block`` for ``lanes`` entries from ``part`` on."""
        e, n = self.e, self.e.target.lanes
        at = e.gep(e.at(target, block, 4 * STEP * QUADS), 4 * part)
        quads = [e.load(vec(I32, n), e.gep(at, 4 * STEP * c)) for c in range(QUADS)]
        return Keys(quads, *self.stored_scales(e.gep(target, STEP * self.n), part, block))

    def store_scales(self, first: Value, target: Value) -> None:
        """Scales and then minima of the step, f32[STEP, n / 32] each."""
        e = self.e
        with e.for_range(0, self.n // VALUES, name="block") as block:
            for part in range(0, STEP, e.target.lanes):
                self._store_scales(*self.scales(first, part, block), target, block, part)

    def _store_scales(self, scale: Value, minimum: Value | None, target: Value, block: Value, part: int) -> None:
        e = self.e
        at = e.gep(e.at(target, block, 4 * STEP), 4 * part)
        e.store(scale, at)
        if minimum is not None:
            e.store(minimum, e.gep(at, 4 * STEP * (self.n // VALUES)))

    def stored_scales(self, target: Value, part: int, block: Value) -> tuple[Value, Value | None]:
        """What ``store_scales`` has stored, as ``scales`` gives it."""
        e = self.e
        ty = vec(F32, e.target.lanes)
        at = e.gep(e.at(target, block, 4 * STEP), 4 * part)
        return e.load(ty, at), e.load(ty, e.gep(at, 4 * STEP * (self.n // VALUES))) if self.layout.low else None
