"""A thin emitter over llvmlite's builder: what kernels need, on every CPU level.

Values are llvmlite values. Scalars are ``i64``/``i32``/``f32``; vectors carry ``n`` lanes. Control flow is structured (``for_range``,
``if_``); loop-carried values live in ``Var`` cells, which LLVM turns into registers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from ggufc.codegen.cpu.target import Target
from ggufc.formats.abi import PARAMS

I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
PTR = ir.PointerType()
VOID = ir.VoidType()
KERNEL_TYPE = ir.FunctionType(VOID, [PTR, PTR, I64, PTR])

Value = Any


def vec(element: ir.Type, n: int) -> ir.Type:
    """``<n x element>``, or the element itself for n = 1."""
    return element if n == 1 else ir.VectorType(element, n)


class Var:
    """A mutable cell of a fixed type."""

    def __init__(self, e: Emitter, ty: ir.Type, init: Value | None) -> None:
        self._e = e
        with e.b.goto_entry_block():
            self._slot = e.b.alloca(ty)
        self.type = ty
        if init is not None:
            self.set(init)

    def get(self) -> Value:
        return self._e.b.load(self._slot, typ=self.type)

    def set(self, value: Value) -> None:
        self._e.b.store(value, self._slot)


class Emitter:
    """Emits one function into ``module`` for ``target``."""

    def __init__(self, module: ir.Module, target: Target, name: str, function_type: ir.FunctionType = KERNEL_TYPE) -> None:
        self.module = module
        self.target = target
        self.fn = ir.Function(module, function_type, name)
        self.fn.attributes.add("nounwind")
        self.b = ir.IRBuilder(self.fn.append_basic_block("entry"))
        self.args = self.fn.args

    # -- constants ---------------------------------------------------------------------------------------------------

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

    # -- kernel ABI --------------------------------------------------------------------------------------------------

    def arg_ptr(self, i: int) -> Value:
        """Kernel argument ``i`` as a pointer."""
        return self.load(PTR, self.gep(self.args[0], self.i64(8 * i)))

    def arg_int(self, i: int) -> Value:
        """Kernel argument ``i`` as i64."""
        return self.load(I64, self.gep(self.args[0], self.i64(8 * i)))

    def param(self, symbol: str) -> Value:
        """Value of a graph symbol (``T``, ``O``, ...) as i64."""
        return self.load(I64, self.gep(self.args[1], self.i64(8 * PARAMS.index(symbol))))

    def dim(self, d: Any) -> Value:
        """Value of a dimension (int or ``ggufc.ir.dims.Dim``) as i64, from the params."""
        if isinstance(d, int):
            return self.i64(d)
        total: Value | None = None
        for symbols, factor in d.terms:
            term = self.i64(factor)
            for symbol in symbols:
                term = self.b.mul(term, self.param(symbol))
            total = term if total is None else self.b.add(total, term)
        return total

    @property
    def tile(self) -> Value:
        return self.args[2]

    @property
    def scratch(self) -> Value:
        return self.args[3]

    # -- memory ------------------------------------------------------------------------------------------------------

    def gep(self, p: Value, byte_offset: Value | int) -> Value:
        """``p`` plus a byte offset (i64)."""
        if isinstance(byte_offset, int):
            if byte_offset == 0:
                return p
            byte_offset = self.i64(byte_offset)
        return self.b.gep(p, [byte_offset], source_etype=I8)

    def at(self, p: Value, index: Value | int, size: int) -> Value:
        """Address of element ``index`` of ``size`` bytes."""
        if isinstance(index, int):
            return self.gep(p, index * size)
        return self.gep(p, self.b.mul(index, self.i64(size)))

    def load(self, ty: ir.Type, p: Value, align: int = 1) -> Value:
        """Load; vectors are unaligned unless ``align`` says more."""
        if not isinstance(ty, ir.VectorType):
            align = max(align, _natural(ty))
        return self.b.load(p, align=align, typ=ty)

    def store(self, v: Value, p: Value, align: int = 1) -> None:
        if not isinstance(v.type, ir.VectorType):
            align = max(align, _natural(v.type))
        self.b.store(v, p, align=align)

    def load_masked(self, element: ir.Type, n: int, p: Value, count: int) -> Value:
        """First ``count`` (static) of ``n`` lanes; the rest are zero and their memory is not touched."""
        if count >= n:
            return self.load(vec(element, n), p)
        v: Value = ir.Constant(ir.VectorType(element, n), [0] * n if isinstance(element, ir.IntType) else [0.0] * n)
        size = _natural(element)
        done = 0
        while done < count:  # power-of-two pieces
            part = 1 << ((count - done).bit_length() - 1)
            piece = self.load(vec(element, part), self.gep(p, done * size), align=1)
            if part == 1:
                v = self.b.insert_element(v, piece, self.i32(done))
            else:
                v = self.insert_vector(v, piece, done)
            done += part
        return v

    def store_masked(self, v: Value, p: Value, count: int) -> None:
        """Store the first ``count`` (static) lanes."""
        n = v.type.count
        if count >= n:
            self.store(v, p)
            return
        size = _natural(v.type.element)
        done = 0
        while done < count:
            part = 1 << ((count - done).bit_length() - 1)
            if part == 1:
                self.store(self.b.extract_element(v, self.i32(done)), self.gep(p, done * size), align=1)
            else:
                self.store(self.extract_vector(v, done, part), self.gep(p, done * size))
            done += part

    def lane_mask(self, n: int, count: Value) -> Value:
        """<n x i1>: lane index < ``count`` (i64, may exceed n or be negative)."""
        lanes = self.const_vec(I32, range(n)) if n > 1 else self.i32(0)
        bounded = self.b.trunc(self.imax(self.imin(count, self.i64(n)), self.i64(0)), I32)
        return self.b.icmp_signed("<", lanes, self.splat(bounded, n))

    def load_lanes(self, element: ir.Type, n: int, p: Value, mask: Value) -> Value:
        """Lanes chosen by ``mask`` (<n x i1>); the rest are zero and their memory is not touched."""
        ty = ir.VectorType(element, n)
        fn = self.intrinsic(f"llvm.masked.load.{_suffix(ty)}.p0", ty, [PTR, I32, ir.VectorType(I1, n), ty])
        return self.b.call(fn, [p, self.i32(1), mask, self.const(ty, 0)])

    def store_lanes(self, v: Value, p: Value, mask: Value) -> None:
        """Store the lanes chosen by ``mask``."""
        fn = self.intrinsic(f"llvm.masked.store.{_suffix(v.type)}.p0", VOID, [v.type, PTR, I32, mask.type])
        self.b.call(fn, [v, p, self.i32(1), mask])

    def prefetch(self, p: Value, locality: int = 0) -> None:
        fn = self.intrinsic("llvm.prefetch.p0", VOID, [PTR, I32, I32, I32])
        self.b.call(fn, [p, self.i32(0), self.i32(locality), self.i32(1)])

    # -- variables and control flow ----------------------------------------------------------------------------------

    def var(self, ty: ir.Type, init: Value | None = None) -> Var:
        return Var(self, ty, init)

    def alloca(self, size: int, align: int = 64) -> Value:
        """``size`` bytes of stack."""
        with self.b.goto_entry_block():
            p = self.b.alloca(ir.ArrayType(I8, size))
            p.align = align
            p.type = PTR  # untyped, as every other address
        return p

    @contextmanager
    def for_range(self, start: Value | int, stop: Value | int, step: int = 1, name: str = "i") -> Iterator[Value]:
        """``for name in range(start, stop, step)`` over i64, ``step`` > 0; yields the index."""
        start = self.i64(start) if isinstance(start, int) else start
        stop = self.i64(stop) if isinstance(stop, int) else stop
        head = self.fn.append_basic_block(f"{name}.head")
        body = self.fn.append_basic_block(f"{name}.body")
        done = self.fn.append_basic_block(f"{name}.done")
        before = self.b.block
        self.b.branch(head)
        self.b.position_at_end(head)
        index = self.b.phi(I64, name=name)
        index.add_incoming(start, before)
        self.b.cbranch(self.b.icmp_signed("<", index, stop), body, done)
        self.b.position_at_end(body)
        yield index
        following = self.b.add(index, self.i64(step), flags=["nsw"])
        index.add_incoming(following, self.b.block)
        self.b.branch(head)
        self.b.position_at_end(done)

    @contextmanager
    def while_loop(self, name: str = "loop") -> Iterator[_Loop]:
        """An endless loop left with ``loop.break_if(cond)``; ``loop.continue_if(cond)`` restarts it."""
        head = self.fn.append_basic_block(f"{name}.head")
        done = self.fn.append_basic_block(f"{name}.done")
        self.b.branch(head)
        self.b.position_at_end(head)
        yield _Loop(self, head, done)
        if not self.b.block.is_terminated:
            self.b.branch(head)
        self.b.position_at_end(done)

    @contextmanager
    def if_(self, cond: Value, likely: bool | None = None) -> Iterator[None]:
        with self.b.if_then(cond, likely=likely):
            yield

    @contextmanager
    def if_else(self, cond: Value) -> Iterator[tuple[Any, Any]]:
        with self.b.if_else(cond) as (then, otherwise):
            yield then, otherwise

    def ret(self) -> None:
        self.b.ret_void()

    # -- lanes as threads (GPUs) -------------------------------------------------------------------------------------

    spmd = False
    """Whether lanes are threads: every thread then holds single values, and the loops below are spread over threads."""

    @contextmanager
    def for_lanes(self, n: Value | int) -> Iterator[Value]:
        """``for i in range(n)``; spread over the lanes of a group where lanes are threads."""
        with self.for_range(0, n) as i:
            yield i

    @contextmanager
    def for_groups(self, start: Value, stop: Value, name: str = "row") -> Iterator[Value]:
        """``for i in range(start, stop)``; spread over groups of threads where lanes are threads."""
        with self.for_range(start, stop, name=name) as i:
            yield i

    @contextmanager
    def one_lane(self) -> Iterator[None]:
        """What only one thread of a group does: storing a value all of them hold."""
        yield

    def lookup16(self, quad: Value, table: Sequence[int]) -> Value:
        """Replace every byte 0..15 of ``quad`` by ``table[byte]``, on targets whose lanes are threads."""
        raise NotImplementedError

    # -- integer helpers (i64) ---------------------------------------------------------------------------------------

    def imin(self, a: Value, c: Value) -> Value:
        return self.b.select(self.b.icmp_signed("<", a, c), a, c)

    def imax(self, a: Value, c: Value) -> Value:
        return self.b.select(self.b.icmp_signed(">", a, c), a, c)

    def ceil_div(self, a: Value, d: int) -> Value:
        return self.b.udiv(self.b.add(a, self.i64(d - 1)), self.i64(d))

    def sext64(self, v: Value) -> Value:
        return self.b.sext(v, I64)

    # -- floats ------------------------------------------------------------------------------------------------------

    def intrinsic(self, name: str, ret: ir.Type, args: Sequence[ir.Type]) -> ir.Function:
        if name in self.module.globals:
            return self.module.globals[name]
        return ir.Function(self.module, ir.FunctionType(ret, list(args)), name)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """``a*b + c`` with one rounding where the target has FMA, two elsewhere; never a mixture within a target."""
        if self.target.has_fma:
            return self.b.call(self.intrinsic(f"llvm.fma.{_suffix(a.type)}", a.type, [a.type] * 3), [a, b, c])
        return self.b.fadd(self.b.fmul(a, b), c)

    def fmax(self, a: Value, c: Value) -> Value:
        """Larger of two non-NaN values (ordered compare and select: one instruction)."""
        return self.b.select(self.b.fcmp_ordered(">", a, c), a, c)

    def fmin(self, a: Value, c: Value) -> Value:
        return self.b.select(self.b.fcmp_ordered("<", a, c), a, c)

    def fabs(self, a: Value) -> Value:
        return self.b.call(self.intrinsic(f"llvm.fabs.{_suffix(a.type)}", a.type, [a.type]), [a])

    def fsqrt(self, a: Value) -> Value:
        return self.b.call(self.intrinsic(f"llvm.sqrt.{_suffix(a.type)}", a.type, [a.type]), [a])

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

    # -- vectors -----------------------------------------------------------------------------------------------------

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

    # -- int8 products -----------------------------------------------------------------------------------------------

    def dot4(self, acc: Value, u: Value, s: Value, u_max: int = 255) -> Value:
        """Per i32 lane: ``acc + sum of 4 products`` of unsigned bytes ``u`` and signed bytes ``s``, exact.

        ``acc``: <n x i32>; ``u``, ``s``: <n x i32> whose bytes are the factors. ``u_max`` bounds the unsigned bytes: up to 127 the AVX2
        form cannot saturate in its 16-bit sums (2 * 127 * 128 < 32768) and is used as it is.
        """
        n = acc.type.count
        if self.target.is_arm and n == 4:
            return self._dot4_neon(acc, u, s, u_max)
        vnni = self.target.vnni
        if (vnni == "avx512" and n in (4, 8, 16)) or (vnni == "avx" and n in (4, 8)):
            ty = vec(I32, n)
            byte_ty = vec(I8, 4 * n)
            fn = self.intrinsic(f"llvm.x86.avx512.vpdpbusd.{32 * n}", ty, [ty, byte_ty, byte_ty])
            return self.b.call(fn, [acc, self.b.bitcast(u, byte_ty), self.b.bitcast(s, byte_ty)])
        if "avx2" in self.target.features and n == 8:
            return self._dot4_avx2(acc, u, s, u_max)
        return self._dot4_plain(acc, u, s)

    def _dot4_avx2(self, acc: Value, u: Value, s: Value, u_max: int) -> Value:
        b, bytes_, words, ints = self.b, vec(I8, 32), vec(I16, 16), vec(I32, 8)
        maddubs = self.intrinsic("llvm.x86.avx2.pmadd.ub.sw", words, [bytes_, bytes_])
        maddwd = self.intrinsic("llvm.x86.avx2.pmadd.wd", ints, [words, words])
        sb = b.bitcast(s, bytes_)
        if u_max <= 127:
            pairs = b.call(maddubs, [b.bitcast(u, bytes_), sb])
            return b.add(acc, b.call(maddwd, [pairs, self.const(words, 1)]))
        low = b.bitcast(b.and_(u, self.const(ints, 0x7F7F7F7F)), bytes_)
        high = b.bitcast(b.and_(b.lshr(u, self.const(ints, 7)), self.const(ints, 0x01010101)), bytes_)
        acc = b.add(acc, b.call(maddwd, [b.call(maddubs, [low, sb]), self.const(words, 1)]))
        return b.add(acc, b.call(maddwd, [b.call(maddubs, [high, sb]), self.const(words, 128)]))

    def _dot4_plain(self, acc: Value, u: Value, s: Value) -> Value:
        if self.target.triple.startswith("x86_64") and acc.type.count == 4:
            return self._dot4_sse2(acc, u, s)
        b = self.b
        ty = acc.type
        for k in range(4):
            ub = b.and_(b.lshr(u, self.const(ty, 8 * k)), self.const(ty, 0xFF))
            sb = b.ashr(b.shl(s, self.const(ty, 24 - 8 * k)), self.const(ty, 24))
            acc = b.add(acc, b.mul(ub, sb))
        return acc

    def _dot4_sse2(self, acc: Value, u: Value, s: Value) -> Value:
        """Even and odd bytes widened to 16 bits, multiplied and added in pairs: no product or sum can overflow."""
        b, words = self.b, vec(I16, 8)
        madd = self.intrinsic("llvm.x86.sse2.pmadd.wd", acc.type, [words, words])
        uw, sw, eight = b.bitcast(u, words), b.bitcast(s, words), self.const(words, 8)
        even = b.call(madd, [b.and_(uw, self.const(words, 0xFF)), b.ashr(b.shl(sw, eight), eight)])
        odd = b.call(madd, [b.lshr(uw, eight), b.ashr(sw, eight)])
        return b.add(acc, b.add(even, odd))


    def _dot4_neon(self, acc: Value, u: Value, s: Value, u_max: int) -> Value:
        if self.target.vnni:
            return self._neon("usdot.v4i32.v16i8", acc, u, s)
        if u_max <= 127:
            return self.dot4_signed(acc, u, s)
        b, ty = self.b, acc.type
        acc = self.dot4_signed(acc, b.and_(u, self.const(ty, 0x7F7F7F7F)), s)
        top = b.and_(b.lshr(u, self.const(ty, 7)), self.const(ty, 0x01010101))
        return b.add(acc, b.shl(self.dot4_signed(self.const(ty, 0), top, s), self.const(ty, 7)))

    def dot4_signed(self, acc: Value, a: Value, s: Value) -> Value:
        """As ``dot4`` with both factors signed, for targets with ``signed_dot`` (NEON) and four lanes."""
        if "dotprod" in self.target.features:
            return self._neon("sdot.v4i32.v16i8", acc, a, s)
        b, ints, words, bytes_ = self.b, vec(I32, 4), vec(I16, 8), vec(I8, 16)
        pairs = self.intrinsic("llvm.aarch64.neon.saddlp.v4i32.v8i16", ints, [words])
        halves = []
        for at in (0, 8):  # products of two signed bytes fit 16 bits, sums of two do not
            x, y = (b.sext(self.extract_vector(b.bitcast(v, bytes_), at, 8), words) for v in (a, s))
            halves.append(b.call(pairs, [b.mul(x, y)]))
        join = self.intrinsic("llvm.aarch64.neon.addp.v4i32", ints, [ints, ints])
        return b.add(acc, b.call(join, halves))

    def _neon(self, name: str, acc: Value, a: Value, s: Value) -> Value:
        bytes_ = vec(I8, 16)
        fn = self.intrinsic(f"llvm.aarch64.neon.{name}", acc.type, [acc.type, bytes_, bytes_])
        return self.b.call(fn, [acc, self.b.bitcast(a, bytes_), self.b.bitcast(s, bytes_)])


class _Loop:
    def __init__(self, e: Emitter, head: ir.Block, done: ir.Block) -> None:
        self._e, self._head, self._done = e, head, done

    def break_if(self, cond: Value) -> None:
        following = self._e.fn.append_basic_block("next")
        self._e.b.cbranch(cond, self._done, following)
        self._e.b.position_at_end(following)

    def continue_if(self, cond: Value) -> None:
        following = self._e.fn.append_basic_block("next")
        self._e.b.cbranch(cond, self._head, following)
        self._e.b.position_at_end(following)


def _natural(ty: ir.Type) -> int:
    """Size, and so natural alignment, of a scalar type in bytes."""
    if isinstance(ty, ir.PointerType | ir.DoubleType):
        return 8
    if isinstance(ty, ir.FloatType):
        return 4
    if isinstance(ty, ir.HalfType):
        return 2
    return max(1, ty.width // 8)


def _suffix(ty: ir.Type) -> str:
    element = ty.element if isinstance(ty, ir.VectorType) else ty
    if isinstance(element, ir.IntType):
        name = f"i{element.width}"
    else:
        name = {ir.FloatType: "f32", ir.DoubleType: "f64", ir.HalfType: "f16"}[type(element)]
    return f"v{ty.count}{name}" if isinstance(ty, ir.VectorType) else name
