"""Activation rows to 8-bit records, with the RMS normalisation before it where asked.

The rounding equals ``formats.activations`` bit for bit; the record is ``codegen.weights.activations``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ggufc.codegen.cpu.target import Target
from ggufc.codegen.emitter import F32, F64, I8, I32, Emitter, Value, vec
from ggufc.codegen.errors import CodegenError
from ggufc.codegen.kernels.vmath import ROUND_F32
from ggufc.codegen.weights.activations import ISUM_FACTOR, q8_record


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
        at = q8_record(self.k)
        d, inverse = e.gep(record, at.off_d), e.gep(record, at.off_s)  # the last field keeps the inverse scales until its turn comes
        if self.mode == "q8_2":
            self._scales_q8_2(e, x, d, inverse)
        else:
            self._scales_q8_k(e, x, d, inverse)
        sums = e.gep(record, at.off_c16)
        with e.for_range(0, self.k // 32, name="block") as i:
            scale = e.splat(e.load(F32, e.at(inverse, i, 4)), e.target.lanes)
            self._codes(e, e.at(x, i, 128), scale, e.at(record, i, 32), e.at(sums, i, 8))
        for start, stop, lanes in self._pieces(e):
            with e.for_range(start, stop, lanes, name="words") as i:
                self._words(e, i, lanes, d, sums, e.gep(record, at.off_c32), inverse)
        e.ret()

    def _pieces(self, e: Emitter) -> list[tuple[int, int, int]]:
        """(start, stop, lanes) over the blocks of 32: whole vectors, then one by one."""
        blocks = self.k // 32
        whole = blocks // e.target.lanes * e.target.lanes
        return [p for p in ((0, whole, e.target.lanes), (whole, blocks, 1)) if p[0] < p[1]]

    def _normalise(self, e: Emitter, x: Value) -> Value:
        """The normalised row, in scratch."""
        b, lanes = e.b, e.target.lanes
        floats, doubles = vec(F32, lanes), vec(F64, lanes)
        weight = e.arg_ptr(2)
        chains = [e.var(doubles, e.const(doubles, 0)) for _ in range(2)]
        with e.for_range(0, self.k, 2 * lanes, name="square") as i:
            for j, total in enumerate(chains):
                v = e.load(floats, e.gep(e.at(x, i, 4), 4 * lanes * j))
                total.set(b.fadd(total.get(), b.fpext(b.fmul(v, v), doubles)))
        squares = b.fadd(chains[0].get(), chains[1].get())
        mean = b.fdiv(e.reduce(squares, "add"), e.const(F64, self.k))
        root = e.fsqrt(b.fadd(b.fptrunc(mean, F32), e.f32(self.eps)))
        scale = e.splat(b.fdiv(e.f32(1.0), root), lanes)
        with e.for_range(0, self.k, lanes, name="scale") as i:
            v = b.fmul(e.load(floats, e.at(x, i, 4)), scale)
            e.store(b.fmul(v, e.load(floats, e.at(weight, i, 4))), e.at(e.scratch, i, 4))
        return e.scratch

    def _scales_q8_2(self, e: Emitter, x: Value, d: Value, inverse: Value) -> None:
        """The scale of each 32 values and its inverse: largest magnitudes first, so that the divisions are vectors."""
        b = e.b
        with e.for_range(0, self.k // 32, name="top") as i:
            e.store(_largest(e, e.at(x, i, 128), 32), e.at(d, i, 4))
        for start, stop, lanes in self._pieces(e):
            ty = vec(F32, lanes)
            with e.for_range(start, stop, lanes, name="scale") as i:
                at = e.at(d, i, 4)
                scale = e.bf16_to_f32(e.f32_to_bf16(b.fdiv(e.load(ty, at), e.const(ty, 127))))
                e.store(scale, at)
                some = b.fcmp_ordered(">", scale, e.const(ty, 0))
                e.store(b.select(some, b.fdiv(e.const(ty, 1), scale), e.const(ty, 0)), e.at(inverse, i, 4))

    def _scales_q8_k(self, e: Emitter, x: Value, d: Value, inverse: Value) -> None:
        """One scale per 256 values, repeated for each 32."""
        b = e.b
        with e.for_range(0, self.k // 256, name="top") as i:
            top = _largest(e, e.at(x, i, 1024), 256)
            factor = b.select(b.fcmp_ordered(">", top, e.f32(0)), b.fdiv(e.f32(127), top), e.f32(0))
            for j in range(0, 8, 4):
                e.store(e.splat(b.fdiv(top, e.f32(127)), 4), e.gep(e.at(d, i, 32), 4 * j))
                e.store(e.splat(factor, 4), e.gep(e.at(inverse, i, 32), 4 * j))

    def _codes(self, e: Emitter, x: Value, inverse: Value, codes: Value, sums: Value) -> None:
        """32 codes, and the sums of the two halves."""
        b, lanes = e.b, e.target.lanes
        floats, ints = vec(F32, lanes), vec(I32, lanes)
        pieces = []
        for j in range(0, 32, lanes):
            v = b.fmul(e.load(floats, e.gep(x, 4 * j)), inverse)
            q = b.sub(b.bitcast(b.fadd(v, e.const(floats, ROUND_F32)), ints), b.bitcast(e.const(floats, ROUND_F32), ints))
            q = b.select(b.icmp_signed("<", q, e.const(ints, 127)), q, e.const(ints, 127))
            q = b.select(b.icmp_signed(">", q, e.const(ints, -128)), q, e.const(ints, -128))
            pieces.append(b.trunc(q, vec(I8, lanes)))
        while len(pieces) > 1:
            pieces = [e.concat(lo, hi) for lo, hi in zip(pieces[::2], pieces[1::2])]
        e.store(pieces[0], codes)
        words = b.bitcast(pieces[0], vec(I32, 8))
        ones = e.const(vec(I32, 4), 0x01010101)
        if lanes == 4:
            low, high = (e.dot4(e.const(ones.type, 0), ones, e.extract_vector(words, j, 4), 1) for j in (0, 4))
            quarters = e.concat(low, high)
        else:
            quarters = e.dot4(e.const(words.type, 0), e.concat(ones, ones), words, 1)
        pairs = b.add(quarters, e.shuffle(quarters, None, [1, 0, 3, 2, 5, 4, 7, 6]))
        halves = b.add(pairs, e.shuffle(pairs, None, [2, 3, 0, 1, 6, 7, 4, 5]))
        e.store(e.shuffle(halves, None, [0, 4]), sums)

    @staticmethod
    def _words(e: Emitter, i: Value, lanes: int, d: Value, sums: Value, c32: Value, s: Value) -> None:
        """The block sums of ``lanes`` blocks to the fields made of them."""
        b = e.b
        at = e.at(sums, i, 8)
        pairs = e.load(vec(I32, 2 * lanes), at)
        factor = e.const(pairs.type, ISUM_FACTOR)
        e.store(b.mul(pairs, factor), at)
        if lanes == 1:
            both = b.add(b.extract_element(pairs, e.i32(0)), b.extract_element(pairs, e.i32(1)))
        else:
            both = b.add(e.shuffle(pairs, None, range(0, 2 * lanes, 2)), e.shuffle(pairs, None, range(1, 2 * lanes, 2)))
        e.store(b.mul(both, e.const(both.type, ISUM_FACTOR)), e.at(c32, i, 4))
        scale = e.load(vec(F32, lanes), e.at(d, i, 4))
        e.store(b.fmul(scale, b.sitofp(both, vec(F32, lanes))), e.at(s, i, 4))


def _largest(e: Emitter, x: Value, count: int) -> Value:
    """Largest magnitude of ``count`` values."""
    floats = vec(F32, e.target.lanes)
    top = e.const(floats, 0)
    for j in range(0, count, e.target.lanes):
        top = e.fmax(e.fabs(e.load(floats, e.gep(x, 4 * j))), top)
    return e.reduce(top, "max")
