"""Row look-ups in a repacked weight: token embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ggufc.codegen.cpu.target import Target
from ggufc.codegen.emitter import F32, I8, I32, Emitter, Value, vec
from ggufc.codegen.weights import weight_format
from ggufc.codegen.weights.base import ROWS, Cursor, WeightFormat
from ggufc.codegen.weights.floats import FloatFormat


@dataclass(frozen=True)
class GetRows:
    """out[k, i] = dequantised row ``ids[i]`` of a repacked weight; one tile per row.

    Each block of 16 rows is unpacked as in a product and one lane kept, so a weight needs one layout only. The arithmetic (scale *
    code, then + min, each rounded to f32) is that of the reference dequantiser. ``ids`` are trusted.
    """

    format: str
    k: int

    arg_names: ClassVar[tuple[str, ...]] = ("w", "ids", "out")

    def __post_init__(self) -> None:
        weight_format(self.format).check_k(self.k)

    def scratch_bytes(self, target: Target) -> int:
        return 0

    def emit(self, e: Emitter) -> None:
        b, lanes = e.b, e.target.lanes
        fmt = weight_format(self.format)
        row = e.sext64(e.load(I32, e.at(e.arg_ptr(1), e.tile, 4)))
        group = e.at(e.arg_ptr(0), b.lshr(row, e.i64(4)), fmt.group_bytes(self.k))
        part = b.lshr(b.and_(row, e.i64(ROWS - 1)), e.i64(lanes.bit_length() - 1))
        lane = b.trunc(b.and_(row, e.i64(lanes - 1)), I32)
        out = e.at(e.arg_ptr(2), e.tile, 4 * self.k)
        if isinstance(fmt, FloatFormat):
            with e.for_range(0, self.k, name="k") as k:
                e.store(b.extract_element(fmt.column(e, group, k, part), lane), e.at(out, k, 4))
        else:
            m = fmt.chunk_blocks(self.k)
            with e.for_range(0, self.k // 32 // m, name="chunk") as chunk, e.for_range(0, m, name="block") as j:
                cursor = fmt.cursor(e, group, self.k, chunk, j, part)
                self._block(e, fmt, cursor, lane, e.at(out, b.add(b.mul(chunk, e.i64(m)), j), 128))
        e.ret()

    def _block(self, e: Emitter, fmt: WeightFormat, cursor: Cursor, lane: Value, out: Value) -> None:
        b = e.b
        u = fmt.unpack(e, cursor)
        for q, quad in enumerate(u.quads):
            g = q * len(u.scales) // 8
            codes = b.zext(b.bitcast(b.extract_element(quad, lane), vec(I8, 4)), vec(I32, 4))
            if fmt.offset:
                codes = b.sub(codes, e.const(vec(I32, 4), fmt.offset_on(e.target)))
            v = b.fmul(e.splat(b.extract_element(u.scales[g], lane), 4), b.sitofp(codes, vec(F32, 4)))
            if u.mins:
                v = b.fadd(v, e.splat(b.extract_element(u.mins[g], lane), 4))
            e.store(v, e.gep(out, 16 * q))
