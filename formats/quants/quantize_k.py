"""Quantisers of the 256-value blocks. Each maps f32 ``[blocks, 256]`` to uint8 ``[blocks, bytes]``."""

from __future__ import annotations

import numpy as np

from ggufc.formats.quants.pack import f16_bytes, pack_planes, to_f16
from ggufc.formats.quants.search import inverse, nearest, scale_and_min, signed_extreme, symmetric_scale, table_scale
from ggufc.formats.quants.tables import N4


def _signed_groups(x: np.ndarray, group: int, half: int, scale_half: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Block scale d, integer group scales and codes for value = d * scale * code, both signed ranges -half .. half-1."""
    n = len(x)
    ideal = symmetric_scale(x.reshape(-1, group), half).reshape(n, -1)
    d = to_f16(signed_extreme(ideal) / -scale_half)
    scales = np.clip(np.rint(ideal * inverse(d)), -scale_half, scale_half - 1)
    step = inverse(d * scales)[:, :, None]
    codes = np.clip(np.rint(x.reshape(n, -1, group) * step), -half, half - 1)
    return d, scales.astype(np.int8), codes.reshape(n, -1).astype(np.int8)


def _min_groups(x: np.ndarray, group: int, top: int, scale_top: int) -> tuple[np.ndarray, ...]:
    """Block scales d and dmin, integer group scales and mins, codes for value = d * scale * code - dmin * min."""
    n = len(x)
    ideal, low = (a.reshape(n, -1) for a in scale_and_min(x.reshape(-1, group), top))
    d = to_f16(ideal.max(axis=1, keepdims=True) / scale_top)
    dmin = to_f16(low.max(axis=1, keepdims=True) / scale_top)
    scales = np.clip(np.rint(ideal * inverse(d)), 0, scale_top)
    mins = np.clip(np.rint(low * inverse(dmin)), 0, scale_top)
    shifted = x.reshape(n, -1, group) + (dmin * mins)[:, :, None]
    codes = np.clip(np.rint(shifted * inverse(d * scales)[:, :, None]), 0, top)
    return d, dmin, scales.astype(np.uint8), mins.astype(np.uint8), codes.reshape(n, -1).astype(np.uint8)


def q2_k(x: np.ndarray) -> np.ndarray:
    d, dmin, scales, mins, q = _min_groups(x, 16, 3, 15)
    return np.concatenate([scales | mins << 4, pack_planes(q, 32, 2), f16_bytes(d), f16_bytes(dmin)], axis=1)


def q3_k(x: np.ndarray) -> np.ndarray:
    d, scales, q = _signed_groups(x, 16, 4, 32)
    s = (scales + 32).view(np.uint8)
    u = (q + 4).view(np.uint8)
    packed = [pack_planes(u >> 2, 32, 1), pack_planes(u & 3, 32, 2), pack_planes(s & 15, 8, 4), pack_planes(s >> 4, 4, 2), f16_bytes(d)]
    return np.concatenate(packed, axis=1)


def _pack_k4(scales: np.ndarray, mins: np.ndarray) -> np.ndarray:
    """Eight 6-bit scales and mins in 12 bytes; undoes ``k_types.scales_k4``."""
    first = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    second = mins[:, :4] | (mins[:, 4:] >> 4) << 6
    return np.concatenate([first, second, (scales[:, 4:] & 15) | (mins[:, 4:] & 15) << 4], axis=1)


def q4_k(x: np.ndarray) -> np.ndarray:
    d, dmin, scales, mins, q = _min_groups(x, 32, 15, 63)
    return np.concatenate([f16_bytes(d), f16_bytes(dmin), _pack_k4(scales, mins), pack_planes(q, 32, 4)], axis=1)


def q5_k(x: np.ndarray) -> np.ndarray:
    d, dmin, scales, mins, q = _min_groups(x, 32, 31, 63)
    high = pack_planes(q >> 4, 32, 1)
    return np.concatenate([f16_bytes(d), f16_bytes(dmin), _pack_k4(scales, mins), high, pack_planes(q & 15, 32, 4)], axis=1)


def q6_k(x: np.ndarray) -> np.ndarray:
    d, scales, q = _signed_groups(x, 16, 32, 128)
    u = (q + 32).view(np.uint8)
    return np.concatenate([pack_planes(u & 15, 64, 4), pack_planes(u >> 4, 32, 2), scales.view(np.uint8), f16_bytes(d)], axis=1)


def iq4_xs(x: np.ndarray) -> np.ndarray:
    n = len(x)
    ideal = table_scale(x.reshape(-1, 32), N4).reshape(n, 8)
    d = to_f16(signed_extreme(ideal) / -32)
    scales = np.clip(np.rint(ideal * inverse(d)), -32, 31)
    q = nearest(N4, x.reshape(n, 8, 32) * inverse(d * scales)[:, :, None]).reshape(n, -1)
    s = (scales + 32).astype(np.uint8)
    return np.concatenate([f16_bytes(d), pack_planes(s >> 4, 1, 2), pack_planes(s & 15, 1, 4), pack_planes(q, 16, 4)], axis=1)
