"""Block types to float32, exactly as row look-ups see them."""

from __future__ import annotations

import numpy as np

from ggufc.formats.errors import GGUFError
from ggufc.formats.ggml_types import type_by_name
from ggufc.formats.quants.codes import DECODERS, SLAB, as_rows, codes, split_rows
from ggufc.formats.quants.ik_types import iq6_k_values

_PLAIN = {"f32": "<f4", "f16": "<f2", "f64": "<f8", "i8": "i1", "i16": "<i2", "i32": "<i4", "i64": "<i8"}


def bf16_to_f32(words: np.ndarray) -> np.ndarray:
    """uint16 patterns of bfloat16 to float32."""
    return (words.astype(np.uint32) << 16).view(np.float32)


def dequantize(type_name: str, raw: np.ndarray, ne0: int) -> np.ndarray:
    """Values f32 ``[rows, ne0]`` of the rows in ``raw`` (uint8, any shape). ``GGUFError`` where ``raw`` is not whole rows."""
    info = type_by_name(type_name)
    rows = as_rows(info.name, raw, ne0)
    if info.name in _PLAIN:
        return np.ascontiguousarray(rows).view(_PLAIN[info.name]).astype(np.float32)
    if info.name == "bf16":
        return bf16_to_f32(np.ascontiguousarray(rows).view("<u2"))
    if info.name not in DECODERS:
        raise GGUFError(f"{info.name} cannot be dequantised")
    out = np.empty((len(rows), ne0), np.float32)
    step = max(1, SLAB // ne0)
    for at in range(0, len(rows), step):
        part = rows[at : at + step]
        if info.name == "iq6_k":
            out[at : at + step] = iq6_k_values(split_rows(info, part)[0]).reshape(-1, ne0)
            continue
        q, scale, low, g = codes(info.name, part, ne0)
        grouped = out[at : at + step].reshape(len(part), -1, g)
        np.multiply(q.reshape(len(part), -1, g), scale[:, :, None], out=grouped, casting="unsafe", dtype=np.float32)
        if low is not None:
            grouped -= low[:, :, None]
    return out
