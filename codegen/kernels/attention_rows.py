"""Attention, one row (a token and a query head) at a time: its state in the thread's memory within a split of the cell list.

The state is (m, l, acc): reference score, partial sums of probabilities, weighted sum of values.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

from llvmlite import ir

from ggufc.codegen.emitter import F32, F64, I32, Emitter, Value, vec
from ggufc.codegen.kernels import vmath
from ggufc.codegen.kernels.attention_cells import AHEAD, GROUP, RING_BYTES, STEP
from ggufc.codegen.kernels.cache_blocks import VALUES

if TYPE_CHECKING:
    from ggufc.codegen.kernels.attention_cpu import FlashAttn

SLACK = 8.0
"""How far scores may exceed the reference m before it moves: p stays below e^8, and moving it, the costly part of a step, becomes rare."""

LOWEST = -3.4028234663852886e38

ROUNDED_BLOCK = 12
"""Bytes that go with the codes of each block of 32 values of a rounded query."""

RECORD = 16
"""Values before acc in a record of partial results: m, l, padding up to the alignment of acc."""


class Scratch:
    """Byte offsets of the thread's working memory."""

    def __init__(self, spec: FlashAttn) -> None:
        self.rows = spec.head_block * spec.token_block
        self.padded = spec.padded
        self.size = 0
        self.k_ring = self._take(RING_BYTES)
        self.v_ring = self._take(RING_BYTES)
        self.k = self._take(4 * STEP * spec.d)
        self.quads = self._take(4 * STEP * STEP * 4)  # partial sums of a group's quads under up to four heads
        self.v = self._take(4 * STEP * self.padded)
        self.q = self._take(4 * spec.d * self.rows)
        self.acc = self._take(4 * self.padded * self.rows)
        self.sums = self._take(4 * STEP * self.rows)
        self.p = self._take(4 * STEP * self.rows)
        self.tops = self._take(4 * self.rows)
        self.bounds = self._take(8 * self.rows)
        self.merged = self._take(4 * self.padded * self.rows)
        self.merged_state = self._take(8 * self.rows)  # M, L
        # What block types need (``attention_rounded``, ``attention_weights``), whatever the types: kinds of rows share this memory.
        blocks = -(-self.padded // VALUES)
        self.codes_size = _lines(spec.d + -(-spec.d // VALUES) * ROUNDED_BLOCK)
        self.codes = self._take(self.codes_size * self.rows)
        self.v_scales = self._take(2 * 4 * STEP * blocks)
        self.weights_size = 4 * STEP * GROUP * (self.padded // 16)
        self.weights = self._take(self.weights_size * 4)
        self.minima_size = 4 * STEP * blocks
        self.minima = self._take(self.minima_size * self.rows)

    def _take(self, size: int) -> int:
        at = self.size
        self.size += _lines(size)
        return at


def _lines(size: int) -> int:
    return -(-size // 64) * 64


def registers(lanes: int) -> int:
    """Accumulators that fit beside the operands."""
    return 16 if lanes == 16 else 8


def direct(spec: FlashAttn, lanes: int) -> bool:
    """Whether a lone token reads the cache as it lies: with few query heads it uses each value too rarely to convert and store it first."""
    return spec.head_block <= 4 and spec.head_block * STEP // lanes <= registers(lanes)


class Rows:
    """The rows of a block of tokens under one group of query heads."""

    def __init__(self, spec: FlashAttn, e: Emitter) -> None:
        self.spec, self.e, self.s = spec, e, Scratch(spec)
        self.lanes = e.target.lanes
        self.width = STEP // self.lanes  # vectors per step
        self.registers = registers(self.lanes)

    def at(self, region: int, index: Value | int = 0, size: int = 0) -> Value:
        return self.e.at(self.e.gep(self.e.scratch, region), index, size)

    def ring_entry(self, entry: Value) -> Value:
        """Where the ring holds the address of an entry of the list."""
        return self.e.b.and_(entry, self.e.i64(2 * AHEAD * STEP - 1))

    def bound(self, r: Value, lo: Value, hi: Value) -> None:
        """Row ``r`` sees entries lo..hi-1."""
        e, bounds = self.e, self.at(self.s.bounds, r, 8)
        e.store(e.b.trunc(lo, I32), bounds)
        e.store(e.b.trunc(hi, I32), e.gep(bounds, 4))

    def clear(self, r: Value) -> None:
        """An empty state."""
        e, s = self.e, self.s
        self.fill(self.at(s.acc, r, 4 * s.padded), s.padded)
        self.fill(self.at(s.sums, r, 4 * STEP), STEP)
        e.store(e.f32(LOWEST), self.at(s.tops, r, 4))

    def fill(self, p: Value, n: int) -> None:
        with self.e.for_range(0, n, self.lanes) as i:
            self.e.store(self.e.const(vec(F32, self.lanes), 0.0), self.e.at(p, i, 4))

    def rescale(self, p: Value, n: int, factor: Value) -> None:
        e = self.e
        with e.for_range(0, n, self.lanes) as i:
            at = e.at(p, i, 4)
            e.store(e.b.fmul(e.load(vec(F32, self.lanes), at), factor), at)

    def rescale_row(self, r: Value, factor: Value) -> None:
        """The weighted sums and the partial sums of row ``r`` times ``factor``."""
        self.rescale(self.at(self.s.acc, r, 4 * self.s.padded), self.s.padded, factor)
        self.rescale(self.at(self.s.sums, r, 4 * STEP), STEP, factor)

    def capped(self, v: Value) -> Value:
        """Scores after the soft cap, if there is one."""
        e, b = self.e, self.e.b
        if not self.spec.softcap:
            return v
        scaled = b.fmul(v, e.const(v.type, 1 / self.spec.softcap))
        return b.fmul(vmath.tanh(e, scaled), e.const(v.type, self.spec.softcap))

    def soften(self, p: Value, entry: Value, r: Value) -> None:
        """Capped scores ``p`` of row ``r`` for the step that begins at ``entry`` to probabilities relative to the row's reference score."""
        e, b, n = self.e, self.e.b, self.lanes
        bounds = self.at(self.s.bounds, r, 8)
        lo, hi = (e.splat(e.load(I32, e.gep(bounds, 4 * i)), n) for i in range(2))
        index = e.splat(b.trunc(entry, I32), n)
        for w in range(self.width):
            at = e.gep(p, 4 * n * w)
            lanes = b.add(index, e.const_vec(I32, range(n * w, n * w + n)))
            seen = b.and_(b.icmp_signed(">=", lanes, lo), b.icmp_signed("<", lanes, hi))
            v = e.load(vec(F32, n), at)
            e.store(b.select(seen, v, e.const(v.type, float("-inf"))), at)
        self.soften_seen(p, r)

    def soften_seen(self, p: Value, r: Value) -> None:
        """As ``soften``, of capped scores; those of entries that row ``r`` does not see are -inf."""
        e, b, s, n = self.e, self.e.b, self.s, self.lanes
        most = self.largest([e.load(vec(F32, n), e.gep(p, 4 * n * w)) for w in range(self.width)])
        top = self.at(s.tops, r, 4)
        old = e.load(F32, top)
        bits = ir.IntType(n)
        higher = b.bitcast(b.fcmp_ordered(">", most, e.splat(b.fadd(old, e.f32(SLACK)), n)), bits)
        with e.if_(b.icmp_unsigned("!=", higher, bits(0)), likely=False):
            new = e.reduce(most, "max")
            e.store(new, top)
            factor = e.splat(vmath.exp_flushed(e, b.fsub(old, new)), n)
            self.rescale_row(r, factor)
        self.weigh(p, r, 1)

    def largest(self, v: list[Value]) -> Value:
        """Maximum of each lane."""
        return reduce(self.e.fmax, v)

    def weigh(self, p: Value, r: Value, steps: int) -> None:
        """Probabilities from the scores of ``steps`` adjacent steps, none of which moves the reference of row ``r``."""
        e, b, n = self.e, self.e.b, self.lanes
        ty = vec(F32, n)
        reference = e.splat(e.load(F32, self.at(self.s.tops, r, 4)), n)
        sums = [e.gep(self.at(self.s.sums, r, 4 * STEP), 4 * n * w) for w in range(self.width)]
        totals = [e.load(ty, at) for at in sums]
        for i in range(steps * self.width):
            at = e.gep(p, 4 * n * i)
            probability = vmath.exp_flushed(e, b.fsub(e.load(ty, at), reference))
            e.store(probability, at)
            totals[i % self.width] = b.fadd(totals[i % self.width], probability)
        for at, total in zip(sums, totals):
            e.store(total, at)

    def halved(self, sums: Value) -> Value:
        """16 partial sums added by halving, in double precision."""
        e, n = self.e, self.lanes
        parts = [e.load(vec(F32, n), e.gep(sums, 4 * n * w)) for w in range(self.width)]
        parts = [e.b.fpext(part, vec(F64, n)) for part in parts]
        while len(parts) > 1:
            parts = [e.b.fadd(x, y) for x, y in zip(parts[: len(parts) // 2], parts[len(parts) // 2 :])]
        return e.b.fptrunc(e.reduce(parts[0], "add"), F32)
