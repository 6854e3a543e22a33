"""How large a session's programs must be: what is asked of an executor, and the limits that follow."""

from __future__ import annotations

from dataclasses import dataclass

from .state_inputs import symbols

CACHE_PAD = 256
"""Cells are allocated, and visible lengths rounded, in multiples of this (attention walks the cache in tiles)."""


def pad(n: int, to: int = CACHE_PAD) -> int:
    return -(-n // to) * to


@dataclass(frozen=True)
class Limits:
    """Largest sizes a bound program must serve: ``n_ubatch`` tokens, ``n_cells`` cells, ``n_seq_max`` sequences."""

    n_ubatch: int
    n_cells: int
    n_seq_max: int = 1

    def env(self) -> dict[str, int]:
        # Sequences may share cells, so each list of the batch can be as long as the cache.
        lists = min(self.n_seq_max, self.n_ubatch)
        common = {"T": self.n_ubatch, "O": self.n_ubatch, "C": self.n_cells, "KV": self.n_cells, "R": self.n_cells * lists}
        return common | symbols(self.n_ubatch, self.n_cells, self.n_seq_max)


@dataclass(frozen=True)
class Sizes:
    """What a session asks of its executors: a cache of ``n_ctx`` cells (rounded up to a multiple of ``CACHE_PAD``) for ``n_seq_max``
    sequences, micro-batches of up to ``n_ubatch`` tokens, ``n_threads`` threads (None: the physical cores), and, if not 0, caches of layers
    with a window that have ``window_rows`` rows (``windows``).
    """

    n_ctx: int = 4096
    n_ubatch: int = 512
    n_seq_max: int = 1
    n_threads: int | None = None
    window_rows: int = 0

    @property
    def limits(self) -> Limits:
        return Limits(self.n_ubatch, pad(self.n_ctx), self.n_seq_max)


DEFAULT_SIZES = Sizes()
