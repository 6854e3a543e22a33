"""Instructions that touch memory: loads, stores, atomics, and copies that do not wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

import simt_ops as ops
from simt_memory import ATOMIC, READ, VIEWS, WRITE, SimtError
from simt_operands import Index, Operands, Runs, inside
from simt_parse import Instruction

if TYPE_CHECKING:
    from simt import _Run


def _access(s: _Run, space: str, address: np.ndarray, size: int, count: int, idx: Index, write: int) -> tuple[np.ndarray, np.ndarray]:
    """The memory as words of ``size`` bytes, and the first of ``count`` neighbouring ones for each thread; checked and logged."""
    if space == "global":
        memory, at = s.memory.bytes, s.global_access(address, size * count, idx, write)
    elif space == "shared":
        memory, at = s.shared, s.shared_access(address, size * count, idx, write)
    else:
        raise s.fail(f"{'stores to' if write else 'loads from'} the {space} space are outside the subset")
    return memory.view(VIEWS[size]), at // size


class MemoryInstructions(Operands):
    def _ld(self, ins: Instruction, parts: list[str]) -> Runs:
        space, type_ = parts[1], parts[-1]
        if space == "param":
            name = ins.operands[1].strip("[]")
            put = self.put(ins.operands[0])
            return lambda s, idx: put(s, idx, np.full(len(s.local_block[idx]), s.args[name], np.uint64))
        to = inside(ins.operands[0]) if ins.operands[0].startswith("{") else [ins.operands[0]]
        puts = [self.put(o) for o in to]
        address, _ = self.address(ins.operands[1])
        dtype, count = ops.TYPES[type_], len(to)
        size = np.dtype(dtype).itemsize

        def run(s: _Run, idx: Index) -> None:
            words, first = _access(s, space, address(s, idx), size, count, idx, READ)
            for i, put in enumerate(puts):
                put(s, idx, words[first + i].view(dtype))

        return run

    def _atom(self, ins: Instruction, parts: list[str]) -> Runs:
        """Additions of 32-bit integers to shared memory. What they return depends on an order nobody knows, so a pattern is returned."""
        if parts[1:] != ["shared", "add", "u32"]:
            raise SimtError(f"{self.function.name}: {ins.text!r} is outside the subset")
        put, value = self.put(ins.operands[0]), self.get(ins.operands[2], "u32")
        address, _ = self.address(ins.operands[1])

        def run(s: _Run, idx: Index) -> None:
            at = s.shared_access(address(s, idx), 4, idx, ATOMIC)
            np.add.at(s.shared.view(np.uint32), at // 4, value(s, idx))
            put(s, idx, np.uint32(0xA5A5A5A5))

        return run

    def _st(self, ins: Instruction, parts: list[str]) -> Runs:
        space, type_ = parts[1], parts[-1]
        source = inside(ins.operands[1]) if ins.operands[1].startswith("{") else [ins.operands[1]]
        size = np.dtype(ops.TYPES[type_]).itemsize
        count = len(source)
        gets = [self.get(o, f"u{8 * size}") for o in source]
        address, _ = self.address(ins.operands[0])

        def run(s: _Run, idx: Index) -> None:
            words, first = _access(s, space, address(s, idx), size, count, idx, WRITE)
            for i, get in enumerate(gets):
                words[first + i] = get(s, idx)

        return run

    def _cp(self, ins: Instruction, parts: list[str]) -> Runs:
        """``cp.async`` and its groups."""
        kind = parts[2] if parts[1] == "async" else ""
        threads = lambda s, idx: np.arange(s.n)[idx]  # noqa: E731
        if kind == "commit_group":
            return lambda s, idx: s.copies.close(threads(s, idx))
        if kind == "wait_group":
            pending = int(ins.operands[0])
            return lambda s, idx: s.copies.wait(threads(s, idx), pending)
        if parts[3:] != ["shared", "global"] or (kind, ins.operands[2:]) not in [("ca", ("4",)), ("ca", ("8",)), ("cg", ("16",))]:
            raise SimtError(f"{self.function.name}: {ins.text!r} is outside the subset")
        size = int(ins.operands[2])
        (to, _), (source, _) = self.address(ins.operands[0]), self.address(ins.operands[1])

        def run(s: _Run, idx: Index) -> None:
            first = s.global_access(source(s, idx), size, idx, READ)
            offset = to(s, idx)
            at = s.shared_access(offset, size, idx, WRITE)
            s.copies.start(threads(s, idx), offset, at, s.memory.bytes[first[:, None] + np.arange(size)])

        return run
