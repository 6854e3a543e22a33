"""Attention on a GPU: the cell list in splits of 128 entries counted from entry 0, merged in ascending order.

``_split``: a block takes (token, query heads of one KV head, split). A thread computes the scores of one entry, one fused chain over the
head's values; the maximum and the sum of e^(s - max) go over the block in a fixed order; then a thread adds up one value column over the
entries in ascending order. ``_merge``: a block takes (token, query head) and weighs the splits the token sees, then the head's sink. Splits
no visible entry lies in are neither written nor read, entries outside the token's range add exact zeros, so a result depends on the token's
visible entries and their places in the list alone.
"""

from __future__ import annotations

from ggufc.codegen.emitter import F32, I16, I32, I64, Value, Var
from ggufc.codegen.kernels import cache, vmath
from ggufc.codegen.kernels.attention_cpu import FlashAttn, FlashAttnSplits
from ggufc.codegen.kernels.base import symbol
from ggufc.formats import cuda as fmt

from .emitter import PtxEmitter
from .entry import Entry, Form, power_of_two
from .rows import load_stored

SPLIT = 128
"""Entries per split, and threads per block: a thread scores one entry."""
_HEADS = 8
"""Most query heads of a block: they share converted K and V values in registers."""
_LOWEST = -3.4028234663852886e38


def flash_attn_splits(spec: FlashAttnSplits) -> Form:
    """Nothing: on a GPU the launch after this one cuts lists itself, into splits of its own size."""
    return Form(())


