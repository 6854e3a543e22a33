"""Cell lists of several tokens, as kernels that read listed rows get them."""

from __future__ import annotations

import numpy as np


def two_lists(rng: np.random.Generator, n_tokens: int, length: int, n_cells: int) -> tuple[np.ndarray, np.ndarray]:
    """Two cell lists one after another, and what each token sees of one of them."""
    first = length // 3
    cells = np.concatenate([rng.permutation(n_cells)[:first], rng.permutation(n_cells)[: length - first]]).astype(np.int32)
    visible = np.zeros((n_tokens, 3), np.int32)
    for t in range(n_tokens):
        base, size = ((0, first), (first, length - first))[t % 2]
        hi = int(rng.integers(0, size + 1)) if t % 5 else size
        visible[t] = base, int(rng.integers(0, hi + 1)) if t % 3 == 0 else 0, hi
    return cells, visible
