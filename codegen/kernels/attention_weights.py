"""What values are weighed with: the probability of their entry or, for block types, that times the scale of their block.

A value of a block type is D k or D k + M with a code k. Row by row and block by block

    acc += (p_j D_j) k_j           a fused chain over j ascending, as for other types
    minima_r += p_j M_j            over j = r, r + 16, ...; added by halving to all elements of the block after the split's last entry

so that a scale is multiplied once per entry and row, not once per element.
"""

from __future__ import annotations

from ggufc.codegen.emitter import F32, Value, vec
from ggufc.codegen.kernels.attention_blocks import BlockRows
from ggufc.codegen.kernels.attention_cells import GROUP, STEP, CellRows
from ggufc.codegen.kernels.attention_rounded import RoundedRows
from ggufc.codegen.kernels.cache_blocks import VALUES


class WeighedRows(RoundedRows):
    """Rows with what they add values of one side of the cache with."""

    values: CellRows

    @property
    def scaled(self) -> bool:
        """Whether values are codes of a block type."""
        return isinstance(self.values, BlockRows)

    @property
    def has_minima(self) -> bool:
        return isinstance(self.values, BlockRows) and bool(self.values.layout.low)

    @property
    def _blocks(self) -> int:
        return self.spec.dv // VALUES

    @property
    def _copies(self) -> int:
        """Weights per entry and block, all equal.

        AVX-512 multiplies with a factor in memory for nothing; spreading it to a register first, for two multiplications, costs a
        shuffle.
        """
        return VALUES // self.lanes if self.lanes == 16 else 1

    def _weights(self, row: int, copy: Value | int, j: Value | int) -> Value:
        """Address of the weight of entry ``j`` under the ``row``-th of the rows at hand; copies of a block are neighbours."""
        e = self.e
        return e.at(e.at(self.at(self.s.weights, row, self.s.weights_size), copy, 4 * STEP * GROUP), j, 4)

    def factors(self, p: Value, size: int, row: int, i: Value, vectors: int, j: Value | int) -> list[Value]:
        """What ``vectors`` vectors of entry ``j``, from element ``i`` on, are multiplied with; rows of ``p`` are ``size`` apart."""
        e, b, n = self.e, self.e.b, self.lanes
        if not self.scaled:
            return [e.splat(e.load(F32, e.gep(e.at(p, j, 4), size * row)), n)] * vectors
        # ``i`` is a multiple of the elements taken at once, which either divide a block or are whole blocks.
        each = VALUES // self._copies
        first = b.udiv(i, e.i64(each))
        found = [e.splat(e.load(F32, self._weights(row, b.add(first, e.i64(k)), j)), n) for k in range(-(-vectors * n // each))]
        return [found[n * c // each] for c in range(vectors)]

    def weigh_stored(self, p: Value, scales: Value, r: Value, n_rows: int) -> None:
        """Weights of ``n_rows`` rows from ``r`` on for a step whose scales are stored."""
        if not isinstance(self.values, BlockRows):
            return
        e, b, n = self.e, self.e.b, self.lanes
        rows = [b.add(r, e.i64(row)) for row in range(n_rows)]
        with e.for_range(0, self._blocks, name="weights") as block:
            for w in range(self.width):
                found = self.values.stored_scales(scales, n * w, block)
                for row, index in enumerate(rows):
                    self._weigh_block(e.gep(e.at(p, index, 4 * STEP), 4 * n * w), index, row, block, e.i64(0), w, found)

    def weigh_listed(self, listed: Value, p: Value, size: int, first_row: Value, begin: Value, steps: int) -> None:
        """Weights of a lone token's rows for ``steps`` steps, entries ``begin`` and on counted from ``listed`` in the list."""
        if not isinstance(self.values, BlockRows):
            return
        e, b, n = self.e, self.e.b, self.lanes
        with e.for_range(0, self._blocks, name="weights") as block, e.for_range(0, steps, name="step") as s:
            entry = b.add(begin, b.mul(s, e.i64(STEP)))
            ring = self.ring_entry(b.add(listed, entry))
            for w in range(self.width):
                found = self.values.scales(ring, n * w, block)
                for row in range(self.spec.head_block):
                    at = e.gep(e.at(p, entry, 4), size * row + 4 * n * w)
                    self._weigh_block(at, b.add(first_row, e.i64(row)), row, block, entry, w, found)

    def _weigh_block(self, p: Value, r: Value, row: int, block: Value, entry: Value, w: int, scales: tuple[Value, Value | None]) -> None:
        """``scales`` of ``lanes`` entries, the ``w``-th of a step that begins at ``entry``, with their probabilities at ``p``."""
        e, b, n = self.e, self.e.b, self.lanes
        probability = e.load(vec(F32, n), p)
        scale, minimum = scales
        weight = b.fmul(probability, scale)
        first = b.mul(block, e.i64(self._copies))
        for k in range(self._copies):
            e.store(weight, e.gep(self._weights(row, b.add(first, e.i64(k)), entry), 4 * n * w))
        if minimum is not None:
            # What is not seen may hold anything; its probability is zero.
            seen = b.fcmp_ordered("!=", probability, e.const(vec(F32, n), 0.0))
            at = e.gep(self._minima(r, block), 4 * n * w)
            e.store(e.fma(probability, b.select(seen, minimum, e.const(vec(F32, n), 0.0)), e.load(vec(F32, n), at)), at)

    # Minima

    def _minima(self, r: Value, block: Value | int) -> Value:
        return self.e.at(self.at(self.s.minima, r, self.s.minima_size), block, 4 * STEP)

    def clear_minima(self, rows: Value) -> None:
        """Before the first step of a split."""
        if self.has_minima:
            with self.e.for_range(0, rows, name="row") as r:
                self.fill(self._minima(r, 0), STEP * self._blocks)

    def rescale_row(self, r: Value, factor: Value) -> None:
        super().rescale_row(r, factor)
        if self.has_minima:
            self.rescale(self._minima(r, 0), STEP * self._blocks, factor)

    def add_minima(self, rows: Value) -> None:
        """After the last step of a split."""
        if not self.has_minima:
            return
        e, b, n = self.e, self.e.b, self.lanes
        with e.for_range(0, rows, name="row") as r, e.for_range(0, self._blocks, name="block") as block:
            total = e.splat(self.halved(self._minima(r, block)), n)
            acc = e.at(self.at(self.s.acc, r, 4 * self.s.padded), block, 4 * VALUES)
            for i in range(0, VALUES, n):
                at = e.gep(acc, 4 * i)
                e.store(b.fadd(e.load(vec(F32, n), at), total), at)
