"""Which kernels compute a product: by weight type and number of tokens.

A form's entries divide the numbers of tokens between them; all of them add the same numbers in the same order (``products``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ggufc.codegen.kernels.base import symbol
from ggufc.codegen.kernels.matmul import MatMul
from ggufc.codegen.kernels.matmul_id import MatMulId
from ggufc.codegen.weights import weight_format
from ggufc.codegen.weights.floats import F32Format, FloatFormat

from . import expert_tiles, product_floats, product_halves, product_tiles
from .emitter import PtxEmitter
from .entry import Entry, Form, rows_factor
from .expert_tiles import ExpertTile
from .product_operands import ChoiceTile, DenseTile, units_of
from .products import TILE_FROM, threads, vector_body

TOKENS = 4
"""Tokens that share an unpacked weight in registers."""

_Body = Callable[[PtxEmitter], None]


def matmul(spec: MatMul) -> Form:
    """One row at a time, four (16-bit floats: eight) at a time, and tiles where there are many."""
    name, units = symbol(spec), units_of(spec)
    halves = spec.format in ("f16", "bf16")
    entries = []
    for tokens in (product_halves.TOKENS,) if halves else (1, TOKENS):
        one = tokens == 1
        body = _few(spec, tokens)
        block = product_halves.few_threads(spec) if halves else threads(spec.format, spec.k)
        low, high = (0, 1) if one else (0 if halves else 2, TILE_FROM - 1)
        entries.append(Entry(f"{name}_{tokens}", block, body, grid=rows_factor(spec.rows, tokens, units), low=low, high=high))
    groups, tokens, block = _tile_shape(spec)
    grid = rows_factor(spec.rows, tokens, -(-units // (groups // spec.unit)))
    tile = Entry(f"{name}_tile", block, _tile(spec), grid=grid, low=TILE_FROM)
    return Form(_chosen(spec.rows, [*entries, tile]))


def matmul_id(spec: MatMulId) -> Form:
    """A block per (token, chosen expert, 16 rows), and tiles per expert where there are many tokens."""
    name, units = symbol(spec), units_of(spec)
    halves = spec.format in ("f16", "bf16")
    first = expert_tiles.tile_from(spec, TILE_FROM)
    block = product_halves.few_threads(spec) if halves else threads(spec.format, spec.k)
    few = Entry(f"{name}_1", block, _few(spec, 1), grid=rows_factor(spec.rows, 1, spec.n_used * units), high=first - 1)
    groups, _, block = _tile_shape(spec)
    tile = Entry(f"{name}_tile", block, _tile(spec), grid=expert_tiles.grid(spec, groups), low=first)
    return Form(_chosen(spec.rows, [few, tile]))


def _few(spec: MatMul | MatMulId, tokens: int) -> _Body:
    def tile_of(e: PtxEmitter) -> DenseTile | ChoiceTile:
        return DenseTile(spec, e, spec.unit, tokens) if isinstance(spec, MatMul) else ChoiceTile(spec, e)

    if spec.format in ("f16", "bf16"):
        return lambda e: product_halves.few_body(spec, e, tile_of(e))
    return vector_body(spec, tile_of, tokens)


def _tile_shape(spec: MatMul | MatMulId) -> tuple[int, int, int]:
    """Weight groups, tokens and threads of the tile kernel."""
    if not isinstance(weight_format(spec.format), FloatFormat):
        return product_tiles.GROUPS, product_tiles.BLOCK_TOKENS, product_tiles.THREADS
    if isinstance(weight_format(spec.format), F32Format):
        return product_floats.GROUPS, product_floats.TOKENS, product_floats.THREADS
    return product_halves.GROUPS, product_halves.TOKENS * product_halves.WARPS, 32 * product_halves.WARPS


def _tile(spec: MatMul | MatMulId) -> _Body:
    groups, tokens, _ = _tile_shape(spec)

    def body(e: PtxEmitter) -> None:
        tile = DenseTile(spec, e, groups, tokens) if isinstance(spec, MatMul) else ExpertTile(spec, e, groups)
        if not isinstance(weight_format(spec.format), FloatFormat):
            taken = 0 if isinstance(spec, MatMul) else expert_tiles.shared_bytes(spec)
            product_tiles.tile_body(spec, e, tile, taken)
        elif isinstance(weight_format(spec.format), F32Format):
            product_floats.tile_body(spec, e, tile)
        else:
            product_halves.tile_body(spec, e, tile)

    return body


def _chosen(rows: str, entries: list[Entry]) -> tuple[Entry, ...]:
    """The entries that ``rows`` calls for: all, told apart by a symbol's value, or the one for a number."""
    if not rows.isdigit():
        return tuple(replace(entry, sym=rows) for entry in entries)
    n = int(rows)
    return tuple(replace(e, low=0, high=0) for e in entries if e.low <= n and (not e.high or n <= e.high))
