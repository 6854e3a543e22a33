"""Attention on a GPU: the cell list in splits of 128 entries counted from entry 0, merged in ascending order.

Splits: a block takes (tokens, query heads of one KV head, split); token and head are a *row*. A thread computes the scores of one entry, a
fused chain over the head's values per row; the maximum and the sum of e^(s - max) of a row go over the block in a fixed order; then a
thread adds up one value column per row over the entries in ascending order. ``_split`` has the heads of one token, ``_rows`` those of up
to eight tokens that share a list: keys and values are read and widened once for all rows. Entries outside a token's range are passed over,
so both forms compute a row by the same steps. ``_merge``: a block takes (token, query head) and weighs the splits the token sees, then the
head's sink. Splits no visible entry lies in are neither written nor read. So a result depends on the token's visible entries and their
places in the list alone.
"""

from __future__ import annotations

from dataclasses import replace

from llvmlite import ir

from ggufc.codegen.emitter import F32, I16, I32, I64, Value, Var
from ggufc.codegen.kernels import cache, vmath
from ggufc.codegen.kernels.attention_cpu import FlashAttn, FlashAttnSplits
from ggufc.codegen.kernels.base import symbol
from ggufc.formats import cuda as fmt

from .emitter import WARP, PtxEmitter
from .entry import Entry, Form, power_of_two
from .rows import load_stored

SPLIT = 128
"""Entries per split, and threads per block: a thread scores one entry."""
_HEADS = 8
"""Most query heads of a block: they share converted K and V values in registers."""
_TOKENS, _ROWS = 8, 24
"""Most tokens and rows of a block of several tokens: a thread holds a sum for each row, as many as leave no spills."""
_SHARED_BYTES = 48 << 10
_RESIDENT = 512, 384
"""Threads of ``_split`` and ``_rows`` a multiprocessor should hold: sums of many rows need registers, and many chains hide latencies by
themselves."""
_RESIDENT_BLOCKS = 384, 256
"""The same where rows are stored in blocks of 32: a block being unpacked needs registers, too."""
_WARPS = SPLIT // WARP
_CHUNK = 4
"""Entries whose probabilities a thread loads at once."""
_LOWEST = -3.4028234663852886e38


def flash_attn_splits(spec: FlashAttnSplits) -> Form:
    """Nothing: on a GPU the launch after this one cuts lists itself, into splits of its own size."""
    return Form(())


def flash_attn(spec: FlashAttn) -> Form:
    name, several = symbol(spec), token_block(spec)
    units = spec.n_head // head_block(spec)
    splits = fmt.Factor("R", SPLIT, 1)
    # The grid of a slice of tokens: the runtime passes the slice's tokens as T.
    few_resident, resident = _RESIDENT if {spec.type_k, spec.type_v} <= {"f32", "f16", "bf16"} else _RESIDENT_BLOCKS
    grid = (fmt.Factor("T", 1, units), splits)
    few = Entry(name + "_split", SPLIT, lambda e: _splits(spec, e, 1), group=SPLIT, grid=grid, resident=few_resident)
    entries = [few]
    if several > 1:
        grid = (fmt.Factor("T", several, units), splits)
        body = lambda e: _splits(spec, e, several)  # noqa: E731
        many = Entry(name + "_rows", SPLIT, body, group=SPLIT, grid=grid, sym="T", low=several, resident=resident)
        entries = [replace(few, sym="T", high=several - 1), many]
    block = min(256, max(32, power_of_two(spec.dv)))
    merge = Entry(name + "_merge", block, lambda e: _merge(spec, e), group=block, grid=(fmt.Factor("T", 1, spec.n_head),))
    return Form((*entries, merge), extra_bytes=4 * spec.n_head * (spec.dv + 2), extra_div=SPLIT, slice_tokens=several)


def head_block(spec: FlashAttn) -> int:
    """Query heads per block: those of a KV head, or an even part of them."""
    group = spec.n_head // spec.n_head_kv
    return next(n for n in range(min(group, _HEADS), 0, -1) if group % n == 0)


