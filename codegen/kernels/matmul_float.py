"""Products of f32 activations and F32, F16 or BF16 weights.

One output element is four partial sums over the columns k mod 4, each a chain of fused multiply-adds in ascending k, joined as (0 + 1)
+ (2 + 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ggufc.codegen.emitter import F32, Emitter, Value, vec
from ggufc.codegen.kernels.matmul_tokens import Done, Tokens, blocks, parts
from ggufc.codegen.weights.floats import FloatFormat

CHAINS = 4


@dataclass
class FloatProduct:
    """Emits the accumulation over K for one float format."""

    format: FloatFormat
    k: int

    def row_bytes(self) -> int:
        """Bytes of the activations of one token."""
        return 4 * self.k

    def scratch_bytes(self, groups: int) -> int:
        return 0

    def prepare(self, e: Emitter, tokens: Tokens, groups: int) -> None:
        """Nothing: activations are multiplied as they are."""

    def run(self, e: Emitter, groups: Sequence[Value], tokens: Tokens, done: Done) -> None:
        """All groups for all tokens."""
        size = 4 if e.target.lanes == 16 else 2
        with parts(e) as part:
            for n, t in blocks(e, tokens.first, tokens.stop, size):
                rows = tokens.rows(t, n)
                done(part, t, [self._sums(e, group, part, rows) for group in groups])

    def _sums(self, e: Emitter, group: Value, part: int | Value, rows: Sequence[Value]) -> list[Value]:
        """One vector of weight rows per row of activations at ``rows``."""
        b, lanes = e.b, e.target.lanes
        floats = vec(F32, lanes)
        acc = [[e.var(floats, e.const(floats, 0)) for _ in range(CHAINS)] for _ in rows]

        def column(k: Value, chain: int) -> None:
            w = self.format.column(e, group, k, part)
            for t, row in enumerate(rows):
                a = e.splat(e.load(F32, e.at(row, k, 4)), lanes)
                acc[t][chain].set(e.fma(w, a, acc[t][chain].get()))

        whole = self.k // CHAINS * CHAINS
        with e.for_range(0, whole, CHAINS, name="k") as k:
            for chain in range(CHAINS):
                column(b.add(k, e.i64(chain)), chain)
        for chain in range(self.k - whole):
            column(e.i64(whole + chain), chain)
        return [b.fadd(b.fadd(a[0].get(), a[1].get()), b.fadd(a[2].get(), a[3].get())) for a in acc]
