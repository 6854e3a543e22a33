"""Attention, one step of 16 entries at a time: scores, and the weighted sum of values.

Several tokens share a step through f32 copies of its K (transposed) and V rows; a lone token reads the cache directly. Both compute an
element of a row with the same chain of roundings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from ggufc.codegen.emitter import F32, I32, I64, Emitter, Value, Var, vec
from ggufc.codegen.kernels import cache
from ggufc.codegen.kernels.attention_cells import AHEAD, NEAR, STEP, CellRows
from ggufc.codegen.kernels.attention_rows import Rows

if TYPE_CHECKING:
    from ggufc.codegen.kernels.attention_cpu import FlashAttn


class Span(NamedTuple):
    """The entries of a run of tokens: ``low..high-1`` any token sees, ``all_low..all_high-1`` all see."""

    cells: Value
    low: Value
    high: Value
    all_low: Value
    all_high: Value


class Steps(Rows):
    """The walk of rows over the steps of a span."""

    def __init__(self, spec: FlashAttn, e: Emitter, first_head: Value, kv_head: Value) -> None:
        super().__init__(spec, e, first_head)
        k_cell, v_cell = spec.cells_of
        self.keys = CellRows(e, spec.type_k, spec.d, k_cell, e.arg_ptr(2), kv_head, self.at(self.s.k_ring))
        self.values = CellRows(e, spec.type_v, spec.dv, v_cell, e.arg_ptr(3), kv_head, self.at(self.s.v_ring), not spec.shared)
        self.cells = e.arg_ptr(4)
        # With few query heads a lone token uses each converted value too rarely to store it first.
        self.direct = spec.head_block <= 4 and spec.head_block * self.width <= self.registers
        # Its steps fetch what they read of a step to come, piece by piece: a burst of prefetches would hold up the arithmetic.
        self.streaming = spec.type_k in cache.SIZES and spec.type_v in cache.SIZES

    def walk(self, span: Span, rows: Value) -> None:
        """All steps of the span for the first ``rows`` rows."""
        e, b = self.e, self.e.b
        first = b.ashr(span.low, e.i64(4))
        stop = b.ashr(b.add(span.high, e.i64(STEP - 1)), e.i64(4))
        ready = e.var(I64, first)

        def announced(ahead: int, fetch: bool, body: Callable[[Span, Value, Value], None]) -> None:
            with e.for_range(first, stop, name="step") as step:
                self.announce_until(span, ready, e.imin(stop, b.add(step, e.i64(ahead + 1))), fetch)
                body(span, step, rows)

        def together() -> None:
            announced(AHEAD, True, self.step_together)

        def alone() -> None:
            self.announce_until(span, ready, e.imin(stop, b.add(first, e.i64(NEAR))), True)
            announced(NEAR, not self.streaming, lambda span, step, _: self.step_alone(span, step, stop))

        if self.direct:
            with e.if_else(b.icmp_signed("==", rows, e.i64(self.spec.head_block))) as (one, several):
                with one:
                    alone()
                with several:
                    together()
        else:
            together()

    def announce_until(self, span: Span, ready: Var, stop: Value, fetch: bool) -> None:
        """Addresses and prefetch of the cells of steps ``ready..stop-1``; entries that no token sees stand for the nearest one seen."""
        e, b = self.e, self.e.b
        last = b.sub(span.high, e.i64(1))
        with e.for_range(ready.get(), stop, name="announce") as step:
            entry = b.shl(step, e.i64(4))
            with e.for_range(0, STEP, name="entry") as j:
                seen = e.imax(e.imin(b.add(entry, j), last), span.low)
                cell = e.sext64(e.load(I32, e.at(span.cells, seen, 4)))
                slot = b.add(self.ring_slot(step), j)
                self.keys.announce(slot, cell, fetch)
                self.values.announce(slot, cell, fetch)
        ready.set(e.imax(ready.get(), stop))

    def ring_slot(self, step: Value) -> Value:
        return self.e.b.shl(self.e.b.and_(step, self.e.i64(2 * AHEAD - 1)), self.e.i64(4))

    def step_together(self, span: Span, step: Value, rows: Value) -> None:
        """One step for the rows of several tokens, converted to scratch first."""
        e, b, s = self.e, self.e.b, self.s
        k, v, p, entry = self.at(s.k), self.at(s.v), self.at(s.p), b.shl(step, e.i64(4))
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

    def step_alone(self, span: Span, step: Value, stop: Value) -> None:
        """One step for the heads of one token, straight from the cache: the same chains as ``step_together``."""
        e, b, s, n = self.e, self.e.b, self.s, self.lanes
        ty = vec(F32, n)
        slot, entry = self.ring_slot(step), b.shl(step, e.i64(4))
        p = self.at(s.p)
        ahead = b.add(step, e.i64(NEAR))
        coming = self.ring_slot(b.select(b.icmp_signed("<", ahead, stop), ahead, step))
        scores = [[e.var(ty, e.const(ty, 0.0)) for _ in range(self.width)] for _ in range(self.spec.head_block)]
        for i, count in self.keys.chunks(self.keys.block):
            if self.streaming:
                for j in range(STEP):
                    self.keys.fetch_part(self.keys.row(coming, j), i, count)
            q = e.at(self.at(s.q), i, 4)
            for w in range(self.width):
                for c, column in enumerate(self.keys.columns(slot, n * w, i, count)):
                    for row, cells in enumerate(scores):
                        factor = e.splat(e.load(F32, e.gep(q, 4 * (self.spec.d * row + c))), n)
                        cells[w].set(e.fma(factor, column, cells[w].get()))
        for row, cells in enumerate(scores):
            for w, cell in enumerate(cells):
                e.store(cell.get(), e.gep(p, 4 * (STEP * row + n * w)))
        with e.for_range(0, self.spec.head_block, name="row") as r:
            self.soften(p, entry, r)
        begin, end = e.imax(b.sub(span.low, entry), e.i64(0)), e.imin(b.sub(span.high, entry), e.i64(STEP))

        def columns(i: Value, vectors: int, count: int) -> None:
            rows = [e.at(self.at(s.acc, row, 4 * s.padded), i, 4) for row in range(self.spec.head_block)]
            acc = [[e.var(ty, e.load(ty, e.gep(at, 4 * n * c))) for c in range(vectors)] for at in rows]
            with e.for_range(begin, end, name="entry") as j:
                source = self.values.row(slot, j)
                if self.streaming:
                    self.values.fetch_part(self.values.row(coming, j), i, count)
                factors = [e.splat(e.load(F32, e.gep(e.at(p, j, 4), 4 * STEP * row)), n) for row in range(self.spec.head_block)]
                for c in range(vectors):
                    value = self.values.load(source, b.add(i, e.i64(n * c)), min(n, count - n * c))
                    for row, cells in enumerate(acc):
                        cells[c].set(e.fma(factors[row], value, cells[c].get()))
            for at, cells in zip(rows, acc):
                for c, cell in enumerate(cells):
                    e.store(cell.get(), e.gep(at, 4 * n * c))

        self.value_columns(columns, min(4, self.registers // self.spec.head_block))

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

    def score_groups(self) -> list[int]:
        most = self.registers // self.width
        return sorted({most, max(1, most // 2), min(self.spec.head_block, most), 1}, reverse=True)

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
        return sorted({most, min(self.spec.head_block, most), 1}, reverse=True)

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
