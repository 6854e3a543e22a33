"""The persistent buffers of an artifact: where each cache's rows are, and the buffers of the host.

Row c is cell c, except that caches of layers with a window have ``Sizes.window_rows`` rows if that is not 0 (``windows``), and that other
rows than cells belong to one of ``Sizes.n_seq_max`` sequences (``state_inputs``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

import msgspec
import numpy as np

from ggufc.formats import artifact as fmt
from ggufc.formats.errors import ArtifactError
from ggufc.formats.ggml_types import TYPES

from .artifact import Artifact
from .memory import ALIGNMENT, Region, align
from .rows import CacheRows, HostPart, of_cells, row_bytes
from .sizes import Sizes
from .state_inputs import symbols


class CacheLayout:
    """Places of the caches ``only`` names (all by default) in one block of ``size`` bytes: ``row_bytes``, ``n_rows`` and ``offsets`` by
    name. ArtifactError for rows that cannot be stored.
    """

    def __init__(
        self,
        artifact: Artifact,
        sizes: Sizes,
        only: Collection[str] | None = None,
        alignment: int = ALIGNMENT,
    ) -> None:
        self.n_cells, window_rows = sizes.limits.n_cells, sizes.window_rows
        self.specs = {cache.name: cache for cache in artifact.manifest.caches if only is None or cache.name in only}
        self.n_rows: dict[str, int] = {}
        self.row_bytes: dict[str, int] = {}
        self.offsets: dict[str, int] = {}
        self.size = 0
        for name, cache in self.specs.items():
            info = TYPES.get(cache.dtype)
            if info is None or cache.row <= 0 or cache.row % info.block:
                raise ArtifactError(
                    f"{artifact.path}: cache {name} has rows of {cache.row} values of type {cache.dtype!r}, which cannot be stored"
                )
            if cache.hadamard and (cache.hadamard < 0 or cache.hadamard & (cache.hadamard - 1) or cache.row % cache.hadamard):
                raise ArtifactError(
                    f"{artifact.path}: cache {name} has rows of {cache.row} values under a transform of blocks of {cache.hadamard}, which "
                    "cannot be; compile the model again"
                )
            self.row_bytes[name] = row_bytes(cache)
            self.n_rows[name] = window_rows if window_rows and cache.window else self._rows(artifact, cache, sizes.n_seq_max)
            self.offsets[name] = self.size
            self.size += align(self.row_bytes[name] * self.n_rows[name], alignment)

    def _rows(self, artifact: Artifact, cache: fmt.Cache, n_seq_max: int) -> int:
        env = {"C": self.n_cells} | symbols(1, self.n_cells, n_seq_max)
        unknown = {symbol for symbol in cache.rows if symbol and symbol not in env}
        rows = 0 if unknown else fmt.evaluate(cache.rows, env)
        if not 0 < rows < 1 << 40:
            raise ArtifactError(f"{artifact.path}: cache {cache.name} has {cache.rows} rows, which cannot be; compile the model again")
        return rows

    def bytes_of(self, name: str) -> int:
        """Bytes of one cache's rows."""
        return self.row_bytes[name] * self.n_rows[name]


class Caches(Protocol):
    """What a session does with the caches of its executors, whichever memory they are in; a ``rows.Store``."""

    n_cells: int
    specs: dict[str, fmt.Cache]

    def rows(self, name: str) -> CacheRows:
        """The rows of one cache."""

    def clear(self, n_rows: int | None = None) -> None:
        """Zero the first ``n_rows`` cells of every cache (all by default), and everything that belongs to sequences."""

    def clear_rows(self, name: str, first: int, n: int) -> None:
        """Zero ``n`` rows of one cache."""


def logical(caches: Iterable[fmt.Cache]) -> list[fmt.Cache]:
    """Descriptions of caches with those divided by heads (``Cache.rest_of``) as one each."""
    caches = list(caches)
    rests = {cache.rest_of: cache.row for cache in caches if cache.rest_of}
    return [msgspec.structs.replace(c, row=c.row + rests.get(c.name, 0)) for c in caches if not c.rest_of]


class JoinedCaches:
    """Caches divided by heads (``Cache.rest_of``) as one each: rows of two parts, the first heads' and the rest's."""

    def __init__(self, divided: Caches) -> None:
        self.n_cells, self._divided = divided.n_cells, divided
        self._rests = {cache.rest_of: cache for cache in divided.specs.values() if cache.rest_of}
        self.specs = {cache.name: cache for cache in logical(divided.specs.values())}

    def rows(self, name: str) -> CacheRows:
        """The rows of one cache, in one part or two."""
        rest = self._rests.get(name)
        if rest is None:
            return self._divided.rows(name)
        first = self._divided.specs[name]
        parts = [*self._divided.rows(name).parts, *self._divided.rows(rest.name).parts]
        return CacheRows(self.specs[name], parts, first.row // first.head)

    def clear(self, n_rows: int | None = None) -> None:
        """Zero the first ``n_rows`` cells of every cache (all by default), and everything that belongs to sequences."""
        self._divided.clear(n_rows)

    def clear_rows(self, name: str, first: int, n: int) -> None:
        """Zero ``n`` rows of one cache."""
        for each in [name, *([self._rests[name].name] if name in self._rests else [])]:
            self._divided.clear_rows(each, first, n)


def joined(caches: Caches) -> Caches:
    """The caches as sessions see them."""
    return JoinedCaches(caches) if any(cache.rest_of for cache in caches.specs.values()) else caches


class CacheBuffers(CacheLayout):
    """The caches in host memory, zero-filled. ``view(name)`` is u8 [rows, row bytes]."""

    def __init__(self, artifact: Artifact, sizes: Sizes, only: Collection[str] | None = None) -> None:
        super().__init__(artifact, sizes, only)
        self.memory = Region(self.size, f"a KV cache of {self.n_cells} cells")

    def view(self, name: str) -> np.ndarray:
        row, start, n = self.row_bytes[name], self.offsets[name], self.n_rows[name]
        return self.memory.bytes[start : start + row * n].reshape(n, row)

    def rows(self, name: str) -> CacheRows:
        """The rows of one cache for state files and for moving cells: here in one part."""
        return CacheRows(self.specs[name], [HostPart(self.view(name))])

    def clear(self, n_rows: int | None = None) -> None:
        """Zero the first ``n_rows`` cells of every cache (all by default), and everything that belongs to sequences; rows never written
        stay untouched memory.
        """
        for name, spec in self.specs.items():
            self.view(name)[: n_rows if of_cells(spec) else None] = 0

    def clear_rows(self, name: str, first: int, n: int) -> None:
        """Zero ``n`` rows of one cache."""
        self.view(name)[first : first + n] = 0