def flash_attn(spec: FlashAttn) -> Form:
    name = symbol(spec)
    # The grid of a slice of tokens: the runtime passes the slice's tokens as T.
    grid = (fmt.Factor("T", 1, spec.n_head // head_block(spec)), fmt.Factor("R", SPLIT, 1))
    split = Entry(name + "_split", SPLIT, lambda e: _split(spec, e), group=SPLIT, grid=grid)
    block = min(256, max(32, power_of_two(spec.dv)))
    merge = Entry(name + "_merge", block, lambda e: _merge(spec, e), group=block, grid=(fmt.Factor("T", 1, spec.n_head),))
    return Form((split, merge), extra_bytes=4 * spec.n_head * (spec.dv + 2), extra_div=SPLIT)


def head_block(spec: FlashAttn) -> int:
    """Query heads per block: those of a KV head, or an even part of them."""
    group = spec.n_head // spec.n_head_kv
    return next(n for n in range(min(group, _HEADS), 0, -1) if group % n == 0)


class _Place:
    """Where a tile's token and its partial results are."""

    def __init__(self, e: PtxEmitter, spec: FlashAttn, local: Value) -> None:
        """``local``: token counted from the start of the slice."""
        b = e.b
        self.e, self.spec, self.local = e, spec, local
        self.token = b.add(e.first, local)
        self.splits = e.ceil_div(e.param("R"), SPLIT)
        triple = e.at(e.arg_ptr(5), self.token, 12)
        base, self.lo, self.hi = (e.sext64(e.load(I32, e.gep(triple, 4 * i))) for i in range(3))
        self.cells = e.at(e.arg_ptr(4), base, 4)

    def partial(self, head: Value, split: Value) -> Value:
        """dv weighted sums, then maximum and sum of weights."""
        e, b = self.e, self.e.b
        index = b.add(b.mul(b.add(b.mul(self.local, e.i64(self.spec.n_head)), head), self.splits), split)
        return e.at(e.extra, index, 4 * (self.spec.dv + 2))


def _split(spec: FlashAttn, e: PtxEmitter) -> None:
    b, group, per_head = e.b, head_block(spec), spec.n_head // spec.n_head_kv
    q_shared = e.shared(4 * group * spec.d, "q")
    p_shared = e.shared(4 * group * SPLIT, "p")
    rows = e.shared(8 * SPLIT, "rows")
    splits = e.ceil_div(e.param("R"), SPLIT)
    e.begin_tiles()
    split = b.urem(e.tile, splits)
    rest = b.udiv(e.tile, splits)
    unit = b.urem(rest, e.i64(spec.n_head // group))
    place = _Place(e, spec, b.udiv(rest, e.i64(spec.n_head // group)))
    g = b.udiv(unit, e.i64(per_head // group))
    start = b.mul(split, e.i64(SPLIT))
    first = e.imax(place.lo, start)
    last = e.imin(place.hi, b.add(start, e.i64(SPLIT)))
    with e.if_(b.icmp_signed("<", first, last)):
        head = b.mul(unit, e.i64(group))
        q = e.at(e.arg_ptr(0), b.add(b.mul(place.token, e.arg_int(1)), b.mul(head, e.i64(spec.d))), 4)
        with e.for_threads(group * spec.d) as i:
            e.store(e.load(F32, e.at(q, i, 4)), e.at(q_shared, i, 4))
        e.barrier()
        entry = b.add(start, e.thread)
        seen = b.and_(b.icmp_signed(">=", entry, first), b.icmp_signed("<", entry, last))
        scores = _scores(e, spec, place, g, entry, seen, q_shared, rows)
        numbers = []
        for h, score in enumerate(scores):
            top = e.reduce(score, "max")
            p = b.select(seen, vmath.exp_flushed(e, b.fsub(score, top)), e.f32(0.0))
            e.store(p, e.at(e.gep(p_shared, 4 * SPLIT * h), e.thread, 4))
            numbers.append((top, e.reduce(p, "add")))
        with e.if_(b.icmp_signed("==", e.thread, e.i64(0))):
            for h, (top, total) in enumerate(numbers):
                to = e.gep(place.partial(b.add(head, e.i64(h)), split), 4 * spec.dv)
                e.store(top, to)
                e.store(total, e.gep(to, 4))
        e.barrier()
        _values(e, spec, place, head, split, b.sub(first, start), b.sub(last, start), p_shared, rows)
    e.barrier()


def _scores(e: PtxEmitter, spec: FlashAttn, place: _Place, g: Value, entry: Value, seen: Value, q: Value, rows: Value) -> list[Value]:
    """The thread's entry against every query head; the V row's address goes to ``rows``."""
    b = e.b
    acc = [e.var(F32, e.f32(0.0)) for _ in range(head_block(spec))]
    k_row, v_row = cache.row_bytes(spec.type_k, spec.d), cache.row_bytes(spec.type_v, spec.dv)
    k_cell, v_cell = (cache.row_bytes(t, n) for t, n in zip((spec.type_k, spec.type_v), spec.cells_of))
    with e.if_(seen):
        cell = e.sext64(e.load(I32, e.at(place.cells, entry, 4)))
        offset = b.add(b.mul(cell, e.i64(v_cell)), b.mul(g, e.i64(v_row)))
        e.store(offset, e.at(rows, e.thread, 8))
        key = e.at(e.at(e.arg_ptr(2), cell, k_cell), g, k_row)
        _dot(e, spec, key, q, acc)
    out = []
    for total in acc:
        s = b.fmul(total.get(), e.f32(spec.scale))
        if spec.softcap:
            s = b.fmul(vmath.tanh(e, b.fmul(s, e.f32(1 / spec.softcap))), e.f32(spec.softcap))
        out.append(b.select(seen, s, e.f32(_LOWEST)))
    return out


def _dot(e: PtxEmitter, spec: FlashAttn, key: Value, q: Value, acc: list[Var]) -> None:
    """Chains over the head's values in ascending order, eight 16-bit values per load where rows allow."""
    d = spec.d
    wide = 8 if spec.type_k in ("f16", "bf16") and d % 8 == 0 else 1
    with e.for_range(0, d, wide, name="value") as i:
        if wide > 1:
            values = [cache.widen(e, spec.type_k, v) for v in e.vector_load(I16, wide, e.at(key, i, 2), 16)]
        else:
            values = [load_stored(e, spec.type_k, key, i)]
        for h, total in enumerate(acc):
            at = e.gep(e.at(q, i, 4), 4 * h * d)
            queries = [x for j in range(0, wide, 4) for x in e.vector_load(F32, 4, e.gep(at, 4 * j), 16)] if wide > 1 else [e.load(F32, at)]
            for x, v in zip(queries, values):
                total.set(e.fma(x, v, total.get()))


def _values(
    e: PtxEmitter, spec: FlashAttn, place: _Place, head: Value, split: Value, first: Value, last: Value, p: Value, rows: Value
) -> None:
    """Weighted sums of the value columns, a thread per column."""
    b = e.b
    with e.for_threads(spec.dv) as i:
        acc = [e.var(F32, e.f32(0.0)) for _ in range(head_block(spec))]
        with e.for_range(first, last, name="entry") as j:
            v = load_stored(e, spec.type_v, e.gep(e.arg_ptr(3), e.load(I64, e.at(rows, j, 8))), i)
            for h, total in enumerate(acc):
                total.set(e.fma(e.load(F32, e.at(e.gep(p, 4 * SPLIT * h), j, 4)), v, total.get()))
        for h, total in enumerate(acc):
            e.store(total.get(), e.at(place.partial(b.add(head, e.i64(h)), split), i, 4))


def _merge(spec: FlashAttn, e: PtxEmitter) -> None:
    """out = sum of e^(m_s - m) acc_s / sum of e^(m_s - m) l_s, both in ascending order of s."""
    b = e.b
    e.begin_tiles()
    head = b.urem(e.tile, e.i64(spec.n_head))
    place = _Place(e, spec, b.udiv(e.tile, e.i64(spec.n_head)))
    first = b.lshr(place.lo, e.i64(SPLIT.bit_length() - 1))
    stop = b.select(b.icmp_signed("<", place.lo, place.hi), e.ceil_div(place.hi, SPLIT), first)
    out = e.at(e.arg_ptr(6), b.add(b.mul(place.token, e.arg_int(7)), b.mul(head, e.i64(spec.dv))), 4)
    top = e.var(F32, e.f32(_LOWEST))
    with e.for_range(first, stop, name="top") as s:
        top.set(e.fmax(top.get(), e.load(F32, e.gep(place.partial(head, s), 4 * spec.dv))))
    sink = e.load(F32, e.at(e.arg_ptr(8), head, 4)) if spec.sinks else None
    most = top.get() if sink is None else e.fmax(top.get(), sink)
    with e.for_threads(spec.dv) as i:
        acc, total = e.var(F32, e.f32(0.0)), e.var(F32, e.f32(0.0))
        with e.for_range(first, stop, name="split") as s:
            part = place.partial(head, s)
            w = vmath.exp_flushed(e, b.fsub(e.load(F32, e.gep(part, 4 * spec.dv)), most))
            total.set(e.fma(w, e.load(F32, e.gep(part, 4 * spec.dv + 4)), total.get()))
            acc.set(e.fma(w, e.load(F32, e.at(part, i, 4)), acc.get()))
        if sink is not None:
            total.set(b.fadd(total.get(), vmath.exp_flushed(e, b.fsub(sink, most))))
        none = b.fcmp_ordered("==", total.get(), e.f32(0.0))
        e.store(b.select(none, e.f32(0.0), b.fdiv(acc.get(), total.get())), e.at(out, i, 4))