def token_block(spec: FlashAttn) -> int:
    """Tokens of a block of ``_rows``: as many as registers and shared memory hold; 1 where that is no gain."""
    group = head_block(spec)
    fits = (_SHARED_BYTES - 12 * SPLIT) // (group * (4 * spec.d + 4 * SPLIT + 8 * _WARPS))
    return max(1, min(_TOKENS, _ROWS // group, fits))


class _Place:
    """Where a token and its partial results are; ``local``: token counted from the start of the slice."""

    def __init__(self, e: PtxEmitter, spec: FlashAttn, local: Value) -> None:
        b = e.b
        self.e, self.spec, self.local = e, spec, local
        self.token = b.add(e.first, local)
        self.splits = e.ceil_div(e.param("R"), SPLIT)
        self.exists = b.icmp_signed("<", self.token, e.param("T"))
        triple = e.at(e.arg_ptr(5), e.imin(self.token, b.sub(e.param("T"), e.i64(1))), 12)
        self.base, self.lo, self.hi = (e.sext64(e.load(I32, e.gep(triple, 4 * i))) for i in range(3))
        self.cells = e.at(e.arg_ptr(4), self.base, 4)

    def partial(self, head: Value, split: Value) -> Value:
        """dv weighted sums, then maximum and sum of weights."""
        e, b = self.e, self.e.b
        index = b.add(b.mul(b.add(b.mul(self.local, e.i64(self.spec.n_head)), head), self.splits), split)
        return e.at(e.extra, index, 4 * (self.spec.dv + 2))


class _Memory:
    """Shared memory of a block. Of each row: its query, probabilities, and what each warp finds of their maximum and sum; of each entry:
    where its values are and which tokens see it.
    """

    def __init__(self, e: PtxEmitter, spec: FlashAttn, rows: int) -> None:
        self.q = e.shared(4 * rows * spec.d, "q")
        self.p = e.shared(4 * rows * SPLIT, "p")
        self.tops, self.totals = (e.shared(4 * rows * _WARPS, name) for name in ("tops", "totals"))
        self.values = e.shared(8 * SPLIT, "values")
        self.seen = e.shared(4 * SPLIT, "seen")


def _splits(spec: FlashAttn, e: PtxEmitter, tokens: int) -> None:
    """A tile: up to ``tokens`` tokens that share a list go together, others one after the other."""
    b, group = e.b, head_block(spec)
    memory = _Memory(e, spec, tokens * group)
    splits, units = e.ceil_div(e.param("R"), SPLIT), e.i64(spec.n_head // group)
    e.begin_tiles()
    split = b.urem(e.tile, splits)
    rest = b.udiv(e.tile, splits)
    unit = b.urem(rest, units)
    local = b.mul(b.udiv(rest, units), e.i64(tokens))
    block = _Block(e, spec, memory, unit, split)
    if tokens == 1:
        block.compute(local, 1)
    else:
        places = [_Place(e, spec, b.add(local, e.i64(i))) for i in range(tokens)]
        together = e.const(ir.IntType(1), 1)
        for place in places[1:]:
            together = b.and_(together, b.or_(b.icmp_signed("==", place.base, places[0].base), b.not_(place.exists)))
        with e.if_else(together) as (all_, each):
            with all_:
                block.compute(local, tokens)
            with each, e.for_range(0, tokens, name="token") as i:
                block.compute(b.add(local, i), 1)
    e.barrier()


class _Block:
    """The heads of a block's unit under one split. Places are made anew where they are needed: eight would fill the registers."""

    def __init__(self, e: PtxEmitter, spec: FlashAttn, memory: _Memory, unit: Value, split: Value) -> None:
        b, self.group = e.b, head_block(spec)
        self.e, self.spec, self.memory, self.split = e, spec, memory, split
        self.head = b.mul(unit, e.i64(self.group))
        self.g = b.udiv(unit, e.i64(spec.n_head // spec.n_head_kv // self.group))
        self.start = b.mul(split, e.i64(SPLIT))

    def _range(self, local: Value) -> tuple[_Place, Value, Value]:
        """A token, and the entries of this split it sees: none if the first is not below the last."""
        e, b = self.e, self.e.b
        place = _Place(e, self.spec, local)
        last = b.select(place.exists, e.imin(place.hi, b.add(self.start, e.i64(SPLIT))), self.start)
        return place, e.imax(place.lo, self.start), last

    def compute(self, local: Value, n: int) -> None:
        """Partial results of the rows of ``n`` tokens, which share a list; ``local``: the first, counted from the slice's first."""
        e, b, group = self.e, self.e.b, self.group
        entry = b.add(self.start, e.thread)
        low, high, seen, nobody = b.add(self.start, e.i64(SPLIT)), self.start, e.i32(0), e.i32(0)
        for t in range(n):
            _, first, last = self._range(b.add(local, e.i64(t)))
            some = b.icmp_signed("<", first, last)
            low, high = e.imin(low, b.select(some, first, low)), e.imax(high, b.select(some, last, high))
            sees = b.and_(b.icmp_signed(">=", entry, first), b.icmp_signed("<", entry, last))
            seen = b.or_(seen, b.select(sees, e.i32(1 << t), e.i32(0)))
            nobody = b.or_(nobody, b.select(some, e.i32(0), e.i32(1 << t)))
        with e.if_(b.icmp_signed("<", low, high)):
            e.store(seen, e.at(self.memory.seen, e.thread, 4))
            self._load_queries(local, n)
            self._weigh(self._scores(local, entry, seen, n), seen)
            with e.if_(b.icmp_signed("<", e.thread, e.i64(n * group))):
                token = b.add(local, b.udiv(e.thread, e.i64(group)))
                place, first, last = self._range(token)
                with e.if_(b.icmp_signed("<", first, last)):
                    to = place.partial(b.add(self.head, b.urem(e.thread, e.i64(group))), self.split)
                    e.store(self._joined(self.memory.tops, e.thread, "max"), e.gep(to, 4 * self.spec.dv))
                    e.store(self._joined(self.memory.totals, e.thread, "add"), e.gep(to, 4 * self.spec.dv + 4))
            self._values(local, n, low, high, nobody)
            e.barrier()

    def _weigh(self, scores: list[Value], seen: Value) -> None:
        """Probabilities of the thread's entry relative to each row's maximum; what the warps find of maxima and sums."""
        e, b, lane = self.e, self.e.b, self.e.b.and_(self.e.thread, self.e.i64(WARP - 1))
        warp = b.lshr(e.thread, e.i64(WARP.bit_length() - 1))

        def put(memory: Value, r: int, v: Value) -> None:
            with e.if_(b.icmp_signed("==", lane, e.i64(0))):
                e.store(v, e.at(e.gep(memory, 4 * _WARPS * r), warp, 4))

        for r, score in enumerate(scores):
            put(self.memory.tops, r, e.reduce_warp(score, "max"))
        e.barrier()
        for r, score in enumerate(scores):
            top = self._joined(self.memory.tops, e.i64(r), "max")
            p = b.select(self._bit(seen, r // self.group), vmath.exp_flushed(e, b.fsub(score, top)), e.f32(0.0))
            e.store(p, e.at(e.gep(self.memory.p, 4 * SPLIT * r), e.thread, 4))
            put(self.memory.totals, r, e.reduce_warp(p, "add"))
        e.barrier()

    def _joined(self, memory: Value, row: Value, op: str) -> Value:
        """What the warps have found of a row, put together."""
        parts = self.e.vector_load(F32, _WARPS, self.e.at(memory, row, 4 * _WARPS), 4 * _WARPS)
        return self.e.combine(self.e.combine(parts[0], parts[2], op), self.e.combine(parts[1], parts[3], op), op)

    def _bit(self, mask: Value, t: int) -> Value:
        return self.e.b.icmp_signed("!=", self.e.b.and_(mask, self.e.i32(1 << t)), self.e.i32(0))

    def _load_queries(self, local: Value, n: int) -> None:
        e, b, d = self.e, self.e.b, self.spec.d
        for t in range(n):
            token = e.imin(b.add(e.first, b.add(local, e.i64(t))), b.sub(e.param("T"), e.i64(1)))
            q = e.at(e.arg_ptr(0), b.add(b.mul(token, e.arg_int(1)), b.mul(self.head, e.i64(d))), 4)
            with e.for_threads(self.group * d) as i:
                e.store(e.load(F32, e.at(q, i, 4)), e.at(e.gep(self.memory.q, 4 * t * self.group * d), i, 4))
        e.barrier()

    def _scores(self, local: Value, entry: Value, seen: Value, n: int) -> list[Value]:
        """The thread's entry against every row; where its values are goes to shared memory."""
        e, b, spec = self.e, self.e.b, self.spec
        acc = [e.var(F32) for _ in range(n * self.group)]
        for total in acc:
            total.set(e.f32(0.0))
        k_row, v_row = cache.row_bytes(spec.type_k, spec.d), cache.row_bytes(spec.type_v, spec.dv)
        k_cell, v_cell = (cache.row_bytes(t, n) for t, n in zip((spec.type_k, spec.type_v), spec.cells_of))
        values = e.var(I64)
        values.set(e.i64(0))
        with e.if_(b.icmp_signed("!=", seen, e.i32(0))):
            cell = e.sext64(e.load(I32, e.at(_Place(e, spec, local).cells, entry, 4)))
            values.set(b.add(b.mul(cell, e.i64(v_cell)), b.mul(self.g, e.i64(v_row))))
            self._dot(e.at(e.at(e.arg_ptr(2), cell, k_cell), self.g, k_row), acc)
        e.store(values.get(), e.at(self.memory.values, e.thread, 8))
        out = []
        for r, total in enumerate(acc):
            s = b.fmul(total.get(), e.f32(spec.scale))
            if spec.softcap:
                s = b.fmul(vmath.tanh(e, b.fmul(s, e.f32(1 / spec.softcap))), e.f32(spec.softcap))
            out.append(b.select(self._bit(seen, r // self.group), s, e.f32(_LOWEST)))
        return out

    def _dot(self, key: Value, acc: list[Var]) -> None:
        """Chains over the head's values in ascending order, 16 bytes of 16-bit values per load where rows allow."""
        e, d, type_k = self.e, self.spec.d, self.spec.type_k
        wide = 8 if type_k in ("f16", "bf16") and d % 8 == 0 else 1
        with e.for_range(0, d, wide, name="value") as i:
            if wide > 1:
                values = [cache.widen(e, type_k, v) for v in e.vector_load(I16, wide, e.at(key, i, 2), 16)]
            else:
                values = [load_stored(e, type_k, key, i)]
            for r, total in enumerate(acc):
                at = e.gep(e.at(self.memory.q, i, 4), 4 * r * d)
                if wide > 1:
                    queries = [x for j in range(0, wide, 4) for x in e.vector_load(F32, 4, e.gep(at, 4 * j), 16)]
                else:
                    queries = [e.load(F32, at)]
                for x, v in zip(queries, values):
                    total.set(e.fma(x, v, total.get()))

    def _values(self, local: Value, n: int, low: Value, high: Value, nobody: Value) -> None:
        """Weighted sums of the value columns, a thread per column; entries a token does not see leave its rows as they are.

        ``nobody``: tokens that see nothing of the split, whose rows nobody reads.
        """
        e, b, spec, group = self.e, self.e.b, self.spec, self.group
        begin = b.and_(b.sub(low, self.start), e.i64(-_CHUNK))
        with e.for_threads(spec.dv) as i:
            acc = [e.var(F32) for _ in range(n * group)]
            for total in acc:
                total.set(e.f32(0.0))
            with e.for_range(begin, b.sub(high, self.start), _CHUNK, name="chunk") as first:
                at = e.at(self.memory.values, first, 8)
                rows = [*e.vector_load(I64, 2, at, 16), *e.vector_load(I64, 2, e.gep(at, 16), 16)]
                values = [load_stored(e, spec.type_v, e.gep(e.arg_ptr(3), row), i) for row in rows]
                masks = e.vector_load(I32, _CHUNK, e.at(self.memory.seen, first, 4), 16)
                all_masks = masks[0]
                for mask in masks[1:]:
                    all_masks = b.and_(all_masks, mask)

                def add(everyone: bool, first: Value = first, values: list[Value] = values, masks: list[Value] = masks) -> None:
                    for r, total in enumerate(acc):
                        p = e.vector_load(F32, _CHUNK, e.at(e.gep(self.memory.p, 4 * SPLIT * r), first, 4), 16)
                        for factor, v, mask in zip(p, values, masks):
                            following = e.fma(factor, v, total.get())
                            total.set(following if everyone else b.select(self._bit(mask, r // group), following, total.get()))

                whole = b.icmp_signed("==", b.or_(all_masks, nobody), e.i32((1 << n) - 1))
                with e.if_else(whole) as (all_, some):
                    with all_:
                        add(True)
                    with some:
                        add(False)
            for t in range(n):
                place, start, stop = self._range(b.add(local, e.i64(t)))
                with e.if_(b.icmp_signed("<", start, stop)):
                    for h in range(group):
                        e.store(acc[t * group + h].get(), e.at(place.partial(b.add(self.head, e.i64(h)), self.split), i, 4))


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
