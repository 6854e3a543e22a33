"""Arithmetic of the PTX subset as numpy functions over lanes. Registers hold raw bits; an operation reads them in its own types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

TYPES: dict[str, Any] = {
    "u8": np.uint8, "s8": np.int8, "b8": np.uint8, "u16": np.uint16, "s16": np.int16, "b16": np.uint16, "u32": np.uint32, "s32": np.int32,
    "b32": np.uint32, "u64": np.uint64, "s64": np.int64, "b64": np.uint64, "f16": np.float16, "f32": np.float32, "f64": np.float64,
    "pred": np.bool_,
}  # fmt: skip
SIGNED = {np.uint8: np.int8, np.uint16: np.int16, np.uint32: np.int32, np.uint64: np.int64}


def _c_divide(a, b):  # type: ignore[no-untyped-def]
    """Integer division toward zero; by zero gives all ones, as the hardware."""
    ones = np.array(-1).astype(a.dtype)
    safe = np.where(b == 0, 1, b)
    if np.issubdtype(a.dtype, np.signedinteger):
        q = np.abs(a) // np.abs(safe)
        q = np.where((a < 0) != (safe < 0), -q, q)
    else:
        q = a // safe
    return np.where(b == 0, ones, q).astype(a.dtype)


def _remainder(a, b):  # type: ignore[no-untyped-def]
    return (a - _c_divide(a, b) * b).astype(a.dtype)


def _mul_hi(a, b):  # type: ignore[no-untyped-def]
    bits = 8 * a.dtype.itemsize
    if bits < 64:
        wide = np.int64 if np.issubdtype(a.dtype, np.signedinteger) else np.uint64
        return ((a.astype(wide) * b.astype(wide)) >> wide(bits)).astype(a.dtype)
    mask, s = np.uint64(0xFFFFFFFF), np.uint64(32)
    al, ah, bl, bh = a & mask, a >> s, np.uint64(b) & mask, np.uint64(b) >> s
    mid = ah * bl + ((al * bl) >> s)
    mid2 = al * bh + (mid & mask)
    return ah * bh + (mid >> s) + (mid2 >> s)


def _mul_wide(a, b):  # type: ignore[no-untyped-def]
    wide = {2: {True: np.int32, False: np.uint32}, 4: {True: np.int64, False: np.uint64}}[a.dtype.itemsize][
        np.issubdtype(a.dtype, np.signedinteger)
    ]
    return a.astype(wide) * b.astype(wide)


def _shift(left: bool):  # type: ignore[no-untyped-def]
    def run(a, b):  # type: ignore[no-untyped-def]
        bits = 8 * a.dtype.itemsize
        n = np.asarray(b).astype(np.int64) & 0xFFFFFFFF
        clamped = np.minimum(n, bits - 1).astype(a.dtype)
        if left:
            return np.where(n >= bits, a.dtype.type(0), a << clamped)
        shifted = a >> clamped
        return shifted if np.issubdtype(a.dtype, np.signedinteger) else np.where(n >= bits, a.dtype.type(0), shifted)

    return run


def _fma(a, b, c):  # type: ignore[no-untyped-def]
    if a.dtype == np.float32:  # the product of two f32 is exact in f64
        return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float32)
    return a * b + c


def _bfe(a, start, length):  # type: ignore[no-untyped-def]
    """Bits of ``a``; the field's own top bit is the sign of a signed type. Fields lie inside the value in code that LLVM emits."""
    bits = 8 * a.dtype.itemsize
    up = (bits - np.asarray(start).astype(np.int64) - np.asarray(length).astype(np.int64)).astype(a.dtype)
    down = (bits - np.asarray(length).astype(np.int64)).astype(a.dtype)
    return (a << up) >> down


def dot4(a, b, c, signed_a: bool, signed_b: bool):  # type: ignore[no-untyped-def]
    """Sum of four byte products plus ``c`` (i32 bits as u32)."""
    total = c.view(np.int32).astype(np.int64)
    for i in range(4):
        x = ((a >> np.uint32(8 * i)) & np.uint32(255)).astype(np.uint8)
        y = ((b >> np.uint32(8 * i)) & np.uint32(255)).astype(np.uint8)
        x = x.view(np.int8) if signed_a else x
        y = y.view(np.int8) if signed_b else y
        total = total + x.astype(np.int64) * y.astype(np.int64)
    return total.astype(np.uint32)


