"""Instructions the lanes of a warp execute together: shuffles, votes, tensor-core products, matrix loads, warp barriers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

import simt_ops as ops
from simt_memory import READ, SimtError
from simt_operands import Index, Operands, Runs, inside
from simt_parse import Instruction

if TYPE_CHECKING:
    from simt import _Run


class WarpInstructions(Operands):
    def _shfl(self, ins: Instruction, parts: list[str]) -> Runs:
        kind = parts[2]
        clamp = {"bfly": 31, "up": 0, "idx": 31}.get(kind)
        if parts[1] != "sync" or clamp != int(ins.operands[3], 0):
            raise SimtError(f"{self.function.name}: {ins.text!r} is outside the subset")
        put = self.put(ins.operands[0].split("|")[0])
        value, distance, members = self.get(ins.operands[1], "u32"), self.get(ins.operands[2], "u32"), int(ins.operands[4], 0)

        def run(s: _Run, idx: Index) -> None:
            if members != -1:
                raise s.fail("a shuffle among some lanes is outside the subset")
            whole = np.zeros(s.n, np.uint32)
            whole[idx] = value(s, idx)
            own, by = np.arange(s.n)[idx], distance(s, idx).astype(np.int64)
            if kind == "idx":
                other = own // 32 * 32 + by % 32
            else:
                other = own ^ by if kind == "bfly" else np.where(own % 32 >= by, own - by, own)
            put(s, idx, whole[other])

        return run

    def _vote(self, ins: Instruction, parts: list[str]) -> Runs:
        if parts[1:] != ["sync", "ballot", "b32"] or int(ins.operands[2], 0) != -1:
            raise SimtError(f"{self.function.name}: {ins.text!r} is outside the subset")
        put, get = self.put(ins.operands[0]), self.get(ins.operands[1], "pred")

        def run(s: _Run, idx: Index) -> None:
            flags = np.broadcast_to(get(s, idx), s.log_thread[idx].shape).reshape(-1, 32)
            masks = (flags.astype(np.uint32) << np.arange(32, dtype=np.uint32)).sum(1, dtype=np.uint32)
            put(s, idx, np.repeat(masks, 32))

        return run

    def _mma(self, ins: Instruction, parts: list[str]) -> Runs:
        shape, types = (parts[3], parts[6:]) if parts[1:3] == ["sync", "aligned"] and parts[4:6] == ["row", "col"] else ("", [])
        multiply = {
            ("m16n8k16", "s32", "u8", "s8", "s32"): ops.mma, ("m16n8k32", "s32", "u8", "s8", "s32"): ops.mma,
            ("m16n8k16", "f32", "f16", "f16", "f32"): ops.mma_f16, ("m16n8k16", "f32", "bf16", "bf16", "f32"): ops.mma_bf16,
        }.get((shape, *types))  # fmt: skip
        if multiply is None:
            raise SimtError(f"{self.function.name}: {ins.text!r} is outside the subset")
        puts = [self.put(o) for o in inside(ins.operands[0])]
        a, b = ([self.get(o, "u32") for o in inside(operand)] for operand in ins.operands[1:3])
        c = [self.get(o, "u32" if types[0] == "s32" else "f32") for o in inside(ins.operands[3])]

        def run(s: _Run, idx: Index) -> None:
            words = [np.broadcast_to(get(s, idx), s.log_thread[idx].shape).reshape(-1, 32) for get in (*a, *b, *c)]
            results = multiply(words[: len(a)], words[len(a) : len(a) + len(b)], words[len(a) + len(b) :])
            for put, v in zip(puts, results):
                put(s, idx, v.reshape(-1))

        return run

    def _ldmatrix(self, ins: Instruction, parts: list[str]) -> Runs:
        """Four 8 x 8 matrices of 16-bit values, transposed; lane 8 i + r points to row r of matrix i."""
        if parts[1:] != ["sync", "aligned", "m8n8", "x4", "trans", "shared", "b16"]:
            raise SimtError(f"{self.function.name}: {ins.text!r} is outside the subset")
        puts = [self.put(o) for o in inside(ins.operands[0])]
        address, _ = self.address(ins.operands[1])
        lane = np.arange(32)

        def run(s: _Run, idx: Index) -> None:
            at = s.shared_access(address(s, idx), 16, idx, READ)
            rows = s.shared.view(np.uint16)[at[:, None] // 2 + np.arange(8)].reshape(-1, 4, 8, 8).astype(np.uint32)
            for i, put in enumerate(puts):
                low, high = (rows[:, i, 2 * (lane % 4) + j, lane // 4] for j in range(2))
                put(s, idx, (low | high << np.uint32(16)).reshape(-1))

        return run

    def _bar(self, ins: Instruction, parts: list[str]) -> Runs:
        if parts[1] != "warp":
            raise SimtError(f"{self.function.name}: {ins.text!r} is outside the subset")

        def run(s: _Run, idx: Index) -> None:
            s.warp_epoch[idx] += 1

        return run
