"""Anonymous, zero-filled memory for caches, activations and inputs."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np

from .errors import RuntimeRefusal

ALIGNMENT = 64
_HUGE = 4 << 20
"""Regions from this size on ask for huge pages: rows of activations and caches lie pages apart, and each page costs a look-up."""


def align(n: int, to: int = ALIGNMENT) -> int:
    return -(-n // to) * to


class Region:
    """``size`` bytes of anonymous memory: page-aligned, zero on first touch, not resident before it is touched (in huge pages if large).

    ``bytes`` is the u8 view, ``base`` its address. A guard of one alignment unit follows the last byte for kernels that load whole vectors.
    """

    def __init__(self, size: int, purpose: str) -> None:
        self.size = size
        try:
            self._map = mmap.mmap(-1, align(max(size, 1), mmap.PAGESIZE) + mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:
            raise RuntimeRefusal(
                f"cannot reserve {size / 2**20:.0f} MiB for {purpose} ({error}); use a smaller n_ctx, n_ubatch or n_seq_max"
            ) from None
        if size >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # kernels without huge pages
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = np.frombuffer(self._map, np.uint8)[:size]
        self.base = int(np.frombuffer(self._map, np.uint8).__array_interface__["data"][0])
