"""The IQ types: codebook rows with separate signs, ternary grids with an offset, and IQ4_XS."""

from __future__ import annotations

import numpy as np

from ggufc.formats.quants.bits import bits, f16, nibble_planes, nibbles, pairs, u16, u32
from ggufc.formats.quants.decoded import Decoded
from ggufc.formats.quants.k_types import iq4_scale_bits
from ggufc.formats.quants.tables import N4, SIGNS7, grid, sign_rows

_SEVEN = np.array([0, 7, 14, 21], np.uint32)


def _signed(rows: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """Codebook rows int8 ``[n, k, 8]`` with the signs of the sign bytes ``[n, k]``, as ``[n, 8 k]``."""
    return (rows * sign_rows()[signs]).reshape(len(rows), -1)


def _packed_signs(words: np.ndarray) -> np.ndarray:
    """Sign bytes of the four eights described by each 32-bit word (7 bits each): ``[n, 4 words]``."""
    return SIGNS7[words[:, :, None] >> _SEVEN & 127].reshape(len(words), -1)


def iq4_xs(b: np.ndarray, header: np.ndarray) -> Decoded:
    scale = f16(b[:, :2]) * iq4_scale_bits(b[:, 4:8], pairs(b[:, 2:4]))
    return Decoded(N4[nibble_planes(b[:, 8:], 16)], scale, None)


def iq2_xxs(b: np.ndarray, header: np.ndarray) -> Decoded:
    words = u32(b[:, 2:]).reshape(len(b), 8, 2)
    index = np.ascontiguousarray(words[:, :, 0]).view(np.uint8)
    scale = f16(b[:, :2]) * (np.float32(0.5) + (words[:, :, 1] >> 28).astype(np.float32)) * np.float32(0.25)
    return Decoded(_signed(grid("iq2_xxs")[index], _packed_signs(words[:, :, 1])), scale, None)


def iq2_xs(b: np.ndarray, header: np.ndarray) -> Decoded:
    q = u16(b[:, 2:66])
    scale = f16(b[:, :2]) * (np.float32(0.5) + nibbles(b[:, 66:])) * np.float32(0.25)
    return Decoded(_signed(grid("iq2_xs")[q & 511], SIGNS7[q >> 9]), scale, None)


def iq2_s(b: np.ndarray, header: np.ndarray) -> Decoded:
    q = b[:, 2:34].astype(np.int32) | pairs(b[:, 66:74]).astype(np.int32) << 8
    scale = f16(b[:, :2]) * (np.float32(0.5) + nibbles(b[:, 74:])) * np.float32(0.25)
    return Decoded(_signed(grid("iq2_s")[q], b[:, 34:66]), scale, None)


def iq3_xxs(b: np.ndarray, header: np.ndarray) -> Decoded:
    words = u32(b[:, 66:])
    rows = grid("iq3_xxs")[b[:, 2:66]].reshape(len(b), 32, 8)
    scale = f16(b[:, :2]) * (np.float32(0.5) + (words >> 28).astype(np.float32)) * np.float32(0.5)
    return Decoded(_signed(rows, _packed_signs(words)), scale, None)


def iq3_s(b: np.ndarray, header: np.ndarray) -> Decoded:
    q = b[:, 2:66].astype(np.int32) | bits(b[:, 66:74]).astype(np.int32) << 8
    rows = grid("iq3_s")[q].reshape(len(b), 32, 8)
    scale = f16(b[:, :2]) * (1 + 2 * nibbles(b[:, 106:]))
    return Decoded(_signed(rows, b[:, 74:106]), scale, None)


def _ternary(index: np.ndarray, negative: np.ndarray) -> np.ndarray:
    """Eights of the ternary grid with an offset of +-1/8, in eighths: 8 grid +- 1."""
    offset = 1 - 2 * negative.astype(np.int8)
    return (8 * grid("iq1_s")[index] + offset[:, :, None]).reshape(len(index), -1)


def iq1_s(b: np.ndarray, header: np.ndarray) -> Decoded:
    qh = u16(b[:, 34:])
    high = (qh[:, :, None] >> np.array([0, 3, 6, 9]) & 7).reshape(len(b), 32)
    scale = f16(b[:, :2]) * (2 * (qh >> 12 & 7) + 1).astype(np.float32) * np.float32(0.125)
    return Decoded(_ternary(b[:, 2:34].astype(np.int32) | high << 8, np.repeat(qh >> 15, 4, axis=1)), scale, None)


def iq1_m(b: np.ndarray, header: np.ndarray) -> Decoded:
    sc = u16(b[:, 48:])
    # The block's f16 scale is spread over the top nibbles of the four words of group scales.
    d = (sc >> 12 << np.array([0, 4, 8, 12])).sum(axis=1, keepdims=True).astype("<u2").view("<f2").astype(np.float32)
    groups = (sc[:, :, None] >> np.array([0, 3, 6, 9]) & 7).reshape(len(b), 16)
    qh = nibbles(b[:, 32:48])
    scale = d * (2 * groups + 1).astype(np.float32) * np.float32(0.125)
    return Decoded(_ternary(b[:, :32].astype(np.int32) | (qh & 7).astype(np.int32) << 8, qh >> 3), scale, None)
