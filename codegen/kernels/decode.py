"""Rows of a cache of blocks as f32, for operators that look at a cache from other directions than along its rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ggufc.codegen.cpu.target import Target
from ggufc.codegen.emitter import Emitter
from ggufc.codegen.errors import CodegenError
from ggufc.codegen.kernels import cache_blocks
from ggufc.codegen.kernels.cache import row_bytes


@dataclass(frozen=True)
class DecodeRows:
    """out f32[row, N] = rows of a cache of ``dtype`` (a block type). One tile per row."""

    row: int
    dtype: str
    arg_names: ClassVar[tuple[str, ...]] = ("cache", "out")

    def __post_init__(self) -> None:
        if self.dtype not in cache_blocks.BLOCKS or self.row % cache_blocks.VALUES:
            raise CodegenError(f"decode: rows of {self.row} {self.dtype} are not whole blocks of {cache_blocks.VALUES} values")

    def emit(self, e: Emitter) -> None:
        lanes, block_bytes = e.target.lanes, cache_blocks.block_bytes(self.dtype)
        source, target = e.at(e.arg_ptr(0), e.tile, row_bytes(self.dtype, self.row)), e.at(e.arg_ptr(1), e.tile, 4 * self.row)
        with e.for_range(0, self.row // cache_blocks.VALUES, name="block") as i:
            block, values = e.at(source, i, block_bytes), e.at(target, i, 4 * cache_blocks.VALUES)
            for at in range(0, cache_blocks.VALUES, lanes):
                e.store(cache_blocks.load(e, self.dtype, lanes, block, e.i64(at)), e.gep(values, 4 * at))
        e.ret()

    def scratch_bytes(self, target: Target) -> int:
        return 0
