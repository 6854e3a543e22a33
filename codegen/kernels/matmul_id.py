"""Products with chosen experts: each token multiplies only the weights its router picked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ggufc.codegen.cpu.target import Target
from ggufc.codegen.emitter import I32, Emitter
from ggufc.codegen.kernels.matmul_float import FloatProduct
from ggufc.codegen.kernels.matmul_int8 import Int8Product
from ggufc.codegen.weights import weight_format
from ggufc.codegen.weights.base import ROWS
from ggufc.codegen.weights.floats import FloatFormat

_TILE_BYTES = 64 << 10


@dataclass(frozen=True)
class MatMulId:
    """y[n, u, t] = W[ids[u, t]] x[u or 0, t]; ``ids`` i32 [n_used, T], W ``n_expert`` repacked matrices one after the other.

    ``x``: q8 records (or contiguous f32 rows for float formats), one per token with ``broadcast_x``, else one per (u, t). Tiles: ``tiles_per_token`` for each token.
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
        n_groups = -(-self.n // ROWS)
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
                for part in range(ROWS // lanes):
                    if isinstance(product, FloatProduct):
                        (v,) = product.direct(e, group, part, x, 1, e.i64(stride))
                    else:
                        (v,) = product.direct(e, group, part, x, 1)
                    at = e.gep(e.at(y, g, 4 * ROWS), 4 * lanes * part)
                    left = self.n % ROWS - lanes * part
                    if self.n % ROWS == 0 or left >= lanes:
                        e.store(v, at)
                        continue
                    with e.if_else(b.icmp_signed("<", g, e.i64(self.n // ROWS))) as (whole, tail):
                        with whole:
                            e.store(v, at)
                        with tail:
                            if left > 0:
                                e.store_masked(v, at, left)
        e.ret()


def _groups_per_tile(spec: MatMulId) -> int:
    return max(1, -(-_TILE_BYTES // weight_format(spec.format).group_bytes(spec.k)))


def tiles_per_token(spec: MatMulId) -> int:
    """Tile ``t * tiles_per_token + j`` computes the j-th block of rows of token ``t``, for all its experts."""
    return -(-(-(-spec.n // ROWS)) // _groups_per_tile(spec))
