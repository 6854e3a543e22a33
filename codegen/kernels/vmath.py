"""Elementary functions as straight-line code on vectors (or scalars) of f32, and sine/cosine on f64.

Every function is a fixed sequence of IEEE operations per lane, so a value's result does not depend on its lane, its vector width or
its neighbours. The polynomials are minimax fits made for this project (weighted least squares iterated on Chebyshev nodes,
coefficients rounded to f32); their errors are tested.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from llvmlite import ir

from ggufc.codegen.emitter import F64, I32, I64, Emitter, Value, vec

ROUND_F32 = 12582912.0
"""1.5 * 2^23: adding it rounds |x| < 2^22 to an integer, ties to even, in the low mantissa bits."""
_ROUND_F64 = 6755399441055744.0  # 1.5 * 2^52

_EXP = (0.5, 0.1666666716337204, 0.041666269302368164, 0.008333264850080013, 0.0013946191174909472, 0.00019917941244784743)
_LOG = (
    0.3333331048488617, -0.24999986588954926, 0.20002219080924988, -0.16669239103794098, 0.1421876847743988,
    -0.12384585291147232, 0.1187247782945633, -0.11788333207368851, 0.069146528840065,
)  # fmt: skip
_TANH = (-0.3333333134651184, 0.13333210349082947, -0.05394722893834114, 0.0217030867934227, -0.008182933554053307, 0.002147750463336706)
# ln 2 in two parts; the first has ten bits, so its product with an exponent is exact with and without FMA.
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.1219444e-4
# pi/2 in three parts; the first two have 33 bits, so their products with a 20-bit quadrant number are exact.
_HALF_PI = (1.5707963267341256, 6.077100506303966e-11, 2.0222662487959506e-21)


def _lanes(v: Value) -> int:
    return v.type.count if isinstance(v.type, ir.VectorType) else 1


def polynomial(e: Emitter, x: Value, coefficients: Sequence[float]) -> Value:
    """Horner's rule, coefficients in ascending order."""
    ty = x.type
    acc = e.const(ty, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        acc = e.fma(acc, x, e.const(ty, c))
    return acc


def _power_of_two(e: Emitter, n: Value) -> Value:
    """2^n as f32 for i32 lanes in -126..127."""
    ints = vec(I32, _lanes(n))
    return e.b.bitcast(e.b.shl(e.b.add(n, e.const(ints, 127)), e.const(ints, 23)), vec(ir.FloatType(), _lanes(n)))


def exp(e: Emitter, x: Value) -> Value:
    """e^x: subnormal results included, 0 below about -104, infinity above about 88.7; NaN stays NaN."""
    b, ty = e.b, x.type
    ints = vec(I32, _lanes(x))
    low, high = e.const(ty, -104.5), e.const(ty, 89.5)
    x = b.select(b.fcmp_ordered("<", x, low), low, x)
    x = b.select(b.fcmp_ordered(">", x, high), high, x)
    shifted = e.fma(x, e.const(ty, math.log2(math.e)), e.const(ty, ROUND_F32))
    n = b.fsub(shifted, e.const(ty, ROUND_F32))
    k = b.sub(b.bitcast(shifted, ints), b.bitcast(e.const(ty, ROUND_F32), ints))
    r = e.fma(n, e.const(ty, -_LN2_HIGH), x)
    r = e.fma(n, e.const(ty, -_LN2_LOW), r)
    p = b.fadd(e.fma(b.fmul(r, r), polynomial(e, r, _EXP), r), e.const(ty, 1.0))
    # Two factors: 2^k itself may be outside the normal range.
    half = b.ashr(k, e.const(ints, 1))
    return b.fmul(b.fmul(p, _power_of_two(e, half)), _power_of_two(e, b.sub(k, half)))


def exp_flushed(e: Emitter, x: Value) -> Value:
    """e^x for x up to 88, as the softmax needs it: results below 2^-126 are 0; x = 0 gives exactly 1."""
    b, ty = e.b, x.type
    ints = vec(I32, _lanes(x))
    low = e.const(ty, -87.3)
    clamped = b.select(b.fcmp_ordered("<", x, low), low, x)
    shifted = e.fma(clamped, e.const(ty, math.log2(math.e)), e.const(ty, ROUND_F32))
    n = b.fsub(shifted, e.const(ty, ROUND_F32))
    r = e.fma(n, e.const(ty, -_LN2_HIGH), clamped)
    r = e.fma(n, e.const(ty, -_LN2_LOW), r)
    p = b.fadd(e.fma(b.fmul(r, r), polynomial(e, r, _EXP), r), e.const(ty, 1.0))
    scaled = b.bitcast(b.add(b.bitcast(p, ints), b.shl(b.bitcast(shifted, ints), e.const(ints, 23))), ty)
    return b.select(b.fcmp_ordered("<", x, low), e.const(ty, 0.0), scaled)


def log(e: Emitter, x: Value) -> Value:
    """Natural logarithm; -inf at 0, NaN below."""
    b, ty = e.b, x.type
    ints = vec(I32, _lanes(x))
    small = b.fcmp_ordered("<", x, e.const(ty, 2.0**-126))
    scaled = b.select(small, b.fmul(x, e.const(ty, 2.0**25)), x)
    bits = b.bitcast(scaled, ints)
    # Mantissa into [sqrt(1/2), sqrt(2)): 0x3F3504F3 is sqrt(1/2).
    moved = b.sub(bits, e.const(ints, 0x3F3504F3))
    k = b.ashr(moved, e.const(ints, 23))
    m = b.bitcast(b.sub(bits, b.shl(k, e.const(ints, 23))), ty)
    k = b.sub(k, b.select(small, e.const(ints, 25), e.const(ints, 0)))
    f = b.fsub(m, e.const(ty, 1.0))
    z = b.fmul(f, f)
    n = b.sitofp(k, ty)
    tail = e.fma(n, e.const(ty, _LN2_LOW), b.fmul(b.fmul(z, f), polynomial(e, f, _LOG)))
    tail = e.fma(z, e.const(ty, -0.5), tail)
    r = e.fma(n, e.const(ty, _LN2_HIGH), b.fadd(f, tail))
    r = b.select(b.fcmp_ordered("==", x, e.const(ty, math.inf)), x, r)
    r = b.select(b.fcmp_ordered("==", x, e.const(ty, 0.0)), e.const(ty, -math.inf), r)
    return b.select(b.fcmp_ordered(">=", x, e.const(ty, 0.0)), r, e.const(ty, math.nan))


def tanh(e: Emitter, x: Value) -> Value:
    """Odd polynomial below 0.625, 1 - 2 / (e^2x + 1) above."""
    b, ty = e.b, x.type
    a = e.fabs(x)
    z = b.fmul(x, x)
    near = e.fma(b.fmul(x, z), polynomial(e, z, _TANH), x)
    far = b.fsub(e.const(ty, 1.0), b.fdiv(e.const(ty, 2.0), b.fadd(exp(e, b.fadd(a, a)), e.const(ty, 1.0))))
    far = b.select(b.fcmp_ordered("<", x, e.const(ty, 0.0)), b.fneg(far), far)
    return b.select(b.fcmp_ordered("<", a, e.const(ty, 0.625)), near, far)


def _logistic_product(e: Emitter, factor: Value, x: Value) -> Value:
    """factor / (1 + e^-x)."""
    return e.b.fdiv(factor, e.b.fadd(exp(e, e.b.fneg(x)), e.const(x.type, 1.0)))


def sigmoid(e: Emitter, x: Value) -> Value:
    return _logistic_product(e, e.const(x.type, 1.0), x)


def silu(e: Emitter, x: Value) -> Value:
    """x / (1 + e^-x)."""
    return _logistic_product(e, x, x)


def gelu(e: Emitter, x: Value) -> Value:
    """Tanh form, 0.5 x (1 + tanh u) = x / (1 + e^-2u) with u = sqrt(2/pi) x (1 + 0.044715 x^2)."""
    ty = x.type
    inner = e.fma(e.b.fmul(x, x), e.const(ty, 0.044715), e.const(ty, 1.0))
    return _logistic_product(e, x, e.b.fmul(e.b.fmul(x, e.const(ty, 2 * math.sqrt(2 / math.pi))), inner))


def softplus(e: Emitter, x: Value) -> Value:
    """ln(1 + e^x) = max(x, 0) + ln(1 + y) with y = e^-|x|; the rounding of 1 + y is corrected."""
    b, ty = e.b, x.type
    one, zero = e.const(ty, 1.0), e.const(ty, 0.0)
    y = exp(e, b.fneg(e.fabs(x)))
    u = b.fadd(one, y)
    rest = b.fdiv(b.fsub(y, b.fsub(u, one)), u)
    return b.fadd(b.select(b.fcmp_ordered("<", x, zero), zero, x), b.fadd(log(e, u), rest))


def sincos(e: Emitter, x: Value) -> tuple[Value, Value]:
    """(sin x, cos x) of f64 lanes for |x| up to a few million, error below 1e-15."""
    b, ty = e.b, x.type
    n_lanes = _lanes(x)
    ints = vec(I64, n_lanes)
    shifted = e.fma(x, e.const(ty, 2 / math.pi), e.const(ty, _ROUND_F64))
    n = b.fsub(shifted, e.const(ty, _ROUND_F64))
    quadrant = b.bitcast(shifted, ints)
    r = x
    for part in _HALF_PI:
        r = e.fma(n, e.const(ty, -part), r)
    z = b.fmul(r, r)
    sin = e.fma(b.fmul(r, z), polynomial(e, z, [(-1) ** (i + 1) / math.factorial(2 * i + 3) for i in range(7)]), r)
    cos = e.fma(z, polynomial(e, z, [(-1) ** (i + 1) / math.factorial(2 * i + 2) for i in range(8)]), e.const(vec(F64, n_lanes), 1.0))
    odd = b.icmp_signed("!=", b.and_(quadrant, e.const(ints, 1)), e.const(ints, 0))

    def signed(v: Value, q: Value) -> Value:
        flip = b.shl(b.and_(q, e.const(ints, 2)), e.const(ints, 62))
        return b.bitcast(b.xor(b.bitcast(v, ints), flip), ty)

    return signed(b.select(odd, cos, sin), quadrant), signed(b.select(odd, sin, cos), b.add(quadrant, e.const(ints, 1)))
