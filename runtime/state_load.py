"""Restoring what ``state`` saved.

A blob is read twice: ``parse`` walks all of it, compares every fact with the destination and keeps only where the rows lie; ``restore``
then copies them. So a blob that does not fit is known before a cell changes, and no cell can claim rows that were not written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ggufc.formats import artifact as fmt
from ggufc.formats.ggml_types import TYPES

from . import state
from .batch import MAX_POSITION
from .errors import RuntimeRefusal
from .kvcells import KVCells
from .rows import CacheRows, Store, chunks, head_split
from .state_io import Source
from .state_rows import Saved
from .windows import WindowRows

_MORE_SEQUENCES = "open the session with a larger n_seq_max"
_TYPE_NAMES = {info.id: info.name for info in TYPES.values()}


@dataclass(frozen=True)
class Section:
    """Rows of one cache in the blob: the byte offset of each part's payload, and the bytes each part has of a row. ``window``: the rows of
    a compacted cache.
    """

    cache: str
    offsets: list[int]
    widths: list[int]
    window: bool = False


@dataclass
class Blob:
    """A checked blob. ``pos`` i32 [n] in saved order; ``ids`` the sequences of each cell (whole context only); ``last`` >= -1 for a partial
    blob: the position its sequence ended at, with ``n_cells`` cells. ``live``: rows of compacted caches. ``states``: what belongs to
    sequences.
    """

    tokens: list[int]
    pos: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    ids: list[tuple[int, ...]] | None = None
    sections: list[Section] = field(default_factory=list)
    partial: bool = False
    last: int = -1
    n_cells: int = 0
    live: int = 0
    states: Saved | None = None


ParseStates = Callable[[Source], Saved] | None
"""Checks the section about states of sequences, where the model has such."""


class _Reader:
    """Walks one blob against a destination; refusals name both sides of what differs."""

    def __init__(
        self, source: Source, cells: KVCells, store: Store, n_layer: int, windows: WindowRows | None = None, states: ParseStates = None
    ) -> None:
        self.source, self.cells, self.store, self.n_layer, self.windows = source, cells, store, n_layer, windows
        self.parse_states = states
        self.states: Saved | None = None

    def differs(self, what: str, have: object, want: object, remedy: str = "restore it where it was saved") -> RuntimeRefusal:
        return RuntimeRefusal(f"{self.source.name} does not fit: {what} is {have} in the saved state and {want} here; {remedy}")

    def head(self, magic: int, version: int, kind: str) -> list[int]:
        found = self.source.u32("the magic number")
        if found != magic:
            known = {state.SESSION_MAGIC: "a whole context", state.SEQUENCE_MAGIC: "one sequence"}
            raise RuntimeRefusal(
                f"{self.source.name} holds {known.get(found, f'something else (magic number {found:#010x})')}, not {kind}; give a sequence "
                "id for the state of a sequence, and none for that of a context"
            )
        have = self.source.u32("the version")
        if have != version:
            raise self.differs("the format version", have, version, "save the state again with this version of ggufc")
        count = self.source.u32("the number of tokens")
        if count > self.cells.size:  # more than can be a sequence here: they say nothing about the cells
            self.source.skip(4 * count, "the tokens")
            return []
        return self.source.i32s(count, "the tokens").tolist()

    def session_fields(self, arch: str) -> None:
        """Architecture, and fields that other engines fill and this one has no use for."""
        text = self.source.take(self.source.u32("the length of the architecture"), "the architecture").decode("utf-8", "replace")
        if text != arch:
            raise self.differs("the architecture", text, arch)
        self.source.skip(self.source.u32("the length of the RNG state"), "the RNG state")
        self.source.skip(4 * self.source.u32("the number of output rows"), "the output rows")
        self.source.skip(4 * self.source.u64("the number of logits"), "the logits")
        self.source.skip(4 * self.source.u64("the number of embeddings"), "the embeddings")

    def cell_table(self, n: int, sequence: bool) -> tuple[np.ndarray, list[tuple[int, ...]] | None]:
        if n > self.cells.size:
            raise self.differs("the number of cells", n, self.cells.size, "use a larger n_ctx")
        if sequence:
            table = self.source.i32s(2 * n, "the cells").reshape(n, 2)
            if table[:, 1].any():
                raise RuntimeRefusal(f"{self.source.name}: cells of one sequence carry sequence ids; the state is damaged, save it again")
            self._positions(table[:, 0])
            return table[:, 0].copy(), None
        pos, ids = np.empty(n, np.int32), []
        for cell in range(n):
            pos[cell] = self.source.i32("the cells")
            count = self.source.u32("the cells")
            if not 0 < count <= self.cells.n_seq_max:
                raise self.differs(f"the number of sequences of cell {cell}", count, f"1 to {self.cells.n_seq_max}", _MORE_SEQUENCES)
            mine = tuple(self.source.i32s(count, "the cells").tolist())
            if min(mine) < 0 or max(mine) >= self.cells.n_seq_max or len(set(mine)) != count:
                raise self.differs(f"the sequences of cell {cell}", list(mine), f"0 to {self.cells.n_seq_max - 1}", _MORE_SEQUENCES)
            ids.append(mine)
        self._positions(pos)
        return pos, ids

    def _positions(self, pos: np.ndarray) -> None:
        if len(pos) and not (pos.min() >= 0 and pos.max() <= MAX_POSITION):
            raise RuntimeRefusal(
                f"{self.source.name}: positions run from {pos.min()} to {pos.max()}, which cannot be; the state is damaged, save it again"
            )

    def presence(self) -> list[fmt.Cache | None]:
        """Check v_state and the number of layers; the caches whose rows follow, K of all layers, then V."""
        k, v, _ = state.layer_table(self.store, self.n_layer)
        have, want = self.source.u32("v_state"), state.v_state(self.store)
        if have > state.V_ABSENT:
            raise self.differs("v_state", have, want, "save the state again")
        if (have == state.V_ABSENT) != (want == state.V_ABSENT):
            words = ("there", "absent")
            raise self.differs("the V cache", words[have == state.V_ABSENT], words[want == state.V_ABSENT])
        if have == state.V_TRANSPOSED:
            raise self.differs("the V cache", "transposed (v_state 1)", "row-major (v_state 0)", "save it with flash attention on")
        layers = self.source.u32("the number of layers")
        if layers != len(k):
            raise self.differs("the number of layers", layers, len(k))
        return [*k, *([] if want == state.V_ABSENT else v)]

    def compacted(self, marker: int) -> int:
        """Live rows of compacted caches, whose marker has just been read."""
        have, want = (["for every cell", "for windows"][x] for x in (marker == state.COMPACT_MARKER, self.windows is not None))
        if have != want:
            raise self.differs("the number of rows", have, want, "open the session with the same compact_windows")
        if self.windows is None:
            return 0
        rows, live = self.source.u32("the rows of window caches"), self.source.u32("their live rows")
        if rows != self.windows.rows:
            raise self.differs("the number of rows of window caches", rows, self.windows.rows, "use the same n_ctx and n_ubatch")
        self._gone, head = self.source.i32("the cells without a row"), self.source.u32("the next row")
        if live > rows or head != live:
            raise RuntimeRefusal(f"{self.source.name}: {live} live rows of {rows}, the next is {head}; the state is damaged, save it again")
        return live

    def check_live(self, live: int, n: int) -> None:
        if self.windows is not None and (self._gone < 0 or self._gone + live != n or live < min(n, self.windows.window)):
            raise RuntimeRefusal(
                f"{self.source.name}: {live} cells with a window row and {self._gone} without one cannot be {n} cells; the state is "
                "damaged, save it again"
            )

    def sections(self, n: int | None, live: int = 0) -> list[Section]:
        """Where the rows of ``n`` cells lie, None for a partial blob, which has rows of compacted caches only."""
        found: list[Section] = []
        caches = self.presence()
        layers = len(state.layer_table(self.store, self.n_layer)[0])
        for index, cache in enumerate(caches):
            where = f"{'V' if index >= layers else 'K'} of layer {index % layers}"
            small = self.windows is not None and cache is not None and cache.window > 0
            rows = live if small else n
            if rows is None:
                cache, rows = None, 0
            found.extend(self._section(cache, where, rows, small))
        self.tail(n, found)
        return found

    def tail(self, n: int | None, found: list[Section]) -> None:
        """Recurrent and indexer sections and the end; ``n`` None where rows are not in the blob."""
        _, _, indexers = state.layer_table(self.store, self.n_layer)
        recurrent = self.source.u32("the recurrent marker")
        if recurrent:
            raise self.differs("recurrent state", "there", "absent")
        marker, want = self.source.u32("the indexer marker"), int(bool(indexers) and n is not None)
        if marker != want:
            raise self.differs("the indexer marker", marker, want)
        if n is not None:
            for cache in indexers:
                found.extend(self._section(cache, f"indexer keys of layer {cache.layer}", n))
        if self.parse_states is not None:
            self.states = self.parse_states(self.source)
        if self.source.at != self.source.size:
            raise RuntimeRefusal(
                f"{self.source.name} goes on for {self.source.size - self.source.at} bytes after its last section; it was saved by "
                "something this version does not know"
            )

    def _section(self, cache: fmt.Cache | None, where: str, n: int, window: bool = False) -> list[Section]:
        kind, row = self.source.i32(f"the type of {where}"), self.source.u64(f"the row size of {where}")
        split, turned = (kind & flag if kind >= 0 else 0 for flag in (state.SPLIT_FLAG, state.TURNED_FLAG))
        plain = kind & ~(state.SPLIT_FLAG | state.TURNED_FLAG)
        here = "absent" if cache is None else cache.dtype
        saved = "absent" if kind < 0 else _TYPE_NAMES.get(plain, f"type {kind}")
        if saved != here:
            raise self.differs(where, saved, here, "compile the model with the same cache types")
        if cache is None:
            return []
        wanted = self.store.rows(cache.name).row_bytes
        if row != wanted:
            raise self.differs(f"the row of {where}", f"{row} bytes", f"{wanted} bytes")
        widths = [wanted]
        if split:
            heads = self.source.u32(f"the split of {where}")
            try:
                widths = list(head_split(cache, heads))
            except RuntimeRefusal as why:
                raise self.differs(f"the split of {where}", f"{heads} heads", self.store.rows(cache.name).split, str(why)) from None
        block = self.source.u32(f"the transform of {where}") if turned else 0
        if block != cache.hadamard:
            have, want = ("in blocks of " + str(n) if n else "absent" for n in (block, cache.hadamard))
            raise self.differs(f"the Hadamard transform of {where}", have, want, "compile the model with the same cache options")
        offsets = [self.source.skip(width * n, f"the rows of {where}") for width in widths]
        return [Section(cache.name, offsets, widths, window)]


def parse_session(source: Source, arch: str, cells: KVCells, store: Store, n_layer: int, states: ParseStates = None) -> Blob:
    """Check a whole context's blob against the destination."""
    reader = _Reader(source, cells, store, n_layer, states=states)
    tokens = reader.head(state.SESSION_MAGIC, state.SESSION_VERSION, "a whole context")
    reader.session_fields(arch)
    pos, ids = reader.cell_table(source.u32("the number of cells"), sequence=False)
    sections = reader.sections(len(pos))
    return Blob(tokens, pos, ids, sections, states=reader.states)


