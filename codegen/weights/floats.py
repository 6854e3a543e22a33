"""Formats of F32, F16 and BF16 weights: [column][16 rows], multiplied with unrounded activations."""

from __future__ import annotations

import numpy as np

from ggufc.codegen.emitter import F16, F32, I16, Emitter, Value
from ggufc.codegen.weights.base import ROWS, WeightFormat, load_field


class FloatFormat(WeightFormat):
    """One value of ``size`` bytes per weight; a column of 16 rows is one load."""

    mode = "f32"
    size = 4
    columns = 1

    def group_bytes(self, k: int) -> int:
        return (k * ROWS * self.size + 63) // 64 * 64

    def repack(self, raw: np.ndarray, k: int) -> np.ndarray:
        raw = self._padded(raw, k)
        groups = len(raw) // ROWS
        values = raw.view({2: np.uint16, 4: np.uint32}[self.size]).reshape(groups, ROWS, k)
        out = np.zeros((groups, self.group_bytes(k)), np.uint8)
        out[:, : k * ROWS * self.size].view(values.dtype).reshape(groups, k, ROWS)[...] = values.transpose(0, 2, 1)
        return out.reshape(-1)

    def column(self, e: Emitter, group: Value, at: Value | int, part: Value | int) -> Value:
        """f32 vector of column ``at`` of the part's rows."""
        raise NotImplementedError


class F32Format(FloatFormat):
    type_name = "f32"

    def column(self, e: Emitter, group: Value, at: Value | int, part: Value | int) -> Value:
        return load_field(e, e.at(group, at, 64), 0, F32, 4, part)


class F16Format(FloatFormat):
    type_name, size = "f16", 2

    def column(self, e: Emitter, group: Value, at: Value | int, part: Value | int) -> Value:
        return e.f16_to_f32(load_field(e, e.at(group, at, 32), 0, F16 if e.target.has_f16c else I16, 2, part))


class BF16Format(FloatFormat):
    type_name, size = "bf16", 2

    def column(self, e: Emitter, group: Value, at: Value | int, part: Value | int) -> Value:
        return e.bf16_to_f32(load_field(e, e.at(group, at, 32), 0, I16, 2, part))
