"""The orthonormal Walsh-Hadamard transform of blocks, as numpy reference: the graph's operator means this, and stored keys are turned back
with it.
"""

from __future__ import annotations

import numpy as np


def walsh_hadamard(values: np.ndarray, n: int) -> np.ndarray:
    """Each block of ``n`` adjacent values (a power of two that divides the last dimension) transformed, in the array's own float type.

    The transform is symmetric and orthonormal, so applying it twice gives the values back.
    """
    x = values.reshape(-1, n).copy()
    step = 1
    while step < n:
        pairs = x.reshape(-1, n // (2 * step), 2, step)
        x = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2).reshape(-1, n)
        step *= 2
    return (x / x.dtype.type(np.sqrt(n))).reshape(values.shape)
