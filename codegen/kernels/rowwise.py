"""Kernels over rows of f32: RMS norm and layer norm, with the weight and the residual that follow them.

Sums run in f64 over lanes, then over the lanes by halving: one order for every row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from ggufc.codegen.cpu.target import Target
from ggufc.codegen.emitter import F32, F64, Emitter, Value, vec


def for_chunks(e: Emitter, n: int, body: Callable[[Value | int, int], None]) -> None:
    """``body(index, count)`` over 0..n-1 in vectors; the last call may have ``count`` < lanes (masked loads and stores)."""
    if e.spmd:
        with e.for_lanes(n) as i:
            body(i, 1)
        return
    lanes = e.target.lanes
    whole = n - n % lanes
    if whole:
        with e.for_range(0, whole, lanes) as i:
            body(i, lanes)
    if n % lanes:
        body(e.i64(whole), n % lanes)


def sum_f64(e: Emitter, n: int, term: Callable[[Value | int, int], tuple[Value, Value] | Value]) -> Value:
    """Sum over f32 vectors in f64.

    ``term(index, count)`` returns a vector to add, or a pair whose product is added; lanes past ``count`` must be zero.
    """
    if e.spmd:
        return _sum_f64_over_threads(e, n, term)
    lanes = e.target.lanes
    half = lanes // 2
    accumulators = [e.var(vec(F64, half), e.const(vec(F64, half), 0.0)) for _ in range(2)]

    def add(i: Value | int, count: int) -> None:
        value = term(i, count)
        for k, acc in enumerate(accumulators):
            wide = vec(F64, half)
            if isinstance(value, tuple):
                x, y = (e.b.fpext(e.extract_vector(v, k * half, half), wide) for v in value)
                acc.set(e.fma(x, y, acc.get()))
            else:
                acc.set(e.b.fadd(acc.get(), e.b.fpext(e.extract_vector(value, k * half, half), wide)))

    for_chunks(e, n, add)
    return e.reduce(e.b.fadd(accumulators[0].get(), accumulators[1].get()), "add")


def _sum_f64_over_threads(e: Emitter, n: int, term: Callable[[Value | int, int], tuple[Value, Value] | Value]) -> Value:
    """``sum_f64`` where lanes are threads: one chain per thread, then over the threads."""
    total = e.var(F64, e.const(F64, 0.0))

    def add(i: Value | int, count: int) -> None:
        value = term(i, count)
        if isinstance(value, tuple):
            x, y = (e.b.fpext(v, F64) for v in value)
            total.set(e.fma(x, y, total.get()))
        else:
            total.set(e.b.fadd(total.get(), e.b.fpext(value, F64)))

    for_chunks(e, n, add)
    return e.reduce(total.get(), "add")


def rms_scale(e: Emitter, x: Value, n: int, eps: float) -> Value:
    """1 / sqrt(mean(x^2) + eps) of ``n`` f32 at ``x``, as f32."""
    b = e.b

    def square(i: Value | int, count: int) -> tuple[Value, Value]:
        v = e.load_masked(F32, e.target.lanes, e.at(x, i, 4), count)
        return v, v

    mean = b.fdiv(sum_f64(e, n, square), e.const(F64, n))
    return b.fptrunc(b.fdiv(e.const(F64, 1.0), e.fsqrt(b.fadd(mean, e.const(F64, eps)))), F32)


@dataclass(frozen=True)
class RmsNorm:
    """y = x / sqrt(mean(x^2) + eps) [* w] [+ residual] over rows of ``ne0`` f32; one tile per row.

    Leading dimensions are in elements. ``y`` may be ``x`` or ``residual``. Arguments that the flags leave out are ignored.
    """

    ne0: int
    eps: float
    weight: bool = True
    add: bool = False
    arg_names: ClassVar[tuple[str, ...]] = ("x", "ldx", "w", "residual", "ldr", "y", "ldy")

    def emit(self, e: Emitter) -> None:
        b, lanes = e.b, e.target.lanes
        x = e.at(e.arg_ptr(0), b.mul(e.tile, e.arg_int(1)), 4)
        y = e.at(e.arg_ptr(5), b.mul(e.tile, e.arg_int(6)), 4)
        w = e.arg_ptr(2) if self.weight else None
        residual = e.at(e.arg_ptr(3), b.mul(e.tile, e.arg_int(4)), 4) if self.add else None
        scale = e.splat(rms_scale(e, x, self.ne0, self.eps), lanes)

        def finish(i: Value | int, count: int) -> None:
            v = b.fmul(e.load_masked(F32, lanes, e.at(x, i, 4), count), scale)
            if w is not None:
                v = b.fmul(v, e.load_masked(F32, lanes, e.at(w, i, 4), count))
            if residual is not None:
                v = b.fadd(v, e.load_masked(F32, lanes, e.at(residual, i, 4), count))
            e.store_masked(v, e.at(y, i, 4), count)

        for_chunks(e, self.ne0, finish)
        e.ret()

    def scratch_bytes(self, target: Target) -> int:
        return 0


@dataclass(frozen=True)
class Norm:
    """y = (x - mean) / sqrt(variance + eps) over rows of ``ne0`` f32; one tile per row; ``y`` may be ``x``."""

    ne0: int
    eps: float
    arg_names: ClassVar[tuple[str, ...]] = ("x", "ldx", "y", "ldy")

    def emit(self, e: Emitter) -> None:
        b, lanes = e.b, e.target.lanes
        x = e.at(e.arg_ptr(0), b.mul(e.tile, e.arg_int(1)), 4)
        y = e.at(e.arg_ptr(2), b.mul(e.tile, e.arg_int(3)), 4)
        count64 = e.const(F64, self.ne0)
        total = sum_f64(e, self.ne0, lambda i, count: e.load_masked(F32, lanes, e.at(x, i, 4), count))
        mean = e.splat(b.fptrunc(b.fdiv(total, count64), F32), lanes)

        def centred(i: Value | int, count: int) -> Value:
            v = b.fsub(e.load_masked(F32, lanes, e.at(x, i, 4), count), mean)
            if count < lanes:  # unread lanes would add mean^2
                v = b.select(e.lane_mask(lanes, e.i64(count)), v, e.const(vec(F32, lanes), 0.0))
            return v

        def square(i: Value | int, count: int) -> tuple[Value, Value]:
            v = centred(i, count)
            return v, v

        variance = b.fdiv(sum_f64(e, self.ne0, square), count64)
        scale = b.fptrunc(b.fdiv(e.const(F64, 1.0), e.fsqrt(b.fadd(variance, e.const(F64, self.eps)))), F32)
        scale = e.splat(scale, lanes)
        for_chunks(e, self.ne0, lambda i, count: e.store_masked(b.fmul(centred(i, count), scale), e.at(y, i, 4), count))
        e.ret()

    def scratch_bytes(self, target: Target) -> int:
        return 0
