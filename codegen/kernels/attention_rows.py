"""Attention, one row (a token and a query head) at a time: its state in the thread's memory and everything that happens to it.

Within a split of the cell list the state is (m, l, acc): reference score, partial sums of probabilities, weighted sum of values. The
splits of a row are merged in ascending order, whoever computed them:

    m' = max(M, m); L = L e^(M - m') + l e^(m - m'); ACC = ACC e^(M - m') + acc e^(m - m'); M = m'

The first split that holds anything is taken as it is. A sink is the last to be merged, with l = 1 and acc = 0.
"""

from __future__ import annotations

import math
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


class Rows:
    """The rows of a block of tokens under one group of query heads; ``first_head`` is the first of them."""

    def __init__(self, spec: FlashAttn, e: Emitter, first_head: Value) -> None:
        self.spec, self.e, self.s = spec, e, Scratch(spec)
        self.lanes = e.target.lanes
        self.width = STEP // self.lanes  # vectors per step
        self.registers = 16 if self.lanes == 16 else 8  # accumulators that fit beside the operands
        self.first_head = first_head
        self.q, self.ldq = e.arg_ptr(0), e.arg_int(1)
        self.out, self.ldo, self.sinks = e.arg_ptr(6), e.arg_int(7), e.arg_ptr(8)

    def at(self, region: int, index: Value | int = 0, size: int = 0) -> Value:
        return self.e.at(self.e.gep(self.e.scratch, region), index, size)

    def ring_entry(self, entry: Value) -> Value:
        """Where the ring holds the address of an entry of the list."""
        return self.e.b.and_(entry, self.e.i64(2 * AHEAD * STEP - 1))

    def head(self, h: Value) -> Value:
        return self.e.b.add(self.first_head, h)

    def load_query(self, t: Value, h: Value, r: Value) -> None:
        """The scaled query of token ``t`` and head ``h`` of the group to row ``r``."""
        e, b, s, spec, n = self.e, self.e.b, self.s, self.spec, self.lanes
        source = e.at(self.q, b.add(b.mul(t, self.ldq), b.mul(self.head(h), e.i64(spec.d))), 4)
        target = self.at(s.q, r, 4 * spec.d)
        scale = e.const(vec(F32, n), spec.scale)
        with e.for_range(0, spec.d - spec.d % n, n) as i:
            e.store(b.fmul(e.load(vec(F32, n), e.at(source, i, 4)), scale), e.at(target, i, 4))
        if spec.d % n:
            done = 4 * (spec.d - spec.d % n)
            e.store_masked(b.fmul(e.load_masked(F32, n, e.gep(source, done), spec.d % n), scale), e.gep(target, done), spec.d % n)

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

    def clear_merged(self, r: Value) -> None:
        self.e.store(self.e.f32(0.0), self.e.gep(self.at(self.s.merged_state, r, 8), 4))

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

    # Splits

    def total(self, r: Value) -> Value:
        """l of row ``r``."""
        return self.halved(self.at(self.s.sums, r, 4 * STEP))

    def halved(self, sums: Value) -> Value:
        """16 partial sums added by halving, in double precision."""
        e, n = self.e, self.lanes
        parts = [e.load(vec(F32, n), e.gep(sums, 4 * n * w)) for w in range(self.width)]
        parts = [e.b.fpext(part, vec(F64, n)) for part in parts]
        while len(parts) > 1:
            parts = [e.b.fadd(x, y) for x, y in zip(parts[: len(parts) // 2], parts[len(parts) // 2 :])]
        return e.b.fptrunc(e.reduce(parts[0], "add"), F32)

    def record(self, r: Value, target: Value) -> None:
        """Row ``r``'s state as a record: m, l, acc."""
        e, s = self.e, self.s
        e.store(e.load(F32, self.at(s.tops, r, 4)), target)
        e.store(self.total(r), e.gep(target, 4))
        self.copy(self.at(s.acc, r, 4 * s.padded), e.gep(target, 4 * RECORD), s.padded)

    def copy(self, source: Value, target: Value, count: int) -> None:
        e, n = self.e, self.lanes
        with e.for_range(0, count, n) as i:
            e.store(e.load(vec(F32, n), e.at(source, i, 4)), e.at(target, i, 4))

    def merge_record(self, r: Value, source: Value) -> None:
        """As ``merge`` with what ``record`` has written."""
        e = self.e
        self.merge(r, e.load(F32, source), e.load(F32, e.gep(source, 4)), e.gep(source, 4 * RECORD))

    def merge(self, r: Value, m: Value, l: Value, acc: Value) -> None:
        """Add a split (m, l, acc) to what row ``r`` has merged so far; one that holds nothing changes nothing. A NaN is not nothing."""
        e, b, s, n = self.e, self.e.b, self.s, self.lanes
        ty = vec(F32, n)
        state, merged = self.at(s.merged_state, r, 8), self.at(s.merged, r, 4 * s.padded)
        with e.if_(b.fcmp_unordered("!=", l, e.f32(0.0))):
            top, total = e.load(F32, state), e.load(F32, e.gep(state, 4))
            with e.if_else(b.fcmp_ordered("==", total, e.f32(0.0))) as (first, later):
                with first:
                    e.store(m, state)
                    e.store(l, e.gep(state, 4))
                    self.copy(acc, merged, s.padded)
                with later:
                    higher = e.fmax(top, m)
                    old, new = (vmath.exp_flushed(e, b.fsub(x, higher)) for x in (top, m))
                    e.store(higher, state)
                    e.store(e.fma(total, old, b.fmul(l, new)), e.gep(state, 4))
                    old_lanes, new_lanes = e.splat(old, n), e.splat(new, n)
                    with e.for_range(0, s.padded, n) as i:
                        at = e.at(merged, i, 4)
                        added = b.fmul(e.load(ty, e.at(acc, i, 4)), new_lanes)
                        e.store(e.fma(e.load(ty, at), old_lanes, added), at)

    def merge_open(self, r: Value) -> None:
        """Merge the split that row ``r`` has just walked."""
        s = self.s
        self.merge(r, self.e.load(F32, self.at(s.tops, r, 4)), self.total(r), self.at(s.acc, r, 4 * s.padded))

    def close(self, t: Value, h: Value, r: Value) -> None:
        """Write the result of row ``r`` after its last split; a row of a single split needs no merging."""
        e, b, s = self.e, self.e.b, self.s
        state = self.at(s.merged_state, r, 8)
        single = b.fcmp_ordered("==", e.load(F32, e.gep(state, 4)), e.f32(0.0))
        with e.if_(b.not_(single)):
            self.merge_open(r)
        m = b.select(single, e.load(F32, self.at(s.tops, r, 4)), e.load(F32, state))
        l = b.select(single, self.total(r), e.load(F32, e.gep(state, 4)))
        self.write(t, h, m, l, b.select(single, self.at(s.acc, r, 4 * s.padded), self.at(s.merged, r, 4 * s.padded)))

    def close_merged(self, t: Value, h: Value, r: Value) -> None:
        """Write what row ``r`` has merged; zeros if that is nothing."""
        e, s = self.e, self.s
        state, merged = self.at(s.merged_state, r, 8), self.at(s.merged, r, 4 * s.padded)
        l = e.load(F32, e.gep(state, 4))
        with e.if_(e.b.fcmp_ordered("==", l, e.f32(0.0))):
            self.fill(merged, s.padded)
        self.write(t, h, e.load(F32, state), l, merged)

    def write(self, t: Value, h: Value, m: Value, l: Value, acc: Value) -> None:
        """acc / l, with the head's sink in the denominator where there are sinks; zeros for l = 0.

        Divided, not multiplied by an inverse: that is one rounding instead of two.
        """
        e, b, spec, n = self.e, self.e.b, self.spec, self.lanes
        scale, total = None, l
        if spec.sinks:
            sink = e.load(F32, e.at(self.sinks, self.head(h), 4))
            top = e.fmax(m, sink)
            scale = vmath.exp_flushed(e, b.fsub(m, top))
            total = e.fma(l, scale, vmath.exp_flushed(e, b.fsub(sink, top)))
        unseen = b.fcmp_ordered("==", l, e.f32(0.0))
        divisor = e.splat(b.select(unseen, e.f32(math.inf), total), n)
        factor = None if scale is None else e.splat(scale, n)

        def result(values: Value) -> Value:
            return b.fdiv(values if factor is None else b.fmul(values, factor), divisor)

        target = e.at(self.out, b.add(b.mul(t, self.ldo), b.mul(self.head(h), e.i64(spec.dv))), 4)
        with e.for_range(0, spec.dv - spec.dv % n, n) as i:
            e.store(result(e.load(vec(F32, n), e.at(acc, i, 4))), e.at(target, i, 4))
        if spec.dv % n:
            done = 4 * (spec.dv - spec.dv % n)
            e.store_masked(result(e.load(vec(F32, n), e.gep(acc, done))), e.gep(target, done), spec.dv % n)
