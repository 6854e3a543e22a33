"""Operands of PTX instructions: closures that read and write registers of the threads that run."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

import simt_ops as ops
from simt_memory import VIEWS, SimtError
from simt_parse import Function

if TYPE_CHECKING:
    from simt import _Run

RAW = {"%p": np.bool_, "%rs": np.uint16, "%rd": np.uint64, "%r": np.uint32}
_REGISTER = re.compile(r"(%p|%rs|%rd|%rq|%r)(\d+)")
_SPECIAL = re.compile(r"%(tid|ctaid|ntid|nctaid)\.([xyz])")

Index = Any
Runs = Callable[["_Run", Index], None]


def inside(braces: str) -> list[str]:
    """The operands in braces."""
    return [o.strip() for o in braces.strip("{}").split(",")]


class Operands:
    """Operands of one function; ``symbols`` are the addresses of constants."""

    def __init__(self, function: Function, symbols: dict[str, int]) -> None:
        self.function, self.symbols = function, symbols

    def get(self, operand: str, type_: str) -> Callable[[_Run, Index], Any]:
        """Reader of an operand in the type of the operation."""
        dtype = ops.TYPES[type_]
        found = _REGISTER.fullmatch(operand)
        if found:
            raw = np.dtype(RAW[found[1]])
            if raw.itemsize == np.dtype(dtype).itemsize or dtype is np.bool_:
                return lambda s, idx: s.regs[operand][idx].view(dtype)
            narrow = {1: np.uint8, 2: np.uint16, 4: np.uint32}[np.dtype(dtype).itemsize]
            return lambda s, idx: s.regs[operand][idx].astype(narrow).view(dtype)
        found = _SPECIAL.fullmatch(operand)
        if found:
            axis, one = found[1], found[2] == "x"
            fixed = 0 if axis in ("tid", "ctaid") else 1
            return lambda s, idx: s.special[axis][idx] if one else np.full(len(s.special[axis][idx]), fixed, np.uint32)
        value = self.constant(operand, dtype)
        return lambda s, idx: value

    def constant(self, operand: str, dtype: Any) -> Any:
        if operand.startswith("0f"):
            return np.array([int(operand[2:], 16)], np.uint32).view(np.float32).view(dtype)
        if operand.startswith("0d"):
            return np.array([int(operand[2:], 16)], np.uint64).view(np.float64).view(dtype)
        if operand in self.function.shared:
            return np.array([self.function.shared[operand][0]], dtype)
        if operand in self.symbols:
            return np.array([self.symbols[operand]], dtype)
        try:
            value = int(operand.removesuffix("U"), 0)
        except ValueError:
            raise SimtError(f"{self.function.name}: the operand {operand!r} is outside the subset") from None
        if dtype is np.bool_:
            return np.array([bool(value)])
        if dtype in (np.float32, np.float64, np.float16):
            return np.array([value], dtype)
        bits = 8 * np.dtype(dtype).itemsize
        return (
            np.array([value % (1 << bits)], np.uint64)
            .astype({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[bits // 8])
            .view(dtype)
        )

    def put(self, operand: str) -> Callable[[_Run, Index, Any], None]:
        """Writer of a register; narrower values are extended by their own sign."""
        if operand == "_":
            return lambda s, idx, v: None
        found = _REGISTER.fullmatch(operand)
        if not found:
            raise SimtError(f"{self.function.name}: cannot write to {operand!r}")
        raw = RAW[found[1]]
        size = np.dtype(raw).itemsize
        signed = ops.SIGNED.get(raw)

        def store(s: _Run, idx: Index, v: Any) -> None:
            reg = s.regs.get(operand)
            if reg is None:
                reg = s.regs[operand] = np.zeros(s.n, raw)
            v = np.asarray(v)
            if raw is np.bool_:
                reg[idx] = v
            elif v.dtype.itemsize == size:
                reg[idx] = v.view(raw) if v.ndim else v.reshape(1).view(raw)
            elif v.dtype.kind == "i":
                reg[idx] = v.astype(signed).view(raw)
            else:
                reg[idx] = v.view(VIEWS[v.dtype.itemsize]).astype(raw)

        return store

    def address(self, operand: str) -> tuple[Callable[[_Run, Index], np.ndarray], str]:
        """Reader of ``[base+offset]`` as i64, and the base's name."""
        base, _, offset = operand.strip("[]").partition("+")
        add = np.int64(int(offset)) if offset else np.int64(0)
        if _REGISTER.fullmatch(base):
            read = self.get(base, "s64" if base.startswith("%rd") else "u32")
            return lambda s, idx: read(s, idx).astype(np.int64) + add, base
        fixed = int(self.constant(base, np.int64)[0]) + int(add)
        return lambda s, idx: np.full(len(s.local_block[idx]), fixed, np.int64), base
