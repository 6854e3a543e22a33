"""Formats of the types with blocks of 32: Q4_0, Q4_1, Q5_0, Q5_1, Q6_0, Q8_0, IQ4_NL, MXFP4.

Field positions are those of ggml's block structures (spec: quantised tensor types, section 2). All keep their size exactly.
"""

from __future__ import annotations

import numpy as np

from ggufc.codegen.emitter import F32, I8, I32, Emitter, Value, vec
from ggufc.codegen.weights import tables
from ggufc.codegen.weights.base import (
    Cursor,
    Planes,
    Unpacked,
    WeightFormat,
    as_words,
    bits1,
    bits2,
    blocks_of,
    either,
    field,
    load_f16,
    load_field,
    load_word,
    pack1,
    pack2,
    quads4,
)


def _high_bits(blocks: np.ndarray, at: int) -> np.ndarray:
    """The u32 of fifth bits as a one-bit plane."""
    return pack1(np.unpackbits(blocks[:, :, at : at + 4], axis=-1, bitorder="little"))


class Q4_0(WeightFormat):
    type_name, offset, u_max, light = "q4_0", 8, 15, True
    code_bytes, scale_bytes = 256, 32

    def planes(self, raw: np.ndarray, k: int) -> Planes:
        b = blocks_of(raw, self.type_name)
        return Planes(as_words(b[:, :, 2:18]), (field(b, 0, np.uint16),))

    def unpack(self, e: Emitter, c: Cursor) -> Unpacked:
        return Unpacked(quads4(e, c), [load_f16(e, c.scales, 0, c.part)], [])


class Q4_1(WeightFormat):
    type_name, has_min, u_max, light = "q4_1", True, 15, True
    code_bytes, scale_bytes = 256, 64

    def planes(self, raw: np.ndarray, k: int) -> Planes:
        b = blocks_of(raw, self.type_name)
        return Planes(as_words(b[:, :, 4:20]), (field(b, 0, np.uint16), field(b, 2, np.uint16)))

    def unpack(self, e: Emitter, c: Cursor) -> Unpacked:
        return Unpacked(quads4(e, c), [load_f16(e, c.scales, 0, c.part)], [load_f16(e, c.scales, 32, c.part)])


class Q5_0(WeightFormat):
    type_name, offset, u_max = "q5_0", 16, 31
    code_bytes, scale_bytes = 320, 32

    def planes(self, raw: np.ndarray, k: int) -> Planes:
        b = blocks_of(raw, self.type_name)
        return Planes(np.concatenate([as_words(b[:, :, 6:22]), _high_bits(b, 2)], axis=-1), (field(b, 0, np.uint16),))

    def unpack(self, e: Emitter, c: Cursor) -> Unpacked:
        return Unpacked(either(e, quads4(e, c), bits1(e, c, 4, 4)), [load_f16(e, c.scales, 0, c.part)], [])


class Q5_1(WeightFormat):
    type_name, has_min, u_max = "q5_1", True, 31
    code_bytes, scale_bytes = 320, 64

    def planes(self, raw: np.ndarray, k: int) -> Planes:
        b = blocks_of(raw, self.type_name)
        words = np.concatenate([as_words(b[:, :, 8:24]), _high_bits(b, 4)], axis=-1)
        return Planes(words, (field(b, 0, np.uint16), field(b, 2, np.uint16)))

    def unpack(self, e: Emitter, c: Cursor) -> Unpacked:
        quads = either(e, quads4(e, c), bits1(e, c, 4, 4))
        return Unpacked(quads, [load_f16(e, c.scales, 0, c.part)], [load_f16(e, c.scales, 32, c.part)])


class Q6_0(WeightFormat):
    type_name, offset, u_max = "q6_0", 32, 63
    code_bytes, scale_bytes = 384, 32

    def planes(self, raw: np.ndarray, k: int) -> Planes:
        b = blocks_of(raw, self.type_name)
        qh = b[:, :, 2:10]
        nibbles = np.concatenate([qh & 15, qh >> 4], axis=-1)  # columns 0..15 modulo 16
        high = np.concatenate([nibbles & 3, nibbles >> 2], axis=-1)
        return Planes(np.concatenate([as_words(b[:, :, 10:26]), pack2(high)], axis=-1), (field(b, 0, np.uint16),))

    def unpack(self, e: Emitter, c: Cursor) -> Unpacked:
        return Unpacked(either(e, quads4(e, c), bits2(e, c, 4, 4)), [load_f16(e, c.scales, 0, c.part)], [])


class Q8_0(WeightFormat):
    type_name, offset, light = "q8_0", 128, True
    code_bytes, scale_bytes = 512, 32

    def planes(self, raw: np.ndarray, k: int) -> Planes:
        b = blocks_of(raw, self.type_name)
        return Planes(as_words(b[:, :, 2:34] ^ 0x80), (field(b, 0, np.uint16),))

    def unpack(self, e: Emitter, c: Cursor) -> Unpacked:
        return Unpacked([load_word(e, c, q) for q in range(8)], [load_f16(e, c.scales, 0, c.part)], [])


class IQ4_NL(WeightFormat):
    type_name, offset, u_max, light = "iq4_nl", 128, 241, True
    code_bytes, scale_bytes = 256, 32

    def planes(self, raw: np.ndarray, k: int) -> Planes:
        b = blocks_of(raw, self.type_name)
        return Planes(as_words(b[:, :, 2:18]), (field(b, 0, np.uint16),))

    def unpack(self, e: Emitter, c: Cursor) -> Unpacked:
        quads = tables.lookup16(e, quads4(e, c), [v + 128 for v in tables.IQ4])
        return Unpacked(quads, [load_f16(e, c.scales, 0, c.part)], [])


class MXFP4(WeightFormat):
    type_name, offset, u_max = "mxfp4", 16, 28
    code_bytes, scale_bytes = 256, 16

    def planes(self, raw: np.ndarray, k: int) -> Planes:
        b = blocks_of(raw, self.type_name)
        return Planes(as_words(b[:, :, 1:17]), (field(b, 0, np.uint8),))

    def unpack(self, e: Emitter, c: Cursor) -> Unpacked:
        quads = tables.lookup16(e, quads4(e, c), [v + 16 for v in tables.E2M1_TWICE])
        return Unpacked(quads, [self._scale(e, c)], [])

    @staticmethod
    def _scale(e: Emitter, c: Cursor) -> Value:
        """2^(e - 128) from its bits; the two smallest are subnormal."""
        ints = vec(I32, e.target.lanes)
        x = e.b.zext(load_field(e, c.scales, 0, I8, 1, c.part), ints)
        normal = e.b.shl(e.b.sub(x, e.const(ints, 1)), e.const(ints, 23))
        tiny = e.b.select(e.b.icmp_unsigned("==", x, e.const(ints, 0)), e.const(ints, 1 << 21), e.const(ints, 1 << 22))
        return e.b.bitcast(e.b.select(e.b.icmp_unsigned("<", x, e.const(ints, 2)), tiny, normal), vec(F32, e.target.lanes))
