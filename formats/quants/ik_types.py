"""The K types of ik_llama.cpp: tables of values with a shifted twin, some with a scale in front of each row."""

from __future__ import annotations

import numpy as np

from ggufc.formats.quants.bits import bit_planes, bits, f16, nibble_planes, nibbles, pair_planes, pairs, u16
from ggufc.formats.quants.decoded import Decoded
from ggufc.formats.quants.k_types import iq4_scale_bits
from ggufc.formats.quants.tables import PAIRS, T2, T3, T4, T5, T6


def _cubic6() -> np.ndarray:
    """The 64 values of IQ6_K's cubic, evaluated with fused multiply-adds in f32 (one rounding per step) as the engine does."""
    q = np.arange(64, dtype=np.float64)
    value = np.full(64, np.float32(0.0011972), np.float64)
    for coefficient in (-0.11218, 6.2568, -127.0):
        value = (value * q + np.float64(np.float32(coefficient))).astype(np.float32).astype(np.float64)
    return value.astype(np.float32)


_CUBIC6 = _cubic6()


def _look_up(table: np.ndarray, codes: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Values of ``codes``, from the table's second half in groups whose selector bit is set."""
    n, groups = selector.shape
    shifted = codes.reshape(n, groups, -1) + (selector * (len(table) // 2)).astype(np.uint8)[:, :, None]
    return table[shifted].reshape(n, -1)


def _codes5(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return nibble_planes(low, 32) | bit_planes(high) << 4


def _high_nibble_first(sc: np.ndarray) -> np.ndarray:
    """Nibble i/4 of byte i mod 4: the order of IQ3_KS and IQ2_KL."""
    return nibble_planes(sc, 4)


def iq2_k(b: np.ndarray, header: np.ndarray) -> Decoded:
    scale = f16(b[:, :2]) * (nibbles(b[:, 4:12]).view(np.int8) - 8)
    return Decoded(_look_up(T2, pair_planes(b[:, 12:]), bits(b[:, 2:4])), scale, None)


def iq3_k(b: np.ndarray, header: np.ndarray) -> Decoded:
    sign = 1 - 2 * bits(b[:, 4:6]).view(np.int8)
    scale = f16(b[:, :2]) * ((2 * nibbles(b[:, 6:14]).view(np.int8) + 1) * sign)
    q = pair_planes(b[:, 14:78]) | bit_planes(b[:, 78:]) << 2
    return Decoded(_look_up(T3, q, bits(b[:, 2:4])), scale, None)


def iq4_k(b: np.ndarray, header: np.ndarray) -> Decoded:
    scale = f16(b[:, :2]) * iq4_scale_bits(b[:, 8:16], pairs(b[:, 4:8]))
    return Decoded(_look_up(T4, nibble_planes(b[:, 16:], 16), bits(b[:, 2:4])), scale, None)


def iq5_k(b: np.ndarray, header: np.ndarray) -> Decoded:
    scale = f16(b[:, :2]) * iq4_scale_bits(b[:, 8:16], pairs(b[:, 4:8]))
    return Decoded(_look_up(T5, _codes5(b[:, 16:144], b[:, 144:]), bits(b[:, 2:4])), scale, None)


def iq6_k_parts(b: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes 0..63 ``[n, 256]``, selector bits ``[n, 16]`` and scales f32 ``[n, 16]`` of IQ6_K."""
    q = nibble_planes(b[:, 20:148], 32) | pair_planes(b[:, 148:]) << 4
    return q, bits(b[:, 2:4]), f16(b[:, :2]) * np.ascontiguousarray(b[:, 4:20]).view(np.int8)


def iq6_k(b: np.ndarray, header: np.ndarray) -> Decoded:
    q, selector, scale = iq6_k_parts(b)
    return Decoded(T6[q] + np.repeat(selector, 16, axis=1).view(np.int8), scale, None)


def iq6_k_values(b: np.ndarray) -> np.ndarray:
    """Values f32 of row look-ups, where the cubic is not rounded to integers as in products."""
    q, selector, scale = iq6_k_parts(b)
    return np.repeat(scale, 16, axis=1) * (_CUBIC6[q] + np.repeat(selector, 16, axis=1).astype(np.float32))


def iq2_ks(b: np.ndarray, header: np.ndarray) -> Decoded:
    x = bits(b[:, :2])
    scale = header * ((nibbles(b[:, 2:6]) | x[:, 8:] << 4).view(np.int8) - 16)
    return Decoded(_look_up(T2, pair_planes(b[:, 6:]), x[:, :8]), scale, None)


def iq3_ks(b: np.ndarray, header: np.ndarray) -> Decoded:
    x = bits(b[:, :2])
    scale = header * ((_high_nibble_first(b[:, 2:6]) | x[:, :8] << 4).view(np.int8) - 16)
    q = pair_planes(b[:, 6:70]) | bit_planes(b[:, 70:]) << 2
    return Decoded(_look_up(T3, q, x[:, 8:]), scale, None)


def _even_scale(header: np.ndarray, sc: np.ndarray) -> np.ndarray:
    """Scales whose lowest bit is the table selector."""
    return header * ((sc & 254).astype(np.int16) - 127)


def iq4_ks(b: np.ndarray, header: np.ndarray) -> Decoded:
    sc = b[:, :8]
    return Decoded(_look_up(T4, nibble_planes(b[:, 8:], 16), sc & 1), _even_scale(header, sc), None)


def iq5_ks(b: np.ndarray, header: np.ndarray) -> Decoded:
    sc = b[:, :8]
    return Decoded(_look_up(T5, _codes5(b[:, 8:136], b[:, 136:]), sc & 1), _even_scale(header, sc), None)


def iq4_kss(b: np.ndarray, header: np.ndarray) -> Decoded:
    words = u16(b).reshape(len(b), 8, 8)
    sc = ((words & 1) << np.arange(8)).sum(axis=2).astype(np.uint8)
    words = words & 0xFFFE
    raw = np.ascontiguousarray((words ^ words >> 1).astype("<u2")).view(np.uint8)
    return Decoded(_look_up(T4, nibble_planes(raw.reshape(len(b), -1), 16), sc & 1), _even_scale(header, sc), None)


def iq2_kl(b: np.ndarray, header: np.ndarray) -> Decoded:
    scale = header * ((_high_nibble_first(b[:, 2:6]) | pairs(b[:, :2]) << 4).view(np.int8) - 32)
    low = nibble_planes(b[:, 6:70], 16)
    high = (b[:, None, 70:] >> np.arange(8, dtype=np.uint8)[:, None] & 1).reshape(len(b), 128)
    return Decoded(PAIRS[low | high << 4].reshape(len(b), -1), scale, None)
