"""The few things a GPU must do for us, and what says that there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    graphs: bool
    """Whether calls can be recorded."""

    def free_memory(self) -> int:
        """Bytes that can be allocated."""

    def alloc(self, size: int) -> int:
        """``size`` bytes, aligned to 256."""

    def free(self, address: int) -> None: ...

    def upload(self, address: int, data: np.ndarray) -> None:
        """Copy a contiguous array to the device; the array may be changed afterwards."""

    def download(self, address: int, into: np.ndarray) -> None:
        """Copy to a contiguous array; complete on return."""

    def send(self, address: int, data: np.ndarray) -> None:
        """Copy (part of) a ``host_array`` to the device when its turn comes; it must not change before ``synchronize``."""

    def receive(self, address: int, into: np.ndarray) -> None:
        """Copy to (part of) a ``host_array`` when its turn comes; complete after ``synchronize``."""

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

    def record(self, issue: Callable[[], None]) -> Any:
        """A recording of the ``launch``, ``send``, ``receive`` and ``fill`` calls that ``issue`` makes, none of which is carried out.
        RuntimeRefusal, with nothing left half recorded, if there can be none.
        """

    def replay(self, recording: Any) -> None:
        """Do what was recorded, with what memory holds now."""

    def drop(self, recording: Any) -> None:
        """Free a recording."""

    def synchronize(self) -> None: ...

    def mark(self) -> Any:
        """A point in the stream of calls."""

    def elapsed(self, start: Any, stop: Any) -> float:
        """Milliseconds between two marks that have passed."""

    def close(self) -> None: ...


class PtxTooNew(RuntimeRefusal):
    """The driver does not know the PTX version of a module."""


REMEDY = "or run on the CPU"
NO_CUDA = "CUDA cannot be used: "
"""How refusals begin where there is no driver to talk to."""


def check_index(index: int, count: int) -> None:
    """RuntimeRefusal where ``count`` devices have none of that number."""
    if not 0 <= index < count:
        have = "no CUDA device is visible" if not count else f"there are {count} CUDA devices"
        raise RuntimeRefusal(f"CUDA device {index} does not exist: {have} (CUDA_VISIBLE_DEVICES hides devices); choose another, {REMEDY}")


def no_memory_left(what: str) -> RuntimeRefusal:
    """The driver's allocator has refused; ``what`` completes "to"."""
    return RuntimeRefusal(f"the GPU has no memory left to {what}; use a smaller n_ctx or n_ubatch, {REMEDY}")


def megabytes(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"
