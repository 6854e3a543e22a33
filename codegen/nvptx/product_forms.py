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
    """One row at a time, several at a time, and tiles where there are many."""
    name, units = symbol(spec), units_of(spec)
    tile_from = product_floats.tile_from(spec) if spec.format == "f32" else TILE_FROM
    entries = []
    for tokens, low, high in _steps(spec, tile_from):
        grid = rows_factor(spec.rows, tokens, units)
        block, body = _few_threads(spec, tokens), _few(spec, tokens)
        entries.append(Entry(f"{name}_{tokens}", block, body, grid=grid, low=low, high=high, resident=_resident(spec, tokens)))
    groups, tokens, block = _tile_shape(spec)
    grid = rows_factor(spec.rows, tokens, -(-units // (groups // spec.unit)))
    return Form(_chosen(spec.rows, [*entries, Entry(f"{name}_tile", block, _tile(spec), grid=grid, low=tile_from)]))


def _steps(spec: MatMul, tile_from: int) -> list[tuple[int, int, int]]:
    """(tokens of a block, from, to) of the entries for fewer tokens than tiles take."""
    if spec.format in ("f16", "bf16"):
        return [(product_halves.TOKENS, 0, tile_from - 1)]
    return [(1, 0, 1), (product_floats.few_tokens(spec) if spec.format == "f32" else TOKENS, 2, tile_from - 1)]


def matmul_id(spec: MatMulId) -> Form:
    """A block per (token, chosen expert, 16 rows), and tiles per expert where there are many tokens."""
    name, units = symbol(spec), units_of(spec)
    first = expert_tiles.tile_from(spec, TILE_FROM)
    grid = rows_factor(spec.rows, 1, spec.n_used * units)
    few = Entry(f"{name}_1", _few_threads(spec, 1), _few(spec, 1), grid=grid, high=first - 1, resident=_resident(spec, 1))
    groups, _, block = _tile_shape(spec)
    tile = Entry(f"{name}_tile", block, _tile(spec), grid=expert_tiles.grid(spec, groups), low=first)
    return Form(_chosen(spec.rows, [few, tile]))


def _few(spec: MatMul | MatMulId, tokens: int) -> _Body:
    def tile_of(e: PtxEmitter) -> DenseTile | ChoiceTile:
        return DenseTile(spec, e, spec.unit, tokens) if isinstance(spec, MatMul) else ChoiceTile(spec, e)

    if spec.format in ("f16", "bf16"):
        return lambda e: product_halves.few_body(spec, e, tile_of(e))
    if spec.format == "f32" and isinstance(spec, MatMul) and tokens > 1:
        return lambda e: product_floats.few_body(spec, e, tile_of(e))
    return vector_body(spec, tile_of, tokens)


def _few_threads(spec: MatMul | MatMulId, tokens: int) -> int:
    if spec.format in ("f16", "bf16"):
        return product_halves.few_threads(spec)
    return product_floats.FEW_THREADS if spec.format == "f32" and tokens > 1 else threads(spec.format, spec.k)


def _resident(spec: MatMul | MatMulId, tokens: int) -> int:
    """A product of one token with F32 weights waits for memory only: more threads ask for more of it."""
    return 1024 if spec.format == "f32" and tokens == 1 else 512


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
