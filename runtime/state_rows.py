"""The part of a state blob about states that belong to sequences (``state_inputs``): convolution inputs, rings, compressed entries.

It follows everything else of a blob, only for models that have such states:

    states     u32 'SQST', u32 sequences n, i32 position each continues from, u32 caches; per cache i32 type, u64 bytes of a row, u32 rows,
               the rows

The blob of a sequence holds that sequence's part and is restored into the part of the sequence it becomes; that of a whole context holds
all rows. A partial blob leaves out compressed entries: those behind a cut are written again before they are seen.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ggufc.formats import artifact as fmt
from ggufc.formats.ggml_types import TYPES

from .errors import RuntimeRefusal
from .rows import CacheRows, Store, chunks
from .state_inputs import SequenceStates
from .state_io import Sink, Source

MARKER = 0x54535153


class CellStore:
    """The caches of a store whose rows are cells."""

    def __init__(self, store: Store, states: SequenceStates) -> None:
        self.n_cells, self._store = store.n_cells, store
        others = {cache.name for cache in states.specs}
        self.specs = {name: spec for name, spec in store.specs.items() if name not in others}

    def rows(self, name: str) -> CacheRows:
        return self._store.rows(name)


@dataclass(frozen=True)
class Saved:
    """A checked section: the position each saved sequence continues from, and (cache, first row, rows, byte offset) of all rows."""

    next: list[int]
    parts: list[tuple[fmt.Cache, int, int, int]]


def _parts(store: Store, states: SequenceStates, seq: int | None, partial: bool) -> Iterator[tuple[fmt.Cache, int, int]]:
    """(cache, first row, rows) of what a blob of ``seq`` holds."""
    for cache in states.specs:
        if partial and any(symbol.startswith("C") for symbol in cache.rows):
            continue
        if seq is not None:
            yield cache, *states.part(cache, seq)
        else:
            # The last row of states and rings is not a sequence's: it is zero, or holds what nobody reads.
            yield cache, 0, sum(states.part(cache, s)[1] for s in range(states.n_seq_max))


def write(sink: Sink, store: Store, states: SequenceStates, seq: int | None, partial: bool) -> None:
    """Write the section of one sequence, or of all."""
    following = states.next if seq is None else [states.next[seq]]
    parts = list(_parts(store, states, seq, partial))
    sink.put(struct.pack(f"<II{len(following)}iI", MARKER, len(following), *following, len(parts)))
    for cache, first, n in parts:
        rows = store.rows(cache.name)
        sink.put(struct.pack("<iQI", TYPES[cache.dtype].id, rows.row_bytes, n))
        for part in rows.parts:
            sink.rows(part, np.arange(first, first + n, dtype=np.int32))


def parse(source: Source, store: Store, states: SequenceStates, seq: int | None, partial: bool) -> Saved:
    """Check the section against the destination ``seq``, or the whole context."""

    def differs(what: str, have: object, want: object) -> RuntimeRefusal:
        return RuntimeRefusal(
            f"{source.name} does not fit: {what} is {have} in the saved state and {want} here; open the session with the same sizes and "
            "cache types, or restore the state where it was saved"
        )

    marker = source.u32("the marker of sequence states")
    if marker != MARKER:
        raise differs("the marker of sequence states", f"{marker:#010x}", f"{MARKER:#010x}")
    count, want = source.u32("the number of sequence states"), states.n_seq_max if seq is None else 1
    if count != want:
        raise differs("the number of sequences", count, want)
    following = source.i32s(count, "the positions of sequence states").tolist()
    parts = list(_parts(store, states, seq, partial))
    caches = source.u32("the number of state caches")
    if caches != len(parts):
        raise differs("the number of state caches", caches, len(parts))
    found = []
    for cache, first, n in parts:
        have = (source.i32(cache.name), source.u64(cache.name), source.u32(cache.name))
        here = (TYPES[cache.dtype].id, store.rows(cache.name).row_bytes, n)
        if have != here:
            raise differs(f"(type, bytes of a row, rows) of {cache.name}", have, here)
        found.append((cache, first, n, source.skip(here[1] * n, f"the rows of {cache.name}")))
    return Saved(following, found)


def restore(source: Source, store: Store, saved: Saved) -> None:
    """Copy the rows of a checked section."""
    for cache, first, n, at in saved.parts:
        rows = store.rows(cache.name)
        for a, b in chunks(n, rows.row_bytes):
            rows.write(np.arange(first + a, first + b, dtype=np.int32), source.rows_at(at + a * rows.row_bytes, b - a, rows.row_bytes))
