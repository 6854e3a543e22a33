"""A SIMT interpreter for the PTX our kernels consist of.

All threads of many blocks run in lockstep over numpy arrays, a register being one array. Threads that diverge run apart, lowest address
first; the lanes of a warp meet at shuffles and warp barriers. Blocks synchronise at ``bar.sync``. What a GPU would punish is an error:
accesses outside allocations or misaligned, shared memory read before it was written or while a copy is on its way there
(``simt_copies``), a barrier or a shuffle that not all its threads reach, and races (``simt_memory.AccessLog``). ``simt_translate`` and its
siblings hold the instructions.

    memory = GlobalMemory();  gpu = Simt(ptx_text, memory)
    gpu.launch("kernel", grid=8, block=128, args=[address, 3, ...])
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from simt_copies import Copies
from simt_memory import BASE, WRITE, AccessLog, GlobalMemory, SimtError
from simt_parse import Function, Instruction, parse
from simt_translate import Translator

__all__ = ["GlobalMemory", "Simt", "SimtError"]

_END = re.compile(r"^(bra|ret|exit|bar\.sync|barrier\.sync|barrier\.cta\.sync)")
_MEETING = re.compile(r"^(shfl\.sync|vote\.sync|bar\.warp|mma\.sync|ldmatrix\.sync)")
_BATCH_THREADS = 1 << 14

Index = Any


class Simt:
    """A loaded PTX module over ``memory``. ``races`` off skips the (slower) search for races; ``limit``: instructions after which a launch
    is given up.
    """

    def __init__(self, text: str, memory: GlobalMemory, races: bool = True, limit: int = 2_000_000) -> None:
        self.limit = limit
        self.module = parse(text)
        self.memory, self.races = memory, races
        self.symbols = {name: memory.store(data, name, read_only=True) for name, data in self.module.constants.items()}
        self._programs: dict[str, _Program] = {}
        self.instructions = 0

    def launch(self, name: str, grid: int, block: int, args: Sequence[int]) -> None:
        """Run all blocks; raises SimtError."""
        function = self.module.functions.get(name)
        if function is None:
            raise SimtError(f"there is no kernel {name}")
        if len(args) != len(function.params):
            raise SimtError(f"{name} takes {len(function.params)} arguments, not {len(args)}")
        if not 0 < grid <= 2**31 - 1 or not 0 < block <= 1024 or (function.max_threads and block > function.max_threads):
            raise SimtError(f"{name}: a launch of {grid} blocks of {block} threads is beyond the limits")
        if name not in self._programs:
            self._programs[name] = _Program(function, self.symbols)
        logs = AccessLog("global"), AccessLog("shared")
        step = max(1, _BATCH_THREADS // block)
        with np.errstate(all="ignore"):
            for first in range(0, grid, step):
                run = _Run(self, self._programs[name], args, first, min(step, grid - first), grid, block, logs)
                run.go()
                self.instructions += run.steps
        if self.races:
            self._check_races(name, logs)

    def _check_races(self, name: str, logs: tuple[AccessLog, AccessLog]) -> None:
        written = {int(a) for e in logs[0].entries if e[6] for a in np.unique(self.memory.which(e[0], int(e[1])))}
        kept = [e for e in logs[0].entries if e[6] or written.intersection(np.unique(self.memory.which(e[0], int(e[1]))).tolist())]
        logs[0].entries[:] = kept
        for log, across in zip(logs, (True, False)):
            found = log.check(across)
            if found:
                raise SimtError(f"{name}: {found}")


class _Program:
    """A function cut into straight pieces, each a list of ready closures and its end."""

    def __init__(self, function: Function, symbols: dict[str, int]) -> None:
        self.function, self.symbols = function, symbols
        cuts = {0, *function.labels.values()}
        cuts.update(i + 1 for i, ins in enumerate(function.code) if _END.match(ins.opcode))
        meetings = [i for i, ins in enumerate(function.code) if _MEETING.match(ins.opcode)]
        cuts.update(meetings)
        starts = sorted(c for c in cuts if c < len(function.code))
        self.number = {start: i for i, start in enumerate(starts)}
        self.meets = [start in set(meetings) for start in starts]
        """Pieces that begin with an instruction all lanes of a warp must reach."""
        self.pieces: list[tuple[list[tuple[Instruction, Callable[[_Run, Index], None]]], Instruction | None]] = []
        translate = Translator(function, symbols)
        for start, stop in zip(starts, [*starts[1:], len(function.code)]):
            code = function.code[start:stop]
            end = code[-1] if _END.match(code[-1].opcode) else None
            self.pieces.append(([(ins, translate(ins)) for ins in (code[:-1] if end else code)], end))

    def target(self, label: str) -> int:
        return self.number.get(self.function.labels[label], len(self.pieces))


class _Run:
    """One batch of blocks."""

    def __init__(
        self,
        gpu: Simt,
        program: _Program,
        args: Sequence[int],
        first: int,
        blocks: int,
        grid: int,
        block: int,
        logs: tuple[AccessLog, AccessLog],
    ) -> None:
        self.gpu, self.memory, self.program, self.function = gpu, gpu.memory, program, program.function
        self.args = {name: np.uint64(int(v) % (1 << 64)) for (name, _), v in zip(self.function.params, args)}
        self.n, self.blocks, self.block_size, self.grid, self.first = blocks * block, blocks, block, grid, first
        self.logs = logs
        self.regs: dict[str, np.ndarray] = {}
        thread = np.arange(self.n)
        self.local_block = thread // block
        self.special = {
            "tid": (thread % block).astype(np.uint32), "ctaid": (self.local_block + first).astype(np.uint32),
            "ntid": np.full(self.n, block, np.uint32), "nctaid": np.full(self.n, grid, np.uint32),
        }  # fmt: skip
        self.global_block = self.local_block + first
        self.log_thread = thread % block
        self.epoch = np.zeros(self.n, np.int64)
        self.warp_epoch = np.zeros(self.n, np.int64)
        self.warp = thread // block * (-(-block // 32)) + thread % block // 32
        self.warp_sizes = np.bincount(self.warp)
        size = -(-max(1, self.function.shared_size) // 16) * 16
        self.shared_size = size
        self.shared = np.zeros(blocks * size, np.uint8)
        self.shared_written = np.zeros(blocks * size, bool)
        valid = np.zeros(size, bool)
        for at, length in self.function.shared.values():
            valid[at : at + length] = True
        self.shared_valid = valid
        self.copies = Copies(self)
        self.steps = 0
        self.current: Instruction | None = None

    def fail(self, why: str, idx: Index = None, lane: int = 0) -> SimtError:
        where = ""
        if idx is not None:
            thread = int(np.arange(self.n)[idx][lane])
            where = f", block {thread // self.block_size + self.first}, thread {thread % self.block_size}"
        text = self.current.text if self.current else ""
        return SimtError(f"{self.function.name}: {why} (at {text!r}{where})")

    def go(self) -> None:
        pieces = self.program.pieces
        done = len(pieces)
        pc = np.zeros(self.n, np.int64)
        waiting = np.zeros(self.n, bool)
        everyone: Index = slice(None)
        together: int | None = 0 if not self.program.meets[0] else None
        """The piece all threads are about to run; None where they may differ."""
        while True:
            if together is not None and together < done:
                piece, idx = together, everyone
            else:
                piece, chosen = self._next(np.where(waiting, done, pc), done)
                if piece == done:
                    if (pc == done).all():
                        return
                    raise self._stuck(pc, waiting, done)
                idx = everyone if len(chosen) == self.n else chosen
            code, end = pieces[piece]
            for instruction, run in code:
                self.current = instruction
                run(self, idx)
            self.steps += len(code) + 1
            if self.steps > self.gpu.limit:
                raise self.fail("does not end")
            together = self._finish(piece, end, idx, pc, waiting, done, idx is everyone)

    def _next(self, runnable: np.ndarray, done: int) -> tuple[int, np.ndarray]:
        """The lowest piece some threads can run, and these threads; lanes wait where their warp has to meet."""
        while True:
            piece = int(runnable.min())
            chosen = np.flatnonzero(runnable == piece)
            if piece == done or not self.program.meets[piece]:
                return piece, chosen
            here = np.bincount(self.warp[chosen], minlength=len(self.warp_sizes))
            whole = (here == self.warp_sizes)[self.warp[chosen]]
            if whole.any():
                return piece, chosen[whole]
            runnable[chosen] = done

    def _finish(
        self, piece: int, end: Instruction | None, idx: Index, pc: np.ndarray, waiting: np.ndarray, done: int, everyone: bool
    ) -> int | None:
        """Move the threads that ran a piece on; returns where all threads are if they are at one place."""
        self.current = end
        if end is not None and end.opcode.startswith(("bar", "barrier")):
            if end.predicate:
                raise self.fail("a guarded barrier is outside the subset")
            if everyone:
                self.epoch += 1
                pc[:] = piece + 1
                return piece + 1
            pc[idx] = piece + 1
            waiting[idx] = True
            whole = np.bincount(self.local_block[waiting], minlength=self.blocks) == self.block_size
            self._pass(whole[self.local_block] & waiting, waiting)
            return None
        following, target = piece + 1, piece + 1
        if end is not None:
            target = self.program.target(end.operands[0]) if end.opcode.startswith("bra") else done
        if end is None or not end.predicate:
            pc[idx] = target
            return target if everyone else None
        taken = self.regs[end.predicate][idx] != end.negated
        pc[idx] = np.where(taken, target, following)
        if not everyone:
            return None
        some = taken.any()
        return (target if taken.all() else None) if some else following

    def _pass(self, threads: np.ndarray, waiting: np.ndarray) -> None:
        waiting[threads] = False
        self.epoch[threads] += 1

    def _stuck(self, pc: np.ndarray, waiting: np.ndarray, done: int) -> SimtError:
        """Nothing can run: some barrier, or some meeting of a warp, will never be complete."""
        stopped = waiting if waiting.any() else pc < done
        block = int(self.local_block[stopped][0])
        here = int((stopped & (self.local_block == block)).sum())
        what = "a barrier" if waiting.any() else "a shuffle or warp barrier"
        return SimtError(
            f"{self.function.name}: {here} of {self.block_size} threads of block {block + self.first} wait at {what} the others never reach"
        )

    # Memory

    def log(self, log: AccessLog, address: np.ndarray, size: int, idx: Index, write: int) -> None:
        if self.gpu.races:
            log.add(address, size, self.log_thread[idx], self.global_block[idx], self.epoch[idx].copy(), self.warp_epoch[idx].copy(), write)

    def global_access(self, address: np.ndarray, size: int, idx: Index, write: int) -> np.ndarray:
        """Check and log; returns byte offsets into the memory."""
        which = self.memory.which(address, size)
        if (which < 0).any():
            lane = int(np.flatnonzero(which < 0)[0])
            raise self.fail(
                f"{'writes' if write else 'reads'} {size} bytes at {int(address[lane]):#x}, outside every allocation", idx, lane
            )
        if (address % size).any():
            raise self.fail(f"accesses {size} bytes at a misaligned address", idx, int(np.flatnonzero(address % size)[0]))
        first = self.memory.allocations[int(which[0])]
        read_only = (
            first.read_only if (which == which[0]).all() else any(self.memory.allocations[int(w)].read_only for w in np.unique(which))
        )
        if write and read_only:
            raise self.fail("writes to read-only memory", idx)
        if not read_only or write:
            self.log(self.logs[0], address, size, idx, write)
        return address - BASE

    def shared_access(self, offset: np.ndarray, size: int, idx: Index, write: int) -> np.ndarray:
        if (offset < 0).any() or (offset + size > self.shared_size).any():
            raise self.fail(f"accesses shared memory at byte {int(offset.max())}, outside its {self.shared_size} bytes", idx)
        ends = self.shared_valid[offset] & self.shared_valid[offset + size - 1]
        if not ends.all():
            lane = int(np.flatnonzero(~ends)[0])
            raise self.fail(f"accesses shared memory at byte {int(offset[lane])}, outside every variable", idx, lane)
        if (offset % size).any():
            raise self.fail(f"accesses {size} bytes of shared memory at a misaligned address", idx)
        at = offset + self.local_block[idx] * self.shared_size
        if self.copies.pending:
            met = self.copies.touches(at, size)
            if met.any():
                raise self.fail("touches shared memory that a copy is still on its way to", idx, int(np.flatnonzero(met)[0]))
        if write == WRITE:
            for i in range(size):
                self.shared_written[at + i] = True
        elif not self.shared_written[at].all():
            raise self.fail("reads shared memory that was never written", idx, int(np.flatnonzero(~self.shared_written[at])[0]))
        self.log(self.logs[1], offset, size, idx, write)
        return at
