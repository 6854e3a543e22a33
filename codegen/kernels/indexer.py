"""The lightning indexer: scores of listed cells, and the choice of the best ones.

Two launches. ``IndexerScores`` computes, for 32 entries of the cell lists at a time and every token that sees any of them,

    score = sum over heads g ascending of w_g * max(0, sum over i ascending of q_gi K_i)

as one chain per head and one over the heads, with the entries in lanes: a score depends on its token and its key alone. It needs a number
per entry and token, however many heads there are. ``IndexerSelect`` then finds the k-th largest score of a token by counting digits of
the scores' bit patterns and writes the cells that reach it in the order of the token's list.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from ggufc.codegen.cpu.target import Target
from ggufc.codegen.emitter import F32, I32, I64, Emitter, Value, vec
from ggufc.codegen.errors import CodegenError
from ggufc.codegen.kernels import cache
from ggufc.codegen.kernels.attention_cells import RING_BYTES, STEP, CellRows

ENTRIES = 32
"""Entries of the cell lists per tile of ``IndexerScores``."""

_DIGITS = ((21, 11), (10, 11), (0, 10))
"""(shift, bits) of the digits of a 32-bit pattern, highest first."""


def score_stride(e: Emitter, entries: str) -> Value:
    """Scores per token: the number of listed entries (a symbol) rounded up to whole steps, so that steps of one token do not touch the
    next.
    """
    return e.b.and_(e.b.add(e.param(entries), e.i64(STEP - 1)), e.i64(-STEP))


@dataclass(frozen=True)
class IndexerScores:
    """scores f32[pad(R, 16), T]: of each entry of ``cells`` that token t sees; entries it does not see hold anything.

    ``q`` f32[d, heads, T] with adjacent heads (leading dimension ``ldq``), ``weights`` f32[heads, T] (``ldw``), ``keys`` cache rows of
    ``d`` values of ``dtype``, ``cells`` i32[R], ``visible`` i32[3, T]. ``entries`` is the symbol that counts the lists' entries, R or that
    of compressed ones. One tile per ``ENTRIES`` entries.
    """

    d: int
    heads: int
    dtype: str
    entries: str = "R"
    arg_names: ClassVar[tuple[str, ...]] = ("q", "ldq", "weights", "ldw", "keys", "cells", "visible", "scores")

    def __post_init__(self) -> None:
        cache.check_storage(self.dtype, self.d, "indexer: key row")

    def emit(self, e: Emitter) -> None:
        _Scores(self, e).emit()

    def scratch_bytes(self, target: Target) -> int:
        return RING_BYTES + 4 * STEP * self.d


class _Scores:
    def __init__(self, spec: IndexerScores, e: Emitter) -> None:
        self.spec, self.e = spec, e
        self.lanes = e.target.lanes
        self.width = STEP // self.lanes
        self.group = min(spec.heads, (16 if self.lanes == 16 else 8) // self.width)
        self.keys = CellRows(e, spec.dtype, spec.d, spec.d, e.arg_ptr(4), e.i64(0), e.scratch)
        self.columns = e.gep(e.scratch, RING_BYTES)
        self.stride = score_stride(e, spec.entries)

    def emit(self) -> None:
        e, b = self.e, self.e.b
        first = b.mul(e.tile, e.i64(ENTRIES))
        with e.for_range(0, ENTRIES, STEP, name="step") as offset:
            begin = b.add(first, offset)
            with e.if_(b.icmp_signed("<", begin, e.param(self.spec.entries))):
                self.step(begin)
        e.ret()

    def step(self, begin: Value) -> None:
        """Scores of the entries begin..begin+15 for all tokens that see one of them."""
        e, b = self.e, self.e.b
        last = b.sub(e.param(self.spec.entries), e.i64(1))
        with e.for_range(0, STEP, name="entry") as j:
            cell = e.sext64(e.load(I32, e.at(e.arg_ptr(5), e.imin(b.add(begin, j), last), 4)))
            row = e.at(self.keys.base, cell, self.keys.cell_size)
            e.store(row, e.at(self.keys.ring, j, 8))
            for line in range(0, self.keys.row_size, 64):
                e.prefetch(e.gep(row, line), 2)
        self.keys.store_columns(e.i64(0), self.columns)
        end = b.add(begin, e.i64(STEP))
        with e.for_range(0, e.param("T"), name="token") as t:
            base, lo, hi = (e.sext64(e.load(I32, e.gep(e.at(e.arg_ptr(6), t, 12), 4 * i))) for i in range(3))
            meets = b.and_(b.icmp_signed("<", b.add(base, lo), end), b.icmp_signed(">", b.add(base, hi), begin))
            with e.if_(meets):
                self.token(t, begin)

    def token(self, t: Value, begin: Value) -> None:
        e, b, spec = self.e, self.e.b, self.spec
        ty = vec(F32, self.lanes)
        q = e.at(e.arg_ptr(0), b.mul(t, e.arg_int(1)), 4)
        weights = e.at(e.arg_ptr(2), b.mul(t, e.arg_int(3)), 4)
        totals = [e.var(ty, e.const(ty, 0.0)) for _ in range(self.width)]
        whole = spec.heads - spec.heads % self.group

        def heads(first: Value, count: int) -> None:
            acc = [[e.var(ty, e.const(ty, 0.0)) for _ in range(self.width)] for _ in range(count)]
            rows = e.at(q, first, 4 * spec.d)
            with e.for_range(0, spec.d, name="i") as i:
                column = e.at(self.columns, i, 4 * STEP)
                keys = [e.load(ty, e.gep(column, 4 * self.lanes * w)) for w in range(self.width)]
                for h, cells in enumerate(acc):
                    factor = e.splat(e.load(F32, e.gep(e.at(rows, i, 4), 4 * spec.d * h)), self.lanes)
                    for key, cell in zip(keys, cells):
                        cell.set(e.fma(factor, key, cell.get()))
            for h, cells in enumerate(acc):
                weight = e.splat(e.load(F32, e.gep(e.at(weights, first, 4), 4 * h)), self.lanes)
                for total, cell in zip(totals, cells):
                    total.set(e.fma(weight, e.fmax(cell.get(), e.const(ty, 0.0)), total.get()))

        with e.for_range(0, whole, self.group, name="head") as first:
            heads(first, self.group)
        if spec.heads > whole:
            heads(e.i64(whole), spec.heads - whole)
        target = e.at(e.arg_ptr(7), b.add(b.mul(t, self.stride), begin), 4)
        for w, total in enumerate(totals):
            e.store(total.get(), e.gep(target, 4 * self.lanes * w))


@dataclass(frozen=True)
class IndexerSelect:
    """chosen i32[k, T]: the cells with the ``k`` largest scores of each token's visible entries, in the order of its list, then -1.

    ``scores`` as ``IndexerScores`` wrote them; they are overwritten. The first ``sinks`` entries counted from a list's base win over all
    scores. Of equal scores the first entry wins, or the last with ``ties`` highest. One tile per token.
    """

    k: int
    sinks: int = 0
    ties: str = "lowest"
    entries: str = "R"
    arg_names: ClassVar[tuple[str, ...]] = ("scores", "cells", "visible", "chosen")

    def __post_init__(self) -> None:
        if self.ties not in ("lowest", "highest"):
            raise CodegenError(f"indexer: ties {self.ties!r} are unknown; they are lowest or highest")

    def emit(self, e: Emitter) -> None:
        b = e.b
        base, lo, hi = (e.sext64(e.load(I32, e.gep(e.at(e.arg_ptr(2), e.tile, 12), 4 * i))) for i in range(3))
        start = b.add(base, lo)
        n = e.imax(b.sub(hi, lo), e.i64(0))
        cells, chosen = e.at(e.arg_ptr(1), start, 4), e.at(e.arg_ptr(3), e.tile, 4 * self.k)
        keys = e.at(e.arg_ptr(0), b.add(b.mul(e.tile, score_stride(e, self.entries)), start), 4)
        with e.if_else(b.icmp_signed("<=", n, e.i64(self.k))) as (everything, some):
            with everything:
                with e.for_range(0, n, name="entry") as i:
                    e.store(e.load(I32, e.at(cells, i, 4)), e.at(chosen, i, 4))
                with e.for_range(n, self.k, name="hole") as i:
                    e.store(e.i32(-1), e.at(chosen, i, 4))
            with some:
                self._order(e, keys, n, e.imax(b.sub(e.i64(self.sinks), lo), e.i64(0)))
                threshold, ties, spare = self._threshold(e, keys, n)
                self._collect(e, keys, cells, chosen, n, threshold, ties, spare)
        e.ret()

    def _order(self, e: Emitter, keys: Value, n: Value, sinks: Value) -> None:
        """Scores to patterns whose unsigned order is theirs; zeros of both signs are equal, sinks are the largest pattern."""
        b = e.b

        def convert(at: Value, lanes: int) -> None:
            ints = vec(I32, lanes)
            bits = b.bitcast(b.fadd(e.load(vec(F32, lanes), at), e.const(vec(F32, lanes), 0.0)), ints)
            sign = b.ashr(bits, e.const(ints, 31))
            e.store(b.xor(bits, b.or_(sign, e.const(ints, 1 << 31))), at)

        lanes = e.target.lanes
        whole = b.and_(n, e.i64(-lanes))
        with e.for_range(0, whole, lanes, name="chunk") as i:
            convert(e.at(keys, i, 4), lanes)
        with e.for_range(whole, n, name="rest") as i:
            convert(e.at(keys, i, 4), 1)
        if self.sinks:
            with e.for_range(0, e.imin(sinks, n), name="sink") as i:
                e.store(e.i32(-1), e.at(keys, i, 4))

    def _threshold(self, e: Emitter, keys: Value, n: Value) -> tuple[Value, Value, Value]:
        """The k-th largest pattern, how many of its equals are chosen, and how many are not."""
        b = e.b
        counts = e.scratch
        prefix, wanted, equal = e.var(I32, e.i32(0)), e.var(I64, e.i64(self.k)), e.var(I64, n)
        for shift, bits in _DIGITS:
            with e.for_range(0, 1 << bits, 16, name="clear") as i:
                e.store(e.const(vec(I32, 16), 0), e.at(counts, i, 4))
            above = shift + bits
            with e.for_range(0, n, name="entry") as i:
                key = e.load(I32, e.at(keys, i, 4))

                def count(key: Value = key, shift: int = shift, bits: int = bits) -> None:
                    digit = b.and_(b.lshr(key, e.i32(shift)), e.i32((1 << bits) - 1))
                    at = e.at(counts, b.zext(digit, I64), 4)
                    e.store(b.add(e.load(I32, at), e.i32(1)), at)

                if above == 32:
                    count()
                else:
                    same = b.icmp_unsigned("==", b.lshr(key, e.i32(above)), b.lshr(prefix.get(), e.i32(above)))
                    with e.if_(same):
                        count()
            digit = e.var(I64, e.i64((1 << bits) - 1))
            with e.while_loop("digit") as digits:
                here = e.sext64(e.load(I32, e.at(counts, digit.get(), 4)))
                equal.set(here)
                digits.break_if(b.icmp_signed("<=", wanted.get(), here))
                wanted.set(b.sub(wanted.get(), here))
                digit.set(b.sub(digit.get(), e.i64(1)))
            prefix.set(b.or_(prefix.get(), b.shl(b.trunc(digit.get(), I32), e.i32(shift))))
        return prefix.get(), wanted.get(), b.sub(equal.get(), wanted.get())

    def _collect(self, e: Emitter, keys: Value, cells: Value, chosen: Value, n: Value, threshold: Value, ties: Value, spare: Value) -> None:
        b = e.b
        at = e.var(I64, e.i64(0))
        seen = e.var(I64, e.i64(0))
        # Of the equals the first ones are taken, or the first ones skipped.
        take_equal: Callable[[Value], Value] = lambda i: (  # noqa: E731
            b.icmp_signed("<", i, ties) if self.ties == "lowest" else b.icmp_signed(">=", i, spare)
        )
        with e.for_range(0, n, name="entry") as i:
            key = e.load(I32, e.at(keys, i, 4))
            with e.if_(b.icmp_unsigned(">=", key, threshold)):
                equal = b.icmp_unsigned("==", key, threshold)
                taken = b.or_(b.not_(equal), take_equal(seen.get()))
                seen.set(b.add(seen.get(), b.zext(equal, I64)))
                with e.if_(taken):
                    e.store(e.load(I32, e.at(cells, i, 4)), e.at(chosen, at.get(), 4))
                    at.set(b.add(at.get(), e.i64(1)))

    def scratch_bytes(self, target: Target) -> int:
        return 4 << max(bits for _, bits in _DIGITS)
