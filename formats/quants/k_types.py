"""The K types: blocks of 256 values with 6-bit or 8-bit group scales."""

from __future__ import annotations

import numpy as np

from ggufc.formats.quants.bits import bit_planes, f16, nibble_planes, nibbles, pair_planes
from ggufc.formats.quants.decoded import Decoded


def q2_k(b: np.ndarray, header: np.ndarray) -> Decoded:
    sc = b[:, :16]
    return Decoded(pair_planes(b[:, 16:80]).view(np.int8), f16(b[:, 80:82]) * (sc & 15), f16(b[:, 82:84]) * (sc >> 4))


def q3_k(b: np.ndarray, header: np.ndarray) -> Decoded:
    low = nibble_planes(b[:, 96:104], 8)
    high = np.concatenate([b[:, 104:108] >> s & 3 for s in (0, 2, 4, 6)], axis=1)
    scale = (low | high << 4).view(np.int8) - 32
    q = pair_planes(b[:, 32:96]) | bit_planes(b[:, :32]) << 2
    return Decoded(q.view(np.int8) - 4, f16(b[:, 108:110]) * scale, None)


def scales_k4(sc: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight 6-bit scales and eight 6-bit mins of the 12 bytes shared by Q4_K and Q5_K."""
    a, m, c = sc[:, :4], sc[:, 4:8], sc[:, 8:12]
    scale = np.concatenate([a & 63, (c & 15) | (a >> 6) << 4], axis=1)
    low = np.concatenate([m & 63, (c >> 4) | (m >> 6) << 4], axis=1)
    return scale, low


def q4_k(b: np.ndarray, header: np.ndarray) -> Decoded:
    scale, low = scales_k4(b[:, 4:16])
    return Decoded(nibble_planes(b[:, 16:], 32).view(np.int8), f16(b[:, :2]) * scale, f16(b[:, 2:4]) * low)


def q5_k(b: np.ndarray, header: np.ndarray) -> Decoded:
    scale, low = scales_k4(b[:, 4:16])
    q = nibble_planes(b[:, 48:], 32) | bit_planes(b[:, 16:48]) << 4
    return Decoded(q.view(np.int8), f16(b[:, :2]) * scale, f16(b[:, 2:4]) * low)


def q6_k(b: np.ndarray, header: np.ndarray) -> Decoded:
    q = nibble_planes(b[:, :128], 64) | pair_planes(b[:, 128:192]) << 4
    scale = f16(b[:, 208:210]) * np.ascontiguousarray(b[:, 192:208]).view(np.int8)
    return Decoded(q.view(np.int8) - 32, scale, None)


def iq4_scale_bits(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Six-bit signed group scales from nibbles ``low`` and two-bit fields ``high`` (IQ4_XS, IQ4_K, IQ5_K)."""
    return (nibbles(low) | high << 4).view(np.int8) - 32
