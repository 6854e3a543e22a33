"""Integer products of many tokens: 64 weight rows by 64 tokens per block, both staged in shared memory.

A stage holds four blocks of 32 columns: weights unpacked to code words, scales and minima in f32, activations as they are. A thread
computes four rows (one of each weight group, so gate and up of a gated product meet in one thread) for four tokens. Segments follow each
other with one accumulator each; see ``products``.
"""

from __future__ import annotations

from collections.abc import Sequence

from ggufc.codegen.emitter import F32, I32, Value, Var
from ggufc.codegen.kernels.base import symbol
from ggufc.codegen.kernels.matmul import MatMul
from ggufc.codegen.weights import q8_record, weight_format
from ggufc.codegen.weights.base import ROWS

from .emitter import PtxEmitter
from .entry import Entry, rows_factor
from .products import TILE_FROM, Activations, Finish, accumulate, load_activations, row_count, segments, units_of

GROUPS = 4
BLOCK_TOKENS = 64
STAGE = 4
"""Blocks of 32 columns per stage."""
THREADS = 256
_THREAD_TOKENS = 4


class _Stage:
    """Shared memory of a stage.

    Weights: words [block][word][group][16 rows], numbers likewise. Activations: [block][token] records of eight words, the scale, starts
    and sums.
    """

    def __init__(self, e: PtxEmitter, spec: MatMul) -> None:
        self.e, self.spec = e, spec
        self.format = weight_format(spec.format)
        n = 32 // self.format.group
        self.n_scales, self.n_mins = n, n if self.format.has_min else 0
        self.n_starts, self.n_sums = n if self.format.offset else 0, self.n_mins
        self.words = 8 + self.n_scales + self.n_mins
        self.weights = e.shared(4 * STAGE * self.words * GROUPS * ROWS, "weights")
        extra = 1 + self.n_starts + self.n_sums
        self.record = 32 + -(-4 * extra // 16) * 16  # records stay aligned to 16 bytes
        self.activations = e.shared(STAGE * BLOCK_TOKENS * self.record, "activations")

    def weight(self, block: Value, word: int, group: Value, row: Value) -> Value:
        e, b = self.e, self.e.b
        index = b.add(b.mul(b.add(b.mul(b.add(b.mul(block, e.i64(self.words)), e.i64(word)), e.i64(GROUPS)), group), e.i64(ROWS)), row)
        return e.at(self.weights, index, 4)

    def token(self, block: Value, token: Value) -> Value:
        e, b = self.e, self.e.b
        return e.at(self.activations, b.add(b.mul(block, e.i64(BLOCK_TOKENS)), token), self.record)

    def put_weights(self, unit_groups: Value, n_groups: Value, first: Value, stop: Value) -> None:
        """Unpack: a thread takes one block of one row."""
        e, b, f, k = self.e, self.e.b, self.format, self.spec.k
        row = b.and_(e.thread, e.i64(ROWS - 1))
        group = b.and_(b.lshr(e.thread, e.i64(4)), e.i64(GROUPS - 1))
        block = b.lshr(e.thread, e.i64(6))
        i, m = b.add(first, block), f.chunk_blocks(k)
        with e.if_(b.icmp_signed("<", i, stop)):
            which = e.imin(b.add(unit_groups, group), n_groups)
            start = e.at(e.arg_ptr(0), which, f.group_bytes(k))
            w = f.unpack(e, f.cursor(e, start, k, b.udiv(i, e.i64(m)), b.urem(i, e.i64(m)), row))
            for j, v in enumerate([*w.quads, *w.scales, *w.mins]):
                e.store(v, self.weight(block, j, group, row))

    def put_activations(self, first_token: Value, last_token: Value, first: Value, stop: Value) -> None:
        """A thread takes one block of one token."""
        e, b = self.e, self.e.b
        block, token = b.and_(e.thread, e.i64(STAGE - 1)), b.lshr(e.thread, e.i64(2))
        i = b.add(first, block)
        with e.if_(b.icmp_signed("<", i, stop)):
            source = e.imin(b.add(first_token, token), last_token)
            record = e.at(e.arg_ptr(1), source, q8_record(self.spec.k).stride)
            x = load_activations(e, self.format, self.spec.k, record, i)
            to = self.token(block, token)
            e.vector_store(x.quads[:4], to, 16)
            e.vector_store(x.quads[4:], e.gep(to, 16), 16)
            for j, v in enumerate([x.d, *x.starts, *x.sums]):
                e.store(v, e.gep(to, 32 + 4 * j))

    def get_weights(self, block: Value, group: int, row: Value) -> tuple[list[Value], list[Value], list[Value]]:
        e = self.e
        quads = [e.load(I32, self.weight(block, j, e.i64(group), row)) for j in range(8)]
        numbers = [e.load(F32, self.weight(block, j, e.i64(group), row)) for j in range(8, self.words)]
        return quads, numbers[: self.n_scales], numbers[self.n_scales :]

    def get_activations(self, block: Value, token: Value) -> Activations:
        e = self.e
        at = self.token(block, token)
        quads = e.vector_load(I32, 4, at, 16) + e.vector_load(I32, 4, e.gep(at, 16), 16)
        starts = [e.load(I32, e.gep(at, 36 + 4 * j)) for j in range(self.n_starts)]
        sums = [e.load(F32, e.gep(at, 36 + 4 * (self.n_starts + j))) for j in range(self.n_sums)]
        return Activations(quads, e.load(F32, e.gep(at, 32)), starts, sums)


def tile_entry(spec: MatMul) -> Entry:
    """The entry for ``TILE_FROM`` rows and more."""
    per = GROUPS // spec.unit
    row_tiles = -(-units_of(spec) // per)
    sym = "" if spec.rows.isdigit() else spec.rows
    grid = rows_factor(spec.rows, BLOCK_TOKENS, row_tiles)
    return Entry(symbol(spec) + "_tile", THREADS, lambda e: _body(spec, e), grid=grid, sym=sym, low=TILE_FROM)


def _body(spec: MatMul, e: PtxEmitter) -> None:
    b = e.b
    stage = _Stage(e, spec)
    cut = segments(stage.format, spec.k)
    m = stage.format.chunk_blocks(spec.k)
    per = GROUPS // spec.unit
    row_tiles = -(-units_of(spec) // per)
    count = row_count(spec, e)
    finish = Finish(spec, e)
    row, column = b.and_(e.thread, e.i64(ROWS - 1)), b.lshr(e.thread, e.i64(4))
    e.begin_tiles()
    first_group = b.mul(b.urem(e.tile, e.i64(row_tiles)), e.i64(GROUPS))
    first_token = b.mul(b.udiv(e.tile, e.i64(row_tiles)), e.i64(BLOCK_TOKENS))
    totals = [[e.var(F32, e.f32(0.0)) for _ in range(_THREAD_TOKENS)] for _ in range(GROUPS)]
    acc = [[e.var(F32) for _ in range(_THREAD_TOKENS)] for _ in range(GROUPS)]
    with e.for_range(0, cut.count, name="segment") as s:
        for cell in (cell for line in acc for cell in line):
            cell.set(e.f32(0.0))
        begin = b.mul(s, e.i64(cut.length * m))
        stop = e.imin(b.add(begin, e.i64(cut.length * m)), e.i64(cut.pieces * m))
        with e.for_range(begin, stop, STAGE, name="stage") as first:
            stage.put_weights(first_group, e.i64(-(-spec.n // ROWS) - 1), first, stop)
            stage.put_activations(first_token, b.sub(count, e.i64(1)), first, stop)
            e.barrier()
            with e.for_range(0, e.imin(b.sub(stop, first), e.i64(STAGE)), name="block") as block:
                _multiply(e, stage, block, row, column, acc)
            e.barrier()
        for line, sums in zip(totals, acc):
            for total, part in zip(line, sums):
                total.set(b.fadd(total.get(), part.get()))
    for p in range(per):
        unit = b.add(b.udiv(first_group, e.i64(spec.unit)), e.i64(p))
        out = b.add(b.mul(unit, e.i64(ROWS)), row)
        for t in range(_THREAD_TOKENS):
            token = b.add(b.add(first_token, b.mul(column, e.i64(_THREAD_TOKENS))), e.i64(t))
            exists = b.and_(b.icmp_signed("<", out, e.i64(spec.n // spec.unit)), b.icmp_signed("<", token, count))
            sums = [totals[p * spec.unit + u][t].get() for u in range(spec.unit)]
            with e.if_(exists):
                finish(out, token, sums)


def _multiply(e: PtxEmitter, stage: _Stage, block: Value, row: Value, column: Value, acc: Sequence[Sequence[Var]]) -> None:
    b = e.b
    tokens = [stage.get_activations(block, b.add(b.mul(column, e.i64(_THREAD_TOKENS)), e.i64(t))) for t in range(_THREAD_TOKENS)]
    for g in range(GROUPS):
        quads, scales, mins = stage.get_weights(block, g, row)
        for t, x in enumerate(tokens):
            acc[g][t].set(accumulate(e, quads, scales, mins, x, acc[g][t].get()))
