"""Integer products of many tokens: 64 weight rows by 64 tokens per block, staged in shared memory, multiplied by tensor cores.

A stage holds four blocks of 32 columns (two where shared memory is short). Packed weights and activation records come by copies that do
not wait, in two buffers: while a stage is unpacked and multiplied, the next one is on its way. Weights are unpacked once per stage to code
words, scales and minima in f32. A warp computes two weight groups (gate and up of a gated product meet in one thread) for 16 tokens. The
integer sums of a block are exact, so ``mma`` gives what ``dp4a`` gives; scales are applied per block in the order of ``products``, segments
follow each other with one accumulator each.
"""

from __future__ import annotations

from ggufc.codegen.emitter import F32, I32, Value, Var
from ggufc.codegen.kernels.matmul import MatMul
from ggufc.codegen.kernels.matmul_id import MatMulId
from ggufc.codegen.weights import q8_record, weight_format
from ggufc.codegen.weights.base import ROWS, Cursor

from .emitter import PtxEmitter
from .product_operands import Tile
from .products import correction_words, corrections, segments

GROUPS = 4
BLOCK_TOKENS = 64
THREADS = 256
SHARED_BYTES = 48 << 10
"""Static shared memory of a block on every architecture."""
_PITCH = GROUPS * ROWS + 8
"""Words between code words of a stage: eight more than rows, so that the fragments of ``mma`` come from different banks."""
_PAIRS = GROUPS // 2
_COLUMNS = 16
"""Tokens of a warp: two fragments of eight."""


