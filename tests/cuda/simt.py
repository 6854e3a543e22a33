"""A SIMT interpreter for the PTX our kernels consist of.

All threads of many blocks run in lockstep over numpy arrays, a register being one array. Threads that diverge run apart, lowest address
first; the lanes of a warp meet at shuffles and warp barriers. Blocks synchronise at ``bar.sync``. What a GPU would punish is an error:
accesses outside allocations or misaligned, shared memory read before it was written, a barrier or a shuffle that not all its threads reach,
and races (``simt_memory.AccessLog``).

    memory = GlobalMemory();  gpu = Simt(ptx_text, memory)
    gpu.launch("kernel", grid=8, block=128, args=[address, 3, ...])
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import simt_ops as ops
from simt_memory import ATOMIC, BASE, READ, VIEWS, WRITE, AccessLog, GlobalMemory, SimtError
from simt_parse import Function, Instruction, parse

__all__ = ["GlobalMemory", "Simt", "SimtError"]

_RAW = {"%p": np.bool_, "%rs": np.uint16, "%rd": np.uint64, "%r": np.uint32}
_REGISTER = re.compile(r"(%p|%rs|%rd|%rq|%r)(\d+)")
_SPECIAL = re.compile(r"%(tid|ctaid|ntid|nctaid)\.([xyz])")
_END = re.compile(r"^(bra|ret|exit|bar\.sync|barrier\.sync|barrier\.cta\.sync)")
_MEETING = re.compile(r"^(shfl\.sync|bar\.warp|mma\.sync)")
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
        translate = _Translator(function, symbols)
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

    # -- memory ------------------------------------------------------------------------------------------------------

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
        if write == WRITE:
            for i in range(size):
                self.shared_written[at + i] = True
        elif not self.shared_written[at].all():
            raise self.fail("reads shared memory that was never written", idx, int(np.flatnonzero(~self.shared_written[at])[0]))
        self.log(self.logs[1], offset, size, idx, write)
        return at


class _Translator:
    """Instructions to closures ``run(state, index)``."""

    def __init__(self, function: Function, symbols: dict[str, int]) -> None:
        self.function, self.symbols = function, symbols

    def __call__(self, ins: Instruction) -> Callable[[_Run, Index], None]:
        run = self._plain(ins)
        if not ins.predicate:
            return run
        predicate, negated = ins.predicate, ins.negated

        def guarded(s: _Run, idx: Index) -> None:
            chosen = np.arange(s.n)[idx][s.regs[predicate][idx] != negated]
            if len(chosen):
                run(s, chosen)

        return guarded

    # -- operands ----------------------------------------------------------------------------------------------------

    def get(self, operand: str, type_: str) -> Callable[[_Run, Index], Any]:
        """Reader of an operand in the type of the operation."""
        dtype = ops.TYPES[type_]
        found = _REGISTER.fullmatch(operand)
        if found:
            raw = np.dtype(_RAW[found[1]])
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
            value = int(operand, 0)
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
        raw = _RAW[found[1]]
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

    # -- instructions ------------------------------------------------------------------------------------------------

    def _plain(self, ins: Instruction) -> Callable[[_Run, Index], None]:
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

    def _mov(self, ins: Instruction, parts: list[str]) -> Callable[[_Run, Index], None]:
        to, source = ins.operands
        if source.startswith("{"):
            pieces = [self.get(o, f"u{int(parts[1][1:]) // 2}") for o in _inside(source)]
            put, bits = self.put(to), int(parts[1][1:]) // 2
            wide = ops.TYPES[f"u{2 * bits}"]
            return lambda s, idx: put(s, idx, pieces[0](s, idx).astype(wide) | pieces[1](s, idx).astype(wide) << wide(bits))
        if to.startswith("{"):
            get, bits = self.get(source, "u" + parts[1][1:]), int(parts[1][1:]) // 2
            puts = [self.put(o) for o in _inside(to)]
            half = ops.TYPES[f"u{bits}"]

            def split(s: _Run, idx: Index) -> None:
                v = get(s, idx)
                puts[0](s, idx, v.astype(half))
                puts[1](s, idx, (v >> v.dtype.type(bits)).astype(half))

            return split
        put, get = self.put(to), self.get(source, parts[1])
        return lambda s, idx: put(s, idx, get(s, idx))

    def _setp(self, ins: Instruction, parts: list[str]) -> Callable[[_Run, Index], None]:
        type_ = parts[-1]
        put, a, b = self.put(ins.operands[0]), self.get(ins.operands[1], type_), self.get(ins.operands[2], type_)
        return lambda s, idx: put(s, idx, ops.compare(parts[1], a(s, idx), b(s, idx), type_[0] == "f"))

    def _selp(self, ins: Instruction, parts: list[str]) -> Callable[[_Run, Index], None]:
        put = self.put(ins.operands[0])
        a, b, p = self.get(ins.operands[1], parts[1]), self.get(ins.operands[2], parts[1]), self.get(ins.operands[3], "pred")
        return lambda s, idx: put(s, idx, np.where(p(s, idx), a(s, idx), b(s, idx)))

    def _cvt(self, ins: Instruction, parts: list[str]) -> Callable[[_Run, Index], None]:
        to, source = parts[-2], parts[-1]
        put, get = self.put(ins.operands[0]), self.get(ins.operands[1], source)
        return lambda s, idx: put(s, idx, ops.convert(get(s, idx), to, source, parts[1:-2]))

    def _dp4a(self, ins: Instruction, parts: list[str]) -> Callable[[_Run, Index], None]:
        put = self.put(ins.operands[0])
        a, b, c = (self.get(o, "u32") for o in ins.operands[1:])
        return lambda s, idx: put(s, idx, ops.dot4(a(s, idx), b(s, idx), c(s, idx), parts[1] == "s32", parts[2] == "s32"))

    def _prmt(self, ins: Instruction, parts: list[str]) -> Callable[[_Run, Index], None]:
        put = self.put(ins.operands[0])
        a, b, c = (self.get(o, "u32") for o in ins.operands[1:])
        return lambda s, idx: put(s, idx, ops.permute(a(s, idx), b(s, idx), c(s, idx)))

    def _shfl(self, ins: Instruction, parts: list[str]) -> Callable[[_Run, Index], None]:
        kind = parts[2]
        clamp = {"bfly": 31, "up": 0}.get(kind)
        if parts[1] != "sync" or clamp != int(ins.operands[3], 0):
            raise SimtError(f"{self.function.name}: {ins.text!r} is outside the subset")
        put = self.put(ins.operands[0].split("|")[0])
        value, by, members = self.get(ins.operands[1], "u32"), int(ins.operands[2], 0), int(ins.operands[4], 0)

        def run(s: _Run, idx: Index) -> None:
            if members != -1:
                raise s.fail("a shuffle among some lanes is outside the subset")
            whole = np.zeros(s.n, np.uint32)
            whole[idx] = value(s, idx)
            own = np.arange(s.n)[idx]
            other = own ^ by if kind == "bfly" else np.where(own % 32 >= by, own - by, own)
            put(s, idx, whole[other])

        return run

    def _mma(self, ins: Instruction, parts: list[str]) -> Callable[[_Run, Index], None]:
        shape = parts[3] if parts[1:3] == ["sync", "aligned"] else ""
        if shape not in ("m16n8k16", "m16n8k32") or parts[4:] != ["row", "col", "s32", "u8", "s8", "s32"]:
            raise SimtError(f"{self.function.name}: {ins.text!r} is outside the subset")
        puts = [self.put(o) for o in _inside(ins.operands[0])]
        a, b, c = ([self.get(o, "u32") for o in _inside(operand)] for operand in ins.operands[1:])

        def run(s: _Run, idx: Index) -> None:
            words = [np.broadcast_to(get(s, idx), s.log_thread[idx].shape).reshape(-1, 32) for get in (*a, *b, *c)]
            results = ops.mma(words[: len(a)], words[len(a) : len(a) + len(b)], words[len(a) + len(b) :])
            for put, v in zip(puts, results):
                put(s, idx, v.reshape(-1))

        return run

    def _bar(self, ins: Instruction, parts: list[str]) -> Callable[[_Run, Index], None]:
        if parts[1] != "warp":
            raise SimtError(f"{self.function.name}: {ins.text!r} is outside the subset")

        def run(s: _Run, idx: Index) -> None:
            s.warp_epoch[idx] += 1

        return run

    def _ld(self, ins: Instruction, parts: list[str]) -> Callable[[_Run, Index], None]:
        space, type_ = parts[1], parts[-1]
        if space == "param":
            name = ins.operands[1].strip("[]")
            put = self.put(ins.operands[0])
            return lambda s, idx: put(s, idx, np.full(len(s.local_block[idx]), s.args[name], np.uint64))
        to = _inside(ins.operands[0]) if ins.operands[0].startswith("{") else [ins.operands[0]]
        puts = [self.put(o) for o in to]
        address, _ = self.address(ins.operands[1])
        size = np.dtype(ops.TYPES[type_]).itemsize
        view, dtype, count = VIEWS[size], ops.TYPES[type_], len(to)

        def run(s: _Run, idx: Index) -> None:
            where = address(s, idx)
            if space == "global":
                memory, at = s.memory.bytes, s.global_access(where, size * count, idx, READ)
            elif space == "shared":
                memory, at = s.shared, s.shared_access(where, size * count, idx, READ)
            else:
                raise s.fail(f"loads from the {space} space are outside the subset")
            words = memory.view(view)
            first = at // size
            for i, put in enumerate(puts):
                put(s, idx, words[first + i].view(dtype))

        return run

    def _atom(self, ins: Instruction, parts: list[str]) -> Callable[[_Run, Index], None]:
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

    def _st(self, ins: Instruction, parts: list[str]) -> Callable[[_Run, Index], None]:
        space, type_ = parts[1], parts[-1]
        source = _inside(ins.operands[1]) if ins.operands[1].startswith("{") else [ins.operands[1]]
        size = np.dtype(ops.TYPES[type_]).itemsize
        view, count = VIEWS[size], len(source)
        gets = [self.get(o, f"u{8 * size}") for o in source]
        address, _ = self.address(ins.operands[0])

        def run(s: _Run, idx: Index) -> None:
            where = address(s, idx)
            if space == "global":
                memory, at = s.memory.bytes, s.global_access(where, size * count, idx, WRITE)
            elif space == "shared":
                memory, at = s.shared, s.shared_access(where, size * count, idx, WRITE)
            else:
                raise s.fail(f"stores to the {space} space are outside the subset")
            words = memory.view(view)
            first = at // size
            for i, get in enumerate(gets):
                words[first + i] = get(s, idx)

        return run


def _inside(braces: str) -> list[str]:
    return [o.strip() for o in braces.strip("{}").split(",")]
