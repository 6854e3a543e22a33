"""The inverse of ``bits``: values ``[blocks, count]`` to packed bytes."""

from __future__ import annotations

import numpy as np


def pack_planes(values: np.ndarray, span: int, width: int) -> np.ndarray:
    """Fields of ``width`` bits, plane by plane over runs of ``span`` bytes; undoes ``bits.planes``."""
    fields = 8 // width
    runs = values.astype(np.uint8).reshape(len(values), -1, fields, span)
    shifts = np.arange(0, 8, width, dtype=np.uint8)
    return np.bitwise_or.reduce(runs << shifts[:, None], axis=2).reshape(len(values), -1)


def f16_bytes(x: np.ndarray) -> np.ndarray:
    """f32 ``[blocks, 1]`` as half-precision bytes ``[blocks, 2]``."""
    return np.ascontiguousarray(x.astype("<f2")).view(np.uint8).reshape(len(x), 2)


def to_f16(x: np.ndarray) -> np.ndarray:
    """f32 rounded to half precision, as f32: the scale a reader will see. Overflow gives inf, which ``quantize`` refuses."""
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype(np.float32)
