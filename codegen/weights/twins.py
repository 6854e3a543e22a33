"""ik_llama.cpp's own types: a table of values with a shifted twin, chosen per group of columns.

``w = d * scale * (table[code] + selector * shift)``. Codes keep their bits (two to six); the integer scale of a group takes a byte that
also holds the selector; ``d`` is an f16 per 256 columns, or the value in front of the row, repeated per 256. Codes, selectors and scales
come from the reference unpacking in ``formats.quants`` (spec: quantised tensor types, section 5): a code's value tells code and
selector, because no value occurs in both tables, and a scale divided by ``d`` is the integer, because d and it are so short.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ggufc.codegen.cpu.target import Target
from ggufc.codegen.emitter import I8, I16, I32, Emitter, Value, vec
from ggufc.codegen.weights import tables
from ggufc.codegen.weights.base import (
    ROWS,
    Cursor,
    Parts,
    Planes,
    Unpacked,
    WeightFormat,
    from_parts,
    load_f16,
    load_f32,
    load_field,
    load_word,
    mask_of_rows,
    masked,
    pack1_masks,
    pack2,
    pack3,
    pack4,
    pick,
    quads3,
    quads4,
    words2,
)
from ggufc.formats.ggml_types import type_by_name
from ggufc.formats.quants import codes
from ggufc.formats.quants.codes import DECODERS
from ggufc.formats.quants.tables import PAIRS, T2, T3, T4, T5, T6


@dataclass(frozen=True)
class Twin:
    """``bits`` per code, the first table, the distance of its twin, and how the scale byte is read: ``signed`` (2 * scale + selector),
    ``odd`` (scale + 127, lowest bit replaced by the selector) or ``apart`` (the selectors have a byte of their own)."""

    bits: int
    values: tuple[int, ...]
    shift: int
    scale: str = "signed"


def _half(table: np.ndarray) -> tuple[int, ...]:
    return tuple(int(v) for v in table[: len(table) // 2])


_T2, _T3, _T4, _T5 = (_half(t) for t in (T2, T3, T4, T5))
TWINS = {
    "iq2_k": Twin(2, _T2, 5),
    "iq2_ks": Twin(2, _T2, 5),
    "iq3_k": Twin(3, _T3, 4),
    "iq3_ks": Twin(3, _T3, 4),
    "iq4_k": Twin(4, _T4, 4),
    "iq4_ks": Twin(4, _T4, 4, "odd"),
    "iq4_kss": Twin(4, _T4, 4, "odd"),
    "iq5_k": Twin(5, _T5, 2),
    "iq5_ks": Twin(5, _T5, 2, "odd"),
    "iq6_k": Twin(6, tuple(int(v) for v in T6), 1, "apart"),
}


def super_scales(raw: np.ndarray, type_name: str, k: int) -> np.ndarray:
    """``d`` per 256 columns [R, K/256], in the precision of the file."""
    info = type_by_name(type_name)
    if info.row_header == 0:
        return np.ascontiguousarray(raw.reshape(len(raw), -1, info.bytes)[:, :, :2]).view(np.float16)[:, :, 0]
    head = np.ascontiguousarray(raw[:, : info.row_header]).view({2: np.float16, 4: np.float32}[info.row_header])
    return np.repeat(head, k // 256, axis=1)


def integer_scales(scale: np.ndarray, d: np.ndarray) -> np.ndarray:
    """The integers in ``scale = d * integer``; 0 where ``d`` is 0 or no number, which makes the integer meaningless."""
    wide = np.repeat(d.astype(np.float64), scale.shape[1] // d.shape[1], axis=1)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = np.rint(scale / wide)
    return np.where(np.isfinite(ratio), ratio, 0).astype(np.int32)


class Scaled(WeightFormat):
    """A d per 256 columns, and bytes per group."""

    columns, mode, offset, integer_scales, together = 256, "q8_k", 128, True, 2

    def __init__(self, type_name: str) -> None:
        self.type_name = type_name  # type: ignore[misc]
        self.group = DECODERS[type_name][1]  # type: ignore[misc]
        self._wide_d = type_by_name(type_name).row_header == 4
        self.super_bytes = 64 if self._wide_d else 32  # type: ignore[misc]

    def d(self, e: Emitter, c: Cursor) -> Value:
        return load_f32(e, c.supers, 0, c.part) if self._wide_d else load_f16(e, c.supers, 0, c.part)

    def stored_d(self, raw: np.ndarray, k: int) -> np.ndarray:
        """``d`` as the layout keeps it."""
        return super_scales(raw, self.type_name, k)

    def fields(self, values: np.ndarray) -> tuple[np.ndarray, ...]:
        """Values per group [R, K/group] as one or two fields per 32 columns."""
        n = 32 // self.group
        return tuple(values.reshape(len(values), -1, n)[:, :, i] for i in range(n))


class Twins(Scaled):
    """Every type of ``TWINS``."""

    def __init__(self, type_name: str) -> None:
        super().__init__(type_name)
        self.twin = TWINS[type_name]
        n = 32 // self.group
        self.code_bytes = 64 * self.twin.bits  # type: ignore[misc]
        self.scale_bytes = 16 * n + (16 if self.twin.scale == "apart" else 0)  # type: ignore[misc]
        both = np.array([*self.twin.values, *(v + self.twin.shift for v in self.twin.values)], np.int8)
        self.u_max = int(both.max()) + self.offset  # type: ignore[misc]
        self._index = np.zeros(256, np.uint8)
        self.prefetch = self.twin.bits in (2, 3, 6)  # type: ignore[misc]
        self._index[both.view(np.uint8)] = np.arange(len(both), dtype=np.uint8)

    def planes(self, raw: np.ndarray, k: int) -> Planes:
        code, scale, _, g = codes(self.type_name, raw, k)
        index = self._index[code.view(np.uint8)]
        selector = index[:, ::g] >> self.twin.bits
        d = self.stored_d(raw, k)
        integer = integer_scales(scale, d)
        if self.twin.scale == "apart":
            pairs = selector.reshape(len(raw), -1, 2)
            numbers = (*self.fields(integer.astype(np.int8)), pairs[:, :, 0] | pairs[:, :, 1] << 1)
        elif self.twin.scale == "odd":
            numbers = self.fields((integer + 127 & 254 | selector).astype(np.uint8))
        else:
            numbers = self.fields((2 * integer + selector).astype(np.int8))
        q = (index & (1 << self.twin.bits) - 1).reshape(len(raw), k // 32, 32)
        return Planes(_pack(q, self.twin.bits), numbers, (d.view(np.uint32 if self._wide_d else np.uint16),))

    def unpack(self, e: Emitter, c: Cursor) -> Unpacked:
        scales, selected = self._groups(e, c)
        table = [v + self.offset for v in self.twin.values]
        quads = _VALUES[self.twin.bits](e, c, table, self.twin.shift, [selected[q * len(selected) // 8] for q in range(8)])
        d = self.d(e, c)
        if self.twin.scale == "signed":
            d = e.b.fmul(d, e.const(d.type, 0.5))
        return from_parts(e, quads, Parts(d, scales, None, []))

    def _groups(self, e: Emitter, c: Cursor) -> tuple[list[Value], list[Value]]:
        """Integer scales, doubled where they are ``signed``, and words of all ones where the twin is selected."""
        ints, n = vec(I32, e.target.lanes), 32 // self.group
        apart = e.b.zext(load_field(e, c.scales, 16 * n, I8, 1, c.part), ints) if self.twin.scale == "apart" else None
        scales, selected = [], []
        for i in range(n):
            byte = load_field(e, c.scales, 16 * i, I8, 1, c.part)
            if self.twin.scale == "odd":
                word = e.b.zext(byte, ints)
                integer = e.b.sub(e.b.and_(word, e.const(ints, 254)), e.const(ints, 127))
            else:
                word = e.b.sext(byte, ints)
                integer = word if apart is not None else e.b.and_(word, e.const(ints, -2))
            scales.append(integer)
            chosen = word if apart is None else e.b.lshr(apart, e.const(ints, i))
            selected.append(e.b.sub(e.const(ints, 0), e.b.and_(chosen, e.const(ints, 1))))
        return scales, selected


def _pack(q: np.ndarray, bits: int) -> np.ndarray:
    """Codes uint8 [R, blocks, 32] as words."""
    if bits == 2:
        return pack2(q)
    if bits == 3:
        return pack3(q)
    low = pack4(q & 15)
    return np.concatenate([low, *(pack1_masks(q >> b & 1) for b in range(4, bits))], axis=-1)


def _moved(e: Emitter, values: list[Value], shift: int, selected: list[Value]) -> list[Value]:
    """Values of the twin where selected; bytes stay below 256, so no carry crosses them."""
    return [e.b.add(v, e.b.and_(s, e.const(s.type, shift * 0x01010101))) for v, s in zip(values, selected)]


def _keyed(e: Emitter, code: Value, bit: int, selected: Value) -> Value:
    """The selector as one more bit of an index."""
    return e.b.or_(code, e.b.and_(selected, e.const(code.type, (1 << bit) * 0x01010101)))


def _values2(e: Emitter, c: Cursor, table: list[int], shift: int, selected: list[Value]) -> list[Value]:
    """Two codes make one index, so that half as many fields are cut out."""
    first, second = [table[i & 3] for i in range(16)], [table[i >> 2] for i in range(16)]
    nibbles = words2(e, c)
    if tables.byte_permutes(e):
        twins = [[*t, *(v + shift for v in t)] for t in (first, second)]
        keys = [_keyed(e, nibble, 4, selected[2 * i]) for i, nibble in enumerate(nibbles)]
        return [tables.lookup64(e, key, t * 2) for key in keys for t in twins]
    values = [v for nibble in nibbles for t in (first, second) for v in tables.lookup16(e, [nibble], t)]
    return _moved(e, values, shift, selected)


def _values3(e: Emitter, c: Cursor, table: list[int], shift: int, selected: list[Value]) -> list[Value]:
    keys = [_keyed(e, code, 3, s) for code, s in zip(quads3(e, c), selected)]
    return tables.lookup16(e, keys, [*table, *(v + shift for v in table)])


def _values4(e: Emitter, c: Cursor, table: list[int], shift: int, selected: list[Value]) -> list[Value]:
    if tables.byte_permutes(e):
        twins = [*table, *(v + shift for v in table)] * 2
        return [tables.lookup64(e, _keyed(e, code, 4, s), twins) for code, s in zip(quads4(e, c), selected)]
    return _moved(e, tables.lookup16(e, quads4(e, c), table), shift, selected)


def _values5(e: Emitter, c: Cursor, table: list[int], shift: int, selected: list[Value]) -> list[Value]:
    nibbles = quads4(e, c)
    low, high = tables.lookup16(e, nibbles, table[:16]), tables.lookup16(e, nibbles, table[16:])
    return _moved(e, [pick(e, mask_of_rows(e, c, 4, q), high[q], low[q]) for q in range(8)], shift, selected)


def _values6(e: Emitter, c: Cursor, table: list[int], shift: int, selected: list[Value]) -> list[Value]:
    out = []
    for q, nibble in enumerate(quads4(e, c)):
        parts = [tables.lookup16(e, [nibble], table[i : i + 16])[0] for i in range(0, 64, 16)]
        bit4, bit5 = mask_of_rows(e, c, 4, q), mask_of_rows(e, c, 5, q)
        value = pick(e, bit5, parts[2], pick(e, bit4, parts[1], parts[0]))
        out.append(pick(e, e.b.and_(bit4, bit5), parts[3], value))
    return _moved(e, out, shift, selected)


_Values = Callable[[Emitter, Cursor, list[int], int, list[Value]], list[Value]]
_VALUES: dict[int, _Values] = {2: _values2, 3: _values3, 4: _values4, 5: _values5, 6: _values6}


class IQ2_KL(Scaled):
    """A code of five bits per two columns: nibbles, and highest bits in words of two blocks each.

    The bytes of four rows lie so that interleaving looked-up bytes of first columns with those of second ones gives quads: first two
    pairs of columns of each row, then the other two (``_by_halves``).
    """

    type_name = "iq2_kl"
    code_bytes, scale_bytes, offset, u_max, prefetch = 128, 16, 64, 47 + 64, True

    def __init__(self) -> None:
        super().__init__("iq2_kl")
        self.super_bytes = 32 + 4 * 64  # type: ignore[misc]
        self._index = {(int(a), int(b)): i for i, (a, b) in enumerate(PAIRS)}

    def offset_on(self, target: Target) -> int:
        """128 where products take all unsigned bytes: the sum of the activations then needs no shift."""
        return 128 if target.vnni else self.offset

    def planes(self, raw: np.ndarray, k: int) -> Planes:
        code, scale, _, _ = codes(self.type_name, raw, k)
        d = self.stored_d(raw, k)
        look = np.zeros((256, 256), np.uint8)
        for (a, b), i in self._index.items():
            look[a & 255, b & 255] = i
        pairs = code.view(np.uint8).reshape(len(raw), k // 32, 4, 4, 2)
        index = _by_halves(look[pairs[..., 0], pairs[..., 1]]).reshape(len(raw), k // 32, 16)
        nibbles = index & 15
        words = np.ascontiguousarray(nibbles[..., :8] | nibbles[..., 8:] << 4).view(np.uint32)
        high = _bits_of_two_blocks(index >> 4)
        return Planes(words, (integer_scales(scale, d).astype(np.int8),), (d.view(np.uint16), *(high[..., i] for i in range(4))))

    def unpack(self, e: Emitter, c: Cursor) -> Unpacked:
        b, ints = e.b, vec(I32, e.target.lanes)
        scale = b.sext(load_field(e, c.scales, 0, I8, 1, c.part), ints)
        block = e.i64(c.block) if isinstance(c.block, int) else c.block
        bits = _load_halves(e, e.at(c.supers, b.lshr(block, e.i64(1)), 64), 32, c.part)
        odd = b.trunc(b.and_(block, e.i64(1)), I32)
        values = PAIRS.astype(int) + self.offset_on(e.target)
        find = _pairs_by_bytes if tables.byte_permutes(e) else _pairs
        quads = find(e, c, bits, odd, values[:, 0].tolist(), values[:, 1].tolist())
        return from_parts(e, quads, Parts(self.d(e, c), [scale], None, []))


def _bits_of_two_blocks(bits: np.ndarray) -> np.ndarray:
    """Bits uint8 [R, blocks, 16], those of four index words, to u32 [R, blocks / 8, 4]: a word per two blocks, whose bytes hold the bits of
    word v in bit v for the first block, in bit 4 + v for the second."""
    ordered = bits.reshape(len(bits), -1, 4, 8, 4) << np.arange(8, dtype=np.uint8)[:, None]
    return np.ascontiguousarray(ordered.sum(axis=3, dtype=np.uint8)).view(np.uint32)[..., 0]


def _by_halves(words: np.ndarray) -> np.ndarray:
    """Words of four bytes [R, blocks, words, 4]: of every four rows, the bytes 0 and 1 of each, then the bytes 2 and 3 of each."""
    blocks, n = words.shape[1:3]
    halves = words.reshape(-1, 4, blocks, n, 2, 2).transpose(0, 4, 1, 2, 3, 5)  # half before row
    return np.ascontiguousarray(halves.reshape(-1, 2, blocks, n, 2).transpose(0, 2, 3, 1, 4)).reshape(words.shape)


def _load_halves(e: Emitter, p: Value, at: int, part: Value | int) -> Value:
    """A word of each row laid out by ``_by_halves``, as it lies; a row alone gets its own bytes."""
    if e.target.lanes > 1:
        return load_field(e, p, at, I32, 4, part)
    row = e.i64(part) if isinstance(part, int) else part
    mine = e.gep(e.at(e.gep(p, at), e.b.lshr(row, e.i64(2)), 16), e.b.shl(e.b.and_(row, e.i64(3)), e.i64(1)))
    low, high = (e.b.zext(e.load(I16, e.gep(mine, i)), I32) for i in (0, 8))
    return e.b.or_(low, e.b.shl(high, e.i32(16)))


def _interleaved(e: Emitter, x: Value, y: Value) -> list[Value]:
    """The two quads of first columns ``x`` and second columns ``y``."""
    b, lanes = e.b, e.target.lanes
    if lanes == 1:
        wide = [[b.and_(b.lshr(v, e.i32(8 * i)), e.i32(255)) for i in range(4)] for v in (x, y)]
        pairs = [b.or_(wide[0][i], b.shl(wide[1][i], e.i32(8))) for i in range(4)]
        return [b.or_(pairs[i], b.shl(pairs[i + 1], e.i32(16))) for i in (0, 2)]
    x8, y8 = (b.bitcast(v, vec(I8, 4 * lanes)) for v in (x, y))
    half = [[16 * (i // 16) + 8 * h + i % 16 // 2 + 4 * lanes * (i % 2) for i in range(4 * lanes)] for h in range(2)]
    return [b.bitcast(e.shuffle(x8, y8, places), x.type) for places in half]


def _pairs(e: Emitter, c: Cursor, bits: Value, odd: Value, first: list[int], second: list[int]) -> list[Value]:
    """The eight quads of a block: look-ups in both halves of the tables, and a choice by the highest bits."""
    b, lanes = e.b, e.target.lanes
    bits = b.lshr(bits, e.splat(b.shl(odd, e.i32(2)), lanes))
    quads: list[Value] = []
    for v in range(4):
        nibble = masked(e, _load_halves(e, c.codes, 4 * ROWS * (v % 2), c.part), -4 * (v // 2), 15)
        if lanes == 1:
            mask = b.mul(masked(e, bits, -v, 1), e.i32(255))
        else:
            bytes_ = vec(I8, 4 * lanes)
            mask = b.icmp_unsigned("!=", b.and_(b.bitcast(bits, bytes_), e.const(bytes_, 1 << v)), e.const(bytes_, 0))
        quads += _interleaved(e, *(pick(e, mask, *tables.lookup_pair(e, nibble, t)) for t in (first, second)))
    return quads


def _pairs_by_bytes(e: Emitter, c: Cursor, bits: Value, odd: Value, first: list[int], second: list[int]) -> list[Value]:
    """As ``_pairs`` where bytes are permuted: the highest bit of a word's indices becomes bit 4 or 5 of a key, beside that of the next."""
    b = e.b
    keyed = [[[t[i & 15 | (i >> bit & 1) << 4] for i in range(64)] for t in (first, second)] for bit in (4, 5)]
    # Bits 0 to 3 or 4 to 7 are wanted in bits 4 and 5, two at a time; rotating takes one instruction.
    upper = tables.rotate(e, bits, e.splat(b.sub(e.i32(4), b.shl(odd, e.i32(2))), 16))
    uppers = (upper, tables.rotate(e, upper, e.const(bits.type, 30)))
    quads: list[Value] = []
    for v in range(4):
        word = load_word(e, c, v % 2)
        nibble = b.lshr(word, e.const(word.type, 4)) if v // 2 else word
        key = tables.select_bits(e, nibble, uppers[v // 2], 15)
        quads += _interleaved(e, *(tables.lookup64(e, key, t) for t in keyed[v % 2]))
    return quads
