"""What a weight format is: an interleaved layout made at compile time, and the code that unpacks it.

Rows are taken in groups of 16 (the last group is padded with zero rows). A group is a sequence of *chunks* of M blocks of 32 columns.
A chunk holds, in this order,

    ``super_bytes`` (K types, M = 8): fields, [field][16 rows]
    M times ``scale_bytes``: fields, [field][16 rows]
    M times ``code_bytes``:  words of 4 bytes, [word][16 rows]

A vector of a word or field over the rows is one load on every level: targets with fewer than 16 lanes take a *part* of the 16 rows. M
is chosen so that codes stay aligned to cache lines, and memory is read strictly in order: a product is one stream that the hardware
prefetches, across groups and tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from llvmlite import ir

from ggufc.codegen.cpu.target import Target
from ggufc.codegen.emitter import F16, F32, I8, I16, I32, Emitter, Value, vec
from ggufc.codegen.errors import CodegenError
from ggufc.formats.ggml_types import row_bytes, type_by_name

ROWS = 16
"""Rows of a group."""


@dataclass
class Planes:
    """One chunk of rows, row by row: ``words`` u32 [R, K/32, W]; ``scales`` arrays [R, K/32]; ``supers`` arrays [R, K/256]."""

    words: np.ndarray
    scales: tuple[np.ndarray, ...]
    supers: tuple[np.ndarray, ...] = ()


@dataclass
class Unpacked:
    """32 columns of one part of a group, in registers.

    ``quads``: eight <n x i32>, lane = row, bytes = the unsigned codes of columns 4j..4j+3. ``scales``: f32 <n>, one for 32 columns or
    two for 16 each; ``mins`` likewise or empty. A weight is ``scale * (code - offset) + min``. ``parts`` are the same numbers as
    products of formats with ``integer_scales`` use them.
    """

    quads: list[Value]
    scales: list[Value]
    mins: list[Value]
    parts: Parts | None = None
    scaled: bool = False
    """Whether the codes are already multiplied by the integer scales of ``parts``."""


@dataclass
class Parts:
    """Scales and minima as integers i32 <n> times a number f32 <n>: ``scale = d * scales[g]``, ``min = -low * mins[g]``."""

    d: Value
    scales: list[Value]
    low: Value | None
    mins: list[Value]


@dataclass
class Cursor:
    """Addresses of one 32-column block of a group; ``part`` selects the rows, ``block`` is its number in the chunk (ints or i64)."""

    codes: Value
    scales: Value
    supers: Value
    part: Value | int
    block: Value | int = 0


class WeightFormat:
    """Base of the integer formats. Subclasses state the layout, split raw rows into planes, and unpack."""

    type_name: ClassVar[str] = ""
    mode: ClassVar[str] = "q8_2"
    """How activations are rounded: ``q8_2`` or ``q8_k``; ``f32`` for the float formats, which are multiplied unrounded."""
    group: ClassVar[int] = 32
    """Columns that share a scale."""
    has_min: ClassVar[bool] = False
    offset: ClassVar[int] = 0
    """Added to the codes to make them unsigned: 0 or a power of two up to 128; see ``offset_on``."""
    u_max: ClassVar[int] = 255
    """Largest unsigned code."""
    code_bytes: ClassVar[int] = 0
    scale_bytes: ClassVar[int] = 0
    super_bytes: ClassVar[int] = 0
    columns: ClassVar[int] = 32
    """Columns come in multiples of this."""
    integer_scales: ClassVar[bool] = False
    """Whether integer sums are multiplied by integer scales before they become f32: fewer steps where scales serve 16 columns."""
    scaled_max: ClassVar[int] = 0
    """Largest product of a code and its integer scale where it is a byte up to 127: batches then multiply scaled codes."""
    prefetch: ClassVar[bool] = False
    """Whether one-token products ask for memory ahead: worth it where unpacking is so long that few loads are on their way."""
    together: ClassVar[int] = 1
    """Blocks of a chunk that one-token products take at a time: two where unpacking is long, so that their steps overlap."""
    dense: ClassVar[bool] = False
    """Whether codes follow the scales of a chunk without a gap, off the cache lines by half of one: where the gap is more than a type may
    grow by."""
    light: ClassVar[bool] = False
    """Whether vectors of 16 lanes unpack faster than they multiply: then every block of tokens unpacks weights anew."""

    # Layout

    def check_k(self, k: int) -> None:
        """CodegenError unless rows of ``k`` values exist in this format."""
        if k <= 0 or k % self.columns:
            raise CodegenError(f"a {self.type_name} weight cannot have rows of {k} values: its blocks hold {self.columns}")

    def chunk_blocks(self, k: int) -> int:
        """M, the blocks of 32 columns in a chunk: the fewest whose scales fill cache lines, if K allows."""
        if self.super_bytes:
            return 8
        m = 1
        while m * self.scale_bytes % 64 and k // 32 % (2 * m) == 0:
            m *= 2
        return m

    def chunk_head(self, k: int) -> int:
        """Bytes of a chunk before its codes."""
        size = self.super_bytes + self.chunk_blocks(k) * self.scale_bytes
        return (size + 63) // 64 * 64 if self.super_bytes and not self.dense else size

    def chunk_bytes(self, k: int) -> int:
        """Bytes of a chunk of 16 rows."""
        return self.chunk_head(k) + self.chunk_blocks(k) * self.code_bytes

    def group_bytes(self, k: int) -> int:
        """Bytes of 16 rows of ``k`` columns, a multiple of 64 (of 32 where chunks are dense)."""
        size = k // 32 // self.chunk_blocks(k) * self.chunk_bytes(k)
        return size if self.dense else (size + 63) // 64 * 64

    def packed_bytes(self, k: int, n: int) -> int:
        """Bytes of ``n`` repacked rows."""
        return (n + ROWS - 1) // ROWS * self.group_bytes(k)

    # Compile time

    def planes(self, raw: np.ndarray, k: int) -> Planes:
        """Split rows (uint8 [R, row_bytes]) into planes."""
        raise NotImplementedError

    def repack(self, raw: np.ndarray, k: int) -> np.ndarray:
        """Rows as they lie in the file (uint8 [R, row_bytes]) to the interleaved layout (uint8, R padded to 16 with zero rows).

        Raises CodegenError where the bytes of a row do not match ``k``.
        """
        raw = self._padded(raw, k)
        groups = len(raw) // ROWS
        out = np.zeros((groups, self.group_bytes(k)), np.uint8)
        planes = self.planes(raw, k)
        m, size = self.chunk_blocks(k), self.chunk_bytes(k)
        n_chunks, n_words = k // 32 // m, self.code_bytes // 64
        chunks = out[:, : n_chunks * size].reshape(groups, n_chunks, size)
        words = planes.words.reshape(groups, ROWS, n_chunks, m, n_words)
        scales_end = self.super_bytes + m * self.scale_bytes
        _interleave(chunks[:, :, : self.super_bytes].reshape(groups, n_chunks, 1, self.super_bytes), planes.supers)
        scales = chunks[:, :, self.super_bytes : scales_end].reshape(groups, n_chunks, m, self.scale_bytes)
        _interleave(scales, planes.scales)
        codes = chunks[:, :, self.chunk_head(k) :].view(np.uint32).reshape(groups, n_chunks, m, n_words, ROWS)
        codes[...] = words.transpose(0, 2, 3, 4, 1)
        return out.reshape(-1)

    def _padded(self, raw: np.ndarray, k: int) -> np.ndarray:
        self.check_k(k)
        want = row_bytes(self.type_name, k)
        if raw.ndim != 2 or raw.shape[1] != want:
            raise CodegenError(f"rows of {k} {self.type_name} values take {want} bytes, not {raw.shape[-1]}")
        missing = -len(raw) % ROWS
        if missing:
            raw = np.concatenate([raw, np.zeros((missing, want), np.uint8)])
        return np.ascontiguousarray(raw)

    # Emitters

    def offset_on(self, target: Target) -> int:
        """The offset of the codes that ``unpack`` gives on ``target``."""
        return self.offset

    def cursor(self, e: Emitter, group: Value, k: int, chunk: Value, block: Value | int, part: Value | int) -> Cursor:
        """Addresses of 32-column block ``block`` of chunk ``chunk`` (i64) of the group at ``group``."""
        start = e.at(group, chunk, self.chunk_bytes(k))
        scales, codes = e.gep(start, self.super_bytes), e.gep(start, self.chunk_head(k))
        return Cursor(e.at(codes, block, self.code_bytes), e.at(scales, block, self.scale_bytes), start, part, block)

    def unpack(self, e: Emitter, c: Cursor) -> Unpacked:
        """Code that brings one block into registers."""
        raise NotImplementedError


def _interleave(out: np.ndarray, fields: tuple[np.ndarray, ...]) -> None:
    """Write fields [R, chunks * blocks] to ``out`` uint8 [groups, chunks, blocks, bytes], the 16 rows of a group side by side."""
    at = 0
    for values in fields:
        size = values.dtype.itemsize
        rows = np.ascontiguousarray(values.reshape(out.shape[0], ROWS, out.shape[1], out.shape[2]).transpose(0, 2, 3, 1))
        out[:, :, :, at : at + ROWS * size] = rows.view(np.uint8).reshape(*out.shape[:3], ROWS * size)
        at += ROWS * size


# Splitting helpers (numpy)


def blocks_of(raw: np.ndarray, type_name: str) -> np.ndarray:
    """uint8 [R, blocks, bytes per block] of rows without a row header."""
    info = type_by_name(type_name)
    return raw[:, info.row_header :].reshape(len(raw), -1, info.bytes)


def field(blocks: np.ndarray, at: int, dtype: type) -> np.ndarray:
    """One number per block, [R, blocks]."""
    size = np.dtype(dtype).itemsize
    return np.ascontiguousarray(blocks[:, :, at : at + size]).view(dtype)[:, :, 0]


def as_words(codes: np.ndarray) -> np.ndarray:
    """uint8 [..., 4 W] to uint32 [..., W]."""
    return np.ascontiguousarray(codes).view(np.uint32)


def pack4(codes: np.ndarray) -> np.ndarray:
    """Codes 0..15 (uint8 [R, blocks, 32]) to four words: columns 0-15 in the low nibbles, 16-31 in the high ones."""
    return as_words(codes[..., :16] | codes[..., 16:] << 4)


def pack2(codes: np.ndarray) -> np.ndarray:
    """Codes 0..3 to two words of 16 columns; bits 2q, 2q+1 of byte i hold column 4q + i."""
    c = codes.reshape(*codes.shape[:-1], 2, 4, 4)
    return as_words(c[..., 0, :] | c[..., 1, :] << 2 | c[..., 2, :] << 4 | c[..., 3, :] << 6)[..., 0]


def pack1(bits: np.ndarray) -> np.ndarray:
    """Bits (uint8 0 or 1) to one word: bit q of byte i holds column 4q + i."""
    c = bits.reshape(*bits.shape[:-1], 8, 4)
    out = c[..., 0, :].copy()
    for q in range(1, 8):
        out |= c[..., q, :] << q
    return as_words(out)


def pack3(codes: np.ndarray) -> np.ndarray:
    """Codes 0..7 to three words: word w holds quads 2w and 2w + 1 in bits 0-2 and 3-5; bits 6-7 are shared by quads 6 and 7.

    Quad 6 has bits 0-1 in word 0 and bit 2 in bit 6 of word 1, quad 7 bits 0-1 in word 2 and bit 2 in bit 7 of word 1.
    """
    q = codes.reshape(*codes.shape[:-1], 8, 4)
    six, seven = q[..., 6, :], q[..., 7, :]
    rest = [six << 6, (six >> 2) << 6 | (seven >> 2) << 7, seven << 6]
    words = [q[..., 2 * w, :] | q[..., 2 * w + 1, :] << 3 | rest[w] for w in range(3)]
    return as_words(np.concatenate(words, axis=-1))


def pack1_masks(bits: np.ndarray) -> np.ndarray:
    """Bits (uint8 0 or 1 [R, blocks, 32]) to one word that holds, over the 16 rows of a group, a mask of 64 bits for each quad: bit
    4 * row + column. ``mask_of_rows`` loads it."""
    rows, blocks = bits.shape[:2]
    ordered = bits.reshape(rows // ROWS, ROWS, blocks, 8, 4).transpose(0, 2, 3, 1, 4)
    packed = np.packbits(np.ascontiguousarray(ordered).reshape(rows // ROWS, blocks, 512), axis=-1, bitorder="little")
    return np.ascontiguousarray(packed.view(np.uint32).transpose(0, 2, 1)).reshape(rows, blocks, 1)


# Unpacking helpers (emitted code)


def load_field(e: Emitter, p: Value, at: int, element: ir.Type, size: int, part: Value | int) -> Value:
    """One field of the part's rows: <lanes x element>."""
    lanes = e.target.lanes
    p = e.gep(p, at)
    return e.load(vec(element, lanes), e.at(p, part, size * lanes))