class _Stage:
    """Shared memory of the stages.

    Packed weights: [buffer][group][block] codes, scales and super-scales as in memory. Unpacked ones: words [block][word][group][16 rows],
    numbers likewise. Activations: [buffer][block][token] records of eight words, the scale, words of sums; a record is an odd number of 16
    bytes, which spreads tokens over the banks.
    """

    def __init__(self, e: PtxEmitter, spec: MatMul | MatMulId, tile: Tile, taken: int) -> None:
        self.e, self.spec, self.tile = e, spec, tile
        self.format = f = weight_format(spec.format)
        self.n_scales = 32 // f.group
        self.n_codes, self.n_total = correction_words(f), int(f.has_min and self.n_scales == 1)
        self.words = 8 + self.n_scales * (2 if f.has_min else 1)
        self.packed_size = f.code_bytes + f.scale_bytes + f.super_bytes
        self.record = 16 * (-(-(9 + self.n_codes + self.n_total) // 4) | 1)
        self.blocks = next(n for n in (4, 2, 1) if n == 1 or self._bytes(n) <= SHARED_BYTES - taken)
        self.unpacked = e.shared(4 * self.blocks * self.words * _PITCH, "unpacked")
        self.packed = e.shared(2 * GROUPS * self.blocks * self.packed_size, "packed")
        self.activations = e.shared(2 * self.blocks * BLOCK_TOKENS * self.record, "activations")

    def _bytes(self, blocks: int) -> int:
        return blocks * (4 * self.words * _PITCH + 2 * GROUPS * self.packed_size + 2 * BLOCK_TOKENS * self.record)

    # Copies

    def copy(self, buffer: Value, first: Value, stop: Value) -> None:
        """Start copying the blocks first..stop-1 (as far as a stage goes) of four groups and 64 tokens to ``buffer``, as one group of
        copies.
        """
        self._copy_weights(buffer, first, stop)
        self._copy_activations(buffer, first, stop)
        self.e.close_copies()

    def _copy_weights(self, buffer: Value, first: Value, stop: Value) -> None:
        """Some threads for each block of each group, 16 bytes at a time."""
        e, b, f, k = self.e, self.e.b, self.format, self.spec.k
        per = THREADS // (GROUPS * self.blocks)
        pair, unit = b.udiv(e.thread, e.i64(per)), b.urem(e.thread, e.i64(per))
        group, block = b.urem(pair, e.i64(GROUPS)), b.udiv(pair, e.i64(GROUPS))
        i, m = b.add(first, block), f.chunk_blocks(k)
        with e.if_(b.icmp_signed("<", i, stop)):
            source = f.cursor(e, self.tile.group(group), k, b.udiv(i, e.i64(m)), b.urem(i, e.i64(m)), 0)
            target = self._packed(buffer, group, block)
            at = 0
            for plane, size in ((source.codes, f.code_bytes), (source.scales, f.scale_bytes), (source.supers, f.super_bytes)):
                with e.for_range(b.mul(unit, e.i64(16)), size, 16 * per, name="byte") as byte:
                    e.copy_async(e.gep(e.gep(target, at), byte), e.gep(plane, byte), 16)
                at += size

    def _packed(self, buffer: Value, group: Value, block: Value) -> Value:
        e, b = self.e, self.e.b
        place = b.add(b.mul(b.add(b.mul(buffer, e.i64(GROUPS)), group), e.i64(self.blocks)), block)
        return e.at(self.packed, place, self.packed_size)

    def _copy_activations(self, buffer: Value, first: Value, stop: Value) -> None:
        """A thread takes a block of a token."""
        e, b, at = self.e, self.e.b, q8_record(self.spec.k)
        with e.for_threads(self.blocks * BLOCK_TOKENS) as j:
            block, token = b.urem(j, e.i64(self.blocks)), b.udiv(j, e.i64(self.blocks))
            i = b.add(first, block)
            with e.if_(b.icmp_signed("<", i, stop)):
                record = self.tile.activations(token)
                to = self.token(buffer, block, token)
                for half in range(2):
                    e.copy_async(e.gep(to, 16 * half), e.gep(e.at(record, i, 32), 16 * half), 16)
                e.copy_async(e.gep(to, 32), e.at(e.gep(record, at.off_d), i, 4), 4)
                codes = e.at(e.gep(record, at.off_c16 if self.n_scales > 1 else at.off_c32), i, 4 * self.n_scales)
                for c in range(self.n_codes):
                    e.copy_async(e.gep(to, 36 + 4 * c), e.gep(codes, 4 * c), 4)
                if self.n_total:
                    e.copy_async(e.gep(to, 36 + 4 * self.n_codes), e.at(e.gep(record, at.off_s), i, 4), 4)

    # What has arrived

    def unpack(self, buffer: Value, first: Value, stop: Value) -> None:
        """A thread takes one block of one row."""
        e, b, f = self.e, self.e.b, self.format
        with e.for_threads(ROWS * GROUPS * self.blocks) as j:
            row = b.and_(j, e.i64(ROWS - 1))
            group, block = b.and_(b.lshr(j, e.i64(4)), e.i64(GROUPS - 1)), b.lshr(j, e.i64(6))
            i = b.add(first, block)
            with e.if_(b.icmp_signed("<", i, stop)):
                codes = self._packed(buffer, group, block)
                scales = e.gep(codes, f.code_bytes)
                number = b.urem(i, e.i64(f.chunk_blocks(self.spec.k)))
                w = f.unpack(e, Cursor(codes, scales, e.gep(scales, f.scale_bytes), row, number))
                for word, v in enumerate([*w.quads, *w.scales, *w.mins]):
                    e.store(v, self.weight(block, word, group, row))

    def weight(self, block: Value, word: int | Value, group: int | Value, row: Value) -> Value:
        """Address of an unpacked word (a number, for indices from 8 on) of a weight row."""
        e, b = self.e, self.e.b
        word, group = (e.i64(v) if isinstance(v, int) else v for v in (word, group))
        line = b.add(b.mul(block, e.i64(self.words)), word)
        return e.at(self.unpacked, b.add(b.mul(line, e.i64(_PITCH)), b.add(b.mul(group, e.i64(ROWS)), row)), 4)

    def token(self, buffer: Value, block: Value, token: Value) -> Value:
        """Address of a token's record."""
        e, b = self.e, self.e.b
        place = b.add(b.mul(buffer, e.i64(self.blocks)), block)
        return e.at(self.activations, b.add(b.mul(place, e.i64(BLOCK_TOKENS)), token), self.record)


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


def tile_body(spec: MatMul | MatMulId, e: PtxEmitter, tile: Tile, taken: int = 0) -> None:
    """``GROUPS`` groups by ``BLOCK_TOKENS`` tokens; ``taken``: bytes of shared memory that ``tile`` needs."""
    b = e.b
    stage, warp = _Stage(e, spec, tile, taken), _Warp(e)
    cut = segments(stage.format, spec.k)
    m = stage.format.chunk_blocks(spec.k)
    length, all_blocks = cut.length * m, cut.pieces * m
    per_segment = -(-length // stage.blocks)
    tile.begin()
    count = tile.count
    totals, acc = _sums(e), _sums(e)
    for cell in (*_cells(totals), *_cells(acc)):
        cell.set(e.f32(0.0))

    def bounds(number: Value) -> tuple[Value, Value]:
        """First block of a stage and the end of its segment."""
        segment, inside = b.udiv(number, e.i64(per_segment)), b.urem(number, e.i64(per_segment))
        begin = b.mul(segment, e.i64(length))
        stop = e.imin(b.add(begin, e.i64(length)), e.i64(all_blocks))
        return b.add(begin, b.mul(inside, e.i64(stage.blocks))), stop

    def copy(number: Value) -> None:
        stage.copy(b.and_(number, e.i64(1)), *bounds(number))

    copy(e.i64(0))
    with e.for_range(0, cut.count * per_segment, name="stage") as number:
        # Past the barrier this stage is here, and nobody reads the one before any more.
        e.await_copies()
        e.barrier()
        with e.if_(b.icmp_signed("<", number, e.i64(cut.count * per_segment - 1))):
            copy(b.add(number, e.i64(1)))
        first, stop = bounds(number)
        buffer = b.and_(number, e.i64(1))
        stage.unpack(buffer, first, stop)
        e.barrier()
        # Warps none of whose tokens exist have nothing to multiply.
        last = b.select(b.icmp_signed("<", warp.first_token, count), e.imin(b.sub(stop, first), e.i64(stage.blocks)), e.i64(0))
        with e.for_range(0, last, name="block") as block:
            _multiply(e, stage, warp, buffer, block, acc)
        with e.if_(b.icmp_signed("==", b.urem(number, e.i64(per_segment)), e.i64(per_segment - 1))):
            for total, part in zip(_cells(totals), _cells(acc)):
                total.set(b.fadd(total.get(), part.get()))
                part.set(e.f32(0.0))
    for fragment in range(2):
        for row in range(2):
            for column in range(2):
                token = warp.token(e, fragment, column)
                sums = [totals[group][fragment][row][column].get() for group in range(2)]
                for p in range(2 // spec.unit):
                    unit = b.udiv(warp.groups[p * spec.unit], e.i64(spec.unit))
                    tile.store(unit, warp.rows[row], token, sums[p * spec.unit : (p + 1) * spec.unit])


def _multiply(e: PtxEmitter, stage: _Stage, warp: _Warp, buffer: Value, block: Value, acc: _Sums) -> None:
    """One block of 32 columns: a product per scale and fragment, then the scales."""
    b, n = e.b, stage.n_scales
    further = b.add(warp.t, e.i64(4))
    columns = []
    for fragment in range(2):
        record = stage.token(buffer, block, b.add(warp.first_token, b.add(warp.g, e.i64(8 * fragment))))
        words = [e.load(I32, e.at(record, word, 4)) for word in (warp.t, further)]
        columns.append((words, [_Column(e, stage, stage.token(buffer, block, warp.token(e, fragment, c))) for c in range(2)]))
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
        codes = [e.load(I32, e.gep(record, 36 + 4 * j)) for j in range(stage.n_codes)]
        total = [e.load(F32, e.gep(record, 36 + 4 * (stage.n_codes + j))) for j in range(stage.n_total)]
        self.starts, self.sums = corrections(e, stage.format, self.d, codes, total)
