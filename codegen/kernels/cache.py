"""Rows of values in a storage type: how cache rows lie in memory, and conversion from and to f32 lanes.

Storage types are ``f32 f16 bf16`` and the block types of ``cache_blocks``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ggufc.codegen.cpu.target import Target
from ggufc.codegen.emitter import F32, I16, I32, Emitter, Value, vec
from ggufc.codegen.errors import CodegenError
from ggufc.codegen.kernels import cache_blocks
from ggufc.codegen.kernels.cache_blocks import BLOCKS, VALUES, block_bytes

STORAGE = ("f32", "f16", "bf16", *BLOCKS)
SIZES = {"f32": 4, "f16": 2, "bf16": 2, "i32": 4}


def check_storage(dtype: str, row: int, what: str) -> None:
    """Refuse storage types without conversion code, and rows that are not whole blocks."""
    if dtype not in STORAGE:
        raise CodegenError(f"{what}: {dtype!r} is not a storage type for caches; use one of {', '.join(STORAGE)}")
    if dtype in BLOCKS and row % VALUES:
        raise CodegenError(f"{what}: {dtype} needs a multiple of {VALUES} values, not {row}; use an f16 cache for this model")


def row_bytes(dtype: str, row: int) -> int:
    """Bytes of ``row`` values."""
    return row // VALUES * block_bytes(dtype) if dtype in BLOCKS else row * SIZES[dtype]


def load_f32(e: Emitter, dtype: str, n: int, p: Value, count: int | None = None) -> Value:
    """``n`` lanes of f32 from ``n`` stored values (``f32 f16 bf16``) at ``p``; only the first ``count`` are read if given."""
    element = F32 if dtype == "f32" else I16
    v = e.load(vec(element, n), p) if n == 1 or count is None else e.load_masked(element, n, p, count)
    return widen(e, dtype, v)


def widen(e: Emitter, dtype: str, v: Value) -> Value:
    """Stored lanes (f32, or i16 holding f16/bf16) to f32."""
    return v if dtype == "f32" else e.f16_to_f32(v) if dtype == "f16" else e.bf16_to_f32(v)


def narrow(e: Emitter, dtype: str, v: Value) -> Value:
    """f32 lanes to stored lanes, round to nearest even."""
    return v if dtype == "f32" else e.f32_to_f16(v) if dtype == "f16" else e.f32_to_bf16(v)


def store_row(e: Emitter, dtype: str, row: int, source: Value, target: Value) -> None:
    """Convert ``row`` f32 values at ``source`` to storage at ``target``."""
    if dtype in BLOCKS:
        with e.for_range(0, row // VALUES, name="block") as i:
            cache_blocks.store(e, dtype, e.at(source, i, 4 * VALUES), e.at(target, i, block_bytes(dtype)))
        return
    n, size = e.target.lanes, SIZES[dtype]
    with e.for_range(0, row - row % n, n) as i:
        e.store(narrow(e, dtype, e.load(vec(F32, n), e.at(source, i, 4))), e.at(target, i, size))
    if row % n:
        i = row - row % n
        v = e.load_masked(F32, n, e.gep(source, 4 * i), row % n)
        e.store_masked(narrow(e, dtype, v), e.gep(target, size * i), row % n)


@dataclass(frozen=True)
class StoreRows:
    """Rows f32[row, T] (leading dimension ``ldx``) converted to ``dtype`` into rows ``slots[t]`` of a cache; one tile per token."""

    row: int
    dtype: str
    arg_names: ClassVar[tuple[str, ...]] = ("x", "ldx", "cache", "slots")

    def __post_init__(self) -> None:
        check_storage(self.dtype, self.row, "set_rows")

    def emit(self, e: Emitter) -> None:
        x = e.at(e.arg_ptr(0), e.b.mul(e.tile, e.arg_int(1)), 4)
        slot = e.sext64(e.load(I32, e.at(e.arg_ptr(3), e.tile, 4)))
        store_row(e, self.dtype, self.row, x, e.at(e.arg_ptr(2), slot, row_bytes(self.dtype, self.row)))
        e.ret()

    def scratch_bytes(self, target: Target) -> int:
        return 0
