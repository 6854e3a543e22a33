"""One PTX function of a kernel: its launch geometry and the code of one tile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ggufc.formats import cuda as fmt

from .emitter import WARP, PtxEmitter


@dataclass(frozen=True)
class Entry:
    """``body(e)`` opens the tiles (``e.begin_tiles``) and emits one; the fields are those of ``formats.cuda.Entry``.

    ``group``: threads that share a row (``PtxEmitter``). ``resident``: threads a multiprocessor should hold at once, which bounds
    registers: 512 leave each 128 of them, and keep the assembler from spilling some to hold more threads.
    """

    symbol: str
    block: int
    body: Callable[[PtxEmitter], None]
    group: int = WARP
    grid: tuple[fmt.Factor, ...] = ()
    sym: str = ""
    low: int = 0
    high: int = 0
    resident: int = 512

    def described(self) -> fmt.Entry:
        return fmt.Entry(self.symbol, self.block, list(self.grid), self.sym, self.low, self.high)


@dataclass(frozen=True)
class Form:
    """The GPU form of a kernel specification; extra memory as in ``formats.cuda.CudaKernel``."""

    entries: tuple[Entry, ...]
    extra_bytes: int = 0
    extra_div: int = 1
    slice_tokens: int = 1


def rows_factor(rows: str, div: int, mult: int) -> tuple[fmt.Factor, ...]:
    """Tiles of a product: ``mult`` per ``div`` rows, ``rows`` being a symbol or a number."""
    if rows.isdigit():
        return (fmt.Factor("", 1, mult * -(-int(rows) // div)),)
    return (fmt.Factor(rows, div, mult),)


def power_of_two(n: int) -> int:
    """The smallest power of two not below ``n``."""
    return 1 << max(0, (n - 1).bit_length())


def shared_body(spec: Any) -> Callable[[PtxEmitter], None]:
    """The body written for both targets."""

    def body(e: PtxEmitter) -> None:
        e.begin_tiles()
        spec.emit(e)

    return body
