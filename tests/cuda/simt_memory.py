"""Memory of the SIMT interpreter: allocations with bounds, and the log from which data races are found."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

BASE = 1 << 32
"""Address of the first allocation: small integers are never valid addresses."""
READ, WRITE, ATOMIC = 0, 1, 2
GUARD = 256
FILL = 0xA5
VIEWS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class SimtError(Exception):
    """The program did something a GPU would not forgive; the message names kernel, instruction and thread."""


@dataclass
class Allocation:
    start: int
    size: int
    name: str
    read_only: bool


class GlobalMemory:
    """Device memory: ``alloc`` returns addresses, every access must lie inside one allocation and be aligned to its size."""

    def __init__(self, capacity: int = 1 << 20) -> None:
        self.bytes = np.full(capacity, FILL, np.uint8)
        self.used = 0
        self.allocations: list[Allocation] = []
        self._starts = np.zeros(0, np.int64)
        self._ends = np.zeros(0, np.int64)

    def alloc(self, size: int, name: str = "buffer", read_only: bool = False) -> int:
        start = -(-self.used // GUARD) * GUARD + GUARD
        self.used = start + max(size, 1)
        if self.used + GUARD > len(self.bytes):
            grown = np.full(max(2 * len(self.bytes), (self.used + 2 * GUARD) // 8 * 8 + 8), FILL, np.uint8)
            grown[: len(self.bytes)] = self.bytes
            self.bytes = grown
        self.allocations.append(Allocation(BASE + start, size, name, read_only))
        self._starts = np.append(self._starts, BASE + start)
        self._ends = np.append(self._ends, BASE + start + size)
        return BASE + start

    def store(self, array: np.ndarray, name: str = "buffer", read_only: bool = False) -> int:
        """Allocate and fill."""
        address = self.alloc(array.nbytes, name, read_only)
        self.view(address, array.nbytes)[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return address

    def view(self, address: int, size: int) -> np.ndarray:
        return self.bytes[address - BASE : address - BASE + size]

    def read(self, address: int, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.view(address, count).copy().view(dtype).reshape(shape)

    def which(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Allocation of each access, -1 where it lies outside all of them."""
        i = np.searchsorted(self._starts, addresses, side="right") - 1
        inside = (i >= 0) & (addresses + size <= self._ends[i])
        return np.where(inside, i, -1)

    def guards_intact(self) -> bool:
        """Whether the bytes around the allocations are as they were."""
        outside = np.ones(len(self.bytes), bool)
        for a in self.allocations:
            outside[a.start - BASE : a.start - BASE + a.size] = False
        return bool((self.bytes[outside] == FILL).all())


@dataclass
class AccessLog:
    """Accesses of one launch to one memory; ``check`` finds two threads that touch a word without a barrier between, one of them
    writing. ``write`` is READ, WRITE or ATOMIC; atomics do not race with each other.
    """

    kind: str
    entries: list[tuple[np.ndarray, ...]] = field(default_factory=list)
    granule: int = 4

    def add(
        self, address: np.ndarray, size: int, thread: np.ndarray, block: np.ndarray, epoch: np.ndarray, warp_epoch: np.ndarray, write: int
    ) -> None:
        if size < 4:
            self.granule = 1
        self.entries.append((address, np.int64(size), thread, block, epoch, warp_epoch, np.int8(write)))  # type: ignore[arg-type]

    def check(self, across_blocks: bool) -> str | None:
        """A sentence about the first race, or None. ``across_blocks``: nothing orders blocks, so they may not share written words."""
        if not any(e[6] for e in self.entries):
            return None
        columns = [self._spread(*e) for e in self.entries]
        word, thread, block, epoch, warp_epoch, write = (np.concatenate([c[i] for c in columns]) for i in range(6))
        place = word if across_blocks else word * (int(block.max()) + 1) + block
        written = np.unique(place[write > 0])
        at = np.searchsorted(written, place)
        keep = (at < len(written)) & (written[np.minimum(at, len(written) - 1)] == place)
        word, place, thread, block, epoch, warp_epoch, write = (a[keep] for a in (word, place, thread, block, epoch, warp_epoch, write))
        if across_blocks:
            bad = _groups_with(block, write, (place,))
            if bad is not None:
                return self._message(word, bad, "blocks", block)
        warp = thread // 32
        bad = _groups_with(warp, write, (place, block, epoch))
        if bad is not None:
            return self._message(word, bad, "warps", thread)
        bad = _groups_with(thread, write, (place, block, epoch, warp_epoch))
        return None if bad is None else self._message(word, bad, "threads", thread)

    def _spread(self, address, size, thread, block, epoch, warp_epoch, write):  # type: ignore[no-untyped-def]
        """One row per granule touched."""
        pieces = max(1, int(size) // self.granule)
        first = address // self.granule
        words = (first[:, None] + np.arange(pieces)).reshape(-1)
        wide = [np.repeat(a, pieces) for a in (thread, block, epoch, warp_epoch)]
        return words, *wide, np.full(len(words), np.int8(write))

    def _message(self, word: np.ndarray, bad: np.ndarray, what: str, who: np.ndarray) -> str:
        names = sorted(set(who[bad].tolist()))[:2]
        at = int(word[bad[0]]) * self.granule
        return f"race on {self.kind} memory at byte {at:#x} between {what} (for example {names[0]} and {names[-1]})"


def _groups_with(who: np.ndarray, write: np.ndarray, keys: tuple[np.ndarray, ...]) -> np.ndarray | None:
    """Rows of the first group of equal ``keys`` with a write and two different ``who``; None if there is none."""
    if not len(who):
        return None
    order = np.lexsort(keys[::-1])
    change = np.zeros(len(who), bool)
    change[0] = True
    for key in keys:
        k = key[order]
        change[1:] |= k[1:] != k[:-1]
    starts = np.flatnonzero(change)
    w = who[order]
    mixed = np.minimum.reduceat(w, starts) != np.maximum.reduceat(w, starts)
    kinds = write[order]
    bad = np.flatnonzero(mixed & (np.maximum.reduceat(kinds, starts) > READ) & (np.minimum.reduceat(kinds, starts) < ATOMIC))
    if not len(bad):
        return None
    ends = np.append(starts, len(who))
    return order[starts[bad[0]] : ends[bad[0] + 1]]
