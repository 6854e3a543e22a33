"""Products with chosen experts: each token multiplies only the weights its router picked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ggufc.codegen.cpu.target import Target
from ggufc.codegen.emitter import F32, I32, Emitter, Value
from ggufc.codegen.kernels.matmul_float import FloatProduct
from ggufc.codegen.kernels.matmul_int8 import Int8Product
from ggufc.codegen.weights import weight_format
from ggufc.codegen.weights.base import ROWS
from ggufc.codegen.weights.floats import FloatFormat

_TILE_BYTES = 64 << 10


@dataclass(frozen=True)
class MatMulId:
    """y[n, u, t] = W[ids[u, t]] x[u or 0, t]; ``ids`` i32 [n_used, T], W ``n_expert`` repacked matrices one after the other.

    ``x``: q8 records (or contiguous f32 rows for float formats), one per token with ``broadcast_x``, else one per (u, t). Tiles:
    ``tiles_per_token`` for each token.
    """

    format: str
    k: int
    n: int
    n_expert: int
    n_used: int
    broadcast_x: bool

    arg_names: ClassVar[tuple[str, ...]] = ("w", "x", "y", "ids")

    def __post_init__(self) -> None:
        weight_format(self.format).check_k(self.k)

    def scratch_bytes(self, target: Target) -> int:
        return 0

    def emit(self, e: Emitter) -> None:
        b, lanes = e.b, e.target.lanes
        fmt = weight_format(self.format)
        tiles, per = tiles_per_token(self), _groups_per_tile(self)
        n_groups = (self.n + ROWS - 1) // ROWS
        token = b.sdiv(e.tile, e.i64(tiles))
        first = b.mul(b.srem(e.tile, e.i64(tiles)), e.i64(per))
        last = e.imin(b.add(first, e.i64(per)), e.i64(n_groups))
        product = FloatProduct(fmt, self.k) if isinstance(fmt, FloatFormat) else Int8Product(fmt, self.k)
        stride = 4 * self.k if isinstance(product, FloatProduct) else product.stride()
        with e.for_range(0, self.n_used, name="u") as u:
            row = b.add(b.mul(token, e.i64(self.n_used)), u)
            expert = e.sext64(e.load(I32, e.at(e.arg_ptr(3), row, 4)))
            matrix = e.at(e.arg_ptr(0), expert, fmt.packed_bytes(self.k, self.n))
            x = e.at(e.arg_ptr(1), token if self.broadcast_x else row, stride)
            y = e.at(e.arg_ptr(2), row, 4 * self.n)
            with e.for_range(first, last, name="group") as g:
                group = e.at(matrix, g, fmt.group_bytes(self.k))
                with e.for_range(0, ROWS // lanes, name="part") as part:
                    if isinstance(product, FloatProduct):
                        (v,) = product.direct(e, group, part, x, 1, e.i64(stride))
                    else:
                        (v,) = product.direct(e, group, part, x, 1)
                    self._store(e, y, b.add(b.mul(g, e.i64(ROWS)), b.mul(part, e.i64(lanes))), v)
        e.ret()

    def _store(self, e: Emitter, y: Value, row: Value, v: Value) -> None:
        """Rows ``row`` on, as far as they exist."""
        b, lanes = e.b, e.target.lanes
        if self.n % ROWS == 0:
            e.store(v, e.at(y, row, 4))
            return
        with e.if_else(b.icmp_signed("<=", row, e.i64(self.n - lanes))) as (whole, tail):
            with whole:
                e.store(v, e.at(y, row, 4))
            with tail:
                held = e.alloca(4 * lanes)
                e.store(v, held)
                with e.for_range(row, self.n, name="tail") as r:
                    e.store(e.load(F32, e.at(held, b.sub(r, row), 4)), e.at(y, r, 4))


def _groups_per_tile(spec: MatMulId) -> int:
    return max(1, -(-_TILE_BYTES // weight_format(spec.format).group_bytes(spec.k)))


def tiles_per_token(spec: MatMulId) -> int:
    """Tile ``t * tiles_per_token + j`` computes the j-th block of rows of token ``t``, for all its experts."""
    groups = (spec.n + ROWS - 1) // ROWS
    return (groups + _groups_per_tile(spec) - 1) // _groups_per_tile(spec)
