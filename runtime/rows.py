"""The rows of a cache wherever they lie: in one memory, or split by heads over two.

Attention kernels read a cache as one row-major array, row c being cell c. Everything else (state files, moving rows) goes through
``CacheRows``, which knows the parts a row is held in: one part ordinarily; two where a layer keeps the first G of its KV heads in one
memory (a device's) and the rest in another (the host's). A part holds the same heads of every cell, so a full row is the concatenation of
its pieces in order of the parts.

An executor with device memory gives each of its buffers as a ``Part`` (``read`` copies rows to the host, ``write`` copies them back) and
builds ``CacheRows`` from them; ``head_split`` says where rows are cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from ggufc.formats import artifact as fmt
from ggufc.formats import ggml_types

from .errors import RuntimeRefusal

_CHUNK = 1 << 22
"""Bytes gathered at once: large enough to be fast, small beside any cache worth saving."""

ROW_PARALLEL = ("k", "v", "indexer_k")
"""``Cache.part`` of caches whose row c may belong to cell c. Others hold states of sequences and do not follow when cells move."""


def of_cells(cache: fmt.Cache) -> bool:
    """Whether row c of the cache belongs to cell c."""
    return cache.part in ROW_PARALLEL and cache.rows == {"C": 1}


class Part(Protocol):
    """A buffer that holds ``row_bytes`` bytes of each cell."""

    row_bytes: int

    def read(self, cells: np.ndarray) -> np.ndarray:
        """u8 [n, row_bytes] of the cells i32 [n]; may be a view."""

    def write(self, cells: np.ndarray, rows: np.ndarray) -> None:
        """Store u8 [n, row_bytes] in the cells i32 [n]."""


class HostPart:
    """A part in host memory: ``store`` is u8 [cells, row_bytes]."""

    def __init__(self, store: np.ndarray) -> None:
        self.store = store
        self.row_bytes = int(store.shape[1])

    def read(self, cells: np.ndarray) -> np.ndarray:
        return self.store[_index(cells)]

    def write(self, cells: np.ndarray, rows: np.ndarray) -> None:
        self.store[_index(cells)] = rows


def _index(cells: np.ndarray) -> slice | np.ndarray:
    """A slice where the cells follow one another: copied in one piece instead of row by row."""
    n = len(cells)
    if n and int(cells[-1]) - int(cells[0]) == n - 1 and (n == 1 or bool((np.diff(cells) == 1).all())):
        return slice(int(cells[0]), int(cells[0]) + n)
    return cells


class CacheRows:
    """All rows of one cache over its parts. ``split`` is G, the heads in the first of two parts, or 0 for one part."""

    def __init__(self, spec: fmt.Cache, parts: Sequence[Part], split: int = 0) -> None:
        self.spec, self.parts, self.split = spec, list(parts), split
        self.row_bytes = sum(part.row_bytes for part in parts)
        full = row_bytes(spec)
        if self.row_bytes != full or len(parts) != (2 if split else 1):
            widths = " + ".join(str(part.row_bytes) for part in parts)
            raise RuntimeRefusal(f"cache {spec.name}: parts of {widths} bytes do not make up its rows of {full} bytes")

    def read(self, cells: np.ndarray) -> np.ndarray:
        """u8 [n, row_bytes]: full rows of the cells."""
        pieces = [part.read(cells) for part in self.parts]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=1)

    def write(self, cells: np.ndarray, rows: np.ndarray) -> None:
        """Store full rows u8 [n, row_bytes], each part getting its columns."""
        at = 0
        for part in self.parts:
            part.write(cells, rows[:, at : at + part.row_bytes])
            at += part.row_bytes

    def move(self, src: np.ndarray, dst: np.ndarray) -> None:
        """Copy the rows of ``src`` to ``dst``; the two share no cell."""
        for a, b in chunks(len(src), self.row_bytes):
            self.write(dst[a:b], self.read(src[a:b]))


def chunks(n: int, row: int) -> Iterator[tuple[int, int]]:
    """[a, b) pieces of ``n`` rows of ``row`` bytes, a few MiB each."""
    step = max(1, _CHUNK // max(row, 1))
    for at in range(0, n, step):
        yield at, min(n, at + step)


def row_bytes(cache: fmt.Cache) -> int:
    """Bytes of one full row of a cache whose row is whole blocks of its type."""
    return ggml_types.row_bytes(cache.dtype, cache.row)


class Store(Protocol):
    """What keeps the rows of all caches: the buffers of an executor, on the host or a device."""

    n_cells: int
    specs: dict[str, fmt.Cache]

    def rows(self, name: str) -> CacheRows:
        """The rows of one cache."""


def head_split(cache: fmt.Cache, heads: int) -> tuple[int, int]:
    """Bytes of the two pieces of a row whose first ``heads`` KV heads lie apart.

    RuntimeRefusal, naming the cache, for what cannot be split: a row without that many heads, or heads that end inside a block of the type.
    """
    total = cache.row // cache.head if cache.head > 0 else 0
    if not 0 < heads < total or cache.row % cache.head:
        raise RuntimeRefusal(
            f"cache {cache.name}: {heads} of {total} heads cannot lie apart; choose from 1 to {total - 1}, or do not split"
        )
    info = ggml_types.TYPES[cache.dtype]
    if heads * cache.head % info.block:
        raise RuntimeRefusal(
            f"cache {cache.name}: {heads} heads of {cache.head} values are not whole {cache.dtype} blocks of {info.block}; split "
            "elsewhere, or do not split"
        )
    first = heads * cache.head // info.block * info.bytes
    return first, row_bytes(cache) - first
