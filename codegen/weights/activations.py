"""The record an activation row becomes before an integer product.

One record per token, records contiguous. For a row of K values:

    qs int8[K] | d f32[K/32] | c16 i32[K/16] | c32 i32[K/32] | s f32[K/32]

``d`` is the scale of each 32 values. ``isum`` being the sum of the ``qs`` of a block, ``c16 = -128 * isum`` per 16 values and ``c32``
per 32 values: weight codes are stored unsigned with a power-of-two offset, and a product starts its integer accumulator from these
words (shifted right for offsets below 128), which removes the offset exactly. ``s = d * f32(isum)`` per 32 values multiplies the
minimum of types that have one.
"""

from __future__ import annotations

from typing import NamedTuple

from ggufc.codegen.errors import CodegenError

ISUM_FACTOR = -128
"""``c16`` and ``c32`` hold the block sums times this."""


class Q8Record(NamedTuple):
    """Byte offsets inside a record, and the distance between records (a multiple of 64)."""

    stride: int
    off_d: int
    off_c16: int
    off_c32: int
    off_s: int


def q8_record(k: int) -> Q8Record:
    """Record layout of rows of ``k`` values (a multiple of 32); CodegenError otherwise."""
    if k <= 0 or k % 32:
        raise CodegenError(f"activation rows of {k} values cannot be rounded to 8 bits: blocks hold 32 values")
    off_d = k
    off_c16 = off_d + k // 8
    off_c32 = off_c16 + k // 4
    off_s = off_c32 + k // 8
    return Q8Record((off_s + k // 8 + 63) // 64 * 64, off_d, off_c16, off_c32, off_s)
