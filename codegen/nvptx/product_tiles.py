"""Integer products of many tokens: 64 weight rows by 64 tokens per block, both staged in shared memory, multiplied by tensor cores.

A stage holds four blocks of 32 columns: weights unpacked to code words, scales and minima in f32, activations as they are. A warp
computes two weight groups (gate and up of a gated product meet in one thread) for 16 tokens. The integer sums of a block are exact, so
``mma`` gives what ``dp4a`` gives; scales are applied per block in the order of ``products``, segments follow each other with one
accumulator each.
"""

from __future__ import annotations

from ggufc.codegen.emitter import F32, I32, Value, Var
from ggufc.codegen.kernels.base import symbol
from ggufc.codegen.kernels.matmul import MatMul
from ggufc.codegen.weights import q8_record, weight_format
from ggufc.codegen.weights.base import ROWS

from .emitter import PtxEmitter
from .entry import Entry, rows_factor
from .products import TILE_FROM, Finish, load_activations, row_count, segments, units_of

GROUPS = 4
BLOCK_TOKENS = 64
STAGE = 4
"""Blocks of 32 columns per stage."""
THREADS = 256
_PITCH = GROUPS * ROWS + 8
"""Words between code words of a stage: eight more than rows, so that the fragments of ``mma`` come from different banks."""
_PAIRS = GROUPS // 2
_COLUMNS = 16
"""Tokens of a warp: two fragments of eight."""


