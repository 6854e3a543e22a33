"""Scores against keys of block types: queries are rounded to 8 bits, as ggml does, and multiplied in integers.

For each block b of 32 values, with the query's codes c, scale d and the keys' codes k, scale D and minimum M:

    c = round(x * 127 / max|x|), d = max|x| / 127
    s = fma(f32(sum c k), D d, s) and, for types with a minimum, s = fma(M, d * f32(sum c), s)

in ascending order of b. The sums are exact, so any order of them, and any instruction, gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from ggufc.codegen.emitter import F32, I32, Value, Var, vec
from ggufc.codegen.kernels.attention_blocks import BlockRows, Keys
from ggufc.codegen.kernels.attention_cells import STEP, CellRows
from ggufc.codegen.kernels.attention_rows import ROUNDED_BLOCK, Rows
from ggufc.codegen.kernels.cache_blocks import BLOCKS, VALUES, low_bytes, rounded
from ggufc.codegen.kernels.vmath import ROUND_F32

_UNROLLED = 4
"""Most blocks of a row that are multiplied without a loop."""


class RoundedRows(Rows):
    """Rows whose queries, if the keys have blocks, are also kept as codes: i8[d], then per block its scale, the sum of its codes (i32)
    and their product.

    Latent attention (``shared``) is not rounded: its cache is storage alone, read as f32 for scores and values (spec: runtime-cache, cache
    types).
    """

    keys: CellRows

    @property
    def rounds(self) -> bool:
        return self.spec.type_k in BLOCKS and not self.spec.shared

    def round_query(self, r: Value) -> None:
        """The codes of row ``r``'s query."""
        e, b, n = self.e, self.e.b, self.lanes
        ty = vec(F32, n)
        query, record = self.at(self.s.q, r, 4 * self.spec.d), self.record_of(r)
        with e.for_range(0, self.spec.d // VALUES, name="round") as block:
            x = [e.load(ty, e.gep(e.at(query, block, 4 * VALUES), 4 * i)) for i in range(0, VALUES, n)]
            scale, shifted = rounded(e, x)
            total = e.const(ty, 0.0)
            for i, v in enumerate(shifted):
                total = b.fadd(total, b.fsub(v, e.const(ty, ROUND_F32)))
                e.store(low_bytes(e, v), e.gep(e.at(record, block, VALUES), n * i))
            exact = e.reduce(total, "add")
            words = self._words(record, block)
            e.store(scale, words)
            e.store(b.fptosi(exact, I32), e.gep(words, 4))
            e.store(b.fmul(scale, exact), e.gep(words, 8))

    def record_of(self, r: Value) -> Value:
        return self.at(self.s.codes, r, self.s.codes_size)

    def _words(self, record: Value, block: Value) -> Value:
        return self.e.gep(self.e.at(record, block, ROUNDED_BLOCK), self.spec.d)

    def add_block(self, keys: Keys, block: Value, records: list[Value], totals: list[Var]) -> None:
        """The products of one block to the scores of several rows, whose codes lie at ``records``."""
        e, b, n = self.e, self.e.b, self.lanes
        side = cast(BlockRows, self.keys)
        for record, total in zip(records, totals):
            words, codes = self._words(record, block), e.at(record, block, VALUES)
            start = b.mul(e.load(I32, e.gep(words, 4)), e.i32(-side.zero)) if side.zero else e.i32(0)
            exact = e.splat(start, n)
            for c, quad in enumerate(keys.quads):
                query = e.splat(e.load(I32, e.gep(codes, 4 * c)), n)
                exact = e.dot4_signed(exact, quad, query) if side.signed else e.dot4(exact, quad, query, side.largest)
            scale = b.fmul(keys.scale, e.splat(e.load(F32, words), n))
            score = e.fma(b.sitofp(exact, vec(F32, n)), scale, total.get())
            if keys.minimum is not None:
                score = e.fma(keys.minimum, e.splat(e.load(F32, e.gep(words, 8)), n), score)
            total.set(score)

    def score_rounded(self, k: Value, p: Value, r: Value, n_rows: int) -> None:
        """Scores of ``n_rows`` rows for the step whose keys are stored at ``k``."""
        e, n = self.e, self.lanes
        side, records = cast(BlockRows, self.keys), [self.record_of(e.b.add(r, e.i64(i))) for i in range(n_rows)]
        for w in range(self.width):
            totals = [e.var(vec(F32, n), e.const(vec(F32, n), 0.0)) for _ in records]
            with e.for_range(0, self.spec.d // VALUES, name="block") as block:
                self.add_block(side.stored_keys(k, n * w, block), block, records, totals)
            for i, total in enumerate(totals):
                e.store(self.capped(total.get()), e.gep(e.at(p, r, 4 * STEP), 4 * (STEP * i + n * w)))

    def score_alone(self, begin: Value, steps: int, p: Value, first_row: Value, fetch: Callable[[Value], None]) -> None:
        """Scores of ``steps`` steps from entry ``begin`` on, side by side in ``p``, straight from the cache.

        ``fetch`` gets the first of each four entries, counted from ``begin``.
        """
        e, b, n, blocks = self.e, self.e.b, self.lanes, self.spec.d // VALUES
        side = cast(BlockRows, self.keys)
        records = [self.record_of(b.add(first_row, e.i64(row))) for row in range(self.spec.head_block)]
        with e.for_range(0, steps * self.width, name="part") as part:
            entry = b.mul(part, e.i64(n))
            first = self.ring_entry(b.add(begin, entry))
            totals = [e.var(vec(F32, n), e.const(vec(F32, n), 0.0)) for _ in records]
            quads = [b.add(entry, e.i64(i)) for i in range(0, n, 4)]
            if blocks <= _UNROLLED:
                for i in range(blocks):
                    for quad in quads[i::blocks]:
                        fetch(quad)
                    self.add_block(side.keys_of(first, 0, e.i64(i)), e.i64(i), records, totals)
            else:
                for quad in quads:
                    fetch(quad)
                with e.for_range(0, blocks, name="block") as block:
                    self.add_block(side.keys_of(first, 0, block), block, records, totals)
            for row, total in enumerate(totals):
                e.store(self.capped(total.get()), e.gep(e.at(p, entry, 4), 4 * STEP * steps * row))
