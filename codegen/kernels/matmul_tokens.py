"""Runs of tokens: what a product is asked to compute, and how it walks them in blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ggufc.codegen.emitter import Emitter, Value
from ggufc.codegen.weights.base import ROWS

_RUN_BYTES = 512 << 10
_MIN_RUN = 128


def run_tokens(row_bytes: int) -> int:
    """Tokens whose activations, ``row_bytes`` each, stay in the cache while the groups of a tile pass by; a multiple of 16.

    Not fewer than 128: weights are unpacked again for each run.
    """
    return max(_MIN_RUN, _RUN_BYTES // row_bytes // 16 * 16)


Done = Callable[[Value, Value, list[list[Value]]], None]
"""Takes the part of the group, the number of the first token, and per group a vector of weight rows for each token from it on."""


@dataclass(frozen=True)
class Tokens:
    """Tokens ``first`` to ``stop`` (i64); ``rows(t, n)`` are the addresses of the activations of ``n`` tokens from ``t`` on, which are
    ``adjacent`` if they lie one after the other.
    """

    first: Value
    stop: Value
    rows: Callable[[Value, int], list[Value]]
    adjacent: bool = False


@contextmanager
def parts(e: Emitter) -> Iterator[Value]:
    """Over the parts of a group: a vector holds as many of its rows as the target has lanes."""
    with e.for_range(0, ROWS // e.target.lanes, name="part") as part:
        yield part


def blocks(e: Emitter, first: Value, stop: Value, size: int) -> Iterator[tuple[int, Value]]:
    """Inside emitted loops: (tokens at a time, first of them), in blocks of ``size``, then of half as many, down to one."""
    b = e.b
    while size:
        whole = b.add(first, b.and_(b.sub(stop, first), e.i64(-size)))
        with e.for_range(first, whole, size, name=f"t{size}") as t:
            yield size, t
        first = whole
        size //= 2
