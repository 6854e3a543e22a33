"""The lightning indexer on a GPU: scores of listed cells and the choice of the best (``kernels.indexer`` says what they are).

``IndexerScores``: a block takes 32 entries of the cell lists and eight tokens. Keys are brought to shared memory once, [value][entry],
queries a few heads at a time; a warp takes a token, a lane an entry. The sums are the CPU's chains, so a score depends on its token and key
alone.
``IndexerSelect``: a block takes a token, finds the score of the k-th best entry (``ranking``) and writes the cells that reach it in the
order of the list.
"""

from __future__ import annotations

from ggufc.codegen.emitter import F32, I32, I64, Value
from ggufc.codegen.errors import CodegenError
from ggufc.codegen.kernels import cache
from ggufc.codegen.kernels.base import symbol
from ggufc.codegen.kernels.indexer import IndexerScores, IndexerSelect, score_stride
from ggufc.formats import cuda as fmt

from .emitter import WARP, PtxEmitter
from .entry import Entry, Form
from .ranking import BLOCK, Ranking, float_rank
from .rows import load_stored

ENTRIES, TOKENS = 32, 8
_SHARED_BYTES = 48 << 10


def _heads_at_once(spec: IndexerScores) -> int:
    """Heads whose queries lie in shared memory beside the keys."""
    left = _SHARED_BYTES - 4 * ENTRIES * spec.d
    heads = min(spec.heads, 8, left // (4 * TOKENS * spec.d))
    if heads < 1:
        raise CodegenError(f"indexer: keys of {spec.d} values do not fit a GPU's shared memory; compile this model for the CPU")
    return heads


def indexer_scores(spec: IndexerScores) -> Form:
    at_once = _heads_at_once(spec)
    grid = (fmt.Factor(spec.entries, ENTRIES, 1), fmt.Factor("T", TOKENS, 1))
    return Form((Entry(symbol(spec), WARP * TOKENS, lambda e: _scores(spec, e, at_once), grid=grid),))


def _scores(spec: IndexerScores, e: PtxEmitter, at_once: int) -> None:
    b, d = e.b, spec.d
    keys, queries = e.shared(4 * ENTRIES * d, "keys"), e.shared(4 * TOKENS * at_once * d, "queries")
    columns = e.ceil_div(e.param(spec.entries), ENTRIES)
    tokens, entries, stride = e.param("T"), e.param(spec.entries), score_stride(e, spec.entries)
    warp, lane = b.lshr(e.thread, e.i64(5)), b.and_(e.thread, e.i64(WARP - 1))
    e.begin_tiles()
    first = b.mul(b.urem(e.tile, columns), e.i64(ENTRIES))
    first_token = b.mul(b.udiv(e.tile, columns), e.i64(TOKENS))
    token, entry = b.add(first_token, warp), b.add(first, lane)
    last_token, last_entry = b.sub(tokens, e.i64(1)), b.sub(entries, e.i64(1))
    with e.for_threads(ENTRIES * d) as i:
        # Neighbouring threads take neighbouring values of one key.
        j, value = b.udiv(i, e.i64(d)), b.urem(i, e.i64(d))
        cell = e.sext64(e.load(I32, e.at(e.arg_ptr(5), e.imin(b.add(first, j), last_entry), 4)))
        key = e.at(e.arg_ptr(4), cell, cache.row_bytes(spec.dtype, d))
        e.store(load_stored(e, spec.dtype, key, value), e.at(keys, b.add(b.mul(value, e.i64(ENTRIES)), j), 4))
    total = e.var(F32)
    total.set(e.f32(0.0))

    def heads(start: Value, count: int) -> None:
        with e.for_threads(TOKENS * count * d) as i:
            which, rest = b.udiv(i, e.i64(count * d)), b.urem(i, e.i64(count * d))
            q = e.at(e.arg_ptr(0), b.mul(e.imin(b.add(first_token, which), last_token), e.arg_int(1)), 4)
            e.store(e.load(F32, e.at(q, b.add(b.mul(start, e.i64(d)), rest), 4)), e.at(queries, i, 4))
        e.barrier()
        mine = e.at(queries, warp, 4 * count * d)
        sums = [e.var(F32) for _ in range(count)]
        for s in sums:
            s.set(e.f32(0.0))
        wide = 4 if d % 4 == 0 else 1
        with e.for_range(0, d, wide, name="value") as i:
            values = [e.load(F32, e.at(keys, b.add(b.mul(b.add(i, e.i64(j)), e.i64(ENTRIES)), lane), 4)) for j in range(wide)]
            for h, s in enumerate(sums):
                at = e.gep(e.at(mine, i, 4), 4 * h * d)
                factors = e.vector_load(F32, 4, at, 16) if wide == 4 else [e.load(F32, at)]
                for q, v in zip(factors, values):
                    s.set(e.fma(q, v, s.get()))
        weights = e.at(e.arg_ptr(2), b.mul(e.imin(token, last_token), e.arg_int(3)), 4)
        for h, s in enumerate(sums):
            weight = e.load(F32, e.gep(e.at(weights, start, 4), 4 * h))
            total.set(e.fma(weight, e.fmax(s.get(), e.f32(0.0)), total.get()))
        e.barrier()

    whole = spec.heads - spec.heads % at_once
    with e.for_range(0, whole, at_once, name="head") as start:
        heads(start, at_once)
    if spec.heads > whole:
        heads(e.i64(whole), spec.heads - whole)
    with e.if_(b.and_(b.icmp_signed("<", token, tokens), b.icmp_signed("<", entry, entries))):
        e.store(total.get(), e.at(e.arg_ptr(7), b.add(b.mul(token, stride), entry), 4))


def indexer_select(spec: IndexerSelect) -> Form:
    return Form((Entry(symbol(spec), BLOCK, lambda e: _select(spec, e), group=BLOCK),))


def _select(spec: IndexerSelect, e: PtxEmitter) -> None:
    b, k = e.b, e.i64(spec.k)
    ranking = Ranking(e)
    e.begin_tiles()
    base, lo, hi = (e.sext64(e.load(I32, e.gep(e.at(e.arg_ptr(2), e.tile, 12), 4 * i))) for i in range(3))
    start, n = b.add(base, lo), e.imax(b.sub(hi, lo), e.i64(0))
    cells, chosen = e.at(e.arg_ptr(1), start, 4), e.at(e.arg_ptr(3), e.tile, 4 * spec.k)
    scores = e.at(e.arg_ptr(0), b.add(b.mul(e.tile, score_stride(e, spec.entries)), start), 4)
    sinks = b.sub(e.i64(spec.sinks), lo)
    best = e.const(I64, 0x7FFFFFFF << 32)

    def rank(i: Value) -> Value:
        found = float_rank(e, e.load(F32, e.at(scores, i, 4)), i, ties=spec.ties)
        if not spec.sinks:
            return found
        tie = b.and_(found, e.i64(0xFFFFFFFF))
        return b.select(b.icmp_signed("<", i, sinks), b.or_(best, tie), found)

    def put(place: Value, i: Value) -> None:
        e.store(e.load(I32, e.at(cells, i, 4)), e.at(chosen, place, 4))

    with e.if_else(b.icmp_signed("<=", n, k)) as (everything, some):
        with everything:
            with e.for_threads(n) as i:
                put(i, i)
            with e.for_range(b.add(n, e.thread), k, BLOCK, name="hole") as i:
                e.store(e.i32(-1), e.at(chosen, i, 4))
        with some:
            lowest = ranking.threshold(rank, n, k)
            ranking.for_chosen(n, lambda i: b.icmp_signed(">=", rank(i), lowest), put)