class _Stage:
    """Shared memory of a stage.

    Weights: words [block][word][group][16 rows], numbers likewise. Activations: [block][token] records of eight words, the scale, starts
    and sums; a record is an odd number of 16 bytes, which spreads tokens over the banks.
    """

    def __init__(self, e: PtxEmitter, spec: MatMul) -> None:
        self.e, self.spec = e, spec
        self.format = weight_format(spec.format)
        n = 32 // self.format.group
        self.n_scales, self.n_mins = n, n if self.format.has_min else 0
        self.n_starts, self.n_sums = n if self.format.offset else 0, self.n_mins
        self.words = 8 + self.n_scales + self.n_mins
        self.weights = e.shared(4 * STAGE * self.words * _PITCH, "weights")
        self.record = 16 * (-(-(9 + self.n_starts + self.n_sums) // 4) | 1)
        self.activations = e.shared(STAGE * BLOCK_TOKENS * self.record, "activations")

    def weight(self, block: Value, word: int | Value, group: int | Value, row: Value) -> Value:
        """Address of a word (a number, for indices from 8 on) of a weight row."""
        e, b = self.e, self.e.b
        word, group = (e.i64(v) if isinstance(v, int) else v for v in (word, group))
        line = b.add(b.mul(block, e.i64(self.words)), word)
        return e.at(self.weights, b.add(b.mul(line, e.i64(_PITCH)), b.add(b.mul(group, e.i64(ROWS)), row)), 4)

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


class _Warp:
    """Where a thread stands in its warp's product: 32 rows (two groups) by 16 tokens, in fragments of 16 by 8
    (``PtxEmitter.mma_u8_s8``).
    """

    def __init__(self, e: PtxEmitter) -> None:
        b = e.b
        warp, lane = b.lshr(e.thread, e.i64(5)), b.and_(e.thread, e.i64(31))
        self.pair = b.urem(warp, e.i64(_PAIRS))
        self.first_token = b.mul(b.udiv(warp, e.i64(_PAIRS)), e.i64(_COLUMNS))
        self.g, self.t = b.lshr(lane, e.i64(2)), b.and_(lane, e.i64(3))
        self.rows = [self.g, b.add(self.g, e.i64(8))]
        self.groups = [b.add(b.mul(self.pair, e.i64(2)), e.i64(i)) for i in range(2)]

    def token(self, e: PtxEmitter, fragment: int, column: int) -> Value:
        """Token of the block that a result column of this thread belongs to."""
        return e.b.add(self.first_token, e.b.add(e.b.add(self.t, self.t), e.i64(8 * fragment + column)))


_Sums = list[list[list[list[Var]]]]
"""[weight group][fragment of tokens][row g or g + 8][column 2t or 2t + 1]."""


def _sums(e: PtxEmitter) -> _Sums:
    return [[[[e.var(F32, e.f32(0.0)) for _ in range(2)] for _ in range(2)] for _ in range(2)] for _ in range(2)]


def _cells(sums: _Sums) -> list[Var]:
    return [cell for group in sums for fragment in group for row in fragment for cell in row]


def tile_entry(spec: MatMul) -> Entry:
    """The entry for ``TILE_FROM`` rows and more."""
    per = GROUPS // spec.unit
    row_tiles = -(-units_of(spec) // per)
    sym = "" if spec.rows.isdigit() else spec.rows
    grid = rows_factor(spec.rows, BLOCK_TOKENS, row_tiles)
    return Entry(symbol(spec) + "_tile", THREADS, lambda e: _body(spec, e), grid=grid, sym=sym, low=TILE_FROM)


def _body(spec: MatMul, e: PtxEmitter) -> None:
    b = e.b
    stage, warp = _Stage(e, spec), _Warp(e)
    cut = segments(stage.format, spec.k)
    m = stage.format.chunk_blocks(spec.k)
    row_tiles = -(-units_of(spec) // (GROUPS // spec.unit))
    count = row_count(spec, e)
    finish = Finish(spec, e)
    e.begin_tiles()
    first_group = b.mul(b.urem(e.tile, e.i64(row_tiles)), e.i64(GROUPS))
    first_token = b.mul(b.udiv(e.tile, e.i64(row_tiles)), e.i64(BLOCK_TOKENS))
    totals, acc = _sums(e), _sums(e)
    for cell in _cells(totals):
        cell.set(e.f32(0.0))
    with e.for_range(0, cut.count, name="segment") as s:
        for cell in _cells(acc):
            cell.set(e.f32(0.0))
        begin = b.mul(s, e.i64(cut.length * m))
        stop = e.imin(b.add(begin, e.i64(cut.length * m)), e.i64(cut.pieces * m))
        with e.for_range(begin, stop, STAGE, name="stage") as first:
            stage.put_weights(first_group, e.i64(-(-spec.n // ROWS) - 1), first, stop)
            stage.put_activations(first_token, b.sub(count, e.i64(1)), first, stop)
            e.barrier()
            with e.for_range(0, e.imin(b.sub(stop, first), e.i64(STAGE)), name="block") as block:
                _multiply(e, stage, warp, block, acc)
            e.barrier()
        for total, part in zip(_cells(totals), _cells(acc)):
            total.set(b.fadd(total.get(), part.get()))
    for fragment in range(2):
        for row in range(2):
            for column in range(2):
                token = b.add(first_token, warp.token(e, fragment, column))
                sums = [totals[group][fragment][row][column].get() for group in range(2)]
                for p in range(2 // spec.unit):
                    group = b.add(first_group, warp.groups[p * spec.unit])
                    out = b.add(b.mul(b.udiv(group, e.i64(spec.unit)), e.i64(ROWS)), warp.rows[row])
                    exists = b.and_(b.icmp_signed("<", out, e.i64(spec.n // spec.unit)), b.icmp_signed("<", token, count))
                    with e.if_(exists):
                        finish(out, token, sums[p * spec.unit : (p + 1) * spec.unit])


def _multiply(e: PtxEmitter, stage: _Stage, warp: _Warp, block: Value, acc: _Sums) -> None:
    """One block of 32 columns: a product per scale and fragment, then the scales."""
    b, n = e.b, stage.n_scales
    further = b.add(warp.t, e.i64(4))
    columns = []
    for fragment in range(2):
        record = stage.token(block, b.add(warp.first_token, b.add(warp.g, e.i64(8 * fragment))))
        words = [e.load(I32, e.at(record, word, 4)) for word in (warp.t, further)]
        columns.append((words, [_Column(e, stage, stage.token(block, warp.token(e, fragment, c))) for c in range(2)]))
    for i, group in enumerate(warp.groups):
        halves = [[e.load(I32, stage.weight(block, word, group, row)) for row in warp.rows] for word in (warp.t, further)]
        numbers = [[e.load(F32, stage.weight(block, 8 + j, group, row)) for j in range(stage.words - 8)] for row in warp.rows]
        for fragment, (words, ends) in enumerate(columns):
            for s in range(n):
                a = [*halves[0], *halves[1]] if n == 1 else halves[s]
                start = [end.starts[s] if end.starts else e.i32(0) for end in ends]
                got = e.mma_u8_s8(a, words if n == 1 else [words[s]], [*start, *start])
                for r in range(2):
                    for c, end in enumerate(ends):
                        cell = acc[i][fragment][r][c]
                        cell.set(e.fma(b.sitofp(got[2 * r + c], F32), b.fmul(numbers[r][s], end.d), cell.get()))
            for r in range(2):
                for c, end in enumerate(ends):
                    cell = acc[i][fragment][r][c]
                    for low, total in zip(numbers[r][n:], end.sums):
                        cell.set(e.fma(low, total, cell.get()))


class _Column:
    """What the end of an activation record says about one result column."""

    def __init__(self, e: PtxEmitter, stage: _Stage, record: Value) -> None:
        self.d = e.load(F32, e.gep(record, 32))
        self.starts = [e.load(I32, e.gep(record, 36 + 4 * j)) for j in range(stage.n_starts)]
        self.sums = [e.load(F32, e.gep(record, 36 + 4 * (stage.n_starts + j))) for j in range(stage.n_sums)]
