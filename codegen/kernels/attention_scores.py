"""Attention, the keys' side of a walk over a cell list: addresses and prefetch of coming cells, and scores of a lone token.

A lone token multiplies rows of keys as they lie. Lanes then hold partial sums of an entry, which are added in a fixed tree while the
entries move into lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from llvmlite import ir

from ggufc.codegen.emitter import F32, I1, I32, I64, PTR, Emitter, Value, Var, vec
from ggufc.codegen.kernels.attention_blocks import BlockRows
from ggufc.codegen.kernels.attention_cells import GROUP, STEP, CellRows, joined
from ggufc.codegen.kernels.attention_rows import direct
from ggufc.codegen.kernels.attention_weights import WeighedRows
from ggufc.codegen.kernels.cache_blocks import BLOCKS

if TYPE_CHECKING:
    from ggufc.codegen.kernels.attention_cpu import FlashAttn

QUAD = 4
"""Entries whose partial sums are joined first."""

_UNROLLED = 8
"""Most vectors of a row that are multiplied without a loop."""


class Span(NamedTuple):
    """The entries of a run of tokens: ``low..high-1`` any token sees, ``all_low..all_high-1`` all see."""

    cells: Value
    low: Value
    high: Value
    all_low: Value
    all_high: Value
    end: Value
    """Up to where any token sees the list, of which the span may be a part."""


class Coming(NamedTuple):
    """What a group of steps fetches for later ones."""

    step: Value
    """The first of ``GROUP`` steps whose addresses are noted."""
    keys: Value | None = None
    """Where the cells to fetch lie, if whole cells are fetched in order."""
    values: Value | None = None
    scattered: Value | bool = False
    """Whether rows must be fetched as their addresses are noted."""


class Scores(WeighedRows):
    """Rows with the cache they attend to: the head of cell 0 at ``k`` and ``v``, and ``block`` - 1 more KV heads side by side with it."""

    def __init__(self, spec: FlashAttn, e: Emitter, k: Value, v: Value, block: int) -> None:
        super().__init__(spec, e)
        k_cell, v_cell = spec.cells_of
        k_rows, v_rows = (BlockRows if t in BLOCKS and not spec.shared else CellRows for t in (spec.type_k, spec.type_v))
        self.keys = k_rows(e, spec.type_k, spec.d, k_cell, k, e.i64(0), self.at(self.s.k_ring))
        self.values = v_rows(e, spec.type_v, spec.dv, v_cell, v, e.i64(0), self.at(self.s.v_ring), not spec.shared)
        self.block = block
        # A tile of all KV heads fetches cells in the order in which they lie: memory likes that best. One of a single head fetches what
        # it reads of a step to come, piece by piece: a burst of prefetches would hold up the arithmetic.
        self.in_order = direct(spec, self.lanes) and block == spec.n_head_kv and not spec.shared

    def steps_of(self, span: Span) -> tuple[Value, Value]:
        """The first step of a span, and the one after the last."""
        e, b = self.e, self.e.b
        return b.ashr(span.low, e.i64(4)), b.ashr(b.add(span.high, e.i64(STEP - 1)), e.i64(4))

    # Addresses and prefetch

    def announce_until(self, span: Span, ready: Var, stop: Value, fetch: Value | bool) -> None:
        """Addresses and prefetch of the cells of steps ``ready..stop-1``; entries that no token sees stand for the nearest one seen."""
        e, b = self.e, self.e.b
        last = b.sub(span.high, e.i64(1))
        part = STEP // 2
        with e.for_range(ready.get(), stop, name="announce") as step:
            entry, slot = b.shl(step, e.i64(4)), self.ring_slot(step)
            whole = b.and_(b.icmp_signed(">=", entry, span.low), b.icmp_signed("<=", b.add(entry, e.i64(STEP)), span.high))
            with e.if_else(whole) as (all_seen, some_seen):
                with all_seen:
                    for j in range(0, STEP, part):
                        cells = e.load(vec(I32, part), e.gep(e.at(span.cells, entry, 4), 4 * j))
                        self.note(b.add(slot, e.i64(j)), b.sext(cells, vec(I64, part)))
                with some_seen, e.for_range(0, STEP, name="entry") as j:
                    seen = e.imax(e.imin(b.add(entry, j), last), span.low)
                    self.note(b.add(slot, j), e.sext64(e.load(I32, e.at(span.cells, seen, 4))))
            if fetch is not False:
                wanted = ir.Constant(I1, 1) if fetch is True else fetch
                with e.if_(wanted), e.for_range(0, STEP, name="fetch") as j:
                    for side in (self.keys, self.values):
                        side.fetch_row(b.add(slot, j), self.block)
        ready.set(e.imax(ready.get(), stop))

    def note(self, slot: Value, cell: Value) -> None:
        for side in (self.keys, self.values):
            side.note(slot, cell)

    def ring_slot(self, step: Value) -> Value:
        """Ring index of the first entry of a step."""
        return self.ring_entry(self.e.b.shl(step, self.e.i64(4)))

    def coming(self, span: Span, step: Value, following: Value, ahead: Value) -> Coming:
        """What to fetch during ``GROUP`` steps from ``step`` on: those from ``following``, or ``ahead``, on."""
        e, b = self.e, self.e.b
        if not self.in_order:
            return Coming(ahead)
        entry, bits = b.shl(following, e.i64(4)), ir.IntType(STEP)
        keys, values = (e.var(I64, b.ptrtoint(side.row(self.ring_slot(step), 0), I64)) for side in (self.keys, self.values))
        scattered = e.var(I1, ir.Constant(I1, 1))
        with e.if_(b.icmp_signed("<=", b.add(entry, e.i64(STEP * GROUP)), span.end)):
            at = e.at(span.cells, entry, 4)
            first = e.load(I32, at)
            apart = bits(0)
            for s in range(GROUP):
                in_order = b.add(e.splat(first, STEP), e.const_vec(I32, range(STEP * s, STEP * s + STEP)))
                differ = b.icmp_unsigned("!=", e.load(vec(I32, STEP), e.gep(at, 4 * STEP * s)), in_order)
                apart = b.or_(apart, b.bitcast(differ, bits))
            with e.if_(b.icmp_unsigned("==", apart, bits(0))):
                scattered.set(ir.Constant(I1, 0))
                for side, to in ((self.keys, keys), (self.values, values)):
                    to.set(b.ptrtoint(e.at(side.base, e.sext64(first), side.cell_size), I64))
        return Coming(ahead, b.inttoptr(keys.get(), PTR), b.inttoptr(values.get(), PTR), scattered.get())

    def fetch_values(self, coming: Coming, unit: Value, j: Value, i: Value, count: int) -> None:
        """What the values of entry ``j`` of the coming group leave to fetch when elements i..i+count-1 of this group's are read."""
        e, b = self.e, self.e.b
        if coming.values is not None:
            entry = b.add(b.mul(unit, e.i64(STEP * GROUP)), j)
            at, size = self.values.part(e.at(coming.values, entry, self.values.row_size), i, count)
            for line in range(0, size, 64):
                e.prefetch(e.gep(at, line), 2)
        else:
            at = self.ring_entry(b.add(b.shl(coming.step, e.i64(4)), j))
            self.values.fetch_part(self.values.row(e.i64(0), at), i, count)

    def fetch_keys(self, coming: Coming, unit: Value, entry: Value) -> None:
        """Of the coming group's keys, the share of entries ``entry``..+3 of this group, under this KV head."""
        e, b, keys = self.e, self.e.b, self.keys
        if coming.keys is not None:
            at = e.at(coming.keys, b.add(b.mul(unit, e.i64(STEP * GROUP)), entry), keys.row_size)
            for line in range(0, QUAD * keys.row_size, 64):
                e.prefetch(e.gep(at, line), 2)
        else:
            first = self.ring_entry(b.add(b.shl(coming.step, e.i64(4)), entry))
            for j in range(QUAD):
                keys.fetch_part(keys.row(first, j), e.i64(0), self.spec.d)

    # Scores

    def score_steps(self, step: Value, steps: int, p: Value, first_row: Value, fetch: Callable[[Value], None] = lambda entry: None) -> None:
        """Capped scores of ``steps`` steps from ``step`` on, side by side in ``p``; ``fetch`` gets the first of each ``QUAD`` entries."""
        e, n, heads = self.e, self.lanes, range(self.spec.head_block)
        begin, size, quads = self.e.b.shl(step, self.e.i64(4)), 4 * n, steps * STEP // QUAD
        if isinstance(self.keys, BlockRows):
            self.score_alone(begin, steps, p, first_row, fetch)
            return
        sums = self.at(self.s.quads)
        # A loop keeps the compiler from multiplying everything first and adding it then, for which there are not enough registers.
        with e.for_range(0, quads, name="quad") as quad:
            first = e.b.shl(quad, e.i64(2))
            fetch(first)
            target = e.at(sums, quad, size)
            for row, entries in enumerate(self.partial_sums(self.ring_entry(e.b.add(begin, first)), first_row)):
                pairs = [joined(e, entries[:2], 0), joined(e, entries[2:], 0)]
                e.store(joined(e, pairs, 1), e.gep(target, quads * size * row))
        with e.for_range(0, steps * self.width, name="join") as w:
            for row in heads:
                at = e.gep(e.at(sums, w, n // QUAD * size), quads * size * row)
                done, stage = [e.load(vec(F32, n), e.gep(at, size * i)) for i in range(n // QUAD)], 2
                while len(done) > 1:
                    done = [joined(e, done[i : i + 2], stage) for i in range(0, len(done), 2)]
                    stage += 1
                e.store(self.capped(done[0]), e.gep(e.at(p, w, size), 4 * STEP * steps * row))

    def partial_sums(self, first: Value, first_row: Value) -> list[list[Value]]:
        """By row and entry, ``QUAD`` from ring index ``first`` on: lane i is the sum of the products i, i + lanes, i + 2 lanes, ..."""
        e, n, spec = self.e, self.lanes, self.spec
        ty, q, heads = vec(F32, n), self.at(self.s.q, first_row, 4 * spec.d), range(spec.head_block)
        out: list[list[Value]] = [[] for _ in heads]
        together = QUAD if QUAD * spec.head_block <= self.registers else QUAD // 2
        for j in range(0, QUAD, together):
            entries = [self.keys.row(first, j + i) for i in range(together)]
            sums = [[e.var(ty, e.const(ty, 0.0)) for _ in entries] for _ in heads]

            def add(i: Value, count: int, entries: list[Value] = entries, sums: list[list[Var]] = sums) -> None:
                keys = [self.keys.load(entry, i, count) for entry in entries]
                for row, cells in enumerate(sums):
                    factor = e.load_masked(F32, n, e.gep(e.at(q, i, 4), 4 * spec.d * row), count)
                    for key, cell in zip(keys, cells):
                        cell.set(e.fma(factor, key, cell.get()))

            if spec.d <= _UNROLLED * n:
                for i in range(0, spec.d, n):
                    add(e.i64(i), min(n, spec.d - i))
            else:
                for at, count in self.keys.chunks(n):
                    add(at, count)
            for done, cells in zip(out, sums):
                done += [cell.get() for cell in cells]
        return out
