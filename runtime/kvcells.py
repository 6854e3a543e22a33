"""The books of a KV cache: which cell holds which position of which sequences.

A cell holds ``pos`` (-1 = free), the set of sequences that own it and a pending rotation ``delta``. Every sequence also keeps its cells
sorted by position, because attention walks that list; appending at the end, the normal case, costs O(1). Everything here is metadata: no
key or value moves.

Rules: slot search, sequence operations and their edge cases follow the project's cache specification, sections 1.1 to 1.4.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from .errors import RuntimeRefusal

FREE = -1
_INFINITY = np.iinfo(np.int32).max


def position_range(p0: int, p1: int) -> tuple[int, int]:
    """[p0, p1) with a negative p0 meaning 0 and a negative p1 meaning infinity. RuntimeRefusal for bounds that are no whole numbers."""
    for bound in (p0, p1):
        if not isinstance(bound, (int, np.integer)):
            raise RuntimeRefusal(f"a bound of a range of positions is {bound!r}; give whole numbers")
    return max(p0, 0), _INFINITY if p1 < 0 else min(p1, _INFINITY)


class CellList:
    """Cells of one sequence in order of position, ties in order of arrival. ``cells`` and ``pos`` are i32 views of the live part."""

    def __init__(self, cells: np.ndarray | None = None, pos: np.ndarray | None = None) -> None:
        self._cells = np.empty(16, np.int32) if cells is None else np.array(cells, np.int32)
        self._pos = np.empty(16, np.int32) if pos is None else np.array(pos, np.int32)
        self.n = 0 if cells is None else len(self._cells)

    def __len__(self) -> int:
        return self.n

    @property
    def cells(self) -> np.ndarray:
        return self._cells[: self.n]

    @property
    def pos(self) -> np.ndarray:
        return self._pos[: self.n]

    def add(self, cells: np.ndarray, pos: np.ndarray) -> None:
        """Insert entries; amortised O(len(cells)) where all positions follow those present, O(n) otherwise."""
        k = len(cells)
        if k == 0:
            return
        if k > 1 and (pos[1:] < pos[:-1]).any():
            order = np.argsort(pos, kind="stable")
            cells, pos = cells[order], pos[order]
        if self.n + k > len(self._cells):
            size = max(2 * len(self._cells), self.n + k)
            self._cells, self._pos = _grown(self._cells, self.n, size), _grown(self._pos, self.n, size)
        if self.n == 0 or pos[0] >= self._pos[self.n - 1]:
            self._cells[self.n : self.n + k] = cells
            self._pos[self.n : self.n + k] = pos
        else:
            at = np.searchsorted(self.pos, pos, side="right")
            self._cells[: self.n + k] = np.insert(self.cells, at, cells)
            self._pos[: self.n + k] = np.insert(self.pos, at, pos)
        self.n += k

    def span(self, p0: int, p1: int) -> tuple[int, int]:
        """Indices [a, b) of the entries with positions in [p0, p1)."""
        a, b = np.searchsorted(self.pos, [p0, p1])
        return int(a), max(int(a), int(b))

    def remove(self, a: int, b: int) -> None:
        """Drop the entries [a, b)."""
        tail = self.n - b
        self._cells[a : a + tail] = self._cells[b : self.n].copy()
        self._pos[a : a + tail] = self._pos[b : self.n].copy()
        self.n -= b - a


def _grown(old: np.ndarray, n: int, size: int) -> np.ndarray:
    new = np.empty(size, old.dtype)
    new[:n] = old[:n]
    return new


class KVCells:
    """``size`` cells for at most ``n_seq_max`` sequences; ``pad`` is the rounding of the visible length.

    Arrays to read: ``pos`` i32 [size], ``delta`` i32 [size], ``member`` bool [n_seq_max, size]; ``used``, ``head``, ``needs_shift``.
    """

    def __init__(self, size: int, n_seq_max: int = 1, pad: int = 256) -> None:
        if size < 1 or n_seq_max < 1 or pad < 1:
            raise RuntimeRefusal(f"a cache of {size} cells for {n_seq_max} sequences is impossible; all must be positive")
        self.size, self.n_seq_max, self.pad = size, n_seq_max, pad
        self.pos = np.full(size, FREE, np.int32)
        self.delta = np.zeros(size, np.int32)
        self.member = np.zeros((n_seq_max, size), bool)
        self._owners = np.zeros(size, np.int32)
        self._lists = [CellList() for _ in range(n_seq_max)]
        self.used = self.head = 0
        self._top = 0  # 1 + highest occupied cell
        self.n_written = 0  # 1 + highest cell occupied since the last clear
        self.needs_shift = False

    # Placement

    def plan(self, counts: Iterable[int]) -> list[int] | None:
        """First cell for each of several micro-batches placed one after another, or None when one does not fit. Changes nothing.

        Raises RuntimeRefusal (hard) for more tokens than the cache has cells, which no freeing can help.
        """
        head, used = self.head, self.used
        occupied: np.ndarray | None = None
        counts = list(counts)
        starts: list[int] = []
        if sum(counts) > self.size:
            raise RuntimeRefusal(f"{sum(counts)} tokens cannot be placed in a cache of {self.size} cells; use a larger n_ctx")
        for i, n in enumerate(counts):
            if head > used + 2 * n:
                head = 0
            if len(counts) == 1 and head + n <= self.size and (self.pos[head : head + n] < 0).all():
                return [head]  # the normal case of a decode step: no search
            if occupied is None:
                occupied = self.pos >= 0
            start = _first_run(occupied, head, n)
            if start is None:
                return None
            starts.append(start)
            if i + 1 < len(counts):
                occupied[start : start + n] = True
                used += n
                head = start + n if start + n < self.size else 0
        return starts

    def insert(self, start: int, pos: np.ndarray, seqs: Sequence[Sequence[int]] | np.ndarray) -> None:
        """Occupy ``start ..`` with tokens at ``pos`` (i32 [n]); ``seqs`` is one sequence per token (array) or several each.

        The caller has checked sequences and positions (``check``) and got ``start`` from ``plan``.
        """
        n = len(pos)
        where = slice(start, start + n)
        if (self.pos[where] >= 0).any() or start + n > self.size:
            raise RuntimeRefusal(f"cells {start} to {start + n - 1} are not free; this is a defect of ggufc, please report it")
        self._occupy(where, np.arange(start, start + n, dtype=np.int32), pos, seqs)
        self.head = start + n if start + n < self.size else 0

    def insert_at(self, cells: np.ndarray, pos: np.ndarray, seqs: Sequence[Sequence[int]] | np.ndarray) -> None:
        """As ``insert``, into the free cells i32 [n] got from ``place``, which need not be neighbours."""
        if len(cells) == 0:
            return
        if (self.pos[cells] >= 0).any():
            raise RuntimeRefusal("a cell to restore into is not free; this is a defect of ggufc, please report it")
        self._occupy(cells, cells, pos, seqs)
        self._top = max(self._top, int(cells.max()) + 1)
        self.n_written = max(self.n_written, self._top)
        self.head = int(cells[-1]) + 1 if int(cells[-1]) + 1 < self.size else 0

    def place(self, n: int) -> np.ndarray | None:
        """Free cells i32 [n] for ``insert_at``: neighbours where there are any, else scattered; None if fewer are free. Changes nothing."""
        if n > self.size - self.used:
            return None
        occupied = self.pos >= 0
        start = _first_run(occupied, self.head, n) if n else 0
        if start is not None:
            return np.arange(start, start + n, dtype=np.int32)
        return np.flatnonzero(~occupied)[:n].astype(np.int32)

    def _occupy(self, where: slice | np.ndarray, cells: np.ndarray, pos: np.ndarray, seqs: Sequence[Sequence[int]] | np.ndarray) -> None:
        """Enter tokens into free cells; ``where`` and ``cells`` name the same cells."""
        n = len(pos)
        self.pos[where] = pos
        self.delta[where] = 0
        if isinstance(seqs, np.ndarray):
            self._owners[where] = 1
            first = int(seqs[0])
            if n == 1 or (seqs == first).all():
                self.member[first, where] = True
                self._lists[first].add(cells, pos)
            else:
                for seq in np.unique(seqs).tolist():
                    mine = seqs == seq
                    self.member[seq, cells[mine]] = True
                    self._lists[seq].add(cells[mine], pos[mine])
        else:
            for seq in sorted({s for group in seqs for s in group}):
                mine = np.array([seq in group for group in seqs])
                self.member[seq, cells[mine]] = True
                self._owners[cells[mine]] += 1
                self._lists[seq].add(cells[mine], pos[mine])
        self.used += n
        self._top = max(self._top, int(cells[-1]) + 1)
        self.n_written = max(self.n_written, self._top)

    def holes(self) -> float:
        """Share of the visible length that is free; 0 where no free cell lies between occupied ones."""
        return 1.0 - self.used / self.n_kv() if self._top > self.used else 0.0

    def defrag(self) -> tuple[np.ndarray, np.ndarray]:
        """Fill free cells from the front with occupied ones from the end; positions, owners and pending rotations move along.

        Returns the cells i32 (source, destination) whose rows must be moved in every cache; the two share no cell. Every sequence keeps its
        order, so nothing a token sees changes.
        """
        occupied = self.pos >= 0
        dst = np.flatnonzero(~occupied[: self.used]).astype(np.int32)
        src = (self.used + np.flatnonzero(occupied[self.used :])).astype(np.int32)[::-1].copy()
        if len(src):
            for values, free in ((self.pos, FREE), (self.delta, 0), (self._owners, 0)):
                values[dst] = values[src]
                values[src] = free
            self.member[:, dst] = self.member[:, src]
            self.member[:, src] = False
            new = np.arange(self.size, dtype=np.int32)
            new[src] = dst
            for entries in self._lists:
                entries.cells[:] = new[entries.cells]
        self._top = self.used
        self.head = self.used if self.used < self.size else 0
        return src, dst

    def n_kv(self) -> int:
        """Visible length: highest occupied cell + 1, padded; at least one pad, at most the cache."""
        return min(self.size, max(self.pad, -(-self._top // self.pad) * self.pad))

    # Reading

    def list_of(self, seq: int) -> CellList:
        """The sequence's cells sorted by position; a live object, not a copy."""
        self._check_seq(seq, "reading a sequence")
        return self._lists[seq]

    def pos_min(self, seq: int) -> int:
        """Smallest position of a sequence, -1 if it is empty."""
        entries = self.list_of(seq)
        return int(entries.pos[0]) if len(entries) else -1

    def pos_max(self, seq: int) -> int:
        """Largest position of a sequence, -1 if it is empty."""
        entries = self.list_of(seq)
        return int(entries.pos[-1]) if len(entries) else -1

    def _check_seq(self, seq: int, what: str) -> None:
        if not isinstance(seq, (int, np.integer)) or not 0 <= seq < self.n_seq_max:
            raise RuntimeRefusal(f"{what}: sequence {seq} does not exist; ids run from 0 to {self.n_seq_max - 1} (n_seq_max)")

    # Sequence operations

    def clear(self) -> None:
        """Free every cell."""
        self.pos[:] = FREE
        self.delta[:] = 0
        self.member[:] = False
        self._owners[:] = 0
        self._lists = [CellList() for _ in range(self.n_seq_max)]
        self.used = self.head = self._top = self.n_written = 0
        self.needs_shift = False

    def seq_rm(self, seq: int, p0: int = -1, p1: int = -1) -> None:
        """Drop ``seq`` (all sequences if negative) from its cells in [p0, p1); cells without a sequence become free."""
        if not isinstance(seq, (int, np.integer)) or seq >= 0:
            self._check_seq(seq, "seq_rm")
        p0, p1 = position_range(p0, p1)
        freed = [self._drop(s, p0, p1) for s in (range(self.n_seq_max) if seq < 0 else (seq,))]
        self._release(np.concatenate(freed))

    def _drop(self, seq: int, p0: int, p1: int) -> np.ndarray:
        """Take ``seq`` out of its cells in [p0, p1); returns those left without an owner."""
        entries = self._lists[seq]
        a, b = entries.span(p0, p1)
        cells = entries.cells[a:b].copy()
        entries.remove(a, b)
        self.member[seq, cells] = False
        self._owners[cells] -= 1
        return cells[self._owners[cells] == 0]

    def _release(self, cells: np.ndarray) -> None:
        """Free cells that have no owner; the next slot search starts no later than the first of them."""
        if len(cells) == 0:
            return
        self.pos[cells] = FREE
        self.delta[cells] = 0
        self.used -= len(cells)
        self.head = min(self.head, int(cells.min()))
        if int(cells.max()) + 1 == self._top:
            occupied = np.flatnonzero(self.pos[: self._top] >= 0)
            self._top = int(occupied[-1]) + 1 if len(occupied) else 0
        if self.needs_shift and not self.delta.any():
            self.needs_shift = False

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Let ``dst`` share the cells of ``src`` in [p0, p1); no data moves. Copying onto itself does nothing."""
        self._check_seq(src, "seq_cp source")
        self._check_seq(dst, "seq_cp destination")
        if src == dst:
            return
        entries = self._lists[src]
        a, b = entries.span(*position_range(p0, p1))
        cells, pos = entries.cells[a:b], entries.pos[a:b]
        new = ~self.member[dst, cells]  # shared already: a set does not take an element twice
        cells, pos = cells[new], pos[new]
        self.member[dst, cells] = True
        self._owners[cells] += 1
        self._lists[dst].add(cells, pos)

    def seq_keep(self, seq: int) -> None:
        """Free every cell that is not ``seq``'s and take the other sequences out of its cells."""
        self._check_seq(seq, "seq_keep")
        freed = [self._drop(s, 0, _INFINITY) for s in range(self.n_seq_max) if s != seq]
        if freed:
            self._release(np.concatenate(freed))

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        """Move positions in [p0, p1) by ``delta``, also for sequences that share the cells; a position below 0 frees its cell."""
        self._check_seq(seq, "seq_add")
        if not isinstance(delta, (int, np.integer)):
            raise RuntimeRefusal(f"seq_add by {delta!r}; give a whole number")
        if delta == 0:
            return
        cells = self._cells_in(seq, p0, p1)
        moved = self.pos[cells].astype(np.int64) + delta
        if len(moved) and moved.max() >= _INFINITY:
            raise RuntimeRefusal(f"seq_add by {delta} moves a position beyond {_INFINITY - 1}; nothing was changed")
        self._move(cells, moved.astype(np.int64))

    def seq_div(self, seq: int, p0: int, p1: int, k: int) -> None:
        """Divide positions in [p0, p1) by ``k`` (floor)."""
        self._check_seq(seq, "seq_div")
        if not isinstance(k, (int, np.integer)) or k < 1:
            raise RuntimeRefusal(f"seq_div by {k!r}; the divisor must be a whole number from 1 on")
        if k == 1:
            return
        cells = self._cells_in(seq, p0, p1)
        self._move(cells, self.pos[cells].astype(np.int64) // k)

    def _cells_in(self, seq: int, p0: int, p1: int) -> np.ndarray:
        entries = self._lists[seq]
        a, b = entries.span(*position_range(p0, p1))
        return entries.cells[a:b].copy()

    def _move(self, cells: np.ndarray, moved: np.ndarray) -> None:
        """Give ``cells`` new positions and rebuild the lists that hold them."""
        if len(cells) == 0:
            return
        self.delta[cells] += (moved - self.pos[cells]).astype(np.int32)
        self.pos[cells] = np.maximum(moved, FREE)
        gone = cells[moved < 0]
        for seq in np.flatnonzero(self.member[:, cells].any(axis=1)).tolist():
            held = self._lists[seq].cells
            held = held[self.pos[held] >= 0]
            pos = self.pos[held]
            order = np.argsort(pos, kind="stable")
            self._lists[seq] = CellList(held[order], pos[order])
        self.member[:, gone] = False
        self._owners[gone] = 0
        self.needs_shift = bool(self.needs_shift or self.delta[cells].any())
        self._release(gone)

    def shift_done(self) -> None:
        """The pending rotations have been applied."""
        self.delta[:] = 0
        self.needs_shift = False


def _first_run(occupied: np.ndarray, head: int, n: int) -> int | None:
    """First of ``n`` free neighbouring cells at or after ``head``, else anywhere; None if there is no such run."""
    size = len(occupied)
    if head + n <= size and not occupied[head : head + n].any():
        return head
    for low in (head, 0):
        free = np.flatnonzero(~occupied[low:])
        if len(free) < n:
            continue
        # A run of n free cells: the n-th next free index is n - 1 further.
        ends = free[n - 1 :] - free[: len(free) - n + 1]
        hits = np.flatnonzero(ends == n - 1)
        if len(hits):
            return low + int(free[hits[0]])
    return None
