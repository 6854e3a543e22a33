"""Types with blocks of 32 values. A decoder maps blocks uint8 ``[n, bytes]`` to codes, scale and min (value = scale * code - min)."""

from __future__ import annotations

import numpy as np

from ggufc.formats.quants.bits import bits, f16, nibble_planes
from ggufc.formats.quants.decoded import Decoded
from ggufc.formats.quants.tables import E2M1, N4


def q4_0(b: np.ndarray, header: np.ndarray) -> Decoded:
    return Decoded(nibble_planes(b[:, 2:], 16).view(np.int8) - 8, f16(b[:, :2]), None)


def q4_1(b: np.ndarray, header: np.ndarray) -> Decoded:
    return Decoded(nibble_planes(b[:, 4:], 16).view(np.int8), f16(b[:, :2]), -f16(b[:, 2:4]))


def q5_0(b: np.ndarray, header: np.ndarray) -> Decoded:
    q = nibble_planes(b[:, 6:], 16) | bits(b[:, 2:6]) << 4
    return Decoded(q.view(np.int8) - 16, f16(b[:, :2]), None)


def q5_1(b: np.ndarray, header: np.ndarray) -> Decoded:
    q = nibble_planes(b[:, 8:], 16) | bits(b[:, 4:8]) << 4
    return Decoded(q.view(np.int8), f16(b[:, :2]), -f16(b[:, 2:4]))


def q6_0(b: np.ndarray, header: np.ndarray) -> Decoded:
    high = nibble_planes(b[:, 2:10], 8)
    q = nibble_planes(b[:, 10:], 16) | np.concatenate([high & 3, high >> 2], axis=1) << 4
    return Decoded(q.view(np.int8) - 32, f16(b[:, :2]), None)


def q8_0(b: np.ndarray, header: np.ndarray) -> Decoded:
    return Decoded(np.ascontiguousarray(b[:, 2:]).view(np.int8), f16(b[:, :2]), None)


def iq4_nl(b: np.ndarray, header: np.ndarray) -> Decoded:
    return Decoded(N4[nibble_planes(b[:, 2:], 16)], f16(b[:, :2]), None)


def mxfp4(b: np.ndarray, header: np.ndarray) -> Decoded:
    scale = np.ldexp(np.float32(1), b[:, :1].astype(np.int32) - 128)
    return Decoded(E2M1[nibble_planes(b[:, 1:], 16)], scale, None)
