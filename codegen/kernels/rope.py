"""Rotary position embedding: a table of cosines and sines per token, and its application with the head norm and the cache store around it.

Formulas: the paper of Su et al. (RoPE), linear interpolation, and YaRN (Peng et al.). Angles are computed in f64 from f64 constants.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from ggufc.codegen.cpu.target import Target
from ggufc.codegen.emitter import F32, F64, I32, Emitter, Value, vec
from ggufc.codegen.errors import CodegenError
from ggufc.codegen.kernels import cache, vmath
from ggufc.codegen.kernels.rowwise import for_chunks, rms_scale


def inverse_frequencies(
    n_dims: int, base: float, freq_scale: float, ext_factor: float, beta_fast: float, beta_slow: float, n_ctx_orig: int
) -> list[float]:
    """Angle per position of each pair, before division by frequency factors.

    ``ext_factor`` blends linear interpolation (0) with YaRN's ramp (1): dimensions that turn more than ``beta_fast`` times over
    ``n_ctx_orig`` keep their frequency.
    """
    pairs = n_dims // 2
    plain = [base ** (-2.0 * i / n_dims) for i in range(pairs)]
    if not ext_factor:
        return [freq_scale * f for f in plain]

    def corner(beta: float) -> float:
        return n_dims * math.log(n_ctx_orig / (2 * math.pi * beta)) / (2 * math.log(base))

    low = max(0.0, math.floor(corner(beta_fast)))
    high = min(n_dims - 1.0, math.ceil(corner(beta_slow)))
    out = []
    for i, f in enumerate(plain):
        ramp = ext_factor * (1 - min(1.0, max(0.0, (i - low) / max(0.001, high - low))))
        out.append(freq_scale * f * (1 - ramp) + f * ramp)
    return out


def magnitude(freq_scale: float, ext_factor: float, attn_factor: float) -> float:
    """Factor on cosine and sine; YaRN adds 0.1 ln(1/s)."""
    return attn_factor * (1 + 0.1 * math.log(1 / freq_scale)) if ext_factor else attn_factor


@dataclass(frozen=True)
class RopeTable:
    """positions i32[T] -> table f32[n_dims, T]: cosine of pair i at 2i, sine at 2i+1, times the magnitude; one tile per token.

    With ``freq_factors`` the angle of pair i is divided by ``ff[i]`` (f32[n_dims/2]); ``inverse`` negates the sines.
    """

    n_dims: int
    base: float
    freq_scale: float = 1.0
    ext_factor: float = 0.0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    n_ctx_orig: int = 0
    freq_factors: bool = False
    inverse: bool = False
    arg_names: ClassVar[tuple[str, ...]] = ("positions", "ff", "table")

    def emit(self, e: Emitter) -> None:
        b = e.b
        pairs = self.n_dims // 2
        n = e.target.lanes // 2
        padded = -(-pairs // n) * n
        f = inverse_frequencies(self.n_dims, self.base, self.freq_scale, self.ext_factor, self.beta_fast, self.beta_slow, self.n_ctx_orig)
        constants = e.global_const(F64, f + [0.0] * (padded - pairs), f"frequencies_{e.fn.name}")
        position = e.splat(b.sitofp(e.load(I32, e.at(e.arg_ptr(0), e.tile, 4)), F64), n)
        out = e.at(e.arg_ptr(2), e.tile, 4 * self.n_dims)
        scale = e.const(vec(F64, n), magnitude(self.freq_scale, self.ext_factor, self.attn_factor))

        def chunk(i: Value, count: int) -> None:
            angle = b.fmul(position, e.load(vec(F64, n), e.at(constants, i, 8)))
            if self.freq_factors:
                factors = e.load_masked(F32, n, e.at(e.arg_ptr(1), i, 4), count)
                if count < n:
                    factors = b.select(e.lane_mask(n, e.i64(count)), factors, e.const(vec(F32, n), 1.0))
                angle = b.fdiv(angle, b.fpext(factors, vec(F64, n)))
            sin, cos = (b.fptrunc(b.fmul(v, scale), vec(F32, n)) for v in vmath.sincos(e, angle))
            sin = b.fneg(sin) if self.inverse else sin
            mixed = e.shuffle(cos, sin, [lane // 2 + lane % 2 * n for lane in range(2 * n)])
            e.store_masked(mixed, e.at(out, i, 8), 2 * count)

        if pairs >= n:
            with e.for_range(0, pairs - pairs % n, n) as i:
                chunk(i, n)
        if pairs % n:
            chunk(e.i64(pairs - pairs % n), pairs % n)
        e.ret()

    def scratch_bytes(self, target: Target) -> int:
        return 0


@dataclass(frozen=True)
class RopeApply:
    """Rotate rows f32[d * n_head, T] by ``table``; one tile per token.

    ``norm``: each head first goes through RMS norm with weight ``w`` f32[d] (``eps``). ``mode``: ``norm`` turns pairs (2i, 2i+1),
    ``neox`` pairs (i, i + n_dims/2); dimensions from ``n_dims`` on pass. ``n_dims`` = 0 only norms and stores. Without ``store`` the
    result is f32 with leading dimension ``ldy`` (``y`` may be ``x``); with it the row is converted to ``to`` and written to row
    ``slots[t]`` of the cache ``y`` (``d * n_head`` values per row).
    """

    d: int
    n_head: int
    n_dims: int
    mode: str = "norm"
    norm: bool = False
    eps: float = 0.0
    store: bool = False
    to: str = "f32"
    arg_names: ClassVar[tuple[str, ...]] = ("x", "ldx", "table", "w", "y", "ldy", "slots")

    def __post_init__(self) -> None:
        if self.mode not in ("norm", "neox"):
            raise CodegenError(f"rope: mode {self.mode!r} is unknown; it is norm or neox")
        if self.n_dims % 2 or not 0 <= self.n_dims <= self.d:
            raise CodegenError(f"rope: n_dims {self.n_dims} must be even and at most the head size {self.d}")
        cache.check_storage(self.to, self.d * self.n_head, "rope into the cache")
        if not self.store and self.to != "f32":
            raise CodegenError(f"rope: a result that is not stored into a cache is f32, not {self.to}")

    def _direct(self) -> bool:
        return not self.store or self.to == "f32"

    def emit(self, e: Emitter) -> None:
        b = e.b
        t, row = e.tile, self.d * self.n_head
        x = e.at(e.arg_ptr(0), b.mul(t, e.arg_int(1)), 4)
        table = e.at(e.arg_ptr(2), t, 4 * self.n_dims) if self.n_dims else None
        if self.store:
            slot = e.sext64(e.load(I32, e.at(e.arg_ptr(6), t, 4)))
            target = e.at(e.arg_ptr(4), slot, cache.row_bytes(self.to, row))
        else:
            target = e.at(e.arg_ptr(4), b.mul(t, e.arg_int(5)), 4)
        out = target if self._direct() else e.scratch
        with e.for_range(0, self.n_head, name="head") as h:
            self._head(e, e.at(x, h, 4 * self.d), table, e.at(out, h, 4 * self.d))
        if not self._direct():
            cache.store_row(e, self.to, row, e.scratch, target)
        e.ret()

    def _head(self, e: Emitter, x: Value, table: Value, y: Value) -> None:
        b, lanes = e.b, e.target.lanes
        scale = e.splat(rms_scale(e, x, self.d, self.eps), lanes) if self.norm else None

        def load(i: Value, count: int) -> Value:
            v = e.load_masked(F32, lanes, e.at(x, i, 4), count)
            if scale is not None:
                v = b.fmul(b.fmul(v, scale), e.load_masked(F32, lanes, e.at(e.arg_ptr(3), i, 4), count))
            return v

        def rotated(u: Value, v: Value, cos: Value, sin: Value) -> tuple[Value, Value]:
            return e.fma(u, cos, b.fneg(b.fmul(v, sin))), e.fma(u, sin, b.fmul(v, cos))

        half = self.n_dims // 2

        def neox(i: Value, count: int) -> None:
            second = b.add(i, e.i64(half))
            u, v = load(i, count), load(second, count)
            low = e.load_masked(F32, lanes, e.at(table, i, 8), min(lanes, 2 * count))
            high = e.load_masked(F32, lanes, e.gep(e.at(table, i, 8), 4 * lanes), max(0, 2 * count - lanes))
            cos = e.shuffle(low, high, range(0, 2 * lanes, 2))
            sin = e.shuffle(low, high, range(1, 2 * lanes, 2))
            u, v = rotated(u, v, cos, sin)
            e.store_masked(u, e.at(y, i, 4), count)
            e.store_masked(v, e.at(y, second, 4), count)

        def interleaved(i: Value, count: int) -> None:
            v = load(i, count)
            angles = e.load_masked(F32, lanes, e.at(table, i, 4), count)
            evens = [lane & ~1 for lane in range(lanes)]
            odds = [lane | 1 for lane in range(lanes)]
            cos, sin = e.shuffle(angles, None, evens), e.shuffle(angles, None, odds)
            first, second = rotated(e.shuffle(v, None, evens), e.shuffle(v, None, odds), cos, sin)
            mixed = e.shuffle(first, second, [lane + lanes * (lane & 1) for lane in range(lanes)])
            e.store_masked(mixed, e.at(y, i, 4), count)

        if self.mode == "neox":
            for_chunks(e, half, neox)
        else:
            for_chunks(e, self.n_dims, interleaved)
        start = self.n_dims

        def passed(i: Value, count: int) -> None:
            at = b.add(i, e.i64(start))
            e.store_masked(load(at, count), e.at(y, at, 4), count)

        for_chunks(e, self.d - start, passed)

    def scratch_bytes(self, target: Target) -> int:
        return 0 if self._direct() else 4 * self.d * self.n_head
