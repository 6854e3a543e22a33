"""The shared emitter on a GPU: one thread's code, with blocks for tiles and threads for lanes.

A kernel is

    kernel(arg 0, ..., arg n-1, params, extra, first, tiles)

with 64-bit words: the arguments of the schedule, the device address of the graph's symbols, the address of extra device memory (attention's
partial results), the first token of a slice (attention again; 0 elsewhere) and the number of tiles. Blocks are one-dimensional and each
takes tiles ``ctaid, ctaid + nctaid, ...``, so a grid of any size computes all tiles and no limit of the hardware can be exceeded.

A block consists of *groups* of ``group`` threads (a warp, the whole block, or one thread). Kernels written for CPU vectors give each group
a row
(``for_groups``) and each thread of it every ``group``-th value (``for_lanes``); ``reduce`` adds up a group in a fixed order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from llvmlite import ir

from ggufc.codegen.emitter import F32, F64, I1, I8, I32, I64, PTR, VOID, Emitter, Value, vec
from ggufc.codegen.errors import CodegenError

from .target import PtxTarget

WARP = 32
GLOBAL_PTR = ir.PointerType(addrspace=1)
SHARED = 3
SHARED_PTR = ir.PointerType(addrspace=SHARED)
_FULL = -1  # every lane of the warp takes part in a shuffle


class PtxEmitter(Emitter):
    """Emits one kernel of ``block`` threads in groups of ``group``; ``finish`` closes it.

    ``n_args``: arguments of the schedule. Bodies run once per tile; ``ret`` ends a tile, not the kernel.
    """

    spmd = True

    def __init__(self, module: ir.Module, target: PtxTarget, name: str, n_args: int, block: int, group: int = WARP) -> None:
        self.module, self.block, self.group = module, block, group
        self.target = target  # type: ignore[assignment]
        self.n_args = n_args
        self.fn = ir.Function(module, ir.FunctionType(VOID, [I64] * (n_args + 4)), name)
        self.fn.calling_convention = "ptx_kernel"
        self.args = self.fn.args
        entry = self.fn.append_basic_block("entry")
        self.b = ir.IRBuilder(entry)
        self._special: dict[str, Value] = {}
        self._shared_used = False
        self.thread = self._sreg("tid.x")
        self.lane = self.b.and_(self.thread, self.i64(group - 1)) if group < block else self.thread
        self.group_index = self.b.lshr(self.thread, self.i64(group.bit_length() - 1)) if group < block else self.i64(0)
        self._params = self._pointer(self.args[n_args])
        self._tiles_left: Value = self.args[n_args + 3]
        self._first, self._step = self._sreg("ctaid.x"), self._sreg("nctaid.x")
        self._exchange: Value | None = None
        self._alone = group == 1
        self._loop_done = self._loop_head = None
        self._tile: Value | None = None
        body = self.fn.append_basic_block("begin")
        self.b.branch(body)
        self.b.position_at_end(body)

    # Tiles

    def begin_tiles(self, count: Value | None = None) -> None:
        """Open the loop over the block's tiles; ``count`` replaces the launch's number of tiles."""
        head, body, done = (self.fn.append_basic_block(f"tiles.{name}") for name in ("head", "body", "done"))
        before = self.b.block
        self.b.branch(head)
        self.b.position_at_end(head)
        tile = self.b.phi(I64, name="tile")
        tile.add_incoming(self._first, before)
        self.b.cbranch(self.b.icmp_signed("<", tile, self._tiles_left if count is None else count), body, done)
        self.b.position_at_end(body)
        self._tile, self._loop_head, self._loop_done = tile, head, done

    def finish(self) -> None:
        """Close the loop over tiles and the kernel."""
        if self._tile is None:
            raise CodegenError(f"internal: kernel {self.fn.name} has no tiles")
        if self._shared_used:
            self.barrier()  # the next tile overwrites what slower threads may still read
        following = self.b.add(self._tile, self._step)
        self._tile.add_incoming(following, self.b.block)
        self.b.branch(self._loop_head)
        self.b.position_at_end(self._loop_done)
        self.b.ret_void()

    @property
    def tile(self) -> Value:
        return self._tile

    @property
    def scratch(self) -> Value:
        raise CodegenError(f"internal: kernel {self.fn.name} asks for a thread's scratch memory, which GPUs do not have")

    def ret(self) -> None:
        """The end of a tile's body; ``finish`` closes the kernel."""

    # Kernel ABI

    def _pointer(self, word: Value) -> Value:
        """A generic address that the optimiser knows to be global."""
        return self.b.addrspacecast(self.b.inttoptr(word, GLOBAL_PTR), PTR)

    def arg_ptr(self, i: int) -> Value:
        return self._pointer(self.args[i])

    def arg_int(self, i: int) -> Value:
        return self.args[i]

    @property
    def extra(self) -> Value:
        """Extra device memory of the launch."""
        return self._pointer(self.args[self.n_args + 1])

    @property
    def first(self) -> Value:
        """First token of the slice this launch computes."""
        return self.args[self.n_args + 2]

    def param(self, symbol: str) -> Value:
        from ggufc.formats.abi import PARAMS

        return self.load(I64, self.gep(self._params, 8 * PARAMS.index(symbol)))

    def _sreg(self, name: str) -> Value:
        fn = self.intrinsic(f"llvm.nvvm.read.ptx.sreg.{name}", I32, [])
        return self.b.zext(self.b.call(fn, []), I64)

    # Threads

    @contextmanager
    def for_lanes(self, n: Value | int) -> Iterator[Value]:
        """0..n-1 over the threads of a group."""
        with self.strided(self.lane, n, self.group) as i:
            yield i

    @contextmanager
    def for_groups(self, start: Value, stop: Value, name: str = "row") -> Iterator[Value]:
        """start..stop-1 over the groups of the block; every thread of a group sees the same index."""
        with self.strided(self.b.add(start, self.group_index), stop, self.block // self.group, name) as i:
            yield i

    @contextmanager
    def for_threads(self, n: Value | int) -> Iterator[Value]:
        """0..n-1 over the threads of the block."""
        with self.strided(self.thread, n, self.block) as i:
            yield i

    @contextmanager
    def strided(self, start: Value, stop: Value | int, step: int, name: str = "i") -> Iterator[Value]:
        with self.for_range(start, stop, step, name) as i:
            yield i

    @contextmanager
    def one_lane(self) -> Iterator[None]:
        """Only the first thread of a group: results every thread of it holds are stored once."""
        with self.if_(self.b.icmp_signed("==", self.lane, self.i64(0))):
            yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, every thread works for itself: ``reduce`` is over the single value it has."""
        before, self._alone = self._alone, True
        yield
        self._alone = before

    def barrier(self) -> None:
        """All threads of the block; must not be reached by some of them only."""
        self.b.call(self.intrinsic("llvm.nvvm.barrier.cta.sync.aligned.all", VOID, [I32]), [self.i32(0)])

    def group_barrier(self) -> None:
        """Order memory among the threads of a group."""
        if self.group == 1:
            return
        if self.group == WARP:
            self.b.call(self.intrinsic("llvm.nvvm.bar.warp.sync", VOID, [I32]), [self.i32(_FULL)])
        else:
            self.barrier()

    def shared(self, size: int, name: str, align: int = 16) -> Value:
        """``size`` bytes of the block's shared memory."""
        array = ir.ArrayType(I8, size)
        g = ir.GlobalVariable(self.module, array, f"{name}_{self.fn.name}", addrspace=SHARED)
        g.linkage = "internal"
        g.initializer = ir.Constant(array, ir.Undefined)
        g.align = align
        self._shared_used = True
        with self.b.goto_entry_block():
            return self.b.addrspacecast(g, PTR)

    def global_const(self, element: ir.Type, values: Sequence[float | int], name: str) -> Value:
        if name not in self.module.globals:
            ty = ir.ArrayType(element, len(values))
            g = ir.GlobalVariable(self.module, ty, name, addrspace=1)
            g.initializer = ir.Constant(ty, list(values))
            g.global_constant = True
            g.linkage = "internal"
            g.align = 16
        return self.b.addrspacecast(self.module.globals[name], PTR)

    # Exchange between threads

    def shuffle_xor(self, v: Value, mask: int) -> Value:
        """The value of the lane whose number differs by ``mask``; f32, i32, f64 or i64."""
        b = self.b
        if v.type in (F64, I64):
            bits = b.bitcast(v, I64) if v.type == F64 else v
            low, high = b.trunc(bits, I32), b.trunc(b.lshr(bits, self.i64(32)), I32)
            low, high = self.shuffle_xor(low, mask), self.shuffle_xor(high, mask)
            joined = b.or_(b.zext(low, I64), b.shl(b.zext(high, I64), self.i64(32)))
            return b.bitcast(joined, F64) if v.type == F64 else joined
        kind = "f32" if v.type == F32 else "i32"
        fn = self.intrinsic(f"llvm.nvvm.shfl.sync.bfly.{kind}", v.type, [I32, v.type, I32, I32])
        return b.call(fn, [self.i32(_FULL), v, self.i32(mask), self.i32(31)])

    def shuffle_up(self, v: Value, distance: int) -> Value:
        """The i32 of the lane ``distance`` before this one; the first lanes get their own."""
        fn = self.intrinsic("llvm.nvvm.shfl.sync.up.i32", I32, [I32] * 4)
        return self.b.call(fn, [self.i32(_FULL), v, self.i32(distance), self.i32(0)])

    def shuffle_from(self, v: Value, lane: Value) -> Value:
        """The f32 of the lane numbered ``lane`` (i64)."""
        fn = self.intrinsic("llvm.nvvm.shfl.sync.idx.f32", F32, [I32, F32, I32, I32])
        return self.b.call(fn, [self.i32(_FULL), v, self.b.trunc(lane, I32), self.i32(31)])

    def ballot(self, flag: Value) -> Value:
        """An i32 whose bit l is the i1 of lane l; all lanes of the warp together."""
        fn = self.intrinsic("llvm.nvvm.vote.ballot.sync", I32, [I32, I1])
        return self.b.call(fn, [self.i32(_FULL), flag])

    def atomic_add(self, p: Value, v: Value) -> None:
        """Add an integer to shared memory, other threads of the block doing the same: sums of integers have no order."""
        self.b.atomic_rmw("add", p, v, "monotonic")

    def combine(self, a: Value, c: Value, op: str) -> Value:
        """``add`` or ``max`` of two values of any scalar type."""
        if isinstance(a.type, ir.IntType):
            return self.b.add(a, c) if op == "add" else self.b.select(self.b.icmp_signed(">", a, c), a, c)
        return self.b.fadd(a, c) if op == "add" else self.fmax(a, c)

    def reduce_warp(self, v: Value, op: str, width: int = WARP) -> Value:
        """Over each run of ``width`` lanes, by a butterfly; every lane gets the same bits, since a + b = b + a."""
        step = width // 2
        while step:
            v = self.combine(v, self.shuffle_xor(v, step), op)
            step //= 2
        return v

    def reduce(self, v: Value, op: str) -> Value:
        """Over the threads of a group; the result is in all of them."""
        if self._alone:
            return v
        v = self.reduce_warp(v, op)
        if self.group == WARP:
            self.group_barrier()  # what the group has read may be overwritten from here on, as with the block's barrier below
            return v
        b, warps = self.b, self.group // WARP
        size = 8 if v.type in (F64, I64) else 4
        if self._exchange is None:
            self._exchange = self.shared(8 * warps, "exchange")
        with self.if_(b.icmp_signed("==", b.and_(self.thread, self.i64(WARP - 1)), self.i64(0))):
            self.store(v, self.at(self._exchange, b.lshr(self.thread, self.i64(5)), size))
        self.barrier()
        parts = [self.load(v.type, self.gep(self._exchange, size * w)) for w in range(warps)]
        self.barrier()
        while len(parts) > 1:
            half = len(parts) // 2
            parts = [self.combine(parts[i], parts[i + half], op) for i in range(half)]
        return parts[0]

    # Values

    def shuffle(self, a: Value, c: Value | None, lanes: Sequence[int]) -> Value:
        """Of single values: the one the only lane picks."""
        lanes = list(lanes)
        if isinstance(a.type, ir.VectorType) or len(lanes) != 1:
            return super().shuffle(a, c, lanes)
        return a if lanes[0] == 0 else c

    def store_masked(self, v: Value, p: Value, count: int) -> None:
        """A thread's single value; ``count`` is 1."""
        self.store(v, p)

    def dot4(self, acc: Value, u: Value, s: Value, u_max: int = 255) -> Value:
        """``dp4a`` of unsigned bytes ``u`` and signed bytes ``s``."""
        return self.b.call(self.intrinsic("llvm.nvvm.idp4a.u.s", I32, [I32] * 3), [u, s, acc])

    def mma_u8_s8(self, a: Sequence[Value], b: Sequence[Value], c: Sequence[Value]) -> list[Value]:
        """Tensor-core product of 16 rows of unsigned bytes and 8 columns of signed ones, added to ``c``; all lanes of the warp together.

        32 bytes deep with four words of ``a`` and two of ``b``, 16 deep with two and one. Lane l holds, with g = l / 4 and t = l % 4: in
        ``a`` bytes 4t.. of rows g and g + 8 (then the same 16 further on), in ``b`` bytes 4t.. of column g (then 16 further on), and of the
        result columns 2t and 2t + 1 of rows g and g + 8.
        """
        shape = "m16n8k32" if len(b) == 2 else "m16n8k16"
        words = [*a, *b, *c]
        result = ir.LiteralStructType([I32] * 4)
        fn = self.intrinsic(f"llvm.nvvm.mma.{shape}.row.col.u8.s8", result, [I32] * len(words))
        got = self.b.call(fn, words)
        return [self.b.extract_value(got, i) for i in range(4)]

    def mma_16bit(self, kind: str, a: Sequence[Value], b: Sequence[Value], c: Sequence[Value]) -> list[Value]:
        """Tensor-core product of 16 rows and 8 columns of ``kind`` (``f16`` or ``bf16``), 16 deep, added to ``c`` in f32.

        Words hold two values. Lane l, with g = l / 4 and t = l % 4, has in ``a`` values 2t, 2t + 1 of rows g and g + 8, then of the same
        rows eight further on; in ``b`` values 2t, 2t + 1 of column g, then eight further on; of the result what ``mma_u8_s8`` says.
        """
        result = ir.LiteralStructType([F32] * 4)
        if kind == "f16":
            pair = ir.VectorType(ir.HalfType(), 2)
            words = [self.b.bitcast(w, pair) for w in (*a, *b)]
            fn = self.intrinsic("llvm.nvvm.mma.m16n8k16.row.col.f32.f32", result, [pair] * 6 + [F32] * 4)
        else:
            words = [*a, *b]
            fn = self.intrinsic("llvm.nvvm.mma.m16n8k16.row.col.bf16", result, [I32] * 6 + [F32] * 4)
        got = self.b.call(fn, [*words, *c])
        return [self.b.extract_value(got, i) for i in range(4)]

    def load_matrices_transposed(self, p: Value) -> list[Value]:
        """``ldmatrix``: four matrices of 8 x 8 16-bit values from shared memory. Lane l gives the address of row l % 8 of matrix l / 8 and
        gets, of each matrix, rows 2t and 2t + 1 of column g.
        """
        result = ir.LiteralStructType([I32] * 4)
        fn = self.intrinsic("llvm.nvvm.ldmatrix.sync.aligned.m8n8.x4.trans.b16.p3", result, [SHARED_PTR])
        got = self.b.call(fn, [self.b.addrspacecast(p, SHARED_PTR)])
        return [self.b.extract_value(got, i) for i in range(4)]

    # Copies that do not wait

    def copy_async(self, to: Value, source: Value, size: int) -> None:
        """Start copying ``size`` bytes (4, 8 or 16, aligned) from global to shared memory; past the first-level cache where 16."""
        name = f"llvm.nvvm.cp.async.{'cg' if size == 16 else 'ca'}.shared.global.{size}"
        fn = self.intrinsic(name, VOID, [SHARED_PTR, GLOBAL_PTR])
        self.b.call(fn, [self.b.addrspacecast(to, SHARED_PTR), self.b.addrspacecast(source, GLOBAL_PTR)])

    def close_copies(self) -> None:
        """The copies this thread started since the last call are one group, which may be empty."""
        self.b.call(self.intrinsic("llvm.nvvm.cp.async.commit.group", VOID, []), [])

    def await_copies(self, pending: int = 0) -> None:
        """Wait until at most ``pending`` of this thread's groups are on their way; others see what arrived after a barrier."""
        self.b.call(self.intrinsic("llvm.nvvm.cp.async.wait.group", VOID, [I32]), [self.i32(pending)])

    def pack_halves(self, low: Value, high: Value) -> Value:
        """Two f32, rounded to f16, in one word."""
        pair = ir.VectorType(ir.HalfType(), 2)
        return self.b.bitcast(self.b.call(self.intrinsic("llvm.nvvm.ff2f16x2.rn", pair, [F32, F32]), [high, low]), I32)

    def permute_bytes(self, a: Value, c: Value, selector: Value) -> Value:
        """``prmt``: four bytes of the eight in (a, c), chosen by the low nibbles of ``selector``."""
        return self.b.call(self.intrinsic("llvm.nvvm.prmt", I32, [I32] * 3), [a, c, selector])

    def lookup16(self, quad: Value, table: Sequence[int]) -> Value:
        """Replace every byte 0..15 of ``quad`` by ``table[byte]``."""
        b = self.b
        words = [sum((table[4 * i + j] & 0xFF) << 8 * j for j in range(4)) for i in range(4)]
        t = [self.i32(w - (1 << 32) if w >> 31 else w) for w in words]
        x = b.and_(b.or_(quad, b.lshr(quad, self.i32(4))), self.i32(0x00FF00FF))
        nibbles = b.or_(x, b.lshr(x, self.i32(8)))
        low = b.and_(nibbles, self.i32(0x7777))
        upper = b.lshr(b.and_(nibbles, self.i32(0x8888)), self.i32(1))
        return self.permute_bytes(self.permute_bytes(t[0], t[1], low), self.permute_bytes(t[2], t[3], low), b.or_(upper, self.i32(0x3210)))

    def vector_load(self, element: ir.Type, n: int, p: Value, align: int) -> list[Value]:
        """``n`` adjacent values by one load."""
        v = self.load(vec(element, n), p, align)
        return [self.b.extract_element(v, self.i32(i)) for i in range(n)]

    def vector_store(self, values: Sequence[Value], p: Value, align: int) -> None:
        v: Value = ir.Constant(ir.VectorType(values[0].type, len(values)), ir.Undefined)
        for i, x in enumerate(values):
            v = self.b.insert_element(v, x, self.i32(i))
        self.store(v, p, align)
