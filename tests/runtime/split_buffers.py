"""Row storage with some layers split by heads, as sessions with GPUs have it, in host memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ggufc.formats.artifact import Cache
from ggufc.runtime.memory import Region
from ggufc.runtime.rows import CacheRows, HostPart, head_split, row_bytes


class SplitBuffers:
    """``split`` maps layer -> heads of the first part; other layers are whole."""

    def __init__(self, caches: Sequence[Cache], n_cells: int, split: Mapping[int, int] | None = None) -> None:
        self.n_cells = n_cells
        self.specs = {cache.name: cache for cache in caches}
        self._rows = {cache.name: self._allocate(cache, (split or {}).get(cache.layer, 0)) for cache in caches}

    def _allocate(self, cache: Cache, heads: int) -> CacheRows:
        split = heads if cache.part in ("k", "v") else 0
        widths = head_split(cache, split) if split else (row_bytes(cache),)
        parts = [HostPart(Region(self.n_cells * width, f"cache {cache.name}").bytes.reshape(self.n_cells, width)) for width in widths]
        return CacheRows(cache, parts, split)

    def rows(self, name: str) -> CacheRows:
        return self._rows[name]
