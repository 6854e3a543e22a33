"""What products share: which form computes them on a target, and how their results are stored.

A *form* accumulates groups of 16 weight rows over K for a run of tokens and hands the results on in registers, a vector of weight rows
per token; what becomes of them (bias, residual, gate) is the kernel's business. All forms of a weight format give the same bits, so a
target takes whichever is fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol

from ggufc.codegen.cpu.target import Target
from ggufc.codegen.emitter import F32, I64, Emitter, Value
from ggufc.codegen.kernels import vmath
from ggufc.codegen.kernels.matmul_amx import TileProduct
from ggufc.codegen.kernels.matmul_bf16 import COLUMNS, Bf16Product
from ggufc.codegen.kernels.matmul_float import FloatProduct
from ggufc.codegen.kernels.matmul_int8 import Int8Product
from ggufc.codegen.kernels.matmul_tokens import Done, Tokens
from ggufc.codegen.weights import weight_format
from ggufc.codegen.weights.base import ROWS
from ggufc.codegen.weights.floats import FloatFormat
from ggufc.formats.abi import PARAMS


class Product(Protocol):
    """A form of the product by weights of one format with rows of one length."""

    def row_bytes(self) -> int:
        """Bytes from the activations of a token to those of the next, where they lie one after the other."""

    def scratch_bytes(self, groups: int) -> int:
        """Bytes of the thread's scratch, from its start, that ``run`` over ``groups`` groups uses."""

    def prepare(self, e: Emitter, tokens: Tokens, groups: int) -> None:
        """Emit what is done once for ``tokens`` that are adjacent, before ``run`` takes ``groups`` groups at a time."""

    def run(self, e: Emitter, groups: Sequence[Value], tokens: Tokens, done: Done) -> None:
        """Emit the products of all ``groups`` (addresses) with all ``tokens``; ``done`` takes the results."""


@cache
def product(name: str, k: int, target: Target) -> Product:
    """The form that ``target`` uses for weights of type ``name``."""
    fmt = weight_format(name)
    if isinstance(fmt, FloatFormat):
        return Bf16Product(fmt, k) if target.fast_prefill and k % COLUMNS == 0 else FloatProduct(fmt, k)
    return TileProduct(fmt, k) if target.has_tiles else Int8Product(fmt, k)


def rows_argument(rows: str) -> int:
    """The kernel argument that tells a product its number of tokens: the place of a symbol among the parameters, or minus a number.

    As it is an argument, products that differ in nothing else share their code.
    """
    return -int(rows) if rows.isdigit() else PARAMS.index(rows)


def row_count(e: Emitter, argument: int) -> Value:
    """The number of tokens (i64) that kernel argument ``argument`` tells."""
    b = e.b
    told = e.arg_int(argument)
    fixed = b.icmp_signed("<", told, e.i64(0))
    at = e.at(e.args[1], b.select(fixed, e.i64(0), told), 8)
    return b.select(fixed, b.neg(told), e.load(I64, at))


def gated(e: Emitter, epilogue: str, results: Sequence[Sequence[Value]]) -> list[Value]:
    """act(gate) * up of the results of two groups where the epilogue is ``silu_glu`` or ``gelu_glu``; else those of the first."""
    if not epilogue.endswith("_glu"):
        return list(results[0])
    act = vmath.silu if epilogue == "silu_glu" else vmath.gelu
    return [e.b.fmul(act(e, gate), up) for gate, up in zip(*results)]


def store_existing(e: Emitter, row: Value, n: int, values: Sequence[Value], store: Callable[[Value, Value, int], None]) -> None:
    """``store(row, value, i)`` for each value (a vector of weight rows from ``row`` on): row by row where fewer than its lanes exist."""
    b, lanes = e.b, e.target.lanes
    if n % ROWS == 0:
        for i, v in enumerate(values):
            store(row, v, i)
        return
    with e.if_else(b.icmp_signed("<=", row, e.i64(n - lanes))) as (whole, tail):
        with whole:
            for i, v in enumerate(values):
                store(row, v, i)
        with tail:
            held = e.alloca(4 * lanes)
            for i, v in enumerate(values):
                e.store(v, held)
                with e.for_range(row, e.i64(n), name="tail") as r:
                    store(r, e.load(F32, e.at(held, b.sub(r, row), 4)), i)
