"""A device whose GPU is the SIMT interpreter: what the runtime's CUDA executor runs on in tests."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from simt import GlobalMemory, Simt


class SimtDevice:
    """``free`` is what ``free_memory`` reports; ``races`` off runs faster."""

    name = "SIMT interpreter"

    def __init__(self, capability: int = 90, free: int = 1 << 40, races: bool = True) -> None:
        self.capability, self.free_bytes, self.races = capability, free, races
        self.memory = GlobalMemory()
        self.allocated: set[int] = set()
        self.launches = 0
        self.largest_grid = 0

    def free_memory(self) -> int:
        return self.free_bytes

    def alloc(self, size: int) -> int:
        address = self.memory.alloc(size)
        self.allocated.add(address)
        return address

    def free(self, address: int) -> None:
        self.allocated.remove(address)

    def upload(self, address: int, data: np.ndarray) -> None:
        self.memory.view(address, data.nbytes)[:] = np.ascontiguousarray(data).reshape(-1).view(np.uint8)

    def download(self, address: int, into: np.ndarray) -> None:
        into.reshape(-1).view(np.uint8)[:] = self.memory.view(address, into.nbytes)

    def fill(self, address: int, size: int) -> None:
        self.memory.view(address, size)[:] = 0

    def host_array(self, size: int) -> np.ndarray:
        return np.zeros(size, np.uint8)

    def load(self, ptx: str) -> Simt:
        return Simt(ptx, self.memory, self.races)

    def function(self, module: Simt, symbol: str) -> tuple[Simt, str]:
        return module, symbol

    def launch(self, function: tuple[Simt, str], grid: int, block: int, words: Sequence[int]) -> None:
        self.launches += 1
        self.largest_grid = max(self.largest_grid, grid)
        function[0].launch(function[1], grid, block, words)

    def synchronize(self) -> None:
        pass

    def mark(self) -> float:
        return time.perf_counter()

    def elapsed(self, start: float, stop: float) -> float:
        return 1e3 * (stop - start)

    def close(self) -> None:
        self.allocated.clear()
