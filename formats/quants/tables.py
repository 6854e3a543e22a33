"""Value tables of the non-linear types, and the codebooks of the grid types."""

from __future__ import annotations

from functools import cache

import numpy as np


def _with_shifted(first: list[int], shift: int) -> np.ndarray:
    return np.array([*first, *(v + shift for v in first)], np.int8)


_N4 = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
_N5 = [-126, -114, -103, -92, -83, -74, -65, -57, -50, -43, -36, -30, -24, -18, -12, -6]
_N5 += [-1, 5, 11, 17, 23, 29, 36, 43, 51, 59, 68, 77, 87, 97, 109, 121]

N4 = np.array(_N4, np.int8)
"""IQ4_NL, IQ4_XS."""
E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""MXFP4: twice the E2M1 values."""
T2 = _with_shifted([-31, -13, 1, 17], 5)
T3 = _with_shifted([-63, -40, -23, -10, 1, 13, 28, 47], 4)
T4 = _with_shifted(_N4, 4)
T5 = _with_shifted(_N5, 2)

T6 = np.array(
    [
        *(-127, -121, -115, -109, -104, -98, -93, -88, -84, -79, -74, -70, -66, -62, -58, -54),
        *(-51, -47, -44, -40, -37, -34, -31, -28, -25, -22, -19, -16, -13, -11, -8, -5),
        *(-2, 0, 3, 6, 9, 12, 14, 17, 20, 23, 27, 30, 33, 36, 40, 44),
        *(47, 51, 55, 59, 63, 68, 72, 77, 82, 87, 92, 98, 103, 109, 115, 121),
    ],
    np.int8,
)
"""IQ6_K in products: the polynomial rounded to integers."""

PAIRS = np.array(
    [
        *((-63, -23), (-63, 13), (-40, -63), (-40, -10), (-40, 13), (-40, 47), (-23, -40), (-23, -23)),
        *((-23, 1), (-23, 13), (-23, 28), (-10, -63), (-10, 1), (-10, 13), (-10, 47), (1, -23)),
        *((1, -10), (1, 1), (1, 13), (1, 28), (13, -40), (13, -23), (13, -10), (13, 1)),
        *((13, 13), (28, -63), (28, -23), (28, 1), (28, 28), (28, 47), (47, -23), (47, 13)),
    ],
    np.int8,
)
"""IQ2_KL: two values per code."""

_byte = np.arange(128, dtype=np.uint8)
SIGNS7 = _byte | (np.bitwise_count(_byte) & 1) << 7
"""Seven stored sign bits to eight: the last makes the number of minus signs even."""


@cache
def sign_rows() -> np.ndarray:
    """int8 [256, 8]: +1 or -1 for each bit of a sign byte."""
    bits = np.arange(256)[:, None] >> np.arange(8) & 1
    return (1 - 2 * bits).astype(np.int8)


@cache
def grid(name: str) -> np.ndarray:
    """The codebook of ``iq1_s``, ``iq2_xxs``, ``iq2_xs``, ``iq2_s``, ``iq3_xxs`` or ``iq3_s`` as int8 [rows, values].

    The books come from the ``gguf`` package; it is imported here because importing it takes longer than everything else in this room.
    """
    from gguf import quants

    book = getattr(quants, name.upper())
    book.init_grid()
    table: np.ndarray = book.grid.reshape(book.grid_shape).astype(np.int8)
    table.setflags(write=False)
    return table
