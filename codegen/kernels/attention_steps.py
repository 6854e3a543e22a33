"""Attention of several tokens, one step of 16 entries at a time: scores, and the weighted sum of values.

The tokens share a step through f32 copies of its K (transposed) and V rows; a lone token reads the cache directly
(``attention_alone``). Both compute an element of a row with the same chain of roundings.
"""

from __future__ import annotations

from collections.abc import Callable

from ggufc.codegen.emitter import F32, I32, I64, Value, vec
from ggufc.codegen.kernels.attention_alone import Alone
from ggufc.codegen.kernels.attention_blocks import BlockRows
from ggufc.codegen.kernels.attention_cells import AHEAD, STEP
from ggufc.codegen.kernels.attention_scores import Span


class Steps(Alone):
    """The walk of rows over the steps of a span."""

    def walk_together(self, span: Span, rows: Value) -> None:
        """All steps of the span for the first ``rows`` rows."""
        e, b = self.e, self.e.b
        self.clear_minima(rows)
        first, stop = self.steps_of(span)
        ready = e.var(I64, first)
        with e.for_range(first, stop, name="step") as step:
            self.announce_until(span, ready, e.imin(stop, b.add(step, e.i64(AHEAD + 1))), True)
            self.step_together(span, step, rows)
        self.add_minima(rows)

    def step_together(self, span: Span, step: Value, rows: Value) -> None:
        """One step for the rows of several tokens, converted to scratch first."""
        e, b, s = self.e, self.e.b, self.s
        k, v, p, entry = self.at(s.k), self.at(s.v), self.at(s.p), b.shl(step, e.i64(4))
        self.keys.store_columns(self.ring_slot(step), k)
        self.values.store_rows(self.ring_slot(step), v, s.padded)
        if isinstance(self.values, BlockRows):
            self.values.store_scales(self.ring_slot(step), self.at(s.v_scales))
        score = self.score_rounded if isinstance(self.keys, BlockRows) else self.score
        self.for_groups(rows, self.score_groups(), lambda r, n: score(k, p, r, n))
        with e.for_range(0, rows, name="row") as r:
            self.soften(e.at(p, r, 4 * STEP), entry, r)
        whole = b.and_(b.icmp_signed(">=", entry, span.all_low), b.icmp_signed("<=", b.add(entry, e.i64(STEP)), span.all_high))
        with e.if_else(whole) as (all_visible, partly):
            with all_visible:
                self.for_groups(rows, self.value_groups(), lambda r, n: self.add_values(p, v, r, n))
            with partly, e.for_range(0, rows, name="row") as r:
                self.add_visible_values(p, v, entry, r)

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
        # Beside the sums that grow there are those that wait for others.
        most = max(1, self.registers // 2 // self.width)
        return sorted({most, max(1, most // 2), min(self.spec.head_block, most), 1}, reverse=True)

    def score(self, k: Value, p: Value, r: Value, n_rows: int) -> None:
        """Scores of ``n_rows`` rows: sums of every ``lanes``-th product, added in the tree of ``attention_cells.joined``."""
        e, spec, n = self.e, self.spec, self.lanes
        ty = vec(F32, n)
        q = self.at(self.s.q, r, 4 * spec.d)

        def added(sums: list[list[Value]], i: Value) -> list[list[Value]]:
            column = e.at(k, i, 4 * STEP)
            keys = [e.load(ty, e.gep(column, 4 * n * w)) for w in range(self.width)]
            out = []
            for row, totals in enumerate(sums):
                factor = e.splat(e.load(F32, e.gep(e.at(q, i, 4), 4 * spec.d * row)), n)
                out.append([e.fma(factor, key, total) for key, total in zip(keys, totals)])
            return out

        def leaf(first: int) -> list[list[Value]]:
            """Products first, first + lanes, ..."""
            sums: list[list[Value]] = [[e.const(ty, 0.0)] * self.width for _ in range(n_rows)]
            count = len(range(first, spec.d, n))
            if count <= 4:
                for i in range(first, spec.d, n):
                    sums = added(sums, e.i64(i))
                return sums
            cells = [[e.var(ty, total) for total in totals] for totals in sums]
            unroll = next(u for u in (4, 3, 2, 1) if count % u == 0)
            with e.for_range(first, spec.d, unroll * n, name="i") as i:
                sums = [[cell.get() for cell in row] for row in cells]
                for u in range(unroll):
                    sums = added(sums, e.b.add(i, e.i64(u * n)))
                for row, totals in zip(cells, sums):
                    for cell, total in zip(row, totals):
                        cell.set(total)
            return [[cell.get() for cell in row] for row in cells]

        def tree(terms: list[int]) -> list[list[Value]]:
            if len(terms) == 1:
                return leaf(terms[0])
            half = len(terms) // 2
            left, right = tree(terms[:half]), tree(terms[half:])
            return [[e.b.fadd(x, y) for x, y in zip(*rows)] for rows in zip(left, right)]

        lanes = {4: [0], 8: [0, 4], 16: [0, 8, 4, 12]}[n]
        target = e.at(p, r, 4 * STEP)
        for row, cells in enumerate(tree([lane + i for lane in lanes for i in (0, 2, 1, 3)])):
            for w, cell in enumerate(cells):
                e.store(self.capped(cell), e.gep(target, 4 * (STEP * row + n * w)))

    def value_groups(self) -> list[int]:
        most = self.registers // 4
        return sorted({most, min(self.spec.head_block, most), 1}, reverse=True)

    def add_values(self, p: Value, v: Value, r: Value, n_rows: int) -> None:
        """acc += p V for ``n_rows`` rows that see the whole step."""
        e, s, n = self.e, self.s, self.lanes
        ty = vec(F32, n)
        self.weigh_stored(p, self.at(s.v_scales), r, n_rows)
        row_p = e.at(p, r, 4 * STEP)

        def columns(i: Value, vectors: int, _count: int) -> None:
            rows = [e.at(self.at(s.acc, e.b.add(r, e.i64(row)), 4 * s.padded), i, 4) for row in range(n_rows)]
            acc = [[e.load(ty, e.gep(row, 4 * n * c)) for c in range(vectors)] for row in rows]
            values = e.at(v, i, 4)
            for j in range(STEP):
                column = [e.load(ty, e.gep(values, 4 * (s.padded * j + n * c))) for c in range(vectors)]
                for row in range(n_rows):
                    factors = self.factors(row_p, 4 * STEP, row, i, vectors, j)
                    acc[row] = [e.fma(factors[c], column[c], acc[row][c]) for c in range(vectors)]
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
        self.weigh_stored(p, self.at(s.v_scales), r, 1)

        def columns(i: Value, vectors: int, _count: int) -> None:
            at = e.at(self.at(s.acc, r, 4 * s.padded), i, 4)
            acc = [e.var(ty, e.load(ty, e.gep(at, 4 * n * c))) for c in range(vectors)]
            with e.for_range(begin, end, name="entry") as j:
                factors = self.factors(row_p, 4 * STEP, 0, i, vectors, j)
                values = e.at(e.at(v, j, 4 * s.padded), i, 4)
                for c, cell in enumerate(acc):
                    cell.set(e.fma(factors[c], e.load(ty, e.gep(values, 4 * n * c)), cell.get()))
            for c, cell in enumerate(acc):
                e.store(cell.get(), e.gep(at, 4 * n * c))

        self.value_columns(columns)
