"""Formats of the K types and IQ4_XS: blocks of 256 with a scale per 16 or 32 columns under one f16 scale.

Field positions are those of ggml's block structures (spec: quantised tensor types, sections 3 and 4). Six-bit and four-bit group
scales are stored as bytes, which costs at most 6 % of the size and no time.
"""

from __future__ import annotations

import numpy as np

from ggufc.codegen.emitter import I8, I32, Emitter, Value, vec
from ggufc.codegen.weights import tables
from ggufc.codegen.weights.base import (
    Cursor,
    Parts,
    Planes,
    Unpacked,
    WeightFormat,
    bits1,
    bits2,
    blocks_of,
    either,
    field,
    from_parts,
    load_f16,
    load_field,
    load_small,
    pack1,
    pack2,
    pack3,
    pack4,
    quads3,
    quads4,
)


class KQuant(WeightFormat):
    columns = 256


def _two_bits(qs: np.ndarray) -> np.ndarray:
    """64 bytes per block to codes 0..3 [R, 8 per block, 32]: 32 bytes hold four 32-column blocks, two bits each."""
    rows, blocks = qs.shape[:2]
    halves = qs.reshape(rows, blocks, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]
    return (halves & 3).reshape(rows, 8 * blocks, 32)


def _nibbles32(qs: np.ndarray) -> np.ndarray:
    """128 bytes per block: 32 bytes hold the low nibbles of one 32-column block and the high ones of the next."""
    rows, blocks = qs.shape[:2]
    pairs = qs.reshape(rows, blocks, 4, 1, 32) >> np.array([0, 4], np.uint8)[:, None]
    return (pairs & 15).reshape(rows, 8 * blocks, 32)


def _bit_planes(qh: np.ndarray) -> np.ndarray:
    """32 bytes per block whose bit i belongs to 32-column block i."""
    rows, blocks = qh.shape[:2]
    return (qh.reshape(rows, blocks, 1, 32) >> np.arange(8, dtype=np.uint8)[:, None] & 1).reshape(rows, 8 * blocks, 32)


