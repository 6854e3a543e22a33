"""Products with chosen experts: each token multiplies only the weights its router picked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from llvmlite import ir

from ggufc.codegen.cpu.target import Target
from ggufc.codegen.emitter import I32, I64, Emitter, Value
from ggufc.codegen.errors import CodegenError
from ggufc.codegen.kernels.matmul_product import gated, product, row_count, store_existing
from ggufc.codegen.kernels.matmul_tokens import Tokens
from ggufc.codegen.weights import weight_format
from ggufc.codegen.weights.base import ROWS

TOKENS = 8
"""``tiles`` counts tokens in eights: a launch has that many tiles per started eight."""
_TILE_BYTES = 64 << 10
_BATCH = 256
"""Rows of one expert that are gathered before its weights are walked."""


@dataclass(frozen=True)
class MatMulId:
    """y[n, u, t] = W[ids[u, t]] x[u or 0, t]; ``ids`` i32 [n_used, rows], W ``n_expert`` repacked matrices one after the other.

    With the epilogue ``silu_glu`` or ``gelu_glu`` W holds the gates, ``up`` as many matrices of the same shape, and y is act(gate) * up:
    activations are read once for both. ``pitch``: rows from an expert's matrix to the next one's, ``n`` if 0.

    ``rows`` is the symbol of the token count (``T``, ``O``) or a number; the argument ``rows`` tells it to the code. ``x``: q8 records (or
    contiguous f32 rows for float formats), one per token with ``broadcast_x``, else one per (u, t).

    Tiles: ``tiles`` per started 8 tokens. A tile is a block of an expert's rows and a share of the positions in ``ids``; it takes the
    experts that *first* occur in its share, each with all tokens that chose it, wherever they stand. So every weight is unpacked once
    per 8 tokens that use it (once per ``_BATCH`` where there are many), without a launch that sorts the choices, and one token costs
    what a dense product with its experts costs. How tokens meet in a tile has no influence on the bits of a result.
    """

    format: str
    k: int
    n: int
    n_expert: int
    n_used: int
    broadcast_x: bool
    rows: str = "T"
    epilogue: str = "none"
    pitch: int = 0

    arg_names: ClassVar[tuple[str, ...]] = ("w", "x", "y", "ids", "rows", "up")

    def __post_init__(self) -> None:
        weight_format(self.format).check_k(self.k)
        if self.epilogue not in ("none", "silu_glu", "gelu_glu"):
            raise CodegenError(f"a product with experts cannot end with {self.epilogue!r}; known are none, silu_glu and gelu_glu")

    @property
    def is_glu(self) -> bool:
        return self.epilogue != "none"

    @property
    def expert_bytes(self) -> int:
        """Bytes from an expert's matrix to the next one's."""
        return weight_format(self.format).packed_bytes(self.k, self.pitch or self.n)

    @property
    def unit(self) -> int:
        """Matrices that are multiplied together: gate and up, or one."""
        return 2 if self.is_glu else 1

    @property
    def code(self) -> MatMulId:
        """The product whose code this one uses."""
        return replace(self, rows="T")

    def scratch_bytes(self, target: Target) -> int:
        return _listed(self, target) + 8 * _BATCH

    def emit(self, e: Emitter) -> None:
        _MatMulIdEmitter(self, e).emit()


def _groups(spec: MatMulId) -> int:
    return (spec.n + ROWS - 1) // ROWS


def _groups_per_tile(spec: MatMulId) -> int:
    return max(1, -(-_TILE_BYTES // (spec.unit * weight_format(spec.format).group_bytes(spec.k))))


def _row_blocks(spec: MatMulId) -> int:
    return -(-_groups(spec) // _groups_per_tile(spec))


def tiles(spec: MatMulId) -> int:
    """Tiles of one launch per started ``TOKENS`` tokens."""
    return _row_blocks(spec) * spec.n_used


def _listed(spec: MatMulId, target: Target) -> int:
    """Where in scratch the list of positions begins."""
    return product(spec.format, spec.k, target).scratch_bytes(spec.unit)


class _MatMulIdEmitter:
    """State of one emission."""

    def __init__(self, spec: MatMulId, e: Emitter) -> None:
        self.spec, self.e = spec, e
        self.product = product(spec.format, spec.k, e.target)
        self.format = weight_format(spec.format)
        self.w, self.x, self.y, self.ids = (e.arg_ptr(i) for i in range(4))
        self.matrices = [self.w, e.arg_ptr(5)] if spec.is_glu else [self.w]
        self.chosen = e.gep(e.scratch, _listed(spec, e.target))
        self.count = e.var(I64)

    def emit(self) -> None:
        e, b, spec = self.e, self.e.b, self.spec
        blocks, per = _row_blocks(spec), _groups_per_tile(spec)
        tokens = row_count(e, 4)
        total = b.mul(tokens, e.i64(spec.n_used))
        shares = b.mul(e.ceil_div(tokens, TOKENS), e.i64(spec.n_used))
        share = b.udiv(e.tile, e.i64(blocks))
        first = b.mul(b.urem(e.tile, e.i64(blocks)), e.i64(per))
        last = e.imin(b.add(first, e.i64(per)), e.i64(_groups(spec)))
        begin = b.udiv(b.mul(share, total), shares)
        end = b.udiv(b.mul(b.add(share, e.i64(1)), total), shares)
        with e.for_range(begin, end, name="position") as position:
            expert = e.load(I32, e.at(self.ids, position, 4))
            with e.if_(b.not_(self._occurs_before(position, expert))):
                matrices = [e.at(m, e.sext64(expert), spec.expert_bytes) for m in self.matrices]
                self._expert(matrices, expert, position, total, first, last)
        e.ret()

    # Who chose an expert

    def _equal(self, at: Value, stop: Value, expert: Value) -> Value:
        """Bit i: position ``at + i`` before ``stop`` names ``expert``; as many positions as the target has lanes."""
        e, b, lanes = self.e, self.e.b, self.e.target.lanes
        exists = e.lane_mask(lanes, b.sub(stop, at))
        ids = e.load_lanes(I32, lanes, e.at(self.ids, at, 4), exists)
        return b.zext(b.bitcast(b.and_(exists, b.icmp_signed("==", ids, e.splat(expert, lanes))), ir.IntType(lanes)), I64)

    def _occurs_before(self, position: Value, expert: Value) -> Value:
        e, b = self.e, self.e.b
        at, found = e.var(I64, e.i64(0)), e.var(I64, e.i64(0))
        with e.while_loop("earlier") as loop:
            loop.break_if(b.or_(b.icmp_signed(">=", at.get(), position), b.icmp_unsigned("!=", found.get(), e.i64(0))))
            found.set(self._equal(at.get(), position, expert))
            at.set(b.add(at.get(), e.i64(e.target.lanes)))
        return b.icmp_unsigned("!=", found.get(), e.i64(0))

    def _expert(self, matrices: list[Value], expert: Value, position: Value, total: Value, first: Value, last: Value) -> None:
        """Rows ``first`` to ``last`` (in groups) of one expert for every position that names it."""
        e, b, lanes = self.e, self.e.b, self.e.target.lanes
        at = e.var(I64, position)
        with e.while_loop("batch") as batches:
            batches.break_if(b.icmp_signed(">=", at.get(), total))
            self.count.set(e.i64(0))
            with e.while_loop("gather") as gather:
                full = b.icmp_signed(">", self.count.get(), e.i64(_BATCH - lanes))
                gather.break_if(b.or_(full, b.icmp_signed(">=", at.get(), total)))
                self._append(at.get(), self._equal(at.get(), total, expert))
                at.set(b.add(at.get(), e.i64(lanes)))
            with e.if_(b.icmp_signed(">", self.count.get(), e.i64(0))), e.for_range(first, last, name="group") as g:
                self._group([e.at(m, g, self.format.group_bytes(self.spec.k)) for m in matrices], g)

    def _append(self, at: Value, bits: Value) -> None:
        """Add the positions of the set bits to the list."""
        e, b = self.e, self.e.b
        left = e.var(I64, bits)
        with e.while_loop("bit") as loop:
            now = left.get()
            loop.break_if(b.icmp_unsigned("==", now, e.i64(0)))
            lowest = b.cttz(now, ir.Constant(ir.IntType(1), 1))
            e.store(b.add(at, lowest), e.at(self.chosen, self.count.get(), 8))
            self.count.set(b.add(self.count.get(), e.i64(1)))
            left.set(b.and_(now, b.sub(now, e.i64(1))))

    # Products

    def _group(self, groups: list[Value], g: Value) -> None:
        e, b, spec = self.e, self.e.b, self.spec

        def position(t: Value, i: int) -> Value:
            return e.load(I64, e.at(self.chosen, b.add(t, e.i64(i)), 8))

        def rows(t: Value, n: int) -> list[Value]:
            positions = [position(t, i) for i in range(n)]
            sources = [b.udiv(p, e.i64(spec.n_used)) for p in positions] if spec.broadcast_x else positions
            return [e.at(self.x, s, self.product.row_bytes()) for s in sources]

        def done(part: Value, t: Value, results: list[list[Value]]) -> None:
            values = gated(e, spec.epilogue, results)
            first = b.add(b.mul(g, e.i64(ROWS)), b.mul(part, e.i64(e.target.lanes)))
            outs = [e.at(self.y, position(t, i), 4 * spec.n) for i in range(len(values))]
            store_existing(e, first, spec.n, values, lambda row, v, i: e.store(v, e.at(outs[i], row, 4)))

        self.product.run(e, groups, Tokens(e.i64(0), self.count.get(), rows), done)
