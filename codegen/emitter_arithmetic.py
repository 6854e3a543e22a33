"""The emitter's arithmetic: constants, whole numbers, floats and vectors.

Values are llvmlite values. Scalars are ``i64``/``i32``/``f32``; vectors carry ``n`` lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from ggufc.codegen.cpu.target import Target

I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
PTR = ir.PointerType()
VOID = ir.VoidType()

Value = Any


def vec(element: ir.Type, n: int) -> ir.Type:
    """``<n x element>``, or the element itself for n = 1."""
    return element if n == 1 else ir.VectorType(element, n)


class Arithmetic:
    """Instructions that compute, at the place where ``b`` stands in ``module``."""

    module: ir.Module
    target: Target
    b: ir.IRBuilder

    def i64(self, v: int) -> Value:
        return ir.Constant(I64, v)

    def i32(self, v: int) -> Value:
        return ir.Constant(I32, v)

    def f32(self, v: float) -> Value:
        return ir.Constant(F32, float(v))

    def const(self, ty: ir.Type, v: float | int) -> Value:
        """Scalar or splat constant of ``ty``."""
        element = ty.element if isinstance(ty, ir.VectorType) else ty
        value = float(v) if isinstance(element, ir.HalfType | ir.FloatType | ir.DoubleType) else int(v)
        return ir.Constant(ty, [value] * ty.count) if isinstance(ty, ir.VectorType) else ir.Constant(ty, value)

    def const_vec(self, element: ir.Type, values: Sequence[float | int]) -> Value:
        return ir.Constant(ir.VectorType(element, len(values)), list(values))

    def global_const(self, element: ir.Type, values: Sequence[float | int], name: str) -> Value:
        """A read-only table in the image; equal names share one table."""
        if name in self.module.globals:
            return self.module.globals[name]
        ty = ir.ArrayType(element, len(values))
        g = ir.GlobalVariable(self.module, ty, name)
        g.initializer = ir.Constant(ty, list(values))
        g.global_constant = True
        g.linkage = "internal"
        g.align = 64
        return g

    def imin(self, a: Value, c: Value) -> Value:
        return self.b.select(self.b.icmp_signed("<", a, c), a, c)

    def imax(self, a: Value, c: Value) -> Value:
        return self.b.select(self.b.icmp_signed(">", a, c), a, c)

    def ceil_div(self, a: Value, d: int) -> Value:
        return self.b.udiv(self.b.add(a, self.i64(d - 1)), self.i64(d))

    def sext64(self, v: Value) -> Value:
        return self.b.sext(v, I64)

    def intrinsic(self, name: str, ret: ir.Type, args: Sequence[ir.Type]) -> ir.Function:
        if name in self.module.globals:
            return self.module.globals[name]
        return ir.Function(self.module, ir.FunctionType(ret, list(args)), name)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """``a*b + c`` with one rounding where the target has FMA, two elsewhere; never a mixture within a target."""
        if self.target.has_fma:
            return self.b.call(self.intrinsic(f"llvm.fma.{suffix(a.type)}", a.type, [a.type] * 3), [a, b, c])
        return self.b.fadd(self.b.fmul(a, b), c)

    def fmax(self, a: Value, c: Value) -> Value:
        """Larger of two non-NaN values (ordered compare and select: one instruction)."""
        return self.b.select(self.b.fcmp_ordered(">", a, c), a, c)

    def fmin(self, a: Value, c: Value) -> Value:
        return self.b.select(self.b.fcmp_ordered("<", a, c), a, c)

    def fabs(self, a: Value) -> Value:
        return self.b.call(self.intrinsic(f"llvm.fabs.{suffix(a.type)}", a.type, [a.type]), [a])

    def fsqrt(self, a: Value) -> Value:
        return self.b.call(self.intrinsic(f"llvm.sqrt.{suffix(a.type)}", a.type, [a.type]), [a])

    def f16_to_f32(self, v: Value) -> Value:
        """Half (as ``half`` or ``i16`` lanes) to f32; exact on every level, in integers where the CPU lacks F16C."""
        n = v.type.count if isinstance(v.type, ir.VectorType) else 1
        element = v.type.element if n > 1 else v.type
        if self.target.has_f16c:
            h = v if isinstance(element, ir.HalfType) else self.b.bitcast(v, vec(F16, n))
            return self.b.fpext(h, vec(F32, n))
        if isinstance(element, ir.HalfType):
            v = self.b.bitcast(v, vec(I16, n))
        return self._soft_f16_to_f32(v, n)

    def _soft_f16_to_f32(self, v: Value, n: int) -> Value:
        b, i32v, f32v = self.b, vec(I32, n), vec(F32, n)
        x = b.zext(v, i32v)
        sign = b.shl(b.and_(x, self.const(i32v, 0x8000)), self.const(i32v, 16))
        body = b.shl(b.and_(x, self.const(i32v, 0x7FFF)), self.const(i32v, 13))
        # A multiplication by 2^112 moves the exponent and normalises subnormals exactly; infinities and NaNs need their exponent set.
        scaled = b.bitcast(b.fmul(b.bitcast(body, f32v), b.bitcast(self.const(i32v, 0x77800000), f32v)), i32v)
        special = b.icmp_unsigned(">=", body, self.const(i32v, 0x0F800000))
        scaled = b.select(special, b.or_(body, self.const(i32v, 0x7F800000)), scaled)
        return b.bitcast(b.or_(scaled, sign), f32v)

    def f32_to_f16(self, v: Value) -> Value:
        """f32 to ``i16`` lanes holding halves, round to nearest even."""
        n = v.type.count if isinstance(v.type, ir.VectorType) else 1
        if self.target.has_f16c:
            return self.b.bitcast(self.b.fptrunc(v, vec(F16, n)), vec(I16, n))
        b, i32v, f32v = self.b, vec(I32, n), vec(F32, n)
        x = b.bitcast(v, i32v)
        sign = b.lshr(b.and_(x, self.const(i32v, -(1 << 31))), self.const(i32v, 16))
        a = b.and_(x, self.const(i32v, 0x7FFFFFFF))
        # Normal results: add the rounding bias in the integer representation.
        odd = b.and_(b.lshr(a, self.const(i32v, 13)), self.const(i32v, 1))
        normal = b.lshr(b.add(b.add(b.sub(a, self.const(i32v, 112 << 23)), self.const(i32v, 0xFFF)), odd), self.const(i32v, 13))
        # Subnormal results: adding 0.5 lets the FPU round at 2^-24.
        tiny = b.sub(b.bitcast(b.fadd(b.bitcast(a, f32v), self.const(f32v, 0.5)), i32v), self.const(i32v, 0x3F000000))
        r = b.select(b.icmp_unsigned("<", a, self.const(i32v, 113 << 23)), tiny, normal)
        r = b.select(b.icmp_unsigned(">=", a, self.const(i32v, 0x477FF000)), self.const(i32v, 0x7C00), r)
        r = b.select(b.icmp_unsigned(">", a, self.const(i32v, 0x7F800000)), self.const(i32v, 0x7E00), r)
        return b.trunc(b.or_(r, sign), vec(I16, n))

    def bf16_to_f32(self, v: Value) -> Value:
        """``i16`` lanes holding bf16 to f32."""
        n = v.type.count if isinstance(v.type, ir.VectorType) else 1
        return self.b.bitcast(self.b.shl(self.b.zext(v, vec(I32, n)), self.const(vec(I32, n), 16)), vec(F32, n))

    def f32_to_bf16(self, v: Value) -> Value:
        """f32 to ``i16`` lanes holding bf16, round to nearest even (finite values)."""
        b = self.b
        n = v.type.count if isinstance(v.type, ir.VectorType) else 1
        i32v = vec(I32, n)
        x = b.bitcast(v, i32v)
        odd = b.and_(b.lshr(x, self.const(i32v, 16)), self.const(i32v, 1))
        return b.trunc(b.lshr(b.add(b.add(x, self.const(i32v, 0x7FFF)), odd), self.const(i32v, 16)), vec(I16, n))

    def splat(self, v: Value, n: int) -> Value:
        if n == 1:
            return v
        undef = ir.Constant(ir.VectorType(v.type, n), ir.Undefined)
        return self.b.shuffle_vector(self.b.insert_element(undef, v, self.i32(0)), undef, self.const_vec(I32, [0] * n))

    def shuffle(self, a: Value, c: Value | None, lanes: Sequence[int]) -> Value:
        c = c if c is not None else ir.Constant(a.type, ir.Undefined)
        return self.b.shuffle_vector(a, c, self.const_vec(I32, list(lanes)))

    def extract_vector(self, v: Value, start: int, n: int) -> Value:
        return self.shuffle(v, None, range(start, start + n))

    def insert_vector(self, v: Value, piece: Value, start: int) -> Value:
        n, k = v.type.count, piece.type.count
        wide = self.shuffle(piece, None, [i if i < k else 0 for i in range(n)])
        return self.shuffle(v, wide, [n + i - start if start <= i < start + k else i for i in range(n)])

    def concat(self, a: Value, c: Value) -> Value:
        return self.shuffle(a, c, range(2 * a.type.count))

    def reduce(self, v: Value, op: str) -> Value:
        """Sum (``add``) or maximum (``max``) of all lanes by halving: a fixed tree."""
        while isinstance(v.type, ir.VectorType):
            n = v.type.count // 2
            if n == 1:
                lo, hi = self.b.extract_element(v, self.i32(0)), self.b.extract_element(v, self.i32(1))
            else:
                lo, hi = self.extract_vector(v, 0, n), self.extract_vector(v, n, n)
            v = self.b.fadd(lo, hi) if op == "add" else self.fmax(lo, hi)
        return v


def suffix(ty: ir.Type) -> str:
    """How the names of LLVM's intrinsics spell a type: ``v16f32``."""
    element = ty.element if isinstance(ty, ir.VectorType) else ty
    if isinstance(element, ir.IntType):
        name = f"i{element.width}"
    else:
        name = {ir.FloatType: "f32", ir.DoubleType: "f64", ir.HalfType: "f16"}[type(element)]
    return f"v{ty.count}{name}" if isinstance(ty, ir.VectorType) else name