def load_f16(e: Emitter, p: Value, at: int, part: Value | int) -> Value:
    return e.f16_to_f32(load_field(e, p, at, I16 if not e.target.has_f16c else F16, 2, part))


def load_f32(e: Emitter, p: Value, at: int, part: Value | int) -> Value:
    return load_field(e, p, at, F32, 4, part)


def load_small(e: Emitter, p: Value, at: int, part: Value | int, signed: bool) -> Value:
    """Byte-sized integers as f32."""
    lanes = e.target.lanes
    v = load_field(e, p, at, I8, 1, part)
    wide = e.b.sext(v, vec(I32, lanes)) if signed else e.b.zext(v, vec(I32, lanes))
    return e.b.sitofp(wide, vec(F32, lanes))


def load_word(e: Emitter, c: Cursor, index: int) -> Value:
    """Word ``index`` of the block's code plane: <lanes x i32>."""
    return load_field(e, c.codes, 4 * ROWS * index, I32, 4, c.part)


def masked(e: Emitter, v: Value, shift: int, byte_mask: int) -> Value:
    """Every byte of ``v`` shifted (left for positive ``shift``) and masked with ``byte_mask``."""
    if shift > 0:
        v = e.b.shl(v, e.const(v.type, shift))
    elif shift < 0:
        v = e.b.lshr(v, e.const(v.type, -shift))
    return e.b.and_(v, e.const(v.type, byte_mask * 0x01010101))


