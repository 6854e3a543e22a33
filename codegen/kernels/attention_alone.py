"""Attention of a lone token whose query heads are few: straight from the cache, with the same chains as for several tokens.

Whole steps are taken in groups. The exponentials of a group overlap, and as long as no score exceeds the reference by more than its
slack, which one comparison tells for the whole group, the weighted sums stay in registers over all its entries. Otherwise, and at the
ends of a span, steps are taken one by one. Grouping only interleaves chains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce

from llvmlite import ir

from ggufc.codegen.emitter import F32, I64, Value, vec
from ggufc.codegen.kernels.attention_cells import GROUP, NEAR, STEP
from ggufc.codegen.kernels.attention_rows import SLACK
from ggufc.codegen.kernels.attention_scores import Coming, Scores, Span


class Alone(Scores):
    """The rows of one token and their walk over the steps of a span."""

    def walk_alone(self, span: Span) -> None:
        """All steps of the span for the rows of one token, under all KV heads of the tile."""
        e, b = self.e, self.e.b
        self.clear_minima(e.i64(self.spec.head_block * self.block))
        first, stop = self.steps_of(span)
        ready, current = e.var(I64, first), e.var(I64, first)
        self.announce_until(span, ready, e.imin(stop, b.add(first, e.i64(NEAR))), True)
        with e.while_loop("steps") as steps:
            step = current.get()
            steps.break_if(b.icmp_signed(">=", step, stop))
            following = b.add(step, e.i64(GROUP))
            # What comes next, or the last steps of the span again.
            ahead = b.sub(e.imin(b.add(following, e.i64(GROUP)), stop), e.i64(GROUP))
            coming = self.coming(span, step, following, ahead)
            self.announce_until(span, ready, e.imin(stop, b.add(following, e.i64(GROUP))), coming.scattered)
            begin, end = b.shl(step, e.i64(4)), b.shl(following, e.i64(4))
            whole = b.and_(b.icmp_signed(">=", begin, span.low), b.icmp_signed("<=", end, span.high))
            with e.if_else(whole) as (group, single):
                with group:
                    with self.each_unit() as (unit, first_row):
                        self.group(step, unit, first_row, coming)
                    current.set(following)
                with single:
                    with self.each_unit() as (_, first_row):
                        self.step_alone(span, step, first_row)
                    current.set(b.add(step, e.i64(1)))
        self.add_minima(e.i64(self.spec.head_block * self.block))

    @contextmanager
    def each_unit(self) -> Iterator[tuple[Value, Value]]:
        """(KV head of the tile, its first row); the caches' rows are those of this head meanwhile."""
        e, b = self.e, self.e.b
        if self.block == 1:
            yield e.i64(0), e.i64(0)
            return
        with e.for_range(0, self.block, name="unit") as unit:
            for side in (self.keys, self.values):
                side.shift = b.mul(unit, e.i64(side.row_size))
            yield unit, b.mul(unit, e.i64(self.spec.head_block))
            self.keys.shift = self.values.shift = None

    def group(self, step: Value, unit: Value, first_row: Value, coming: Coming) -> None:
        """``GROUP`` steps that the token sees whole, for the rows of one KV head."""
        e, b, n = self.e, self.e.b, self.lanes
        heads, size = self.spec.head_block, 4 * STEP * GROUP
        p = self.at(self.s.p)
        self.score_steps(step, GROUP, p, first_row, lambda entry: self.fetch_keys(coming, unit, entry))
        rows = [b.add(first_row, e.i64(row)) for row in range(heads)]
        tops = [e.splat(b.fadd(e.load(F32, self.at(self.s.tops, row, 4)), e.f32(SLACK)), n) for row in rows]
        higher = [
            b.fcmp_ordered(">", self.largest([e.load(vec(F32, n), e.gep(p, size * row + 4 * i)) for i in range(0, STEP * GROUP, n)]), top)
            for row, top in enumerate(tops)
        ]
        moves = b.icmp_unsigned("!=", b.bitcast(reduce(b.or_, higher), ir.IntType(n)), ir.IntType(n)(0))
        with e.if_else(moves) as (moving, staying):
            with moving, e.for_range(0, GROUP, name="step") as s:
                with e.for_range(0, heads, name="row") as r:
                    self.soften_seen(e.at(e.at(p, r, size), s, 4 * STEP), b.add(first_row, r))
                first = b.shl(s, e.i64(4))
                self.weigh_listed(b.shl(step, e.i64(4)), p, size, first_row, first, 1)
                self.add_entries(step, p, size, first_row, first, b.add(first, e.i64(STEP)), unit, coming)
            with staying:
                with e.for_range(0, heads, name="row") as r:
                    self.weigh(e.at(p, r, size), b.add(first_row, r), GROUP)
                self.weigh_listed(b.shl(step, e.i64(4)), p, size, first_row, e.i64(0), GROUP)
                self.add_entries(step, p, size, first_row, e.i64(0), e.i64(STEP * GROUP), unit, coming)

    def step_alone(self, span: Span, step: Value, first_row: Value) -> None:
        """One step, of which the token may see a part."""
        e, b, entry, p, size = self.e, self.e.b, self.e.b.shl(step, self.e.i64(4)), self.at(self.s.p), 4 * STEP
        self.score_steps(step, 1, p, first_row)
        with e.for_range(0, self.spec.head_block, name="row") as r:
            self.soften(e.at(p, r, size), entry, b.add(first_row, r))
        self.weigh_listed(entry, p, size, first_row, e.i64(0), 1)
        begin, end = e.imax(b.sub(span.low, entry), e.i64(0)), e.imin(b.sub(span.high, entry), e.i64(STEP))
        self.add_entries(step, p, size, first_row, begin, end)

    def add_entries(
        self,
        step: Value,
        p: Value,
        size: int,
        first_row: Value,
        begin: Value,
        end: Value,
        unit: Value | None = None,
        coming: Coming | None = None,
    ) -> None:
        """acc += p V for the entries begin..end-1 counted from ``step``; fetches as many of the values to come."""
        e, b, s, n = self.e, self.e.b, self.s, self.lanes
        ty, heads = vec(F32, n), range(self.spec.head_block)
        first = b.shl(step, e.i64(4))

        def columns(i: Value, vectors: int, count: int) -> None:
            rows = [e.at(self.at(s.acc, b.add(first_row, e.i64(row)), 4 * s.padded), i, 4) for row in heads]
            acc = [[e.var(ty, e.load(ty, e.gep(at, 4 * n * c))) for c in range(vectors)] for at in rows]
            with e.for_range(begin, end, name="entry") as j:
                source = self.values.row(e.i64(0), self.ring_entry(b.add(first, j)))
                if coming is not None and unit is not None:
                    self.fetch_values(coming, unit, j, i, count)
                factors = [self.factors(p, size, row, i, vectors, j) for row in heads]
                for c in range(vectors):
                    value = self.values.load(source, b.add(i, e.i64(n * c)), min(n, count - n * c))
                    for row, cells in enumerate(acc):
                        cells[c].set(e.fma(factors[row][c], value, cells[c].get()))
            for at, cells in zip(rows, acc):
                for c, cell in enumerate(cells):
                    e.store(cell.get(), e.gep(at, 4 * n * c))

        most = min(8, self.registers // self.spec.head_block)
        # A power of two, so that the elements taken at once divide a block or are whole blocks.
        self.value_columns(columns, 1 << most.bit_length() - 1 if self.scaled else most)

    def value_columns(self, body: Callable[[Value, int, int], None], most: int = 4) -> None:
        """``body(element, vectors, elements)`` over the value's elements, ``most`` vectors at a time; the last vector may be partial."""
        e, n, dv = self.e, self.lanes, self.spec.dv
        whole = dv // (most * n) * most * n
        if whole:
            with e.for_range(0, whole, most * n, name="column") as i:
                body(i, most, most * n)
        if dv > whole:
            body(e.i64(whole), -(-(dv - whole) // n), dv - whole)
