"""What every block type decodes to."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Decoded(NamedTuple):
    """``codes`` int8 ``[rows, ne0]``, ``scale`` f32 ``[rows, ne0/g]``, ``min`` f32 likewise or None: value = scale * code - min."""

    codes: np.ndarray
    scale: np.ndarray
    min: np.ndarray | None