def _per_group(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values per 16 columns [R, blocks, 16] as two fields per 32 columns [R, 8 blocks]."""
    pairs = values.reshape(values.shape[0], -1, 2)
    return pairs[:, :, 0], pairs[:, :, 1]


class Q2_K(KQuant):
    type_name, mode, group, has_min, u_max = "q2_k", "q8_k", 16, True, 3
    code_bytes, scale_bytes, super_bytes, integer_scales, scaled_max = 128, 32, 64, True, 3 * 15

    def planes(self, raw: np.ndarray, k: int) -> Planes:
        b = blocks_of(raw, self.type_name)
        return Planes(pack2(_two_bits(b[:, :, 16:80])), _per_group(b[:, :, :16]), (field(b, 80, np.uint16), field(b, 82, np.uint16)))

    def unpack(self, e: Emitter, c: Cursor) -> Unpacked:
        ints = vec(I32, e.target.lanes)
        both = [e.b.zext(load_field(e, c.scales, 16 * i, I8, 1, c.part), ints) for i in range(2)]
        scales, mins = [e.b.and_(v, e.const(ints, 15)) for v in both], [e.b.lshr(v, e.const(ints, 4)) for v in both]
        return from_parts(e, bits2(e, c, 0, 0), Parts(load_f16(e, c.supers, 0, c.part), scales, load_f16(e, c.supers, 32, c.part), mins))


class Q3_K(KQuant):
    type_name, mode, group, offset, u_max = "q3_k", "q8_k", 16, 4, 7
    code_bytes, scale_bytes, super_bytes, integer_scales, prefetch = 192, 32, 32, True, True

    def planes(self, raw: np.ndarray, k: int) -> Planes:
        b = blocks_of(raw, self.type_name)
        sc = b[:, :, 96:108]
        low = np.concatenate([sc[:, :, :8] & 15, sc[:, :, :8] >> 4], axis=-1)
        high = (sc[:, :, None, 8:12] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3).reshape(low.shape)
        scales = (low | high << 4).astype(np.int8) - np.int8(32)
        words = pack3(_two_bits(b[:, :, 32:96]) | _bit_planes(b[:, :, :32]) << 2)
        return Planes(words, _per_group(scales), (field(b, 108, np.uint16),))

    def unpack(self, e: Emitter, c: Cursor) -> Unpacked:
        return from_parts(e, quads3(e, c), Parts(load_f16(e, c.supers, 0, c.part), _two_scales(e, c), None, []))


def _two_scales(e: Emitter, c: Cursor) -> list[Value]:
    return [e.b.sext(load_field(e, c.scales, 16 * i, I8, 1, c.part), vec(I32, e.target.lanes)) for i in range(2)]


def _six_bit_pairs(sc: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 12 bytes of Q4_K and Q5_K to (scales, mins), uint8 [R, 8 blocks]."""
    a, m, rest = sc[:, :, 0:4], sc[:, :, 4:8], sc[:, :, 8:12]
    scales = np.concatenate([a & 63, rest & 15 | a >> 6 << 4], axis=-1)
    mins = np.concatenate([m & 63, rest >> 4 | m >> 6 << 4], axis=-1)
    return scales.reshape(len(sc), -1), mins.reshape(len(sc), -1)


class Q4_K(KQuant):
    type_name, has_min, u_max = "q4_k", True, 15
    code_bytes, scale_bytes, super_bytes = 256, 32, 64

    def planes(self, raw: np.ndarray, k: int) -> Planes:
        b = blocks_of(raw, self.type_name)
        words = pack4(_nibbles32(b[:, :, 16:144]))
        return Planes(words, _six_bit_pairs(b[:, :, 4:16]), (field(b, 0, np.uint16), field(b, 2, np.uint16)))

    def unpack(self, e: Emitter, c: Cursor) -> Unpacked:
        return Unpacked(quads4(e, c), *_scale_and_min(e, c))


def _scale_and_min(e: Emitter, c: Cursor) -> tuple[list[Value], list[Value]]:
    d, low = load_f16(e, c.supers, 0, c.part), e.b.fneg(load_f16(e, c.supers, 32, c.part))
    scale = e.b.fmul(d, load_small(e, c.scales, 0, c.part, signed=False))
    return [scale], [e.b.fmul(low, load_small(e, c.scales, 16, c.part, signed=False))]


class Q5_K(KQuant):
    type_name, has_min, u_max = "q5_k", True, 31
    code_bytes, scale_bytes, super_bytes, prefetch = 320, 32, 64, True

    def planes(self, raw: np.ndarray, k: int) -> Planes:
        b = blocks_of(raw, self.type_name)
        words = np.concatenate([pack4(_nibbles32(b[:, :, 48:176])), pack1(_bit_planes(b[:, :, 16:48]))], axis=-1)
        return Planes(words, _six_bit_pairs(b[:, :, 4:16]), (field(b, 0, np.uint16), field(b, 2, np.uint16)))

    def unpack(self, e: Emitter, c: Cursor) -> Unpacked:
        return Unpacked(either(e, quads4(e, c), bits1(e, c, 4, 4)), *_scale_and_min(e, c))


class Q6_K(KQuant):
    type_name, group, offset, u_max = "q6_k", 16, 32, 63
    code_bytes, scale_bytes, super_bytes, integer_scales = 384, 32, 32, True

    def planes(self, raw: np.ndarray, k: int) -> Planes:
        b = blocks_of(raw, self.type_name)
        rows, blocks = b.shape[:2]
        low = b[:, :, :128].reshape(rows, blocks, 2, 1, 64) >> np.array([0, 4], np.uint8)[:, None]
        words = np.concatenate([pack4((low & 15).reshape(rows, 8 * blocks, 32)), pack2(_two_bits(b[:, :, 128:192]))], axis=-1)
        scales = np.ascontiguousarray(b[:, :, 192:208]).view(np.int8)
        return Planes(words, _per_group(scales), (field(b, 208, np.uint16),))

    def unpack(self, e: Emitter, c: Cursor) -> Unpacked:
        quads = either(e, quads4(e, c), bits2(e, c, 4, 4))
        return from_parts(e, quads, Parts(load_f16(e, c.supers, 0, c.part), _two_scales(e, c), None, []))


class IQ4_XS(KQuant):
    type_name, mode, offset, u_max, light = "iq4_xs", "q8_k", 128, 241, True
    code_bytes, scale_bytes, super_bytes = 256, 16, 32

    def planes(self, raw: np.ndarray, k: int) -> Planes:
        b = blocks_of(raw, self.type_name)
        rows, blocks = b.shape[:2]
        sl = b[:, :, 4:8]
        low = np.stack([sl & 15, sl >> 4], axis=-1).reshape(rows, blocks, 8)
        high = field(b, 2, np.uint16)[:, :, None] >> np.arange(0, 16, 2, dtype=np.uint16) & 3
        scales = (low | high.astype(np.uint8) << 4).astype(np.int8) - np.int8(32)
        words = np.ascontiguousarray(b[:, :, 8:136]).view(np.uint32).reshape(rows, 8 * blocks, 4)
        return Planes(words, (scales.reshape(rows, -1),), (field(b, 0, np.uint16),))

    def unpack(self, e: Emitter, c: Cursor) -> Unpacked:
        d = load_f16(e, c.supers, 0, c.part)
        scale = e.b.fmul(d, load_small(e, c.scales, 0, c.part, signed=True))
        return Unpacked(tables.lookup16(e, quads4(e, c), [v + 128 for v in tables.IQ4]), [scale], [])
