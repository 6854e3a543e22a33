"""Compacted caches of sliding-window layers: rows for the window instead of for every cell.

A layer with a window of W never reads a row once W later positions exist, so its cache needs W rows and those of one micro-batch. Cells
stay what they are, one per token; ``WindowRows`` says which row of the compacted caches a cell has, if it still has one. Rows are given
away in order of position, oldest first and only when they are needed, so a sequence can be cut back as far as its rows reach.

Attention reads cells through a list. For compacted caches it gets the list's end, cut at a multiple of ``LIST_STEP`` entries, with rows in
place of cells: the entries a token sees keep their places within tiles and splits, so every sum is formed in the same order and the logits
have the bits of the full cache. Entries before the window name row 0 and are never seen.

One sequence only, evaluated from its end on: a row that was given away cannot come back.
"""

from __future__ import annotations

import warnings
from collections.abc import Container, Sequence, Set

import numpy as np

from ggufc.formats import artifact as fmt

from .batch import Batch, Visibility
from .errors import RuntimeRefusal
from .kvcells import FREE, KVCells, position_range

SUFFIX = "@window"
"""Added to an input's name: the copy that launches on compacted caches read."""
REDIRECTED = ("kv_slots", "kv_cells", "visible")
LIST_STEP = 4096
"""Lists are cut at multiples of this, a multiple of the steps and splits attention works in."""
_LEAST_UBATCH = 256


