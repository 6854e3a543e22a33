"""Products of F32, F16 and BF16 weights in batches by pairs of bf16 (``--fast-prefill``).

Weights and activations are rounded to bf16, and ``vdpbf16ps`` adds two products per step to an f32 sum, in ascending order of columns.
Few tokens keep the exact form (``FloatProduct``). So a token's bits depend on how many stand beside it: this form is used only where the
user asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llvmlite import ir

from ggufc.codegen.emitter import F32, I16, I32, Emitter, Value, vec
from ggufc.codegen.kernels.matmul_float import FloatProduct
from ggufc.codegen.kernels.matmul_tokens import Done, Tokens, run_tokens

FEWEST = 32
"""Tokens below which products stay exact."""
_BLOCK = 16
"""Tokens at a time: as many accumulators as half the registers hold."""
COLUMNS = 32
"""Rows come in multiples of this."""
_APART = 64
"""Bytes between rounded rows beyond their size, lest a power of two sends all of them to the same lines of the cache."""


class _BFloat(ir.Type):
    """The element type of the instructions' operands, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"


_BF16 = ir.VectorType(_BFloat(), 32)


@dataclass
class Bf16Product(FloatProduct):
    """``FloatProduct`` whose batches are rounded to bf16; 16 lanes, AVX512-BF16."""

    def scratch_bytes(self, groups: int) -> int:
        return 32 * self.k * groups + self._stride * run_tokens(self.row_bytes())

    @property
    def _stride(self) -> int:
        """Bytes between rounded rows of activations."""
        return 2 * self.k + _APART

    def prepare(self, e: Emitter, tokens: Tokens, groups: int) -> None:
        """Round the activations of all blocks, one after the other behind the panels of ``groups`` groups."""
        whole, many = self._whole(e, tokens)
        rounded = e.gep(e.scratch, 32 * self.k * groups)
        with e.if_(many), e.for_range(tokens.first, whole, name="row") as t:
            self._round(e, tokens.rows(t, 1)[0], e.at(rounded, e.b.sub(t, tokens.first), self._stride))

    def run(self, e: Emitter, groups: Sequence[Value], tokens: Tokens, done: Done) -> None:
        b = e.b
        whole, many = self._whole(e, tokens)
        with e.if_(many):
            panels = [e.gep(e.scratch, 32 * self.k * i) for i in range(len(groups))]
            rounded = e.gep(e.scratch, 32 * self.k * len(groups))
            for group, panel in zip(groups, panels):
                with e.for_range(0, self.k // 2, name="pair") as pair:
                    e.store(self._pair(e, group, b.shl(pair, e.i64(1))), e.at(panel, pair, 64))
            with e.for_range(tokens.first, whole, _BLOCK, name="block") as t:
                block = e.at(rounded, b.sub(t, tokens.first), self._stride)
                if not tokens.adjacent:
                    block = rounded
                    for i, row in enumerate(tokens.rows(t, _BLOCK)):
                        self._round(e, row, e.gep(block, self._stride * i))
                done(e.i64(0), t, [self._sums_of_pairs(e, panel, block) for panel in panels])
        super().run(e, groups, Tokens(whole, tokens.stop, tokens.rows, tokens.adjacent), done)

    def _whole(self, e: Emitter, tokens: Tokens) -> tuple[Value, Value]:
        """Where the whole blocks of a batch end (at its start if it is too small), and whether there are any."""
        b = e.b
        count = b.sub(tokens.stop, tokens.first)
        many = b.icmp_signed(">=", count, e.i64(FEWEST))
        return b.add(tokens.first, b.select(many, b.and_(count, e.i64(-_BLOCK)), e.i64(0))), many

    def _pair(self, e: Emitter, group: Value, at: Value) -> Value:
        """Columns ``at`` and ``at + 1`` of 16 rows in bf16, side by side in i32 lanes."""
        low, high = (self.format.column(e, group, e.b.add(at, e.i64(i)), 0) for i in range(2))
        halves = e.b.bitcast(self._narrow(e, low, high), vec(I16, 32))
        return e.b.bitcast(e.shuffle(halves, None, [i // 2 + 16 * (i % 2) for i in range(32)]), vec(I32, 16))

    @staticmethod
    def _narrow(e: Emitter, low: Value, high: Value) -> Value:
        """Two vectors of f32 to bf16, rounded to nearest even."""
        floats = vec(F32, 16)
        return e.b.call(e.intrinsic("llvm.x86.avx512bf16.cvtne2ps2bf16.512", _BF16, [floats, floats]), [high, low])

    def _round(self, e: Emitter, row: Value, to: Value) -> None:
        """Activations of a token to bf16."""
        with e.for_range(0, self.k, COLUMNS, name="round") as at:
            low, high = (e.load(vec(F32, 16), e.gep(e.at(row, at, 4), 64 * i)) for i in range(2))
            e.store(e.b.bitcast(self._narrow(e, low, high), vec(I32, 16)), e.at(to, at, 2))

    def _sums_of_pairs(self, e: Emitter, panel: Value, rounded: Value) -> list[Value]:
        """One vector of weight rows per token of the block."""
        b, floats = e.b, vec(F32, 16)
        dot = e.intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", floats, [floats, _BF16, _BF16])
        acc = [e.var(floats, e.const(floats, 0)) for _ in range(_BLOCK)]
        with e.for_range(0, self.k // 2, name="k") as pair:
            w = b.bitcast(e.load(vec(I32, 16), e.at(panel, pair, 64)), _BF16)
            for i, a in enumerate(acc):
                x = e.splat(e.load(I32, e.at(e.gep(rounded, self._stride * i), pair, 4)), 16)
                a.set(b.call(dot, [a.get(), w, b.bitcast(x, _BF16)]))
        return [a.get() for a in acc]
