"""Tiles of AMX: registers of up to 16 rows of 64 bytes, and sums of byte products over them.

Tile numbers are immediate operands of LLVM's intrinsics, so tiles are allocated here, by hand. The shapes of all tiles are one piece of
thread state: ``configured`` loads it and gives it back, so no thread needs to know what another kernel uses, and the kernel of the
system has no tiles to save between launches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from llvmlite import ir

from ggufc.codegen.emitter import I8, I64, PTR, VOID, Emitter, Value

_PALETTE = 1
_COLUMNS, _ROWS = 16, 48
"""Where the configuration holds bytes per row (16 bits each) and rows (8 bits each)."""


@contextmanager
def configured(e: Emitter, shapes: Sequence[tuple[int, int]]) -> Iterator[None]:
    """Tile i has ``shapes[i]`` = (rows, bytes per row) inside; all tiles are released afterwards."""
    words = bytearray(64)
    words[0] = _PALETTE
    for i, (rows, columns) in enumerate(shapes):
        words[_COLUMNS + 2 * i] = columns
        words[_ROWS + i] = rows
    name = "tiles_" + "_".join(f"{rows}x{columns}" for rows, columns in shapes)
    _call(e, "ldtilecfg", [PTR], [e.global_const(I8, list(words), name)])
    yield
    _call(e, "tilerelease", [], [])


def zero(e: Emitter, tile: int) -> None:
    _call(e, "tilezero", [I8], [_number(tile)])


def load(e: Emitter, tile: int, p: Value, stride: Value | int) -> None:
    """Rows of memory ``stride`` bytes apart."""
    _call(e, "tileloadd64", [I8, PTR, I64], [_number(tile), p, e.i64(stride) if isinstance(stride, int) else stride])


def store(e: Emitter, tile: int, p: Value, stride: int) -> None:
    _call(e, "tilestored64", [I8, PTR, I64], [_number(tile), p, e.i64(stride)])


def add_products(e: Emitter, total: int, signed: int, unsigned: int) -> None:
    """i32 [m, n] ``total`` += sums over k of ``signed`` bytes [m, k] times ``unsigned`` bytes, stored [k/4, n, 4]; exact."""
    _call(e, "tdpbsud", [I8, I8, I8], [_number(t) for t in (total, signed, unsigned)])


def _number(tile: int) -> Value:
    return ir.Constant(I8, tile)


def _call(e: Emitter, name: str, types: list[ir.Type], args: list[Value]) -> None:
    e.b.call(e.intrinsic(f"llvm.x86.{name}", VOID, types), args)
