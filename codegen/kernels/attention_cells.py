"""The cache side of attention: addresses of listed cells, prefetch, and conversion of K and V heads to f32."""

from __future__ import annotations

from collections.abc import Iterator

from llvmlite import ir

from ggufc.codegen.emitter import I16, I64, PTR, Emitter, Value
from ggufc.codegen.kernels import cache, cache_blocks
from ggufc.codegen.kernels.cache_blocks import BLOCKS, VALUES, block_bytes

STEP = 16
"""Entries of the cell list per softmax step."""

AHEAD = 4
"""Steps between the prefetch of a step's cells and their use by several tokens."""

GROUP = AHEAD
"""Steps that a lone token takes together; the addresses of as many more fit into the rings."""

NEAR = 2
"""The same for a lone token, whose first step waits until the prefetches before it are under way."""

RING_BYTES = 2 * AHEAD * STEP * 8
"""Addresses of twice ``AHEAD`` steps; K and V have a ring each."""


class CellRows:
    """One side (K or V) of the cache for one KV head: row ``head`` of ``n`` values of ``dtype`` in cells of ``cell`` values.

    ``fetch``: whether there is anything to prefetch; values that are part of the keys' rows come with them.
    """

    def __init__(self, e: Emitter, dtype: str, n: int, cell: int, base: Value, head: Value, ring: Value, fetch: bool = True) -> None:
        self.e, self.dtype, self.n, self.ring, self.fetch = e, dtype, n, ring, fetch
        self.row_size = cache.row_bytes(dtype, n)
        self.cell_size = cache.row_bytes(dtype, cell)
        self.base = e.at(base, head, self.row_size)
        self.shift: Value | None = None
        """Distance of the head that is read from the one whose addresses are noted."""
        # Sixteen-bit values are transposed before they are widened, 32 per row and vector: half the shuffles.
        self.paired = dtype in ("f16", "bf16") and e.target.lanes == STEP
        self.block = 2 * e.target.lanes if self.paired else e.target.lanes

    def note(self, slot: Value, cell: Value) -> None:
        """Note the address of ``cell`` (i64, one or a vector of neighbours in the list) under ring index ``slot``."""
        e, b = self.e, self.e.b
        n = cell.type.count if isinstance(cell.type, ir.VectorType) else 1
        offset = b.mul(cell, e.const(cell.type, self.cell_size))
        e.store(b.add(offset, e.splat(b.ptrtoint(self.base, I64), n)), e.at(self.ring, slot, 8))

    def fetch_row(self, slot: Value, heads: int = 1) -> None:
        """Start fetching the rows of ``heads`` heads under ring index ``slot`` into the second-level cache."""
        e = self.e
        if self.fetch:
            row = e.load(PTR, e.at(self.ring, slot, 8))
            for line in range(0, heads * self.row_size, 64):
                e.prefetch(e.gep(row, line), 2)

    def part(self, row: Value, i: Value, count: int) -> tuple[Value, int]:
        """Address and bytes of values i..i+count-1 of ``row``; whole blocks of a block type."""
        e = self.e
        if self.dtype in BLOCKS:
            blocks = -(-count // VALUES)
            return e.at(row, e.b.udiv(i, e.i64(VALUES)), block_bytes(self.dtype)), blocks * block_bytes(self.dtype)
        return e.at(row, i, cache.SIZES[self.dtype]), count * cache.SIZES[self.dtype]

    def fetch_part(self, row: Value, i: Value, count: int) -> None:
        """Start fetching values i..i+count-1 of ``row``."""
        if self.fetch:
            at, size = self.part(row, i, count)
            for line in range(0, size, 64):
                self.e.prefetch(self.e.gep(at, line), 2)

    def row(self, first: Value, j: Value | int) -> Value:
        """Address of entry ``j`` of the step whose ring index starts at ``first``."""
        row = self.e.load(PTR, self.e.at(self.e.at(self.ring, first, 8), j, 8))
        return row if self.shift is None else self.e.gep(row, self.shift)

    def chunks(self, size: int) -> Iterator[tuple[Value, int]]:
        """(index, count) over the row in chunks of ``size``: a loop, then a static tail."""
        e, rest = self.e, self.n % size
        if self.n >= size:
            with e.for_range(0, self.n - rest, size, name="chunk") as i:
                yield i, size
        if rest:
            yield e.i64(self.n - rest), rest

    def load(self, row: Value, i: Value, count: int) -> Value:
        """f32 lanes starting with value ``i`` of ``row``; lanes past ``count`` are zero."""
        e, b, lanes = self.e, self.e.b, self.e.target.lanes
        if self.dtype in BLOCKS:
            block = e.at(row, b.udiv(i, e.i64(VALUES)), block_bytes(self.dtype))
            return cache_blocks.load(e, self.dtype, lanes, block, b.urem(i, e.i64(VALUES)))
        return cache.load_f32(e, self.dtype, lanes, e.at(row, i, cache.SIZES[self.dtype]), count)

    def columns(self, first: Value, part: int, i: Value, count: int) -> list[Value]:
        """Values i..i+count-1 (``count`` up to ``block``), each as one vector over the step's entries part..part+lanes-1."""
        if self.paired:
            e = self.e
            words = [e.load_masked(I16, self.block, e.at(self.row(first, j), i, 2), count) for j in range(STEP)]
            return [cache.widen(e, self.dtype, column) for column in transpose_words(e, words)[:count]]
        rows = [self.row(first, part + j) for j in range(self.e.target.lanes)]
        return transpose(self.e, [self.load(row, i, count) for row in rows])[:count]

    def store_columns(self, first: Value, target: Value) -> None:
        """The step as f32[STEP, n]: value i of all entries side by side."""
        e, lanes = self.e, self.e.target.lanes
        for i, count in self.chunks(self.block):
            for part in range(0, STEP, lanes):
                for c, column in enumerate(self.columns(first, part, i, count)):
                    e.store(column, e.gep(e.at(target, i, 4 * STEP), 4 * (STEP * c + part)))

    def store_rows(self, first: Value, target: Value, padded: int) -> None:
        """The step as f32[padded, STEP]."""
        e = self.e
        with e.for_range(0, STEP, name="entry") as j:
            row = self.row(first, j)
            to = e.at(target, j, 4 * padded)
            for i, count in self.chunks(e.target.lanes):
                e.store(self.load(row, i, count), e.at(to, i, 4))


def joined(e: Emitter, rows: list[Value], stage: int) -> Value:
    """Partial sums of neighbouring entries, two vectors to one: lane sums of both side by side.

    Four vectors joined with ``stage`` 0 and then 1 hold, in each 128-bit lane, (x0 + x2) + (x1 + x3) of the four; stages 2 and 3 add such
    lanes q as (q0 + q2) + (q1 + q3), or q0 + q1 of two. In the end lane j is the sum of vector j.
    """
    a, c = rows
    n = a.type.count
    if stage < 2:
        low, high = ([0, n, 1, n + 1], [2, n + 2, 3, n + 3]) if stage == 0 else ([0, 1, n, n + 1], [2, 3, n + 2, n + 3])
        halves = [[q + i for q in range(0, n, 4) for i in part] for part in (low, high)]
    elif n == 8:
        halves = [[*range(4), *range(8, 12)], [*range(4, 8), *range(12, 16)]]
    elif stage == 2:
        halves = [[*range(8), *range(16, 24)], [*range(8, 16), *range(24, 32)]]
    else:
        halves = [[*range(q, q + 4), *range(q + 8, q + 12), *range(q + 16, q + 20), *range(q + 24, q + 28)] for q in (0, 4)]
    return e.b.fadd(*(e.shuffle(a, c, lanes) for lanes in halves))


def transpose(e: Emitter, rows: list[Value]) -> list[Value]:
    """Columns of a square block of f32 vectors (4, 8 or 16)."""
    n = len(rows)

    def quads(offsets: list[int]) -> list[int]:
        return [4 * q + o if o < 4 else n + 4 * q + o - 4 for q in range(n // 4) for o in offsets]

    low, high = quads([0, 4, 1, 5]), quads([2, 6, 3, 7])  # interleave within each 128-bit lane
    left, right = quads([0, 1, 4, 5]), quads([2, 3, 6, 7])
    out: list[Value] = []
    for i in range(0, n, 4):
        a, c, d, f = rows[i : i + 4]
        t = [e.shuffle(a, c, low), e.shuffle(a, c, high), e.shuffle(d, f, low), e.shuffle(d, f, high)]
        out += [e.shuffle(t[0], t[2], left), e.shuffle(t[0], t[2], right), e.shuffle(t[1], t[3], left), e.shuffle(t[1], t[3], right)]
    # Lane group l of out[4q + c] holds rows 4q..4q+3 of column 4l + c. Exchange l with q, bit by bit.
    step = n // 2
    while step >= 4:
        for i in range(n):
            if not i & step:
                a, c = out[i], out[i + step]
                out[i] = e.shuffle(a, c, [lane if not lane & step else n + lane - step for lane in range(n)])
                out[i + step] = e.shuffle(a, c, [lane + step if not lane & step else n + lane for lane in range(n)])
        step //= 2
    return out


def transpose_words(e: Emitter, rows: list[Value]) -> list[Value]:
    """The 32 columns, <16 x i16> each, of 16 rows of <32 x i16>."""

    def interleave(a: Value, c: Value, words: int, high: bool) -> Value:
        """Units of ``words`` words from the low or high halves of each 128-bit lane, alternating between the two vectors."""
        lanes = []
        for lane in range(0, 32, 8):
            for unit in range(0, 4, words):
                start = lane + unit + 4 * high
                lanes += [*range(start, start + words), *range(32 + start, 32 + start + words)]
        return e.shuffle(a, c, lanes)

    quarters = []
    for i in range(0, 16, 8):
        v = rows[i : i + 8]
        v = [interleave(v[2 * k], v[2 * k + 1], 1, high) for k in range(4) for high in (False, True)]
        v = [interleave(v[4 * k + m], v[4 * k + m + 2], 2, high) for k in range(2) for m in (0, 1) for high in (False, True)]
        quarters.append([interleave(v[m], v[m + 4], 4, high) for m in range(4) for high in (False, True)])
    # Lane l of quarters[q][c]: rows 8q..8q+7 of column 8l + c.
    low: list[Value] = []
    high_half: list[Value] = []
    for h in (0, 1):
        for c in range(8):
            lanes = [w for lane in (h, 2 + h) for base in (0, 32) for w in range(base + 8 * lane, base + 8 * lane + 8)]
            both = e.shuffle(quarters[0][c], quarters[1][c], lanes)
            low.append(e.extract_vector(both, 0, 16))
            high_half.append(e.extract_vector(both, 16, 16))
    return low + high_half
