"""Integer products with AMX tiles, for batches: 16 tokens by 16 weight rows at a time.

A group is unpacked to scratch once for all tokens; a block of it *is* a tile, since both keep the four columns of a quad side by side for
each of 16 rows. The tile of activations is loaded from the records as they are. A block of 32 columns (16 where scales serve 16) makes
one tile of exact integer sums, which goes through memory to the vector registers; from there on the steps are those of ``Int8Product``,
so every bit is the same. Tokens beyond the last 16 take the vector form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ggufc.codegen.emitter import I8, I32, Emitter, Value, Var, vec
from ggufc.codegen.kernels import tiles
from ggufc.codegen.kernels.matmul_int8 import Int8Product, scaled_codes
from ggufc.codegen.kernels.matmul_tokens import Done, Tokens

TOKENS = 16
"""Rows of a tile of activations."""
_FEWEST = 32
"""Tokens below which unpacking for tiles does not pay."""

_SUMS, _ACTIVATIONS, _WEIGHTS = (0, 1), (2, 3), (4, 5)
"""Tile numbers: two of each, so that loads and products of one block overlap with those of the next."""


@dataclass
class TileProduct(Int8Product):
    """``Int8Product`` whose batches are multiplied by tiles; 16 lanes."""

    def scratch_bytes(self, groups: int) -> int:
        return super().scratch_bytes(groups) + TOKENS * self.k

    def run(self, e: Emitter, groups: Sequence[Value], tokens: Tokens, done: Done) -> None:
        b = e.b
        count = b.sub(tokens.stop, tokens.first)
        many = b.icmp_signed(">=", count, e.i64(_FEWEST))
        whole = b.add(tokens.first, b.select(many, b.and_(count, e.i64(-TOKENS)), e.i64(0)))
        with e.if_(many):
            panels = [e.gep(e.scratch, self.blocks * self.panel.block_bytes * i) for i in range(len(groups))]
            for group, panel in zip(groups, panels):
                self._unpack(e, group, panel)
            gathered = e.gep(e.scratch, super().scratch_bytes(len(groups)))
            width = 32 // self._groups
            shapes = {_SUMS: (TOKENS, 64), _ACTIVATIONS: (TOKENS, width), _WEIGHTS: (width // 4, 64)}
            with (
                tiles.configured(e, [shape for numbers, shape in shapes.items() for _ in numbers]),
                e.for_range(tokens.first, whole, TOKENS, name="tile") as t,
            ):
                rows = tokens.rows(t, TOKENS)
                where = (rows[0], self.row_bytes())
                if not tokens.adjacent:
                    self._gather(e, rows, gathered)
                    where = (gathered, self.k)
                done(e.i64(0), t, [self._from_tiles(e, panel, rows, *where) for panel in panels])
        super().run(e, groups, Tokens(whole, tokens.stop, tokens.rows, tokens.adjacent), done)

    @property
    def _groups(self) -> int:
        """Tiles of sums per block of 32 columns: one for each integer scale that is not in the codes themselves."""
        return 1 if self.format.scaled_max else 32 // self.format.group

    def _unpack(self, e: Emitter, group: Value, panel: Value) -> None:
        for i, cursor in self._walk(e, group, 0):
            self._prefetch(e, i, cursor)
            block = e.at(panel, i, self.panel.block_bytes)
            u = self.format.unpack(e, cursor)
            self.panel.write(e, block, e.i64(0), scaled_codes(e, u) if self.format.scaled_max else u, self.format.offset_on(e.target))

    def _gather(self, e: Emitter, rows: Sequence[Value], to: Value) -> None:
        """Activations of tokens that lie anywhere, one after the other."""
        block = vec(I8, 32)
        for i, row in enumerate(rows):
            with e.for_range(0, self.k, 32, name="copy") as at:
                e.store(e.load(block, e.gep(row, at)), e.gep(e.gep(to, i * self.k), at))

    def _from_tiles(self, e: Emitter, panel: Value, rows: Sequence[Value], activations: Value, stride: int) -> list[Value]:
        """Accumulators of 16 records; ``activations``: their bytes, ``stride`` apart."""
        acc = self._accumulators(e, len(rows))
        sums = e.alloca(len(_SUMS) * 1024)
        together = len(_SUMS) // self._groups  # blocks that share the tiles
        whole = self.blocks // together * together
        with e.for_range(0, whole, together, name="k") as i:
            self._blocks(e, panel, rows, activations, stride, [e.b.add(i, e.i64(j)) for j in range(together)], sums, acc)
        for i in range(whole, self.blocks):
            self._blocks(e, panel, rows, activations, stride, [e.i64(i)], sums, acc)
        return [a.get() for a in acc]

    def _blocks(
        self,
        e: Emitter,
        panel: Value,
        rows: Sequence[Value],
        activations: Value,
        stride: int,
        which: Sequence[Value],
        sums: Value,
        acc: Sequence[Var],
    ) -> None:
        n = self._groups
        places = [(i, g) for i in which for g in range(n)]
        for tile, (i, g) in enumerate(places):
            weights = e.gep(e.at(panel, i, self.panel.block_bytes), 64 * 8 // n * g)
            tiles.zero(e, _SUMS[tile])
            tiles.load(e, _ACTIVATIONS[tile], e.gep(e.at(activations, i, 32), 32 // n * g), stride)
            tiles.load(e, _WEIGHTS[tile], weights, 64)
            tiles.add_products(e, _SUMS[tile], _ACTIVATIONS[tile], _WEIGHTS[tile])
        for tile in range(len(places)):
            tiles.store(e, _SUMS[tile], e.gep(sums, 1024 * tile), 64)
        for at, i in enumerate(which):
            u = self.panel.read(e, panel, i, 0)
            u.scaled = bool(self.format.scaled_max)
            for t, (x, a) in enumerate(zip(rows, acc)):
                totals = []
                for g in range(n):
                    total = e.load(vec(I32, 16), e.gep(sums, 1024 * (n * at + g) + 64 * t), 64)
                    start = self._start(e, x, i, g, self.panel.offset(e))
                    totals.append(total if start is None else e.b.add(start, total))
                self._scaled(e, u, x, i, totals, a)
