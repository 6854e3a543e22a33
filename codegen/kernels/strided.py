"""Strided tensors in kernels: their description, the split of their rows into tiles, and the walk over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ggufc.codegen.emitter import F32, I16, I32, Emitter, Value, vec
from ggufc.codegen.errors import CodegenError
from ggufc.codegen.kernels.cache import SIZES, narrow, widen
from ggufc.formats.abi import PARAMS
from ggufc.ir.dims import Dim, IntDim, divide

_TILE_VALUES = 4096
"""Values per tile that repay the claim of a tile."""


@dataclass(frozen=True)
class Strided:
    """A tensor of ``f32 f16 bf16 i32``: shape ``ne``, strides ``nb`` and ``offset`` in elements (ggml order; padded to four dimensions)."""

    dtype: str
    ne: tuple[IntDim, ...]
    nb: tuple[IntDim, ...]
    offset: IntDim = 0

    def __post_init__(self) -> None:
        if self.dtype not in SIZES:
            raise CodegenError(f"strided tensors are f32, f16, bf16 or i32, not {self.dtype}; dequantise with get_rows or mul_mat")
        if len(self.ne) != len(self.nb) or not 1 <= len(self.ne) <= 4:
            raise CodegenError(f"a tensor needs one to four dimensions with one stride each, not ne {self.ne} and nb {self.nb}")
        more = 4 - len(self.ne)
        object.__setattr__(self, "ne", (*self.ne, *[1] * more))
        object.__setattr__(self, "nb", (*self.nb, *[0] * more))

    @property
    def size(self) -> int:
        return SIZES[self.dtype]


def contiguous(dtype: str, ne: Sequence[IntDim], offset: IntDim = 0) -> Strided:
    """Strides of a packed tensor of shape ``ne``."""
    nb: list[IntDim] = []
    step: IntDim = 1
    for n in ne:
        nb.append(step)
        step = step * n
    return Strided(dtype, tuple(ne), tuple(nb), offset)


class Grid(NamedTuple):
    """``mult * ceil(params[sym] / div)`` tiles (``sym`` None: ``mult`` tiles); tile i covers rows from ``i * rows_per_tile``."""

    sym: str | None
    div: int
    mult: int
    rows_per_tile: IntDim


def row_grid(rows: IntDim, values_per_row: IntDim) -> Grid:
    """Split ``rows`` rows into tiles.

    Numbers and multiples of one symbol split evenly; in a product of symbols one is split and the others stay inside a tile; sums are
    one tile.
    """
    per_row = values_per_row if isinstance(values_per_row, int) else 256
    block = max(1, _TILE_VALUES // max(1, per_row))
    if isinstance(rows, int):
        return Grid(None, 1, -(-rows // block), block)
    if len(rows.terms) != 1:
        return Grid(None, 1, 1, rows)
    ((symbols, factor),) = rows.terms
    symbol = min(symbols, key=PARAMS.index)
    rest = divide(rows, Dim((((symbol,), factor),)))
    if not isinstance(rest, int):
        return Grid(symbol, 1, factor, rest)
    if factor < block:
        div = block // factor
        return Grid(symbol, div, 1, factor * div)
    inside = next(n for n in range(min(block, factor), 0, -1) if factor % n == 0)
    return Grid(symbol, 1, factor // inside, inside)


def for_rows(e: Emitter, ne: Sequence[IntDim], values_per_row: IntDim, body: Callable[[list[Value]], None]) -> None:
    """``body([i1, i2, i3])`` for the tile's rows of a shape; ``ne`` holds dimensions 1..3, fastest first."""
    b = e.b
    rows: IntDim = 1
    for n in ne:
        rows = rows * n
    per_tile = e.dim(row_grid(rows, values_per_row).rows_per_tile)
    first = b.mul(e.tile, per_tile)
    with e.for_groups(first, e.imin(b.add(first, per_tile), e.dim(rows))) as row:
        index: list[Value] = []
        rest = row
        outer = max((i for i, n in enumerate(ne) if n != 1), default=-1)
        for i, n in enumerate(ne):
            if n == 1:
                index.append(e.i64(0))
            elif i == outer:
                index.append(rest)
            else:
                index.append(b.urem(rest, e.dim(n)))
                rest = b.udiv(rest, e.dim(n))
        body(index)


def row_pointer(e: Emitter, base: Value, x: Strided, index: Sequence[Value], ne: Sequence[IntDim]) -> Value:
    """Address of the row of ``x`` for an index into dimensions 1..3 of a result of shape ``ne``, with ggml's repetition."""
    b = e.b
    at = e.dim(x.offset)
    for i in range(1, 4):
        if x.ne[i] == 1:
            continue
        position = index[i - 1] if x.ne[i] == ne[i] else b.urem(index[i - 1], e.dim(x.ne[i]))
        at = b.add(at, b.mul(position, e.dim(x.nb[i])))
    return e.at(base, at, x.size)


def load_values(e: Emitter, x: Strided, p: Value, n: int, mask: Value | None = None) -> Value:
    """``n`` adjacent values as f32 lanes (i32 converted); ``mask`` chooses lanes."""
    element = {"f32": F32, "i32": I32}.get(x.dtype, I16)
    v = e.load(vec(element, n), p) if mask is None else e.load_lanes(element, n, p, mask)
    return e.b.sitofp(v, vec(F32, n)) if x.dtype == "i32" else widen(e, x.dtype, v)


def store_values(e: Emitter, x: Strided, v: Value, p: Value, mask: Value | None = None) -> None:
    """f32 lanes to adjacent values (i32: toward zero)."""
    n = 1 if v.type == F32 else v.type.count
    v = e.b.fptosi(v, vec(I32, n)) if x.dtype == "i32" else narrow(e, x.dtype, v)
    if mask is None:
        e.store(v, p)
    else:
        e.store_lanes(v, p, mask)


def for_vectors(e: Emitter, n: IntDim, body: Callable[[Value, int, Value | None], None]) -> None:
    """``body(index, lanes, mask)`` over 0..n-1 in vectors; a last partial vector comes with a mask."""
    b, lanes = e.b, e.target.lanes
    total = e.dim(n)
    if e.spmd:
        with e.for_lanes(total) as i:
            body(i, 1, None)
        return
    whole = b.and_(total, e.i64(-lanes))
    with e.for_range(0, whole, lanes) as i:
        body(i, lanes, None)
    if isinstance(n, int) and n % lanes == 0:
        return
    with e.if_(b.icmp_signed("<", whole, total)):
        body(whole, lanes, e.lane_mask(lanes, b.sub(total, whole)))
