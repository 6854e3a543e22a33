"""A thin emitter over llvmlite's builder: what kernels need, on every CPU level.

Control flow is structured (``for_range``, ``if_``); loop-carried values live in ``Var`` cells, which LLVM turns into registers.
``emitter_arithmetic`` and ``emitter_dot`` hold what computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from ggufc.codegen.cpu.target import Target
from ggufc.codegen.emitter_arithmetic import F16, F32, F64, I1, I8, I16, I32, I64, PTR, VOID, Value, suffix, vec
from ggufc.codegen.emitter_dot import ByteProducts
from ggufc.formats.abi import PARAMS

__all__ = ["F16", "F32", "F64", "I1", "I8", "I16", "I32", "I64", "KERNEL_TYPE", "PTR", "VOID", "Emitter", "Value", "Var", "vec"]

KERNEL_TYPE = ir.FunctionType(VOID, [PTR, PTR, I64, PTR])


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


class Emitter(ByteProducts):
    """Emits one function into ``module`` for ``target``."""

    def __init__(self, module: ir.Module, target: Target, name: str, function_type: ir.FunctionType = KERNEL_TYPE) -> None:
        self.module = module
        self.target = target
        self.fn = ir.Function(module, function_type, name)
        self.fn.attributes.add("nounwind")
        self.b = ir.IRBuilder(self.fn.append_basic_block("entry"))
        self.args = self.fn.args

    # Kernel ABI

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

    def call(self, name: str, args: Sequence[Value]) -> None:
        """Call the function of another kernel with ``args`` (pointers and i64), and with this one's params, tile and scratch."""
        fn = self.module.globals.get(name) or ir.Function(self.module, KERNEL_TYPE, name)
        array = self.alloca(8 * len(args))
        for i, value in enumerate(args):
            self.store(value, self.gep(array, 8 * i))
        self.b.call(fn, [array, *self.args[1:]])

    # Memory

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
        fn = self.intrinsic(f"llvm.masked.load.{suffix(ty)}.p0", ty, [PTR, I32, ir.VectorType(I1, n), ty])
        return self.b.call(fn, [p, self.i32(1), mask, self.const(ty, 0)])

    def store_lanes(self, v: Value, p: Value, mask: Value) -> None:
        """Store the lanes chosen by ``mask``."""
        fn = self.intrinsic(f"llvm.masked.store.{suffix(v.type)}.p0", VOID, [v.type, PTR, I32, mask.type])
        self.b.call(fn, [v, p, self.i32(1), mask])

    def prefetch(self, p: Value, locality: int = 0) -> None:
        fn = self.intrinsic("llvm.prefetch.p0", VOID, [PTR, I32, I32, I32])
        self.b.call(fn, [p, self.i32(0), self.i32(locality), self.i32(1)])

    # Variables and control flow

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

    # Lanes as threads (GPUs)

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
