"""What a weight format is: an interleaved layout made at compile time, and the code that unpacks it.

Rows are taken in groups of 16 (the last group is padded with zero rows). A group of K columns is three planes one after the other, so that the wide plane stays
aligned to cache lines:

    codes   K/32 blocks of ``code_bytes``:  words of 4 bytes, [word][16 rows]
    scales  K/32 blocks of ``scale_bytes``: fields, [field][16 rows]
    supers  K/256 blocks of ``super_bytes`` (K types): fields, [field][16 rows]

A vector of a word or field over the rows is one load on every level: targets with fewer than 16 lanes take a *part* of the 16 rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from llvmlite import ir

from ggufc.codegen.emitter import F16, F32, I8, I16, I32, Emitter, Value, vec
from ggufc.codegen.errors import CodegenError
from ggufc.formats.ggml_types import row_bytes, type_by_name

ROWS = 16
"""Rows of a group."""

CHUNK_VALUES = 1 << 21
"""Values repacked at a time: bounds the memory of a compilation."""

RowSource = Callable[[int, int], np.ndarray]
"""``source(start, stop)`` gives the raw bytes of these rows, uint8 [stop - start, row_bytes]."""


@dataclass
class Planes:
    """One chunk of rows, row by row: ``words`` u32 [R, K/32, W]; ``scales`` arrays [R, K/32]; ``supers`` arrays [R, K/256]."""

    words: np.ndarray
    scales: tuple[np.ndarray, ...]
    supers: tuple[np.ndarray, ...] = ()


@dataclass
class Unpacked:
    """32 columns of one part of a group, in registers.

    ``quads``: eight <n x i32>, lane = row, bytes = the unsigned codes of columns 4j..4j+3. ``scales``: f32 <n>, one for 32 columns or two for 16 each; ``mins``
    likewise or empty. A weight is ``scale * (code - offset) + min``.
    """

    quads: list[Value]
    scales: list[Value]
    mins: list[Value]


@dataclass
class Cursor:
    """Addresses of one 32-column block of a group; ``part`` selects the rows (an int or an i64 value)."""

    codes: Value
    scales: Value
    supers: Value
    part: Value | int


class WeightFormat:
    """Base of the integer formats. Subclasses state the layout, split raw rows into planes, and unpack."""

    type_name: ClassVar[str] = ""
    mode: ClassVar[str] = "q8_2"
    """How activations are rounded: ``q8_2`` or ``q8_k``; ``f32`` for the float formats, which are multiplied unrounded."""
    group: ClassVar[int] = 32
    """Columns that share a scale."""
    has_min: ClassVar[bool] = False
    offset: ClassVar[int] = 0
    """Added to the codes to make them unsigned: 0 or a power of two up to 128."""
    u_max: ClassVar[int] = 255
    """Largest unsigned code."""
    code_bytes: ClassVar[int] = 0
    scale_bytes: ClassVar[int] = 0
    super_bytes: ClassVar[int] = 0
    columns: ClassVar[int] = 32
    """Columns come in multiples of this."""

    # -- layout ------------------------------------------------------------------------------------------------------

    def check_k(self, k: int) -> None:
        """CodegenError unless rows of ``k`` values exist in this format."""
        if k <= 0 or k % self.columns:
            raise CodegenError(f"a {self.type_name} weight cannot have rows of {k} values: its blocks hold {self.columns}")

    def _offsets(self, k: int) -> tuple[int, int, int]:
        codes = k // 32 * self.code_bytes
        scales = codes + k // 32 * self.scale_bytes
        return codes, scales, scales + k // 256 * self.super_bytes

    def group_bytes(self, k: int) -> int:
        """Bytes of 16 rows of ``k`` columns, a multiple of 64."""
        return (self._offsets(k)[2] + 63) // 64 * 64

    def packed_bytes(self, k: int, n: int) -> int:
        """Bytes of ``n`` repacked rows."""
        return (n + ROWS - 1) // ROWS * self.group_bytes(k)

    # -- compile time ------------------------------------------------------------------------------------------------

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
        end_codes, end_scales, end_supers = self._offsets(k)
        n_words = self.code_bytes // 64
        words = planes.words.reshape(groups, ROWS, k // 32, n_words)
        out[:, :end_codes].view(np.uint32).reshape(groups, k // 32, n_words, ROWS)[...] = words.transpose(0, 2, 3, 1)
        _interleave(out[:, end_codes:end_scales], planes.scales, groups, k // 32)
        _interleave(out[:, end_scales:end_supers], planes.supers, groups, k // 256)
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

    def repack_chunks(self, source: RowSource, k: int, n: int) -> Iterator[np.ndarray]:
        """The repacked form of ``n`` rows in pieces of bounded size, in order."""
        step = max(1, CHUNK_VALUES // (k * ROWS)) * ROWS
        for start in range(0, n, step):
            yield self.repack(source(start, min(n, start + step)), k)

    def repack_glu_chunks(self, gate: RowSource, up: RowSource, k: int, n: int) -> Iterator[np.ndarray]:
        """Two weights of ``n`` rows each, their groups alternating: gate group, up group."""
        step = max(1, CHUNK_VALUES // (2 * k * ROWS)) * ROWS
        size = self.group_bytes(k)
        for start in range(0, n, step):
            pair = [self.repack(s(start, min(n, start + step)), k).reshape(-1, size) for s in (gate, up)]
            yield np.stack(pair, axis=1).reshape(-1)

    # -- emitters ----------------------------------------------------------------------------------------------------

    def cursor(self, e: Emitter, group: Value, k: int, block: Value, part: Value | int) -> Cursor:
        """Addresses of 32-column block ``block`` (i64) of the group at ``group``."""
        codes_end, scales_end, _ = self._offsets(k)
        supers = group
        if self.super_bytes:
            supers = e.at(e.gep(group, scales_end), e.b.lshr(block, e.i64(3)), self.super_bytes)
        return Cursor(e.at(group, block, self.code_bytes), e.at(e.gep(group, codes_end), block, self.scale_bytes), supers, part)

    def unpack(self, e: Emitter, c: Cursor) -> Unpacked:
        """Code that brings one block into registers."""
        raise NotImplementedError


def _interleave(out: np.ndarray, fields: tuple[np.ndarray, ...], groups: int, blocks: int) -> None:
    if not fields:
        return
    view = out.reshape(groups, blocks, -1)
    at = 0
    for field in fields:
        size = field.dtype.itemsize
        rows = np.ascontiguousarray(field.reshape(groups, ROWS, blocks).transpose(0, 2, 1))
        view[:, :, at : at + ROWS * size] = rows.view(np.uint8).reshape(groups, blocks, ROWS * size)
        at += ROWS * size


# -- splitting helpers (numpy) ---------------------------------------------------------------------------------------


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


# -- unpacking helpers (emitted code) --------------------------------------------------------------------------------


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
