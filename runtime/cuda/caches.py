"""KV caches in device memory, as the rest of the runtime sees them."""

from __future__ import annotations

import numpy as np

from ggufc.formats import artifact as fmt
from ggufc.runtime.memory import align
from ggufc.runtime.rows import CacheRows, row_bytes

from .device import Device

_ALIGN = 256


class DevicePart:
    """Rows of one cache on the device; neighbouring cells travel together."""

    def __init__(self, device: Device, address: int, width: int) -> None:
        self.device, self.address, self.row_bytes = device, address, width

    def read(self, cells: np.ndarray) -> np.ndarray:
        out = np.empty((len(cells), self.row_bytes), np.uint8)
        for start, stop in _runs(cells):
            self.device.download(self.address + int(cells[start]) * self.row_bytes, out[start:stop])
        return out

    def write(self, cells: np.ndarray, rows: np.ndarray) -> None:
        for start, stop in _runs(cells):
            self.device.upload(self.address + int(cells[start]) * self.row_bytes, np.ascontiguousarray(rows[start:stop]))


def _runs(cells: np.ndarray) -> list[tuple[int, int]]:
    """[start, stop) of runs of consecutive cells."""
    if not len(cells):
        return []
    cuts = np.flatnonzero(np.diff(cells) != 1) + 1
    return list(zip([0, *cuts.tolist()], [*cuts.tolist(), len(cells)]))


class DeviceCaches:
    """The persistent buffers of an artifact on a device, zero-filled; a ``runtime.rows.Store``."""

    def __init__(self, caches: list[fmt.Cache], n_cells: int, device: Device) -> None:
        self.n_cells, self.device = n_cells, device
        self.specs = {cache.name: cache for cache in caches}
        self.row_bytes = {cache.name: row_bytes(cache) for cache in caches}
        self.offsets: dict[str, int] = {}
        self.size = 0
        for name, width in self.row_bytes.items():
            self.offsets[name] = self.size
            self.size += align(width * n_cells, _ALIGN)
        self.base = device.alloc(self.size)
        device.fill(self.base, self.size)

    def rows(self, name: str) -> CacheRows:
        return CacheRows(self.specs[name], [DevicePart(self.device, self.base + self.offsets[name], self.row_bytes[name])])

    def clear(self, n_rows: int | None = None) -> None:
        """Zero the first ``n_rows`` rows of every cache (all by default)."""
        count = self.n_cells if n_rows is None else n_rows
        for name, width in self.row_bytes.items():
            self.device.fill(self.base + self.offsets[name], width * count)