def quads4(e: Emitter, c: Cursor, first: int = 0) -> list[Value]:
    """The eight quads of a plane made by ``pack4``."""
    words = [load_word(e, c, first + j) for j in range(4)]
    return [masked(e, w, 0, 15) for w in words] + [masked(e, w, -4, 15) for w in words]


def bits2(e: Emitter, c: Cursor, first: int, to: int) -> list[Value]:
    """The eight quads of a plane made by ``pack2``, each two-bit code moved to bit ``to``."""
    words = [load_word(e, c, first + j) for j in range(2)]
    return [masked(e, words[q // 4], to - 2 * (q % 4), 3 << to) for q in range(8)]


def bits1(e: Emitter, c: Cursor, first: int, to: int) -> list[Value]:
    """The eight quads of a plane made by ``pack1``, each bit moved to bit ``to``."""
    word = load_word(e, c, first)
    return [masked(e, word, to - q, 1 << to) for q in range(8)]


def either(e: Emitter, a: list[Value], c: list[Value]) -> list[Value]:
    return [e.b.or_(x, y) for x, y in zip(a, c)]


def quads3(e: Emitter, c: Cursor, first: int = 0) -> list[Value]:
    """The eight quads of a plane made by ``pack3``."""
    words = [load_word(e, c, first + w) for w in range(3)]
    six = e.b.or_(masked(e, words[0], -6, 3), masked(e, words[1], -4, 4))
    seven = e.b.or_(masked(e, words[2], -6, 3), masked(e, words[1], -5, 4))
    return [*(masked(e, w, -3 * i, 7) for w in words for i in range(2)), six, seven]


def words2(e: Emitter, c: Cursor, first: int = 0) -> list[Value]:
    """Low and high nibbles of two words, as bytes."""
    return [masked(e, load_word(e, c, first + j), shift, 15) for j in range(2) for shift in (0, -4)]


def from_parts(e: Emitter, quads: list[Value], parts: Parts) -> Unpacked:
    """``Unpacked`` with scales and minima in f32 made of ``parts``; what is not used costs nothing."""
    floats = vec(F32, e.target.lanes)
    scales = [e.b.fmul(parts.d, e.b.sitofp(v, floats)) for v in parts.scales]
    mins = [] if parts.low is None else [e.b.fmul(e.b.fneg(parts.low), e.b.sitofp(v, floats)) for v in parts.mins]
    return Unpacked(quads, scales, mins, parts)


def load_mask(e: Emitter, p: Value, at: int, part: Value | int) -> Value:
    """A mask of 64 bits (row-major, four columns) as what ``pick`` takes: a bit per byte of a quad.

    Where lanes are single values it is a word whose bytes are 0 or 255.
    """
    lanes = e.target.lanes
    p = e.gep(p, at)
    if lanes > 1:
        return e.b.bitcast(e.load(ir.IntType(4 * lanes), e.at(p, part, lanes // 2)), vec(ir.IntType(1), 4 * lanes))
    row = e.i64(part) if isinstance(part, int) else part
    byte = e.b.zext(e.load(I8, e.gep(p, e.b.lshr(row, e.i64(1)))), I32)
    nibble = e.b.and_(e.b.lshr(byte, e.b.shl(e.b.and_(e.b.trunc(row, I32), e.i32(1)), e.i32(2))), e.i32(15))
    bits = e.b.and_(e.b.mul(nibble, e.i32(0x00204081)), e.i32(0x01010101))
    return e.b.mul(bits, e.i32(255))


def mask_of_rows(e: Emitter, c: Cursor, word: int, quad: int) -> Value:
    """The mask of one quad in a plane made by ``pack1_masks``."""
    return load_mask(e, c.codes, 4 * ROWS * word + 8 * quad, c.part)


def pick(e: Emitter, mask: Value, yes: Value, no: Value) -> Value:
    """Bytes of ``yes`` where ``mask`` is set, else of ``no`` (quads)."""
    lanes = e.target.lanes
    if lanes == 1:
        return e.b.xor(no, e.b.and_(e.b.xor(yes, no), mask))
    bytes_ = vec(I8, 4 * lanes)
    return e.b.bitcast(e.b.select(mask, e.b.bitcast(yes, bytes_), e.b.bitcast(no, bytes_)), yes.type)
