"""Unpacking of bit fields shared by many block types. Arrays are uint8 ``[blocks, bytes]``; results ``[blocks, values]``."""

from __future__ import annotations

import numpy as np

_NIBBLES = np.array([0, 4], np.uint8)
_PAIRS = np.array([0, 2, 4, 6], np.uint8)
_BITS = np.arange(8, dtype=np.uint8)


def f16(field: np.ndarray) -> np.ndarray:
    """The half at the start of each row of two bytes, as f32 ``[blocks, 1]``."""
    return np.ascontiguousarray(field).view("<f2").astype(np.float32)


def u16(field: np.ndarray) -> np.ndarray:
    """Little-endian 16-bit words, as int32."""
    return np.ascontiguousarray(field).view("<u2").astype(np.int32)


def u32(field: np.ndarray) -> np.ndarray:
    """Little-endian 32-bit words."""
    return np.ascontiguousarray(field).view("<u4")


def planes(field: np.ndarray, span: int, shifts: np.ndarray, mask: int) -> np.ndarray:
    """Bit planes over runs of ``span`` bytes: for each run first the lowest field of all bytes, then the next, and so on."""
    runs = field.reshape(len(field), -1, 1, span)
    return (runs >> shifts[:, None] & mask).reshape(len(field), -1)


def nibble_planes(field: np.ndarray, span: int) -> np.ndarray:
    """Low nibbles of ``span`` bytes, then their high nibbles, run by run."""
    return planes(field, span, _NIBBLES, 15)


def pair_planes(field: np.ndarray) -> np.ndarray:
    """Two-bit fields over runs of 32 bytes (Q2_K and its relatives)."""
    return planes(field, 32, _PAIRS, 3)


def bit_planes(field: np.ndarray) -> np.ndarray:
    """Bit j/32 of byte j mod 32."""
    return planes(field, 32, _BITS, 1)


def nibbles(field: np.ndarray) -> np.ndarray:
    """Nibble i mod 2 of byte i/2."""
    return planes(field, 1, _NIBBLES, 15)


def pairs(field: np.ndarray) -> np.ndarray:
    """Two-bit field i mod 4 of byte i/4."""
    return planes(field, 1, _PAIRS, 3)


def bits(field: np.ndarray) -> np.ndarray:
    """Bit i mod 8 of byte i/8."""
    return planes(field, 1, _BITS, 1)
