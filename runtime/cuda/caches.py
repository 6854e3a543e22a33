"""KV caches in device memory, as the rest of the runtime sees them."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from ggufc.runtime.artifact import Artifact
from ggufc.runtime.caches import CacheLayout
from ggufc.runtime.rows import CacheRows, of_cells
from ggufc.runtime.sizes import Sizes

from .device import Device
from .pool import ALIGNMENT


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


class DeviceCaches(CacheLayout):
    """The caches ``only`` names (all by default) on a device, zero-filled."""

    def __init__(self, artifact: Artifact, sizes: Sizes, device: Device, only: Collection[str] | None = None) -> None:
        super().__init__(artifact, sizes, only, ALIGNMENT)
        self.device = device
        self.base = device.alloc(self.size)
        device.fill(self.base, self.size)

    def rows(self, name: str) -> CacheRows:
        """The rows of one cache."""
        return CacheRows(self.specs[name], [DevicePart(self.device, self.base + self.offsets[name], self.row_bytes[name])])

    def clear(self, n_rows: int | None = None) -> None:
        """Zero the first ``n_rows`` cells of every cache (all by default), and everything that belongs to sequences."""
        for name, spec in self.specs.items():
            most = self.n_rows[name]
            self.clear_rows(name, 0, most if n_rows is None or not of_cells(spec) else min(n_rows, most))

    def clear_rows(self, name: str, first: int, n: int) -> None:
        """Zero ``n`` rows of one cache."""
        self.device.fill(self.base + self.offsets[name] + first * self.row_bytes[name], self.row_bytes[name] * n)
