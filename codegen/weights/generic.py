"""Any block type without a layout of its own: codes and f32 scales from the reference unpacking in ``formats.quants``.

Right by construction for every type; ``Codes`` keeps a byte per code, ``indexed`` a nibble where a type has few enough values.
"""

from __future__ import annotations

import numpy as np

from ggufc.codegen.emitter import Emitter
from ggufc.codegen.weights.base import Cursor, Planes, Unpacked, WeightFormat, as_words, load_f32, load_word
from ggufc.formats.activations import activation_mode
from ggufc.formats.ggml_types import type_by_name
from ggufc.formats.quants import codes
from ggufc.formats.quants.codes import DECODERS


class Decoded(WeightFormat):
    """Base of the formats made from decoded codes: f32 scales per 16 or 32 columns, then minima where the type has them."""

    def __init__(self, type_name: str) -> None:
        info = type_by_name(type_name)
        self.type_name = info.name  # type: ignore[misc]
        self.columns = max(32, info.block)  # type: ignore[misc]
        self.mode = activation_mode(info.name)  # type: ignore[misc]
        self.group = DECODERS[info.name][1]  # type: ignore[misc]
        blank = np.zeros((1, info.row_header + info.bytes), np.uint8)
        self.has_min = codes(info.name, blank, info.block)[2] is not None  # type: ignore[misc]
        self.scale_bytes = 64 * (32 // self.group) * (2 if self.has_min else 1)  # type: ignore[misc]

    def decode(self, raw: np.ndarray, k: int) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
        """Codes int8 [R, K] and the fields of the scale plane."""
        code, scale, low, g = codes(self.type_name, raw, k)
        n = 32 // g
        numbers = [scale] if low is None else [scale, -low]
        return code, tuple(a.reshape(len(raw), k // 32, n)[:, :, i] for a in numbers for i in range(n))


class Codes(Decoded):
    """``w = scale * (code - 128) + min``, ``code`` a byte."""

    code_bytes = 512
    offset = 128

    def planes(self, raw: np.ndarray, k: int) -> Planes:
        code, numbers = self.decode(raw, k)
        return Planes(as_words((code.view(np.uint8) ^ 0x80).reshape(len(raw), k // 32, 32)), numbers)

    def unpack(self, e: Emitter, c: Cursor) -> Unpacked:
        n = 32 // self.group
        numbers = [load_f32(e, c.scales, 64 * i, c.part) for i in range(n * (2 if self.has_min else 1))]
        return Unpacked([load_word(e, c, q) for q in range(8)], numbers[:n], numbers[n:])
