"""Activation rows to 8-bit records, with the RMS normalisation before it where asked.

The rounding equals ``formats.activations`` bit for bit; the record is ``codegen.weights.activations``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ggufc.codegen.cpu.target import Target
from ggufc.codegen.emitter import F32, F64, I8, I32, Emitter, Value, vec
from ggufc.codegen.errors import CodegenError
from ggufc.codegen.weights.activations import ISUM_FACTOR, q8_record

_ROUND = 12582912.0  # 1.5 * 2^23: adding it rounds |x| < 2^22 to an integer, ties to even, in the low mantissa bits


@dataclass(frozen=True)
class Quantize:
    """One row of ``k`` f32 values per tile to a record; row ``i`` of ``x`` starts ``i * ldx`` elements after the first.

    ``mode`` is ``q8_2`` or ``q8_k``. With ``norm`` the row is first divided by its root mean square (squares in f32, their sum in f64)
    and multiplied by ``weight``.
    """

    k: int
    mode: str
    norm: bool
    eps: float

    arg_names: ClassVar[tuple[str, ...]] = ("x", "ldx", "weight", "out")

    def __post_init__(self) -> None:
        if self.mode not in ("q8_2", "q8_k"):
            raise CodegenError(f"activations cannot be rounded in mode {self.mode!r}: only q8_2 and q8_k are integer modes")
        if self.k % self._block:
            raise CodegenError(f"activation rows of {self.k} values cannot be rounded in blocks of {self._block}")

    @property
    def _block(self) -> int:
        return 32 if self.mode == "q8_2" else 256

    def scratch_bytes(self, target: Target) -> int:
        return 4 * self.k if self.norm else 0

    def emit(self, e: Emitter) -> None:
        b = e.b
        x = e.at(e.arg_ptr(0), b.mul(e.tile, e.arg_int(1)), 4)
        record = e.at(e.arg_ptr(3), e.tile, q8_record(self.k).stride)
        if self.norm:
            x = self._normalise(e, x)
        step = self._block
        with e.for_range(0, self.k // step, name="block") as i:
            self._block_of(e, e.at(x, i, 4 * step), record, i)
        e.ret()

    def _normalise(self, e: Emitter, x: Value) -> Value:
        """The normalised row, in scratch."""
        b, lanes = e.b, e.target.lanes
        floats, doubles = vec(F32, lanes), vec(F64, lanes)
        weight = e.arg_ptr(2)
        total = e.var(doubles, e.const(doubles, 0))
        whole = self.k // lanes * lanes
        with e.for_range(0, whole, lanes, name="square") as i:
            v = e.load(floats, e.at(x, i, 4))
            total.set(b.fadd(total.get(), b.fpext(b.fmul(v, v), doubles)))
        mean = b.fdiv(e.reduce(total.get(), "add"), e.const(F64, self.k))
        root = e.fsqrt(b.fadd(b.fptrunc(mean, F32), e.f32(self.eps)))
        scale = e.splat(b.fdiv(e.f32(1.0), root), lanes)
        with e.for_range(0, whole, lanes, name="scale") as i:
            v = b.fmul(e.load(floats, e.at(x, i, 4)), scale)
            e.store(b.fmul(v, e.load(floats, e.at(weight, i, 4))), e.at(e.scratch, i, 4))
        return e.scratch

    def _block_of(self, e: Emitter, x: Value, record: Value, index: Value) -> None:
        b, lanes = e.b, e.target.lanes
        floats = vec(F32, lanes)
        top = e.var(floats, e.const(floats, 0))
        if self.mode == "q8_2":
            values = [e.load(floats, e.gep(x, 4 * j)) for j in range(0, 32, lanes)]
            for v in values:
                top.set(e.fmax(e.fabs(v), top.get()))
        else:
            with e.for_range(0, 256, lanes, name="top") as j:
                top.set(e.fmax(e.fabs(e.load(floats, e.at(x, j, 4))), top.get()))
        largest = e.reduce(top.get(), "max")
        d = b.fdiv(largest, e.f32(127.0))
        zero = e.f32(0.0)
        if self.mode == "q8_2":
            d = e.bf16_to_f32(e.f32_to_bf16(d))
            inverse = b.select(b.fcmp_ordered(">", d, zero), b.fdiv(e.f32(1.0), d), zero)
            self._store_block(e, x, record, index, d, e.splat(inverse, lanes))
        else:
            inverse = b.select(b.fcmp_ordered(">", largest, zero), b.fdiv(e.f32(127.0), largest), zero)
            inverse = e.splat(inverse, lanes)
            with e.for_range(0, 8, name="sub") as j:
                self._store_block(e, e.at(x, j, 128), record, b.add(b.mul(index, e.i64(8)), j), d, inverse)

    def _store_block(self, e: Emitter, x: Value, record: Value, index: Value, d: Value, inverse: Value) -> None:
        """32 values and their words; ``index`` counts blocks of 32."""
        b, lanes = e.b, e.target.lanes
        floats, ints = vec(F32, lanes), vec(I32, lanes)
        at = q8_record(self.k)
        qs = e.at(record, index, 32)
        halves = []
        for half in range(2):
            total = e.const(ints, 0)
            for j in range(16 * half, 16 * half + 16, lanes):
                v = b.fmul(e.load(floats, e.gep(x, 4 * j)), inverse)
                q = b.sub(b.bitcast(b.fadd(v, e.const(floats, _ROUND)), ints), b.bitcast(e.const(floats, _ROUND), ints))
                q = b.select(b.icmp_signed("<", q, e.const(ints, 127)), q, e.const(ints, 127))
                q = b.select(b.icmp_signed(">", q, e.const(ints, -128)), q, e.const(ints, -128))
                e.store(b.trunc(q, vec(I8, lanes)), e.gep(qs, j))
                total = b.add(total, q)
            halves.append(_sum(e, total))
        both = b.add(*halves)
        factor = e.i32(ISUM_FACTOR)
        e.store(d, e.at(e.gep(record, at.off_d), index, 4))
        c16 = e.at(e.gep(record, at.off_c16), index, 8)
        e.store(b.mul(halves[0], factor), c16)
        e.store(b.mul(halves[1], factor), e.gep(c16, 4))
        e.store(b.mul(both, factor), e.at(e.gep(record, at.off_c32), index, 4))
        e.store(b.fmul(d, b.sitofp(both, F32)), e.at(e.gep(record, at.off_s), index, 4))


def _sum(e: Emitter, v: Value) -> Value:
    """Sum of i32 lanes."""
    n = v.type.count
    while n > 1:
        n //= 2
        if n == 1:
            v = e.b.add(e.b.extract_element(v, e.i32(0)), e.b.extract_element(v, e.i32(1)))
        else:
            v = e.b.add(e.extract_vector(v, 0, n), e.extract_vector(v, n, n))
    return v
