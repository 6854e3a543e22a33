"""Kernels of hyper-connections: gates of residual streams with Sinkhorn's iterations, reading from the streams, writing to them.

With S streams a token's gates are S read gates, S write gates and an S x S matrix by rows. A vector of the next power of two from S on
holds S numbers of one kind; the lanes past S hold zeros. Sums over a row are taken by halving, over a column row by row: one order,
whatever the target's vectors are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ggufc.codegen.cpu.target import Target
from ggufc.codegen.emitter import F32, Emitter, Value, vec
from ggufc.codegen.errors import CodegenError
from ggufc.codegen.kernels import vmath
from ggufc.codegen.kernels.rowwise import for_chunks, rms_scale

MOST_STREAMS = 16
BLOCK = 1024
"""Elements of a token that one tile of ``HcPost`` writes."""

_LOWEST = -3.4028234663852886e38


def check_streams(streams: int) -> None:
    """CodegenError for more streams than a vector holds."""
    if not 1 <= streams <= MOST_STREAMS:
        raise CodegenError(f"hyper-connections: {streams} residual streams; kernels exist for 1 to {MOST_STREAMS}")


class Streams:
    """Vectors of one number per stream."""

    def __init__(self, e: Emitter, streams: int) -> None:
        self.e, self.n = e, streams
        self.lanes = 1 << (streams - 1).bit_length()
        self.type = vec(F32, self.lanes)
        self.valid = e.lane_mask(self.lanes, e.i64(streams)) if self.lanes != streams else None

    def load(self, p: Value, index: int) -> Value:
        """Numbers index .. index+S-1 of ``p``."""
        return (
            self.e.load_masked(F32, self.lanes, self.e.gep(p, 4 * index), self.n)
            if self.lanes > 1
            else self.e.load(F32, self.e.gep(p, 4 * index))
        )

    def store(self, v: Value, p: Value, index: int) -> None:
        at = self.e.gep(p, 4 * index)
        if self.lanes > 1:
            self.e.store_masked(v, at, self.n)
        else:
            self.e.store(v, at)

    def splat(self, v: Value | float) -> Value:
        return self.e.const(self.type, v) if isinstance(v, float) else self.e.splat(v, self.lanes)

    def keep(self, v: Value, otherwise: float = 0.0) -> Value:
        """``v`` with ``otherwise`` in the lanes past S."""
        return v if self.valid is None else self.e.b.select(self.valid, v, self.splat(otherwise))

    def plus(self, v: Value, eps: float) -> Value:
        return self.e.b.fadd(v, self.splat(eps)) if eps else v

    def lane(self, v: Value, i: int) -> Value:
        return self.e.b.extract_element(v, self.e.i32(i)) if self.lanes > 1 else v


def doubly_stochastic(s: Streams, logits: Sequence[Value], iterations: int, eps: float) -> list[Value]:
    """``sinkhorn`` of a matrix given by rows (``ir.ops.hyper``)."""
    e, b = s.e, s.e.b

    def by_columns(rows: list[Value]) -> list[Value]:
        total = rows[0]
        for row in rows[1:]:
            total = b.fadd(total, row)
        total = s.keep(s.plus(total, eps), 1.0)
        return [b.fdiv(row, total) for row in rows]

    rows = []
    for row in logits:
        row = s.keep(row, _LOWEST)
        p = s.keep(vmath.exp_flushed(e, b.fsub(row, s.splat(e.reduce(row, "max")))))
        p = b.fdiv(p, s.splat(e.reduce(p, "add")))
        rows.append(s.keep(s.plus(p, eps)))
    cells = [e.var(s.type, row) for row in by_columns(rows)]
    with e.for_range(1, iterations, name="iteration"):
        rows = []
        for cell in cells:
            row = cell.get()
            total = e.reduce(row, "add")
            total = b.fadd(total, e.f32(eps)) if eps else total
            rows.append(b.fdiv(row, s.splat(total)))
        for cell, row in zip(cells, by_columns(rows)):
            cell.set(row)
    return [cell.get() for cell in cells]


@dataclass(frozen=True)
class HcIn:
    """Gates f32[S*S+2S, T] of a sublayer (``hc_pre``) and what it reads, y f32[n, T] = sum_s read_s x_s (``hc_mix``); one tile per token.

    ``m`` f32[S*S+2S, T] with leading dimension ``ldm``; ``scale`` [3], ``base`` [S*S+2S]; ``x`` f32[n, S, T] contiguous. ``n`` = 0 leaves
    out reading: ``x`` and ``y`` are then ignored.
    """

    n: int
    streams: int
    iterations: int
    eps: float
    arg_names: ClassVar[tuple[str, ...]] = ("m", "ldm", "scale", "base", "x", "gates", "y")

    def __post_init__(self) -> None:
        check_streams(self.streams)

    def emit(self, e: Emitter) -> None:
        b, s, n = e.b, Streams(e, self.streams), self.streams
        m = e.at(e.arg_ptr(0), b.mul(e.tile, e.arg_int(1)), 4)
        scale, base = e.arg_ptr(2), e.arg_ptr(3)
        gates = e.at(e.arg_ptr(5), e.tile, 4 * (n * n + 2 * n))

        def affine(part: int, index: int) -> Value:
            factor = s.splat(e.load(F32, e.gep(scale, 4 * part)))
            return b.fadd(b.fmul(s.load(m, index), factor), s.load(base, index))

        read = s.plus(vmath.sigmoid(e, affine(0, 0)), self.eps)
        write = b.fmul(vmath.sigmoid(e, affine(1, n)), s.splat(2.0))
        matrix = doubly_stochastic(s, [affine(2, 2 * n + n * u) for u in range(n)], self.iterations, self.eps)
        for i, v in enumerate((read, write, *matrix)):
            s.store(v, gates, n * i)
        if self.n:
            mix(
                e,
                e.at(e.arg_ptr(4), e.tile, 4 * self.n * n),
                e.at(e.arg_ptr(6), e.tile, 4 * self.n),
                [s.lane(read, i) for i in range(n)],
                self.n,
            )
        e.ret()

    def scratch_bytes(self, target: Target) -> int:
        return 0


def mix(e: Emitter, x: Value, y: Value, read: Sequence[Value], n: int) -> None:
    """y = sum_s read_s x_s over ``n`` elements; the streams lie one after another."""
    lanes = 1 if e.spmd else e.target.lanes
    factors = [e.splat(r, lanes) for r in read]

    def chunk(i: Value | int, count: int) -> None:
        total: Value | None = None
        for k, factor in enumerate(factors):
            v = _load(e, e.gep(e.at(x, i, 4), 4 * n * k), lanes, count)
            total = e.b.fmul(factor, v) if total is None else e.fma(factor, v, total)
        _store(e, total, e.at(y, i, 4), count)

    for_chunks(e, n, chunk)


@dataclass(frozen=True)
class HcMix:
    """y f32[n, T] = sum_s gates_s x_s with given gates (leading dimension ``ldg``); one tile per token."""

    n: int
    streams: int
    arg_names: ClassVar[tuple[str, ...]] = ("x", "gates", "ldg", "y")

    def emit(self, e: Emitter) -> None:
        gates = e.at(e.arg_ptr(1), e.b.mul(e.tile, e.arg_int(2)), 4)
        read = [e.load(F32, e.gep(gates, 4 * i)) for i in range(self.streams)]
        mix(e, e.at(e.arg_ptr(0), e.tile, 4 * self.n * self.streams), e.at(e.arg_ptr(3), e.tile, 4 * self.n), read, self.n)
        e.ret()

    def scratch_bytes(self, target: Target) -> int:
        return 0


@dataclass(frozen=True)
class HcPost:
    """out_c = write_c y + sum_u matrix[u, c] x_u over f32[n, S, T]; ``out`` may be ``x``.

    ``y`` f32[n, T] with leading dimension ``ldy``, with ``norm`` normed (``eps``) and multiplied by ``w`` first; ``gates`` f32[S*S+2S, T].
    Tiles: ``blocks`` per token, the block fastest.
    """

    n: int
    streams: int
    norm: bool = False
    eps: float = 0.0
    arg_names: ClassVar[tuple[str, ...]] = ("x", "y", "ldy", "gates", "w", "out")

    @property
    def blocks(self) -> int:
        return -(-self.n // BLOCK)

    def emit(self, e: Emitter) -> None:
        b, n = e.b, self.streams
        lanes = 1 if e.spmd else e.target.lanes
        token, block = b.udiv(e.tile, e.i64(self.blocks)), b.urem(e.tile, e.i64(self.blocks))
        y = e.at(e.arg_ptr(1), b.mul(token, e.arg_int(2)), 4)
        gates = e.at(e.arg_ptr(3), token, 4 * (n * n + 2 * n))
        x, out = (e.at(e.arg_ptr(i), token, 4 * self.n * n) for i in (0, 5))
        scale = e.splat(rms_scale(e, y, self.n, self.eps), lanes) if self.norm else None
        write, matrix = (
            [e.splat(e.load(F32, e.gep(gates, 4 * (first + i))), lanes) for i in range(count)] for first, count in ((n, n), (2 * n, n * n))
        )

        def chunk(first: Value, i: Value | int, count: int) -> None:
            at = b.add(first, e.i64(i) if isinstance(i, int) else i)
            v = _load(e, e.at(y, at, 4), lanes, count)
            if scale is not None:
                v = b.fmul(b.fmul(v, scale), _load(e, e.at(e.arg_ptr(4), at, 4), lanes, count))
            streams = [_load(e, e.gep(e.at(x, at, 4), 4 * self.n * u), lanes, count) for u in range(n)]
            for c in range(n):
                total = b.fmul(write[c], v)
                for u in range(n):
                    total = e.fma(matrix[n * u + c], streams[u], total)
                _store(e, total, e.gep(e.at(out, at, 4), 4 * self.n * c), count)

        rest = self.n % BLOCK
        first = b.mul(block, e.i64(BLOCK))
        if not rest:
            for_chunks(e, BLOCK, lambda i, count: chunk(first, i, count))
        elif self.blocks == 1:
            for_chunks(e, rest, lambda i, count: chunk(e.i64(0), i, count))
        else:
            with e.if_else(b.icmp_signed("<", block, e.i64(self.blocks - 1))) as (whole, last):
                with whole:
                    for_chunks(e, BLOCK, lambda i, count: chunk(first, i, count))
                with last:
                    for_chunks(e, rest, lambda i, count: chunk(first, i, count))
        e.ret()

    def __post_init__(self) -> None:
        check_streams(self.streams)

    def scratch_bytes(self, target: Target) -> int:
        return 0


@dataclass(frozen=True)
class Sinkhorn:
    """Matrices f32[S, S, T] made doubly stochastic; one tile per matrix; ``out`` may be ``a``."""

    streams: int
    iterations: int
    eps: float
    arg_names: ClassVar[tuple[str, ...]] = ("a", "out")

    def __post_init__(self) -> None:
        check_streams(self.streams)

    def emit(self, e: Emitter) -> None:
        s, n = Streams(e, self.streams), self.streams
        a, out = (e.at(e.arg_ptr(i), e.tile, 4 * n * n) for i in range(2))
        for u, row in enumerate(doubly_stochastic(s, [s.load(a, n * u) for u in range(n)], self.iterations, self.eps)):
            s.store(row, out, n * u)
        e.ret()

    def scratch_bytes(self, target: Target) -> int:
        return 0


def _load(e: Emitter, p: Value, lanes: int, count: int) -> Value:
    return e.load(F32, p) if lanes == 1 else e.load_masked(F32, lanes, p, count)


def _store(e: Emitter, v: Value, p: Value, count: int) -> None:
    if e.spmd:
        e.store(v, p)
    else:
        e.store_masked(v, p, count)
