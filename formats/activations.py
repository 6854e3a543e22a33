"""How products round activations to int8 blocks: the numpy definition that kernels must match bit for bit.

``q8_2``: blocks of 32, scale bf16(max|x| / 127). ``q8_k``: blocks of 256, scale max|x| / 127 in f32. All arithmetic is f32 and rounding is
half to even. ``activation_mode`` says which one a weight type asks for.
"""

from __future__ import annotations

import numpy as np

from ggufc.formats.errors import GGUFError
from ggufc.formats.ggml_types import type_by_name

_Q8_2 = frozenset(["q4_0", "q4_1", "q5_0", "q5_1", "q6_0", "q8_0", "q4_k", "q5_k", "q6_k", "iq4_nl", "mxfp4"])


def activation_mode(type_name: str) -> str:
    """``q8_2``, ``q8_k``, ``f32`` or ``bf16``: what the activations are rounded to before they meet weights of this type."""
    info = type_by_name(type_name)
    if info.name == "bf16":
        return "bf16"
    if not info.is_quantized:
        return "f32"
    return "q8_2" if info.name in _Q8_2 else "q8_k"


def round_bf16(x: np.ndarray) -> np.ndarray:
    """f32 rounded to the nearest bfloat16 (ties to even), as f32. NaN stays NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(x), x, rounded.view(np.float32)).astype(np.float32)


def round_q8_2(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows ``[..., K]`` -> ``qs`` int8 ``[..., K]`` and ``d`` f32 ``[..., K/32]`` (bfloat16 values); x is about d * qs."""
    blocks = _blocks(x, 32)
    d = round_bf16(np.abs(blocks).max(axis=-1) / np.float32(127))
    inverse = _finite(np.float32(1), d)
    # d may have been rounded down, so that the largest value would become 128.
    qs = np.clip(np.rint(blocks * inverse[..., None]), -128, 127).astype(np.int8)
    return qs.reshape(x.shape), d


def round_q8_k(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows ``[..., K]`` -> ``qs`` int8 ``[..., K]`` and ``d`` f32 ``[..., K/32]``: one scale per 256 values, repeated for each 32."""
    blocks = _blocks(x, 256)
    top = np.abs(blocks).max(axis=-1)
    inverse = _finite(np.float32(127), top)
    qs = np.clip(np.rint(blocks * inverse[..., None]), -127, 127).astype(np.int8)
    return qs.reshape(x.shape), np.repeat(top / np.float32(127), 8, axis=-1)


def round_activations(x: np.ndarray, mode: str) -> np.ndarray:
    """The f32 values that a product in this mode really multiplies."""
    if mode == "f32":
        return np.asarray(x, np.float32)
    if mode == "bf16":
        return round_bf16(x)
    if mode not in ("q8_2", "q8_k"):
        raise GGUFError(f"activation mode {mode!r} is unknown; known are q8_2, q8_k, f32, bf16")
    qs, d = round_q8_2(x) if mode == "q8_2" else round_q8_k(x)
    return qs.astype(np.float32) * np.repeat(d, 32, axis=-1)


def _blocks(x: np.ndarray, length: int) -> np.ndarray:
    if x.shape[-1] % length:
        raise GGUFError(f"activation rows of {x.shape[-1]} values cannot be rounded in blocks of {length}")
    return np.ascontiguousarray(x, np.float32).reshape(*x.shape[:-1], x.shape[-1] // length, length)


def _finite(a: np.float32, b: np.ndarray) -> np.ndarray:
    """a / b, and 0 where that is not finite: blocks of zeros, and of values too small to divide by, round to zeros."""
    with np.errstate(divide="ignore", over="ignore"):
        quotient = a / b
    return np.where(np.isfinite(quotient), quotient, np.float32(0))
