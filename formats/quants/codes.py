"""Integer codes and scales of every block type: what a product of int8 activations needs to know about a weight.

``value = scale * code - min`` with one ``scale`` (and ``min`` where the type has one) per ``g`` = 16 or 32 values. This is the generic path
of kernels for types without a layout of their own, and the one unpacking that the dequantiser is made of.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ggufc.formats.errors import GGUFError
from ggufc.formats.ggml_types import TypeInfo, row_bytes, type_by_name
from ggufc.formats.quants import blocks32, ik_types, iq_types, k_types
from ggufc.formats.quants.decoded import Decoded

SLAB = 1 << 20
"""Values decoded at a time; keeps temporaries in the megabytes."""

Decoder = Callable[[np.ndarray, np.ndarray], Decoded]

DECODERS: dict[str, tuple[Decoder, int]] = {
    "q4_0": (blocks32.q4_0, 32),
    "q4_1": (blocks32.q4_1, 32),
    "q5_0": (blocks32.q5_0, 32),
    "q5_1": (blocks32.q5_1, 32),
    "q6_0": (blocks32.q6_0, 32),
    "q8_0": (blocks32.q8_0, 32),
    "iq4_nl": (blocks32.iq4_nl, 32),
    "mxfp4": (blocks32.mxfp4, 32),
    "q2_k": (k_types.q2_k, 16),
    "q3_k": (k_types.q3_k, 16),
    "q4_k": (k_types.q4_k, 32),
    "q5_k": (k_types.q5_k, 32),
    "q6_k": (k_types.q6_k, 16),
    "iq4_xs": (iq_types.iq4_xs, 32),
    "iq2_xxs": (iq_types.iq2_xxs, 32),
    "iq2_xs": (iq_types.iq2_xs, 16),
    "iq2_s": (iq_types.iq2_s, 16),
    "iq3_xxs": (iq_types.iq3_xxs, 32),
    "iq3_s": (iq_types.iq3_s, 32),
    "iq1_s": (iq_types.iq1_s, 32),
    "iq1_m": (iq_types.iq1_m, 16),
    "iq2_k": (ik_types.iq2_k, 16),
    "iq3_k": (ik_types.iq3_k, 16),
    "iq4_k": (ik_types.iq4_k, 16),
    "iq5_k": (ik_types.iq5_k, 16),
    "iq6_k": (ik_types.iq6_k, 16),
    "iq2_ks": (ik_types.iq2_ks, 32),
    "iq3_ks": (ik_types.iq3_ks, 32),
    "iq4_ks": (ik_types.iq4_ks, 32),
    "iq5_ks": (ik_types.iq5_ks, 32),
    "iq4_kss": (ik_types.iq4_kss, 32),
    "iq2_kl": (ik_types.iq2_kl, 32),
}
"""Block type -> (decoder of blocks, group length g)."""


def as_rows(name: str, raw: np.ndarray, ne0: int) -> np.ndarray:
    """Raw bytes of any shape as uint8 ``[rows, bytes of a row]``; ``GGUFError`` where they are not whole rows."""
    width = row_bytes(name, ne0)
    flat = raw.reshape(-1)
    flat = flat.view(np.uint8) if flat.dtype != np.uint8 else flat
    if flat.size % width:
        raise GGUFError(f"{flat.size} bytes are not whole rows of {ne0} {name} values ({width} bytes each)")
    return flat.reshape(-1, width)


def split_rows(info: TypeInfo, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Blocks uint8 ``[rows * blocks, bytes]`` and the row headers' scale repeated per block, f32 ``[rows * blocks, 1]`` (empty if none)."""
    h = info.row_header
    blocks = np.ascontiguousarray(rows[:, h:]).reshape(-1, info.bytes)
    if h == 0:
        return blocks, np.empty((len(blocks), 0), np.float32)
    head = np.ascontiguousarray(rows[:, :h]).view("<f2" if h == 2 else "<f4").astype(np.float32)
    return blocks, np.repeat(head, len(blocks) // max(1, len(rows)), axis=0)


def codes(type_name: str, raw: np.ndarray, ne0: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, int]:
    """``(codes, scale, min, g)`` of the rows in ``raw``: int8 ``[rows, ne0]``, f32 ``[rows, ne0/g]``, the same or None, 16 or 32.

    ``value = scale * code - min`` exactly as products use it. ``GGUFError`` for types that have no codes (the floats and integers).
    """
    info = type_by_name(type_name)
    entry = DECODERS.get(info.name)
    if entry is None:
        raise GGUFError(f"{info.name} is not a block type: it has no codes and scales")
    decode, g = entry
    rows = as_rows(info.name, raw, ne0)
    out = np.empty((len(rows), ne0), np.int8)
    scale = np.empty((len(rows), ne0 // g), np.float32)
    low: np.ndarray | None = None
    step = max(1, SLAB // ne0)
    for at in range(0, len(rows), step):
        part = slice(at, min(at + step, len(rows)))
        decoded = decode(*split_rows(info, rows[part]))
        out[part] = decoded.codes.reshape(-1, ne0)
        scale[part] = decoded.scale.reshape(-1, ne0 // g)
        if decoded.min is not None:
            low = np.empty_like(scale) if low is None else low
            low[part] = decoded.min.reshape(-1, ne0 // g)
    return out, scale, low, g
