"""Copies from global to shared memory that do not wait: what lies between ``cp.async`` and its ``cp.async.wait_group``.

Data arrive at the latest moment allowed: when the thread that started a copy waits for its group. Until then nobody may touch the bytes.
The arrival counts as a write of that thread, so other threads need a barrier after the wait as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from simt_memory import WRITE

if TYPE_CHECKING:
    from simt import _Run


@dataclass
class _Copy:
    """One instruction's copies, a row per thread: offsets in the block's shared memory and in the batch's, bytes, and group numbers."""

    threads: np.ndarray
    offset: np.ndarray
    at: np.ndarray
    data: np.ndarray
    group: np.ndarray


class Copies:
    """Copies of one batch of blocks."""

    def __init__(self, run: _Run) -> None:
        self.run = run
        self.closed = np.zeros(run.n, np.int64)
        """Groups each thread has closed."""
        self.busy = np.zeros(len(run.shared), bool)
        self.pending: list[_Copy] = []

    def start(self, threads: np.ndarray, offset: np.ndarray, at: np.ndarray, data: np.ndarray) -> None:
        for i in range(data.shape[1]):
            self.busy[at + i] = True
        self.pending.append(_Copy(threads, offset, at, data, self.closed[threads]))

    def close(self, threads: np.ndarray) -> None:
        self.closed[threads] += 1

    def wait(self, threads: np.ndarray, pending: int) -> None:
        """The copies of all but the last ``pending`` closed groups of ``threads`` arrive."""
        reached = np.zeros(self.run.n, np.int64)
        reached[threads] = self.closed[threads] - pending
        left = []
        for copy in self.pending:
            done = copy.group < reached[copy.threads]
            if done.any():
                self._arrive(copy, done)
            if not done.all():
                left.append(_Copy(*(v[~done] for v in (copy.threads, copy.offset, copy.at, copy.data, copy.group))))
        self.pending = left

    def _arrive(self, copy: _Copy, done: np.ndarray) -> None:
        run, at, size = self.run, copy.at[done], copy.data.shape[1]
        for i in range(size):
            run.shared[at + i] = copy.data[done, i]
            self.busy[at + i] = False
        run.log(run.logs[1], copy.offset[done], size, copy.threads[done], WRITE)

    def touches(self, at: np.ndarray, size: int) -> np.ndarray:
        """Which accesses of ``size`` bytes meet a copy on its way."""
        met = self.busy[at]
        for i in range(1, size):
            met = met | self.busy[at + i]
        return met