def parse_sequence(
    source: Source,
    cells: KVCells,
    store: Store,
    n_layer: int,
    partial: bool = False,
    windows: WindowRows | None = None,
    states: ParseStates = None,
) -> Blob:
    """Check a sequence's blob against the destination; ``partial`` says which of the two kinds is expected."""
    reader = _Reader(source, cells, store, n_layer, windows, states)
    tokens = reader.head(state.SEQUENCE_MAGIC, state.SEQUENCE_VERSION, "one sequence")
    count = source.u32("the number of cells")
    if (count == state.PARTIAL_MARKER) != partial:
        kinds = ("a full state", "a partial state")
        raise RuntimeRefusal(f"{source.name} holds {kinds[not partial]}, not {kinds[partial]}; load it with partial={not partial}")
    if not partial:
        live = reader.compacted(count)
        if windows is not None:
            count = source.u32("the number of cells")
        reader.check_live(live, count)
        pos, _ = reader.cell_table(count, sequence=True)
        sections = reader.sections(len(pos), live)
        return Blob(tokens, pos, None, sections, live=live, states=reader.states)
    last, n = source.i32("the last position"), source.u32("the number of cells")
    if windows is None:
        reader.presence()
        reader.tail(None, [])
        return Blob(tokens, partial=True, last=last, n_cells=n, states=reader.states)
    live = reader.compacted(source.u32("the marker of window caches"))
    reader.check_live(live, n)
    sections = reader.sections(None, live)
    return Blob(tokens, sections=sections, partial=True, last=last, n_cells=n, live=live, states=reader.states)


def restore(source: Source, blob: Blob, where: np.ndarray, store: Store, rows_of_windows: np.ndarray | None = None) -> None:
    """Copy the rows of a checked blob to the cells ``where`` i32 [n], in saved order, and those of compacted caches to their rows.

    Parts of the blob are joined into full rows and cut again as the destination keeps them, so a state saved from split layers fits any
    split, and none.
    """
    for section in blob.sections:
        rows: CacheRows = store.rows(section.cache)
        place = rows_of_windows if section.window and rows_of_windows is not None else where
        for a, b in chunks(len(place), rows.row_bytes):
            pieces = [source.rows_at(at + a * width, b - a, width) for at, width in zip(section.offsets, section.widths)]
            rows.write(place[a:b], pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=1))
