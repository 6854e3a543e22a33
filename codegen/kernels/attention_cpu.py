"""Attention over the cell list of a cache, with online softmax, for CPUs.

One tile of work is a block of tokens and one KV head. The list of a token's cells is walked in steps of 16 entries counted from
entry 0. For each step the K rows are converted to f32 and transposed, the V rows converted, once for all query heads of the KV head
and all tokens of the block that share the list. Per row (token, query head) and step:

    s_j = sum_i q_i K_ij                 one fused chain over i ascending; lanes hold the 16 entries j
    m'  = max s if max s > m + 8, else m; acc, l *= e^(m - m') if m' > m
    p_j = e^(s_j - m'); l_j += p_j       l keeps 16 partial sums, added by halving at the end
    acc += p_j V_j                       one fused chain over j ascending; lanes hold the value's elements

Entries a token does not see get p = 0 and take no part in the chains of acc, so a result depends on the token's visible entries and
their places in the list alone: not on other tokens, on cells, on the grouping of rows (which only interleaves independent chains) or
on the size of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from llvmlite import ir

from ggufc.codegen.cpu.target import Target
from ggufc.codegen.emitter import F32, I32, I64, Emitter, Value, vec
from ggufc.codegen.errors import CodegenError
from ggufc.codegen.kernels import cache, vmath
from ggufc.codegen.kernels.attention_cells import AHEAD, RING_BYTES, STEP, CellRows

TOKEN_BLOCK = 16
"""Tokens per tile of work: ``FlashAttn`` runs over ``n_head_kv * ceil(T / TOKEN_BLOCK)`` tiles."""

_SLACK = 8.0
"""How far scores may exceed the reference m before it moves: p stays below e^8, and moving it, the costly part of a step, becomes rare."""

_LOWEST = -3.4028234663852886e38


@dataclass(frozen=True)
class FlashAttn:
    """out f32[dv * n_head, T] = softmax(softcap(scale * q K^T)) V over each token's visible cells; zeros for a token that sees none.

    ``q`` f32[d * n_head, T] (leading dimension ``ldq``); ``k``, ``v`` caches with rows of ``d * n_head_kv`` and ``dv * n_head_kv`` values
    of ``type_k``, ``type_v``; ``cells`` i32[R]; ``visible`` i32[3, T]: (base, lo, hi), the token sees ``cells[base + lo : base + hi]``.
    Query head h reads KV head h / (n_head / n_head_kv). The KV head is the tile's fastest index.
    """

    d: int
    dv: int
    n_head: int
    n_head_kv: int
    type_k: str
    type_v: str
    scale: float
    softcap: float = 0.0
    arg_names: ClassVar[tuple[str, ...]] = ("q", "ldq", "k", "v", "cells", "visible", "out", "ldo")

    def __post_init__(self) -> None:
        cache.check_storage(self.type_k, self.d, "attention: head of the K cache")
        cache.check_storage(self.type_v, self.dv, "attention: head of the V cache")
        if self.n_head % self.n_head_kv:
            raise CodegenError(f"attention: {self.n_head} query heads are not a multiple of {self.n_head_kv} KV heads")

    def emit(self, e: Emitter) -> None:
        _Attention(self, e).emit()

    def scratch_bytes(self, target: Target) -> int:
        return _Scratch(self).size


class _Scratch:
    """Byte offsets of the thread's working memory."""

    def __init__(self, spec: FlashAttn) -> None:
        self.group = spec.n_head // spec.n_head_kv
        self.rows = self.group * TOKEN_BLOCK
        self.padded = -(-spec.dv // 16) * 16
        self.size = 0
        self.k_ring = self._take(RING_BYTES)
        self.v_ring = self._take(RING_BYTES)
        self.k = self._take(4 * STEP * spec.d)
        self.v = self._take(4 * STEP * self.padded)
        self.q = self._take(4 * spec.d * self.rows)
        self.acc = self._take(4 * self.padded * self.rows)
        self.sums = self._take(4 * STEP * self.rows)
        self.p = self._take(4 * STEP * self.rows)
        self.tops = self._take(4 * self.rows)
        self.bounds = self._take(8 * self.rows)

    def _take(self, size: int) -> int:
        at = self.size
        self.size += -(-size // 64) * 64
        return at


class _Span(NamedTuple):
    """The entries of a run of tokens: ``low..high-1`` any token sees, ``all_low..all_high-1`` all see."""

    cells: Value
    low: Value
    high: Value
    all_low: Value
    all_high: Value


class _Attention:
    def __init__(self, spec: FlashAttn, e: Emitter) -> None:
        self.spec, self.e, self.s = spec, e, _Scratch(spec)
        self.lanes = e.target.lanes
        self.width = STEP // self.lanes  # vectors per step
        self.registers = 16 if self.lanes == 16 else 8  # accumulators that fit beside the operands
        b = e.b
        self.g = b.urem(e.tile, e.i64(spec.n_head_kv))
        self.first = b.mul(b.udiv(e.tile, e.i64(spec.n_head_kv)), e.i64(TOKEN_BLOCK))
        self.q, self.ldq = e.arg_ptr(0), e.arg_int(1)
        self.cells, self.visible, self.out, self.ldo = e.arg_ptr(4), e.arg_ptr(5), e.arg_ptr(6), e.arg_int(7)
        self.keys = CellRows(e, spec.type_k, spec.d, spec.n_head_kv, e.arg_ptr(2), self.g, self.at(self.s.k_ring))
        self.values = CellRows(e, spec.type_v, spec.dv, spec.n_head_kv, e.arg_ptr(3), self.g, self.at(self.s.v_ring))
        # With few query heads a lone token uses each converted value too rarely to store it first.
        self.direct = self.s.group <= 4 and self.s.group * self.width <= self.registers

    def at(self, region: int, index: Value | int = 0, size: int = 0) -> Value:
        return self.e.at(self.e.gep(self.e.scratch, region), index, size)

    def triple(self, t: Value, part: int) -> Value:
        e = self.e
        return e.sext64(e.load(I32, e.gep(e.at(self.visible, t, 12), 4 * part)))

    # -- the walk ----------------------------------------------------------------------------------------------------

    def emit(self) -> None:
        """Split the block into runs of tokens with the same list, and attend each run together."""
        e, b = self.e, self.e.b
        last = e.imin(b.add(self.first, e.i64(TOKEN_BLOCK)), e.param("T"))
        start = e.var(I64, self.first)
        with e.while_loop("run") as runs:
            runs.break_if(b.icmp_signed(">=", start.get(), last))
            begin = start.get()
            base = self.triple(begin, 0)
            end = e.var(I64, b.add(begin, e.i64(1)))
            with e.while_loop("extend") as extend:
                extend.break_if(b.icmp_signed(">=", end.get(), last))
                extend.break_if(b.icmp_signed("!=", self.triple(end.get(), 0), base))
                end.set(b.add(end.get(), e.i64(1)))
            self.run(begin, end.get(), base)
            start.set(end.get())
        e.ret()

    def run(self, begin: Value, end: Value, base: Value) -> None:
        e, b, s = self.e, self.e.b, self.s
        huge = 1 << 40
        low, high = e.var(I64, e.i64(huge)), e.var(I64, e.i64(0))  # entries any token sees
        all_low, all_high = e.var(I64, e.i64(0)), e.var(I64, e.i64(huge))  # entries all tokens see
        with e.for_range(begin, end, name="token") as t:
            lo, hi = self.triple(t, 1), self.triple(t, 2)
            with e.if_(b.icmp_signed("<", lo, hi)):
                low.set(e.imin(low.get(), lo))
                high.set(e.imax(high.get(), hi))
            all_low.set(e.imax(all_low.get(), lo))
            all_high.set(e.imin(all_high.get(), hi))
            with e.for_range(0, s.group, name="head") as h:
                self.start_row(t, h, b.add(b.mul(b.sub(t, begin), e.i64(s.group)), h), lo, hi)
        rows = b.mul(b.sub(end, begin), e.i64(s.group))
        span = _Span(e.at(self.cells, base, 4), low.get(), high.get(), all_low.get(), all_high.get())
        first = b.ashr(span.low, e.i64(4))
        stop = b.ashr(b.add(span.high, e.i64(STEP - 1)), e.i64(4))
        with e.for_range(first, e.imin(stop, b.add(first, e.i64(AHEAD))), name="announce") as step:
            self.announce(span, step)

        def together() -> None:
            with e.for_range(first, stop, name="step") as step:
                self.step_together(span, rows, step, stop)

        if self.direct:
            with e.if_else(b.icmp_signed("==", rows, e.i64(s.group))) as (alone, several):
                with alone, e.for_range(first, stop, name="step") as step:
                    self.step_alone(span, step, stop)
                with several:
                    together()
        else:
            together()
        with e.for_range(begin, end, name="token") as t, e.for_range(0, s.group, name="head") as h:
            self.finish_row(t, h, b.add(b.mul(b.sub(t, begin), e.i64(s.group)), h))

    def announce(self, span: _Span, step: Value) -> None:
        """Addresses and prefetch of a step's cells; entries that no token sees stand for the nearest one seen."""
        e, b = self.e, self.e.b
        entry, last = b.shl(step, e.i64(4)), b.sub(span.high, e.i64(1))
        with e.for_range(0, STEP, name="entry") as j:
            seen = e.imax(e.imin(b.add(entry, j), last), span.low)
            cell = e.sext64(e.load(I32, e.at(span.cells, seen, 4)))
            slot = b.add(self.ring_slot(step), j)
            self.keys.announce(slot, cell)
            self.values.announce(slot, cell)

    def announce_ahead(self, span: _Span, step: Value, stop: Value) -> None:
        ahead = self.e.b.add(step, self.e.i64(AHEAD))
        with self.e.if_(self.e.b.icmp_signed("<", ahead, stop)):
            self.announce(span, ahead)

    def ring_slot(self, step: Value) -> Value:
        return self.e.b.shl(self.e.b.and_(step, self.e.i64(2 * AHEAD - 1)), self.e.i64(4))

    def step_together(self, span: _Span, rows: Value, step: Value, stop: Value) -> None:
        """One step for the rows of several tokens, converted to scratch first."""
        e, b, s = self.e, self.e.b, self.s
        k, v, p, entry = self.at(s.k), self.at(s.v), self.at(s.p), b.shl(step, e.i64(4))
        self.announce_ahead(span, step, stop)
        self.keys.store_columns(self.ring_slot(step), k)
        self.values.store_rows(self.ring_slot(step), v, s.padded)
        self.for_groups(rows, self.score_groups(), lambda r, n: self.score(k, p, r, n))
        with e.for_range(0, rows, name="row") as r:
            self.soften(p, entry, r)
        whole = b.and_(b.icmp_signed(">=", entry, span.all_low), b.icmp_signed("<=", b.add(entry, e.i64(STEP)), span.all_high))
        with e.if_else(whole) as (all_visible, partly):
            with all_visible:
                self.for_groups(rows, self.value_groups(), lambda r, n: self.add_values(p, v, r, n))
            with partly, e.for_range(0, rows, name="row") as r:
                self.add_visible_values(p, v, entry, r)

    def step_alone(self, span: _Span, step: Value, stop: Value) -> None:
        """One step for the heads of one token, straight from the cache: the same chains as ``step_together``."""
        e, b, s, n = self.e, self.e.b, self.s, self.lanes
        ty = vec(F32, n)
        self.announce_ahead(span, step, stop)
        slot, entry = self.ring_slot(step), b.shl(step, e.i64(4))
        p = self.at(s.p)
        scores = [[e.var(ty, e.const(ty, 0.0)) for _ in range(self.width)] for _ in range(s.group)]
        for i, count in self.keys.chunks(self.keys.block):
            q = e.at(self.at(s.q), i, 4)
            for w in range(self.width):
                for c, column in enumerate(self.keys.columns(slot, n * w, i, count)):
                    for row, cells in enumerate(scores):
                        factor = e.splat(e.load(F32, e.gep(q, 4 * (self.spec.d * row + c))), n)
                        cells[w].set(e.fma(factor, column, cells[w].get()))
        for row, cells in enumerate(scores):
            for w, cell in enumerate(cells):
                e.store(cell.get(), e.gep(p, 4 * (STEP * row + n * w)))
        with e.for_range(0, s.group, name="row") as r:
            self.soften(p, entry, r)
        begin, end = e.imax(b.sub(span.low, entry), e.i64(0)), e.imin(b.sub(span.high, entry), e.i64(STEP))

        def columns(i: Value, vectors: int, count: int) -> None:
            rows = [e.at(self.at(s.acc, row, 4 * s.padded), i, 4) for row in range(s.group)]
            acc = [[e.var(ty, e.load(ty, e.gep(at, 4 * n * c))) for c in range(vectors)] for at in rows]
            with e.for_range(begin, end, name="entry") as j:
                source = self.values.row(slot, j)
                factors = [e.splat(e.load(F32, e.gep(e.at(p, j, 4), 4 * STEP * row)), n) for row in range(s.group)]
                for c in range(vectors):
                    value = self.values.load(source, b.add(i, e.i64(n * c)), min(n, count - n * c))
                    for row, cells in enumerate(acc):
                        cells[c].set(e.fma(factors[row], value, cells[c].get()))
            for at, cells in zip(rows, acc):
                for c, cell in enumerate(cells):
                    e.store(cell.get(), e.gep(at, 4 * n * c))

        self.value_columns(columns, min(4, self.registers // s.group))

    def for_groups(self, rows: Value, sizes: list[int], body: Callable[[Value, int], None]) -> None:
        """``body(row, n)`` over all rows in groups of the static ``sizes``, largest first; the last size is 1."""
        e, b = self.e, self.e.b
        row = e.var(I64, e.i64(0))
        for n in sizes:
            with e.while_loop(f"rows{n}") as loop:
                r = row.get()
                loop.break_if(b.icmp_signed(">", b.add(r, e.i64(n)), rows))
                body(r, n)
                row.set(b.add(r, e.i64(n)))

    # -- one row -----------------------------------------------------------------------------------------------------

    def start_row(self, t: Value, h: Value, r: Value, lo: Value, hi: Value) -> None:
        e, b, s, spec = self.e, self.e.b, self.s, self.spec
        n = self.lanes
        head = b.add(b.mul(self.g, e.i64(s.group)), h)
        source = e.at(self.q, b.add(b.mul(t, self.ldq), b.mul(head, e.i64(spec.d))), 4)
        target = self.at(s.q, r, 4 * spec.d)
        scale = e.const(vec(F32, n), spec.scale)
        with e.for_range(0, spec.d - spec.d % n, n) as i:
            e.store(b.fmul(e.load(vec(F32, n), e.at(source, i, 4)), scale), e.at(target, i, 4))
        if spec.d % n:
            done = 4 * (spec.d - spec.d % n)
            e.store_masked(b.fmul(e.load_masked(F32, n, e.gep(source, done), spec.d % n), scale), e.gep(target, done), spec.d % n)
        self.fill(self.at(s.acc, r, 4 * s.padded), s.padded)
        self.fill(self.at(s.sums, r, 4 * STEP), STEP)
        e.store(e.f32(_LOWEST), self.at(s.tops, r, 4))
        bounds = self.at(s.bounds, r, 8)
        e.store(b.trunc(lo, I32), bounds)
        e.store(b.trunc(hi, I32), e.gep(bounds, 4))

    def fill(self, p: Value, n: int) -> None:
        with self.e.for_range(0, n, self.lanes) as i:
            self.e.store(self.e.const(vec(F32, self.lanes), 0.0), self.e.at(p, i, 4))

    def rescale(self, p: Value, n: int, factor: Value) -> None:
        e = self.e
        with e.for_range(0, n, self.lanes) as i:
            at = e.at(p, i, 4)
            e.store(e.b.fmul(e.load(vec(F32, self.lanes), at), factor), at)

    def finish_row(self, t: Value, h: Value, r: Value) -> None:
        e, b, s, spec, n = self.e, self.e.b, self.s, self.spec, self.lanes
        parts = [e.load(vec(F32, n), e.gep(self.at(s.sums, r, 4 * STEP), 4 * n * w)) for w in range(self.width)]
        while len(parts) > 1:
            parts = [b.fadd(x, y) for x, y in zip(parts[: len(parts) // 2], parts[len(parts) // 2 :])]
        total = e.reduce(parts[0], "add")
        unseen = b.fcmp_ordered("==", total, e.f32(0.0))
        factor = e.splat(b.select(unseen, e.f32(0.0), b.fdiv(e.f32(1.0), total)), n)
        head = b.add(b.mul(self.g, e.i64(s.group)), h)
        source = self.at(s.acc, r, 4 * s.padded)
        target = e.at(self.out, b.add(b.mul(t, self.ldo), b.mul(head, e.i64(spec.dv))), 4)
        with e.for_range(0, spec.dv - spec.dv % n, n) as i:
            e.store(b.fmul(e.load(vec(F32, n), e.at(source, i, 4)), factor), e.at(target, i, 4))
        if spec.dv % n:
            done = 4 * (spec.dv - spec.dv % n)
            e.store_masked(b.fmul(e.load(vec(F32, n), e.gep(source, done)), factor), e.gep(target, done), spec.dv % n)

    def soften(self, p: Value, entry: Value, r: Value) -> None:
        """Scores of row ``r`` for one step to probabilities relative to the row's reference score."""
        e, b, s, n = self.e, self.e.b, self.s, self.lanes
        ty = vec(F32, n)
        row = e.at(p, r, 4 * STEP)
        bounds = self.at(s.bounds, r, 8)
        lo, hi = (e.splat(e.load(I32, e.gep(bounds, 4 * i)), n) for i in range(2))
        index = e.splat(b.trunc(entry, I32), n)
        scores = []
        for w in range(self.width):
            v = e.load(ty, e.gep(row, 4 * n * w))
            if self.spec.softcap:
                cap = e.const(ty, self.spec.softcap)
                v = b.fmul(vmath.tanh(e, b.fmul(v, e.const(ty, 1 / self.spec.softcap))), cap)
            lanes = b.add(index, e.const_vec(I32, range(n * w, n * w + n)))
            seen = b.and_(b.icmp_signed(">=", lanes, lo), b.icmp_signed("<", lanes, hi))
            scores.append(b.select(seen, v, e.const(ty, float("-inf"))))
        most = scores[0]
        for v in scores[1:]:
            most = e.fmax(most, v)
        top = self.at(s.tops, r, 4)
        old = e.load(F32, top)
        bits = ir.IntType(n)
        higher = b.bitcast(b.fcmp_ordered(">", most, e.splat(b.fadd(old, e.f32(_SLACK)), n)), bits)
        with e.if_(b.icmp_unsigned("!=", higher, bits(0)), likely=False):
            new = e.reduce(most, "max")
            e.store(new, top)
            factor = e.splat(vmath.exp_flushed(e, b.fsub(old, new)), n)
            self.rescale(self.at(s.acc, r, 4 * s.padded), s.padded, factor)
            self.rescale(self.at(s.sums, r, 4 * STEP), STEP, factor)
        reference = e.splat(e.load(F32, top), n)
        sums = self.at(s.sums, r, 4 * STEP)
        for w, v in enumerate(scores):
            probability = vmath.exp_flushed(e, b.fsub(v, reference))
            e.store(probability, e.gep(row, 4 * n * w))
            at = e.gep(sums, 4 * n * w)
            e.store(b.fadd(e.load(vec(F32, n), at), probability), at)

    # -- products ----------------------------------------------------------------------------------------------------

    def score_groups(self) -> list[int]:
        most = self.registers // self.width
        return sorted({most, max(1, most // 2), min(self.s.group, most), 1}, reverse=True)

    def score(self, k: Value, p: Value, r: Value, n_rows: int) -> None:
        """Scores of ``n_rows`` rows."""
        e, spec, n = self.e, self.spec, self.lanes
        ty = vec(F32, n)
        q = self.at(self.s.q, r, 4 * spec.d)
        acc = [[e.var(ty, e.const(ty, 0.0)) for _ in range(self.width)] for _ in range(n_rows)]
        unroll = next(u for u in (4, 2, 1) if spec.d % u == 0)
        with e.for_range(0, spec.d, unroll, name="i") as i:
            for u in range(unroll):
                column = e.gep(e.at(k, i, 4 * STEP), 4 * STEP * u)
                keys = [e.load(ty, e.gep(column, 4 * n * w)) for w in range(self.width)]
                for row, cells in enumerate(acc):
                    factor = e.splat(e.load(F32, e.gep(e.at(q, i, 4), 4 * (spec.d * row + u))), n)
                    for key, cell in zip(keys, cells):
                        cell.set(e.fma(factor, key, cell.get()))
        target = e.at(p, r, 4 * STEP)
        for row, cells in enumerate(acc):
            for w, cell in enumerate(cells):
                e.store(cell.get(), e.gep(target, 4 * (STEP * row + n * w)))

    def value_groups(self) -> list[int]:
        most = self.registers // 4
        return sorted({most, min(self.s.group, most), 1}, reverse=True)

    def value_columns(self, body: Callable[[Value, int, int], None], most: int = 4) -> None:
        """``body(element, vectors, elements)`` over the value's elements, ``most`` vectors at a time; the last vector may be partial."""
        e, n, dv = self.e, self.lanes, self.spec.dv
        whole = dv // (most * n) * most * n
        if whole:
            with e.for_range(0, whole, most * n, name="column") as i:
                body(i, most, most * n)
        if dv > whole:
            body(e.i64(whole), -(-(dv - whole) // n), dv - whole)

    def add_values(self, p: Value, v: Value, r: Value, n_rows: int) -> None:
        """acc += p V for ``n_rows`` rows that see the whole step."""
        e, s, n = self.e, self.s, self.lanes
        ty = vec(F32, n)

        def columns(i: Value, vectors: int, _count: int) -> None:
            rows = [e.at(self.at(s.acc, e.b.add(r, e.i64(row)), 4 * s.padded), i, 4) for row in range(n_rows)]
            acc = [[e.load(ty, e.gep(row, 4 * n * c)) for c in range(vectors)] for row in rows]
            values = e.at(v, i, 4)
            for j in range(STEP):
                column = [e.load(ty, e.gep(values, 4 * (s.padded * j + n * c))) for c in range(vectors)]
                for row in range(n_rows):
                    factor = e.splat(e.load(F32, e.gep(e.at(p, r, 4 * STEP), 4 * (STEP * row + j))), n)
                    acc[row] = [e.fma(factor, column[c], acc[row][c]) for c in range(vectors)]
            for row, at in enumerate(rows):
                for c in range(vectors):
                    e.store(acc[row][c], e.gep(at, 4 * n * c))

        self.value_columns(columns)

    def add_visible_values(self, p: Value, v: Value, entry: Value, r: Value) -> None:
        """acc += p V over the entries of the step that row ``r`` sees."""
        e, b, s, n = self.e, self.e.b, self.s, self.lanes
        ty = vec(F32, n)
        bounds = self.at(s.bounds, r, 8)
        lo, hi = (b.sub(e.sext64(e.load(I32, e.gep(bounds, 4 * i))), entry) for i in range(2))
        begin, end = e.imax(lo, e.i64(0)), e.imin(hi, e.i64(STEP))
        row_p = e.at(p, r, 4 * STEP)

        def columns(i: Value, vectors: int, _count: int) -> None:
            at = e.at(self.at(s.acc, r, 4 * s.padded), i, 4)
            acc = [e.var(ty, e.load(ty, e.gep(at, 4 * n * c))) for c in range(vectors)]
            with e.for_range(begin, end, name="entry") as j:
                factor = e.splat(e.load(F32, e.at(row_p, j, 4)), n)
                values = e.at(e.at(v, j, 4 * s.padded), i, 4)
                for c, cell in enumerate(acc):
                    cell.set(e.fma(factor, e.load(ty, e.gep(values, 4 * n * c)), cell.get()))
            for c, cell in enumerate(acc):
                e.store(cell.get(), e.gep(at, 4 * n * c))

        self.value_columns(columns)
