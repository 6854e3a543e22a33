"""Types whose codes take at most sixteen values: a nibble per code into a table, and f32 scales.

Serves the IQ1, IQ2 and IQ3 types and the engine's own types of two and three bits. The codes come from the reference unpacking in
``formats.quants``; the values are those of the types' codebooks (spec: quantised tensor types, sections 4 and 5).
"""

from __future__ import annotations

import numpy as np

from ggufc.codegen.emitter import Emitter
from ggufc.codegen.errors import CodegenError
from ggufc.codegen.weights import tables
from ggufc.codegen.weights.base import Cursor, Planes, Unpacked, load_f32, pack4, quads4
from ggufc.codegen.weights.generic import Decoded
from ggufc.formats.quants.tables import T2, T3

_MISSING = 255


def _both_signs(*magnitudes: int) -> tuple[int, ...]:
    return (*(-m for m in reversed(magnitudes)), *magnitudes)


_EIGHTS = _both_signs(8, 25, 43)
_TERNARY = _both_signs(1, 7, 9)
_T2, _T3 = tuple(int(v) for v in T2), tuple(int(v) for v in T3)
VALUES: dict[str, tuple[int, ...]] = {
    "iq1_s": _TERNARY,
    "iq1_m": _TERNARY,
    "iq2_xxs": _EIGHTS,
    "iq2_xs": _EIGHTS,
    "iq2_s": _EIGHTS,
    "iq3_xxs": _both_signs(4, 12, 20, 28, 36, 44, 52, 62),
    "iq3_s": _both_signs(1, 3, 5, 7, 9, 11, 13, 15),
    "iq2_k": _T2,
    "iq2_ks": _T2,
    "iq2_kl": _T3[:8],
    "iq3_k": _T3,
    "iq3_ks": _T3,
}
"""Every code a type can decode to."""


class Indexed(Decoded):
    """``w = scale * values[nibble]``; the table holds the values with the offset added."""

    code_bytes = 256

    def __init__(self, type_name: str) -> None:
        super().__init__(type_name)
        self.values = VALUES[type_name]
        self.offset = 1 << (max(abs(v) for v in self.values) - 1).bit_length()  # type: ignore[misc]
        self.u_max = max(self.values) + self.offset  # type: ignore[misc]
        self._index = np.full(256, _MISSING, np.uint8)
        self._index[np.array(self.values, np.int8).view(np.uint8)] = np.arange(len(self.values), dtype=np.uint8)

    def planes(self, raw: np.ndarray, k: int) -> Planes:
        code, numbers = self.decode(raw, k)
        index = self._index[code.view(np.uint8)]
        if (index == _MISSING).any():
            raise CodegenError(f"internal: a {self.type_name} code is not one of its {len(self.values)} values")
        return Planes(pack4(index.reshape(len(raw), k // 32, 32)), numbers)

    def unpack(self, e: Emitter, c: Cursor) -> Unpacked:
        table = [v + self.offset for v in self.values]
        table += [self.offset] * (16 - len(table))
        n = 32 // self.group
        scales = [load_f32(e, c.scales, 64 * i, c.part) for i in range(n)]
        return Unpacked(tables.lookup16(e, quads4(e, c), table), scales, [])