def mma(a, b, c):  # type: ignore[no-untyped-def]
    """``mma.m16n8k(16 or 32)`` of u8 and s8 for warps [n, 32]; fragments as the PTX manual lays them out."""
    warps, k = len(a[0]), 16 * len(b)
    lane = np.arange(32)
    g, t = lane // 4, lane % 4
    left = np.zeros((warps, 16, k), np.int64)
    right = np.zeros((warps, k, 8), np.int64)
    for i in range(4):
        shift = np.uint32(8 * i)
        for j, word in enumerate(a):
            left[:, g + 8 * (j % 2), 16 * (j // 2) + 4 * t + i] = (word >> shift) & np.uint32(255)
        for j, word in enumerate(b):
            right[:, 16 * j + 4 * t + i, g] = ((word >> shift) & np.uint32(255)).astype(np.uint8).view(np.int8)
    product = left @ right
    at = [(g + 8 * (j // 2), 2 * t + j % 2) for j in range(4)]
    return [(product[:, row, column] + start.view(np.int32)).astype(np.uint32) for (row, column), start in zip(at, c)]


def _mma_16bit(a, b, c, decode):  # type: ignore[no-untyped-def]
    """``mma.m16n8k16`` of 16-bit floats for warps [n, 32]: exact products and one rounding, where hardware rounds in ways of its own."""
    lane = np.arange(32)
    g, t = lane // 4, lane % 4
    left, right = np.zeros((len(a[0]), 16, 16), np.float64), np.zeros((len(a[0]), 16, 8), np.float64)
    for half in range(2):
        shift = np.uint32(16 * half)
        for j, word in enumerate(a):
            left[:, g + 8 * (j % 2), 8 * (j // 2) + 2 * t + half] = decode((word >> shift).astype(np.uint16))
        for j, word in enumerate(b):
            right[:, 8 * j + 2 * t + half, g] = decode((word >> shift).astype(np.uint16))
    product = left @ right
    at = [(g + 8 * (j // 2), 2 * t + j % 2) for j in range(4)]
    return [(product[:, row, column] + start).astype(np.float32) for (row, column), start in zip(at, c)]


def mma_f16(a, b, c):  # type: ignore[no-untyped-def]
    return _mma_16bit(a, b, c, lambda v: v.view(np.float16))


def mma_bf16(a, b, c):  # type: ignore[no-untyped-def]
    return _mma_16bit(a, b, c, lambda v: (v.astype(np.uint32) << np.uint32(16)).view(np.float32))


def pack_halves(high, low):  # type: ignore[no-untyped-def]
    """``cvt.rn.f16x2.f32``: the first operand goes to the upper half."""
    upper, lower = (v.astype(np.float16).view(np.uint16).astype(np.uint32) for v in (high, low))
    return upper << np.uint32(16) | lower


def permute(a, b, selector):  # type: ignore[no-untyped-def]
    """``prmt`` in its default mode."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    out = np.zeros_like(both)
    for i in range(4):
        s = (selector >> np.uint32(4 * i)) & np.uint32(15)
        byte = (both >> ((s & np.uint32(7)).astype(np.uint64) * np.uint64(8))) & np.uint64(255)
        sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
        out = out | np.where(s & np.uint32(8), sign, byte) << np.uint64(8 * i)
    return out.astype(np.uint32)


BINARY: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "mul.lo": np.multiply,
    "mul.hi": _mul_hi,
    "mul.wide": _mul_wide,
    "div": _c_divide,
    "rem": _remainder,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "shl": _shift(True),
    "shr": _shift(False),
}
FLOAT_BINARY: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "min": np.fmin, "max": np.fmax,
    "copysign": lambda a, b: np.copysign(b, a),
}  # fmt: skip
UNARY: dict[str, Callable[..., Any]] = {
    "neg": np.negative, "abs": np.abs, "not": np.bitwise_not, "popc": lambda a: np.bitwise_count(a).astype(np.uint32),
}  # fmt: skip
FLOAT_UNARY: dict[str, Callable[..., Any]] = {"neg": np.negative, "abs": np.abs, "sqrt": np.sqrt, "rcp": lambda a: a.dtype.type(1) / a}
TERNARY: dict[str, Callable[..., Any]] = {
    "fma": _fma, "mad.lo": lambda a, b, c: a * b + c, "mad.wide": lambda a, b, c: _mul_wide(a, b) + c, "bfe": _bfe,
}  # fmt: skip
COMPARE: dict[str, Callable[..., Any]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


def compare(name: str, a: Any, b: Any, is_float: bool) -> Any:
    """``setp``; a trailing u on a float comparison makes NaN compare true, ``ne`` of floats is ordered."""
    if not is_float:
        return COMPARE[{"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(name, name)](a, b)
    nan = np.isnan(a) | np.isnan(b)
    if name == "num":
        return ~nan
    if name == "nan":
        return nan
    if name.endswith("u"):
        return COMPARE[name[:-1]](a, b) | nan
    return COMPARE[name](a, b) & ~nan


def convert(v: Any, to: str, source: str, modifiers: list[str]) -> Any:
    """``cvt``: to a float round to nearest even, to an integer as the modifier says, saturating."""
    target = TYPES[to]
    if to[0] == "f":
        return v.astype(target)
    if source[0] == "f":
        rounding = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}
        (f,) = [rounding[m] for m in modifiers if m in rounding]
        info = np.iinfo(target)
        wide = np.where(np.isnan(v), 0, f(v.astype(np.float64)))
        return np.clip(wide, info.min, info.max).astype(target)
    return v.astype(target)