def rows_for(caches: Sequence[fmt.Cache], n_cells: int, n_ubatch: int, pad: int) -> int:
    """Rows that all compacted caches have, or 0 if no layer has a window or nothing would shrink."""
    window = max((cache.window for cache in caches), default=0)
    rows = -(-(window + max(n_ubatch, _LEAST_UBATCH)) // pad) * pad
    return rows if window and rows < n_cells else 0


def rows_of_session(caches: Sequence[fmt.Cache], n_cells: int, n_ubatch: int, n_seq_max: int, pad: int) -> int:
    """Rows of compacted caches; 0, with a warning, where there is nothing to gain. RuntimeRefusal for more sequences, whose windows would
    need rows of their own.
    """
    if n_seq_max > 1:
        raise RuntimeRefusal(f"compact_windows keeps the window of one sequence, n_seq_max is {n_seq_max}; leave out one of them")
    rows = rows_for(caches, n_cells, n_ubatch, pad)
    if not rows:
        warnings.warn("compact_windows changes nothing: no layer's window is smaller than the context", RuntimeWarning, stacklevel=3)
    return rows


def redirected(
    program: fmt.Program, launch: fmt.Launch, windowed: Set[str], inputs: dict[str, fmt.Input], apart: Container[str] = ()
) -> bool:
    """Whether a launch works on compacted caches, so that it reads the inputs named with ``SUFFIX``.

    ``apart``: resources whose rows are not cells; they have lists of their own. RuntimeRefusal if a launch reads a cache otherwise than
    through slots and lists, or reads both kinds of cache.
    """
    caches = {arg.name for arg in launch.args if arg.kind == "cache" and arg.name not in apart}
    if not caches & windowed:
        return False
    kinds = {inputs[arg.name].kind: inputs[arg.name] for arg in launch.args if arg.kind == "input" and arg.name in inputs}
    reads = "kv_cells" in kinds and "visible" in kinds and kinds["visible"].window > 0
    if caches <= windowed and (reads or "kv_slots" in kinds):
        return True
    raise RuntimeRefusal(
        f"window caches cannot be compacted: {launch.node} of {program.name} reads {', '.join(sorted(caches))} in another way than by its "
        "window's list; open the session without compact_windows"
    )


class WindowRows:
    """Which row of the compacted caches each cell of sequence 0 has; ``rows`` rows for windows up to ``window``."""

    def __init__(self, cells: KVCells, rows: int, window: int) -> None:
        self.cells, self.rows, self.window = cells, rows, window
        self.row_of = np.full(cells.size, FREE, np.int32)
        self._cell_of = np.full(rows, FREE, np.int32)
        self.base = 0
        """Positions below have given their rows away."""

    def clear(self) -> None:
        self.row_of[:] = FREE
        self._cell_of[:] = FREE
        self.base = 0

    def check(self, batch: Batch) -> None:
        """Refuse tokens that do not follow the sequence one by one."""
        first = self.cells.pos_max(0) + 1
        if (first and batch.pos[0] != first) or (len(batch) > 1 and bool((np.diff(batch.pos) != 1).any())):
            raise RuntimeRefusal(
                f"with compacted window caches tokens follow one another: position {first or 'any'} is next, the batch has "
                f"{int(batch.pos[0])} to {int(batch.pos[-1])}; open the session without compact_windows"
            )

    def take(self, cells: np.ndarray, first: int) -> np.ndarray:
        """Rows i32 [n] for the cells i32 [n] of a micro-batch just inserted, which begins at position ``first``."""
        n = len(cells)
        rows = np.flatnonzero(self._cell_of < 0)[:n].astype(np.int32)
        if len(rows) < n:
            entries = self.cells.list_of(0)
            a, seen = entries.span(self.base, first - self.window + 1)
            b = a + n - len(rows)
            if b > seen:
                raise RuntimeRefusal(f"{n} tokens do not fit the {self.rows} rows of the window caches; this is a defect of ggufc")
            old = entries.cells[a:b]
            rows = np.concatenate([rows, self.row_of[old]])
            self.row_of[old] = FREE
            self.base = int(entries.pos[b - 1]) + 1
        self.row_of[cells] = rows
        self._cell_of[rows] = cells
        return rows

    def check_rm(self, seq: int, p0: int, p1: int) -> None:
        """Soft refusal unless [p0, p1) is everything, nothing, or an end that leaves the next token its window."""
        p0, p1 = position_range(p0, p1)
        low, high = self.cells.pos_min(0), self.cells.pos_max(0)
        if seq > 0 or p0 > high or p1 <= max(low, p0) or (p0 <= low and p1 > high):
            return
        if p1 <= high or max(low, p0 - self.window + 1) < self.base:
            reach = min(self.base + self.window - 1, high + 1) if self.base > max(low, 0) else low
            raise RuntimeRefusal(
                f"positions {p0} to {min(p1, high + 1) - 1} cannot be removed: the window caches have rows from {self.base} on; remove an "
                f"end from {reach} on, or everything",
                soft=True,
            )

    def removed(self) -> None:
        """Cells have been freed."""
        gone = np.flatnonzero((self._cell_of >= 0) & (self.cells.pos[self._cell_of] < 0))
        self.row_of[self._cell_of[gone]] = FREE
        self._cell_of[gone] = FREE
        if self.cells.used == 0:
            self.base = 0

    def live(self) -> np.ndarray:
        """i32: rows of the cells that have one, in order of position."""
        cells = self.cells.list_of(0).cells
        rows = self.row_of[cells]
        return rows[rows >= 0]

    def restored(self, cells: np.ndarray, live: int) -> np.ndarray:
        """Give the last ``live`` of the cells i32 [n], in order of position, rows 0, 1, ...; returns these rows."""
        self.clear()
        rows = np.arange(live, dtype=np.int32)
        kept = cells[len(cells) - live :]
        self.row_of[kept] = rows
        self._cell_of[rows] = kept
        self.base = int(self.cells.pos[kept[0]]) if live and live < len(cells) else 0
        return rows

    def lists(self, seen: Visibility) -> tuple[int, np.ndarray]:
        """(entries cut off, rows i32) of the list that launches on compacted caches read."""
        cut = int(seen.rows(self.window)[:, 1].min()) // LIST_STEP * LIST_STEP
        return cut, np.maximum(self.row_of[seen.cells[cut:]], 0)
