"""The few things a GPU must do for us, and what says that there is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from ggufc.runtime.errors import RuntimeRefusal


class Device(Protocol):
    """A GPU (or what stands for one). Addresses are integers; calls are in order, ``synchronize`` waits for them and reports what went
    wrong.

    Implementations raise RuntimeRefusal with the way out; ``load`` raises ``PtxTooNew`` where the driver does not know the PTX version.
    """

    name: str
    capability: int
    """90 for sm_90."""

    def free_memory(self) -> int:
        """Bytes that can be allocated."""

    def alloc(self, size: int) -> int:
        """``size`` bytes, aligned to 256."""

    def free(self, address: int) -> None: ...

    def upload(self, address: int, data: np.ndarray) -> None:
        """Copy a contiguous array to the device; the array may be changed afterwards."""

    def download(self, address: int, into: np.ndarray) -> None:
        """Copy to a contiguous array; complete on return."""

    def fill(self, address: int, size: int) -> None:
        """Zero ``size`` bytes."""

    def host_array(self, size: int) -> np.ndarray:
        """u8 host memory that copies quickly (pinned where possible)."""

    def load(self, ptx: str) -> Any:
        """A module."""

    def function(self, module: Any, symbol: str) -> Any:
        """A function of a module."""

    def launch(self, function: Any, grid: int, block: int, words: Sequence[int]) -> None:
        """Start ``grid`` x ``block`` threads with 64-bit arguments."""

    def synchronize(self) -> None: ...

    def mark(self) -> Any:
        """A point in the stream of calls."""

    def elapsed(self, start: Any, stop: Any) -> float:
        """Milliseconds between two marks that have passed."""

    def close(self) -> None: ...


class PtxTooNew(RuntimeRefusal):
    """The driver does not know the PTX version of a module."""


def megabytes(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"
