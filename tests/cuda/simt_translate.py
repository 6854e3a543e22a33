"""PTX instructions to closures ``run(state, index)`` over numpy arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

import simt_ops as ops
from simt_access import MemoryInstructions
from simt_memory import SimtError
from simt_operands import Index, Runs, inside
from simt_parse import Instruction
from simt_warp import WarpInstructions

if TYPE_CHECKING:
    from simt import _Run


class Translator(WarpInstructions, MemoryInstructions):
    """Translates the instructions of one function."""

    def __call__(self, ins: Instruction) -> Runs:
        run = self._plain(ins)
        if not ins.predicate:
            return run
        predicate, negated = ins.predicate, ins.negated

        def guarded(s: _Run, idx: Index) -> None:
            chosen = np.arange(s.n)[idx][s.regs[predicate][idx] != negated]
            if len(chosen):
                run(s, chosen)

        return guarded

    def _plain(self, ins: Instruction) -> Runs:
        parts = ins.opcode.split(".")
        name = parts[0]
        special = getattr(self, f"_{name}", None)
        if special is not None:
            return special(ins, parts)
        type_ = parts[-1]
        long = ".".join(parts[:2])
        name = long if long in ops.BINARY or long in ops.TERNARY else name
        is_float = type_ in ("f16", "f32", "f64")
        table: dict[int, dict[str, Callable[..., Any]]] = {
            2: ops.FLOAT_UNARY if is_float else ops.UNARY,
            3: ops.FLOAT_BINARY if is_float else ops.BINARY,
            4: ops.TERNARY,
        }
        f = table.get(len(ins.operands), {}).get(name)
        if f is None or type_ not in ops.TYPES:
            raise SimtError(f"{self.function.name}: the instruction {ins.text!r} is outside the subset")
        if is_float and name in ("sqrt", "rcp", "div") and "rn" not in parts:
            raise SimtError(f"{self.function.name}: {ins.text!r} is not correctly rounded")
        put = self.put(ins.operands[0])
        types = [type_] * (len(ins.operands) - 1)
        if name in ("shl", "shr"):
            types[1] = "u32"
        if name == "bfe":
            types[1:] = ["u32", "u32"]
        if name == "mad.wide":
            types[2] = type_[0] + str(2 * int(type_[1:]))
        gets = [self.get(o, t) for o, t in zip(ins.operands[1:], types)]
        if len(gets) == 1:
            a = gets[0]
            return lambda s, idx: put(s, idx, f(a(s, idx)))
        if len(gets) == 2:
            a, b = gets
            return lambda s, idx: put(s, idx, f(a(s, idx), b(s, idx)))
        a, b, c = gets
        return lambda s, idx: put(s, idx, f(a(s, idx), b(s, idx), c(s, idx)))

    def _mov(self, ins: Instruction, parts: list[str]) -> Runs:
        to, source = ins.operands
        if source.startswith("{"):
            pieces = [self.get(o, f"u{int(parts[1][1:]) // 2}") for o in inside(source)]
            put, bits = self.put(to), int(parts[1][1:]) // 2
            wide = ops.TYPES[f"u{2 * bits}"]
            return lambda s, idx: put(s, idx, pieces[0](s, idx).astype(wide) | pieces[1](s, idx).astype(wide) << wide(bits))
        if to.startswith("{"):
            get, bits = self.get(source, "u" + parts[1][1:]), int(parts[1][1:]) // 2
            puts = [self.put(o) for o in inside(to)]
            half = ops.TYPES[f"u{bits}"]

            def split(s: _Run, idx: Index) -> None:
                v = get(s, idx)
                puts[0](s, idx, v.astype(half))
                puts[1](s, idx, (v >> v.dtype.type(bits)).astype(half))

            return split
        put, get = self.put(to), self.get(source, parts[1])
        return lambda s, idx: put(s, idx, get(s, idx))

    def _setp(self, ins: Instruction, parts: list[str]) -> Runs:
        type_ = parts[-1]
        put, a, b = self.put(ins.operands[0]), self.get(ins.operands[1], type_), self.get(ins.operands[2], type_)
        return lambda s, idx: put(s, idx, ops.compare(parts[1], a(s, idx), b(s, idx), type_[0] == "f"))

    def _selp(self, ins: Instruction, parts: list[str]) -> Runs:
        put = self.put(ins.operands[0])
        a, b, p = self.get(ins.operands[1], parts[1]), self.get(ins.operands[2], parts[1]), self.get(ins.operands[3], "pred")
        return lambda s, idx: put(s, idx, np.where(p(s, idx), a(s, idx), b(s, idx)))

    def _cvt(self, ins: Instruction, parts: list[str]) -> Runs:
        to, source = parts[-2], parts[-1]
        if to == "f16x2":
            put, high, low = self.put(ins.operands[0]), *(self.get(o, "f32") for o in ins.operands[1:])
            return lambda s, idx: put(s, idx, ops.pack_halves(high(s, idx), low(s, idx)))
        put, get = self.put(ins.operands[0]), self.get(ins.operands[1], source)
        return lambda s, idx: put(s, idx, ops.convert(get(s, idx), to, source, parts[1:-2]))

    def _dp4a(self, ins: Instruction, parts: list[str]) -> Runs:
        put = self.put(ins.operands[0])
        a, b, c = (self.get(o, "u32") for o in ins.operands[1:])
        return lambda s, idx: put(s, idx, ops.dot4(a(s, idx), b(s, idx), c(s, idx), parts[1] == "s32", parts[2] == "s32"))

    def _prmt(self, ins: Instruction, parts: list[str]) -> Runs:
        put = self.put(ins.operands[0])
        a, b, c = (self.get(o, "u32") for o in ins.operands[1:])
        return lambda s, idx: put(s, idx, ops.permute(a(s, idx), b(s, idx), c(s, idx)))
