"""Attention, one row at a time: what surrounds the walks over its splits. Its query comes in, its splits are merged, its result goes out.

The splits of a row are merged in ascending order, whoever computed them:

    m' = max(M, m); L = L e^(M - m') + l e^(m - m'); ACC = ACC e^(M - m') + acc e^(m - m'); M = m'

The first split that holds anything is taken as it is. A sink is the last to be merged, with l = 1 and acc = 0.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ggufc.codegen.emitter import F32, Emitter, Value, vec
from ggufc.codegen.kernels import vmath
from ggufc.codegen.kernels.attention_cells import STEP
from ggufc.codegen.kernels.attention_rounded import RoundedRows
from ggufc.codegen.kernels.attention_rows import RECORD

if TYPE_CHECKING:
    from ggufc.codegen.kernels.attention_cpu import FlashAttn


class Results(RoundedRows):
    """Rows with their queries and results, by the arguments of ``FlashAttn``; ``first_head``: the first of their query heads."""

    def __init__(self, spec: FlashAttn, e: Emitter, first_head: Value) -> None:
        super().__init__(spec, e)
        self.first_head = first_head
        self.q, self.ldq = e.arg_ptr(0), e.arg_int(1)
        self.out, self.ldo, self.sinks = e.arg_ptr(6), e.arg_int(7), e.arg_ptr(8)

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
        if self.rounds:
            self.round_query(r)

    def clear_merged(self, r: Value) -> None:
        self.e.store(self.e.f32(0.0), self.e.gep(self.at(self.s.merged_state, r, 8), 4))

    # Splits

    def total(self, r: Value) -> Value:
        """l of row ``r``."""
        return self.halved(self.at(self.s.sums, r, 4 * STEP))

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
