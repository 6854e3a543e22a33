"""Any block type without a layout of its own: one byte per code and f32 scales, lossless.

The codes come from the reference unpacking in ``formats.quants``, so these types are right by construction; they take the space of
their int8 codes.
"""

from __future__ import annotations

import numpy as np

from ggufc.codegen.emitter import Emitter
from ggufc.codegen.weights.base import Cursor, Planes, Unpacked, WeightFormat, as_words, load_f32, load_word
from ggufc.formats.activations import activation_mode
from ggufc.formats.ggml_types import type_by_name
from ggufc.formats.quants import codes as decode
from ggufc.formats.quants.codes import DECODERS


class Codes(WeightFormat):
    """``w = scale * (code - 128) + min``, ``code`` a byte."""

    code_bytes = 512
    offset = 128

    def __init__(self, type_name: str) -> None:
        info = type_by_name(type_name)
        self.type_name = info.name  # type: ignore[misc]
        self.columns = max(32, info.block)  # type: ignore[misc]
        self.mode = activation_mode(info.name)  # type: ignore[misc]
        self.group = DECODERS[info.name][1]  # type: ignore[misc]
        blank = np.zeros((1, info.row_header + info.bytes), np.uint8)
        self.has_min = decode(info.name, blank, info.block)[2] is not None  # type: ignore[misc]
        self.scale_bytes = 64 * (32 // self.group) * (2 if self.has_min else 1)  # type: ignore[misc]

    def planes(self, raw: np.ndarray, k: int) -> Planes:
        code, scale, low, g = decode(self.type_name, raw, k)
        words = as_words((code.view(np.uint8) ^ 0x80).reshape(len(raw), k // 32, 32))
        per_group = [scale] if low is None else [scale, -low]
        n = 32 // g
        return Planes(words, tuple(a.reshape(len(raw), k // 32, n)[:, :, i] for a in per_group for i in range(n)))

    def unpack(self, e: Emitter, c: Cursor) -> Unpacked:
        n = 32 // self.group
        numbers = [load_f32(e, c.scales, 64 * i, c.part) for i in range(n * (2 if self.has_min else 1))]
        return Unpacked([load_word(e, c, q) for q in range(8)], numbers[:n], numbers[n:])
