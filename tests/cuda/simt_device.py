"""A device whose GPU is the SIMT interpreter: what the runtime's CUDA executor runs on in tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from simt import GlobalMemory, Simt


class SimtDevice:
    """``free`` is what ``free_memory`` reports; ``races`` off runs faster.

    Calls that need not be carried out at once are not: they run in order when something waits for them, so that memory changed too early
    or read too early shows. ``copied`` counts the bytes that went each way.
    """

    name = "SIMT interpreter"
    graphs = True

    def __init__(self, capability: int = 90, free: int = 1 << 40, races: bool = True) -> None:
        self.capability, self.free_bytes, self.races = capability, free, races
        self.memory = GlobalMemory()
        self.allocated: set[int] = set()
        self.launches = self.replays = 0
        self.copied = {"to": 0, "from": 0}
        self.queue: list[Callable[[], None]] = []
        self.recording: list[Callable[[], None]] | None = None
        self.largest_grid = 0
        self.entries: set[str] = set()
        """Which kernels ran."""

    def free_memory(self) -> int:
        return self.free_bytes

    def alloc(self, size: int) -> int:
        address = self.memory.alloc(size)
        self.allocated.add(address)
        return address

    def free(self, address: int) -> None:
        self.synchronize()
        self.allocated.remove(address)

    def _later(self, call: Callable[[], None]) -> None:
        (self.queue if self.recording is None else self.recording).append(call)

    def _to(self, address: int, data: np.ndarray) -> None:
        self.copied["to"] += data.nbytes
        self.memory.view(address, data.nbytes)[:] = np.ascontiguousarray(data).reshape(-1).view(np.uint8)

    def _from(self, address: int, into: np.ndarray) -> None:
        self.copied["from"] += into.nbytes
        into.reshape(-1).view(np.uint8)[:] = self.memory.view(address, into.nbytes)

    def upload(self, address: int, data: np.ndarray) -> None:
        self.synchronize()
        self._to(address, data)

    def download(self, address: int, into: np.ndarray) -> None:
        self.synchronize()
        self._from(address, into)

    def send(self, address: int, data: np.ndarray) -> None:
        self._later(lambda: self._to(address, data))

    def receive(self, address: int, into: np.ndarray) -> None:
        self._later(lambda: self._from(address, into))

    def fill(self, address: int, size: int) -> None:
        def clear() -> None:
            self.memory.view(address, size)[:] = 0

        self._later(clear)

    def host_array(self, size: int) -> np.ndarray:
        return np.zeros(size, np.uint8)

    def load(self, ptx: str) -> Simt:
        return Simt(ptx, self.memory, self.races)

    def function(self, module: Simt, symbol: str) -> tuple[Simt, str]:
        return module, symbol

    def launch(self, function: tuple[Simt, str], grid: int, block: int, words: Sequence[int]) -> None:
        def start() -> None:
            self.launches += 1
            self.entries.add(function[1])
            self.largest_grid = max(self.largest_grid, grid)
            function[0].launch(function[1], grid, block, words)

        words = list(words)
        self._later(start)

    def record(self, issue: Callable[[], None]) -> list[Callable[[], None]]:
        self.recording = calls = []
        try:
            issue()
        finally:
            self.recording = None
        return calls

    def replay(self, recording: list[Callable[[], None]]) -> None:
        self.replays += 1
        self.queue.extend(recording)

    def drop(self, recording: list[Callable[[], None]]) -> None:
        recording.clear()

    def synchronize(self) -> None:
        assert self.recording is None, "a recording cannot wait"
        calls, self.queue = self.queue, []
        for call in calls:
            call()

    def mark(self) -> float:
        self.synchronize()
        return time.perf_counter()

    def elapsed(self, start: float, stop: float) -> float:
        return 1e3 * (stop - start)

    def close(self) -> None:
        self.allocated.clear()
