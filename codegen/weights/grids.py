"""The grid types: an index into a codebook of four or eight columns at once, and a sign per column or an offset per block.

The layout keeps indices and signs as they are: low bytes of indices, their higher bits in a field, signs as a plane of bits. Indices of
long books are other numbers, of two short tables (``staged``). Kernels look indices up in constant tables of the image (``codebooks``).
An entry holds a nibble per column of a quad; the nibble of an eight holds the codes of columns c and c + 4.

What goes into the layout comes from the reference unpacking in ``formats.quants`` (spec: quantised tensor types, section 4): codes are
searched in the book, scales divided by ``d``, so this file knows nothing about the blocks of a file but where ``d`` lies.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    as_words,
    from_parts,
    load_field,
    load_word,
    masked,
    pack1,
    pick,
)
from ggufc.codegen.weights.codebooks import Codebook, look_up
from ggufc.codegen.weights.codebooks_bytes import fields, signed_by_bytes, ternary_by_bytes
from ggufc.codegen.weights.staged import listed_classes, parity_classes, staged
from ggufc.codegen.weights.twins import Scaled, integer_scales
from ggufc.formats.quants import codes
from ggufc.formats.quants.tables import grid


@dataclass(frozen=True)
class Book:
    """``columns`` per index, ``high`` bits of an index beyond eight, the magnitudes codes stand for, and ``denominator``: the scale of a
    group is d * (2 n + 1) / denominator. Books of more than 256 entries of eight columns are ``staged``: ``high`` exceeds their need."""

    columns: int
    high: int
    magnitudes: tuple[int, ...]
    denominator: int


_EIGHTS = (8, 25, 43)
BOOKS = {
    "iq2_xxs": Book(8, 0, _EIGHTS, 8),
    "iq2_xs": Book(8, 2, _EIGHTS, 8),
    "iq2_s": Book(8, 4, _EIGHTS, 8),
    "iq3_xxs": Book(4, 0, (4, 12, 20, 28, 36, 44, 52, 62), 4),
    "iq3_s": Book(4, 1, (1, 3, 5, 7, 9, 11, 13, 15), 1),
    "iq1_s": Book(8, 4, (-1, 0, 1), 8),
    "iq1_m": Book(8, 4, (-1, 0, 1), 8),
}


_TERNARY_CLASSES = (85197125, 2139745, 4322320, 3514912, 2159392, 42600586, 20993076, 12651672)
"""Sets of eight completions (columns 1, 2 and 5) that serve all patterns of the other columns of the book of IQ1_S and IQ1_M with 495
places of the first table. Found by simulated annealing; most sets would do worse than the 512 places there are."""
_IQ2_XS_CLASSES = (
    *(17825860, 2570, 20971537, 33564704, 262405, 8714, 278533, 8389130),
    *(66625, 33554954, 68419585, 524810, 68161792, 163970, 5200, 2132096),
)
"""Sets of four completions (columns 5, 3 and 7), found likewise: all patterns of the book of IQ2_XS take 232 of 256 places."""


class Grid(Scaled):
    """Base of the grid types. Word 0 (and 1 with four columns per index) of a block holds the low bytes of the indices."""

    prefetch = True

    def __init__(self, type_name: str) -> None:
        super().__init__(type_name)
        self.book = BOOKS[type_name]
        self.index_words = 8 // self.book.columns
        order = {m: i for i, m in enumerate(self.book.magnitudes)}
        rows = np.vectorize(order.__getitem__)(grid(type_name).astype(int))
        self.ranks = rows.astype(np.uint8)
        self.codebook, index = self._codebook(rows.tolist())
        self._found = np.zeros(1 << 16, np.uint16)
        self._found[self._keys(rows.astype(np.uint16))] = index

    def _keys(self, ranks: np.ndarray) -> np.ndarray:
        """One number per group of columns: [..., columns] to [...]."""
        bits = 16 // self.book.columns
        keys = np.zeros(ranks.shape[:-1], np.uint16)
        for i in range(self.book.columns):
            keys |= ranks[..., i].astype(np.uint16) << np.uint16(bits * i)
        return keys

    def _codebook(self, rows: list[list[int]]) -> tuple[Codebook, list[int]]:
        """The book, and the index of each of its rows."""
        if self.book.columns != 8 or not self.book.high:
            entries = [self._entry(row, Codebook.order) for row in rows]
            return Codebook(self.type_name, tuple(entries), self.book.high), list(range(len(rows)))
        if isinstance(self, Ternary):  # the upper byte holds columns 1, 5, 2 and 6
            order = (0, 3, 1, 2)
            classes, choice_bits, fifth = listed_classes(_TERNARY_CLASSES, (0, 4, 2)), 3, 0xC0
        else:  # columns 1, 5, 3 and 7
            order, choice_bits, fifth = Codebook.order, self.book.high, 0x03
            classes = listed_classes(_IQ2_XS_CLASSES, (2, 4, 6)) if self.type_name == "iq2_xs" else parity_classes((2, 4, 6))
        stages, index = staged([self._entry(row, order) for row in rows], classes, self.book.high, choice_bits, fifth)
        return Codebook(self.type_name, tuple(stages.entries()), self.book.high, order, stages), index

    def _entry(self, ranks: Sequence[int], order: Sequence[int]) -> int:
        """Four nibbles, of the columns in ``order``; with eight columns that of c + 4 lies above that of c."""
        nibbles = [ranks[c] | (ranks[c + 4] << 2 if self.book.columns == 8 else 0) for c in order]
        return sum(nibble << 4 * n for n, nibble in enumerate(nibbles))

    def indices(self, ranks: np.ndarray) -> np.ndarray:
        """Index of each group of columns of codes given as positions in ``magnitudes``: [R, K/32, 32/columns]."""
        grouped = ranks.reshape(ranks.shape[0], -1, 32 // self.book.columns, self.book.columns)
        return self._found[self._keys(grouped)]

    def high_bits(self, index: np.ndarray) -> np.ndarray:
        """Bits of the indices beyond eight, side by side: uint16 [R, K/32]."""
        packed = np.zeros(index.shape[:-1], np.uint16)
        for i in range(index.shape[-1]):
            packed |= (index[..., i] >> 8).astype(np.uint16) << np.uint16(self.book.high * i)
        return packed

    def steps(self, scale: np.ndarray, d: np.ndarray) -> np.ndarray:
        """The n in ``scale = d * (2 n + 1) / denominator``."""
        return np.maximum(integer_scales(scale * np.float32(self.book.denominator), d), 1) - 1 >> 1

    def offset_on(self, target: Target) -> int:
        """128 where products take all unsigned bytes: the sum of the activations then needs no shift."""
        return 128 if target.vnni else self.offset

    def parts(self, e: Emitter, c: Cursor, steps: list[Value]) -> Parts:
        ints = steps[0].type
        odd = [e.b.or_(e.b.shl(n, e.const(ints, 1)), e.const(ints, 1)) for n in steps]
        d = self.d(e, c)
        return Parts(e.b.fmul(d, e.const(d.type, 1 / self.book.denominator)), odd, None, [])

    def nibbles(self, e: Emitter, c: Cursor, high: Value | None) -> list[Value]:
        """Entries of all indices of a block, a nibble per byte."""
        words = [load_word(e, c, w) for w in range(self.index_words)]
        return look_up(e, self.codebook, words, high)


class Signed(Grid):
    """IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS and IQ3_S: magnitudes and signs.

    Scales per 32 columns are nibbles of one word per 256 columns, two scales per 32 are a byte.
    """

    offset, u_max = 64, 64 + 62

    def __init__(self, type_name: str) -> None:
        super().__init__(type_name)
        self.code_bytes = 64 * (self.index_words + 1)  # type: ignore[misc]
        self._high_field = self.book.high * self.index_words * 4 // 8  # bytes
        self.scale_bytes = ROWS * ((self.group == 16) + self._high_field)  # type: ignore[misc]
        self.super_bytes = 32 + 64 * (self.group == 32)  # type: ignore[misc]
        self.dense = self.codebook.stages is not None  # type: ignore[misc]

    def planes(self, raw: np.ndarray, k: int) -> Planes:
        code, scale, _, _ = codes(self.type_name, raw, k)
        ranks = np.zeros(64, np.uint8)
        ranks[list(self.book.magnitudes)] = np.arange(len(self.book.magnitudes))
        index = self.indices(ranks[np.abs(code)])
        d = self.stored_d(raw, k)
        n = self.steps(scale, d).astype(np.uint32)
        supers: list[np.ndarray] = [d.view(np.uint16)]
        fields: list[np.ndarray] = []
        if self.group == 16:
            fields.append((n[:, ::2] | n[:, 1::2] << 4).astype(np.uint8))
        else:
            supers.append(_nibble_word(n))
        if self._high_field:
            fields.append(self.high_bits(index).astype(np.uint8 if self._high_field == 1 else np.uint16))
        negative = pack1((code < 0).astype(np.uint8).reshape(len(raw), k // 32, 32))
        words = as_words((index & 255).astype(np.uint8))
        return Planes(np.concatenate([words, negative], axis=-1), tuple(fields), tuple(supers))

    def unpack(self, e: Emitter, c: Cursor) -> Unpacked:
        b, ints = e.b, vec(I32, e.target.lanes)
        if self.group == 16:
            byte = b.zext(load_field(e, c.scales, 0, I8, 1, c.part), ints)
            steps = [b.and_(byte, e.const(ints, 15)), b.lshr(byte, e.const(ints, 4))]
        else:
            steps = [b.and_(_nibble(e, c, 32), e.const(ints, 15))]
        high = None
        if self._high_field:
            element = I8 if self._high_field == 1 else I16
            high = b.zext(load_field(e, c.scales, ROWS * (self.group == 16), element, self._high_field, c.part), ints)
        signs = load_word(e, c, self.index_words)
        if tables.byte_permutes(e):
            words = [load_word(e, c, w) for w in range(self.index_words)]
            by_code = [self.offset_on(e.target) + m for m in self.book.magnitudes]
            quads = signed_by_bytes(e, self.codebook, words, high, signs, self.book.columns, by_code)
        elif self.book.columns == 4:
            quads = self._four(e, self.nibbles(e, c, high), signs)
        else:
            quads = self._eight(e, self.nibbles(e, c, high), signs)
        return from_parts(e, quads, self.parts(e, c, steps))

    def _four(self, e: Emitter, codes: list[Value], signs: Value) -> list[Value]:
        """Codes of three bits: the sign becomes the fourth bit of an index."""
        offset = self.offset_on(e.target)
        table = [offset + m for m in self.book.magnitudes] + [offset - m for m in self.book.magnitudes]
        indices = [e.b.or_(n, masked(e, signs, 3 - q, 8)) for q, n in enumerate(codes)]
        return tables.lookup16(e, indices, table)

    def _eight(self, e: Emitter, nibbles: list[Value], signs: Value) -> list[Value]:
        """Two codes of two bits in each byte."""
        values = [self.offset_on(e.target) + m for m in (*self.book.magnitudes, 0)]
        first, second = [values[i & 3] for i in range(16)], [values[i >> 2] for i in range(16)]
        magnitudes = [v for n in nibbles for t in (first, second) for v in tables.lookup16(e, [n], t)]
        return [self._sign(e, signs, q, u) for q, u in enumerate(magnitudes)]

    def _sign(self, e: Emitter, signs: Value, q: int, u: Value) -> Value:
        """2 * offset - u where the sign bit is set: the offset minus the magnitude."""
        lanes, both = e.target.lanes, 2 * self.offset_on(e.target)
        if lanes == 1:  # every byte of u is below 2 * offset: no borrow
            minus = e.b.sub(e.const(u.type, both * 0x01010101 - (1 << 32)), u)
            return pick(e, e.b.mul(masked(e, signs, -q, 1), e.i32(255)), minus, u)
        bytes_ = vec(I8, 4 * lanes)
        bit = e.b.and_(e.b.bitcast(signs, bytes_), e.const(bytes_, (1 << q) - (256 if q == 7 else 0)))
        minus = e.b.sub(e.const(bytes_, both - 256), e.b.bitcast(u, bytes_))
        return pick(e, e.b.icmp_unsigned("!=", bit, e.const(bytes_, 0)), e.b.bitcast(minus, u.type), u)


class Ternary(Grid):
    """IQ1_S and IQ1_M: eighths 8 g - 1 or 8 g + 1 with g of -1, 0, 1. A field of 16 bits per block holds the higher bits of the four
    indices, a nibble of a word per 256 columns what chooses the offsets; in IQ1_S (one offset and one scale per block) also the scale."""

    offset, u_max, code_bytes, dense = 16, 16 + 9, 64, True

    def __init__(self, type_name: str) -> None:
        super().__init__(type_name)
        self._one = type_name == "iq1_s"
        self.scale_bytes = 32 if self._one else 48  # type: ignore[misc]
        self.super_bytes = 32 + 64  # type: ignore[misc]

    def stored_d(self, raw: np.ndarray, k: int) -> np.ndarray:
        if self._one:
            return super().stored_d(raw, k)
        scales = np.ascontiguousarray(raw.reshape(len(raw), -1, 56)[:, :, 48:]).view(np.uint16) >> 12
        bits: np.ndarray = (scales.astype(np.int64) << np.array([0, 4, 8, 12])).sum(axis=-1)
        return bits.astype(np.uint16).view(np.float16)

    def planes(self, raw: np.ndarray, k: int) -> Planes:
        code, scale, _, _ = codes(self.type_name, raw, k)
        minus = (code & 7) == 7
        index = self.indices((code - np.where(minus, np.int8(-1), np.int8(1)) >> 3) + 1)
        d = self.stored_d(raw, k)
        n = self.steps(scale, d)
        eights = minus.reshape(len(raw), k // 32, 4, 8)[..., 0].astype(np.uint8)
        numbers: tuple[np.ndarray, ...] = (self.high_bits(index),)
        if self._one:
            nibbles = eights[..., 0] | n << 1
        else:
            nibbles = (eights << np.arange(4, dtype=np.uint8)).sum(axis=-1)
            numbers += ((n[:, ::2] | n[:, 1::2] << 4).astype(np.uint8),)
        return Planes(as_words((index & 255).astype(np.uint8)), numbers, (d.view(np.uint16), _nibble_word(nibbles)))

    def unpack(self, e: Emitter, c: Cursor) -> Unpacked:
        b, ints = e.b, vec(I32, e.target.lanes)
        high = b.zext(load_field(e, c.scales, 0, I16, 2, c.part), ints)
        nibble = _nibble(e, c, 32)
        if self._one:
            odd = [b.or_(b.and_(nibble, e.const(ints, 14)), e.const(ints, 1))]
        else:
            byte = b.zext(load_field(e, c.scales, 32, I8, 1, c.part), ints)
            steps = (b.and_(byte, e.const(ints, 15)), b.lshr(byte, e.const(ints, 4)))
            odd = [b.or_(b.shl(n, e.const(ints, 1)), e.const(ints, 1)) for n in steps]
        bits = [0] * 4 if self._one else list(range(4))
        word = load_word(e, c, 0)
        values = [self.offset_on(e.target) + 1 + 8 * (i - 1) for i in range(4)]
        if tables.byte_permutes(e):
            minus = {bit: fields(e, nibble, bit - 4, 0) for bit in sorted(set(bits))}
            quads = ternary_by_bytes(e, self.codebook, word, high, [minus[bit] for bit in bits], values, 2)
        else:
            quads = self._quads(e, look_up(e, self.codebook, [word], high), nibble, bits, values)
        d = self.d(e, c)
        return from_parts(e, quads, Parts(b.fmul(d, e.const(d.type, 1 / self.book.denominator)), odd, None, []))

    def _quads(self, e: Emitter, nibbles: list[Value], chosen: Value, bits: list[int], values: list[int]) -> list[Value]:
        """Values of two columns in each byte, less 2 where bit ``bits[i]`` of ``chosen`` is set for index i."""
        b, ty = e.b, chosen.type
        first, second = [values[i & 3] for i in range(16)], [values[i >> 2] for i in range(16)]
        quads = []
        for nibble, bit in zip(nibbles, bits):
            every = b.ashr(b.shl(chosen, e.const(ty, 31 - bit)), e.const(ty, 31))
            lower = b.and_(every, e.const(ty, 0x02020202))
            quads += [b.sub(tables.lookup16(e, [nibble], t)[0], lower) for t in (first, second)]
        return quads


def _nibble_word(values: np.ndarray) -> np.ndarray:
    """Values 0..15 per 32 columns to one u32 per 256, nibble i for block i."""
    eights = values.reshape(len(values), -1, 8).astype(np.int64) << np.arange(0, 32, 4)
    total: np.ndarray = eights.sum(axis=-1)
    return total.astype(np.uint32)


def _nibble(e: Emitter, c: Cursor, at: int) -> Value:
    """The block's nibble of a word made by ``_nibble_word``, in the lowest bits; what lies above is not cleared."""
    word = load_field(e, c.supers, at, I32, 4, c.part)
    block = e.i64(c.block) if isinstance(c.block, int) else c.block
    shift = e.b.shl(e.b.trunc(block, I32), e.i32(2))
    return e.b.lshr(word, e.splat(shift, e.target.lanes))
