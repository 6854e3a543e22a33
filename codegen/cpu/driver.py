"""The generated driver functions: a thread team that runs a launch table.

``ggufc_eval(pool, exec)`` publishes one evaluation and takes part in it; ``ggufc_worker(pool, tid)`` is entered once per worker thread
and returns when the pool stops. Each launch's tiles are dealt out in shares, the same thread getting the same share every time: data
stays with the core that made it, and claiming a tile of one's own share touches no line that another core writes. A thread that has
waited for a moment takes tiles from the shares of others. Tiles are claimed with compare-and-swap on words that carry the evaluation's
epoch, so a late thread can neither take nor repeat a tile of a later evaluation. A launch is complete when all its tiles are *done*, not
when all threads have arrived. Word offsets: ``formats/abi.py``.
"""

from __future__ import annotations

from llvmlite import ir

from ggufc.codegen.emitter import I8, I32, I64, KERNEL_TYPE, PTR, VOID, Emitter, Value
from ggufc.formats import abi

from .target import Target

WORKER, EVAL = "ggufc_worker", "ggufc_eval"
_RUN = "ggufc_run"
_TEAM_TYPE = ir.FunctionType(VOID, [PTR, I64])
_SHARE = "ggufc_share"
_SPINS_IN_LAUNCH = 400
_SPINS_BEFORE_HELP = 16
"""About as long as a message takes between two cores."""
_SPINS_IDLE = 60000
_SYS_FUTEX, _SYS_SCHED_YIELD = 202, 24
_LOW = 0xFFFFFFFF
_FUTEX_WAIT_PRIVATE, _FUTEX_WAKE_PRIVATE = 128, 129


def emit_driver(module: ir.Module, target: Target) -> None:
    """Define the driver functions, and the memory helpers LLVM may call, in ``module``."""
    _emit_memset(module, target)
    _emit_memcpy(module, target)
    _emit_share(module, target)
    _emit_run(module, target)
    _emit_worker(module, target)
    _emit_eval(module, target)


def _word(e: Emitter, base: Value, index: int) -> Value:
    return e.gep(base, 8 * index)


def _atomic_load(e: Emitter, p: Value, ordering: str = "acquire") -> Value:
    return e.b.load_atomic(p, ordering, 8, typ=I64)


def _atomic_store(e: Emitter, v: Value, p: Value, ordering: str = "release") -> None:
    # IRBuilder.store_atomic asks an opaque pointer for its pointee.
    e.b._insert(ir.instructions.StoreAtomicInstr(e.b.block, v, p, ordering, 8))


def _syscall(e: Emitter, number: int, a: Value, b: Value, c: Value, d: Value) -> None:
    """Linux system call with four arguments; the result is not needed."""
    if e.target.is_arm:
        number = {_SYS_FUTEX: 98, _SYS_SCHED_YIELD: 124}[number]
        call = e.global_const(I32, _ARM_SYSCALL, "syscall")
        e.b.call(_TypedPointer(call, ir.FunctionType(VOID, [I64] * 5)), [a, b, c, d, e.i64(number)])
        return
    asm = ir.InlineAsm(
        ir.FunctionType(I64, [I64] * 5), "syscall", "={rax},{rax},{rdi},{rsi},{rdx},{r10},~{rcx},~{r11},~{memory}", side_effect=True
    )
    e.b.call(asm, [e.i64(number), a, b, c, d])


_ARM_SYSCALL = (0xAA0403E8, 0xD4000001, 0xD65F03C0)
"""``mov x8, x4; svc #0; ret`` as a table of words: llvmlite on x86 has no assembler for AArch64, and the whole image is executable."""


def _pause(e: Emitter) -> None:
    if e.target.is_arm:
        e.b.call(e.intrinsic("llvm.aarch64.hint", VOID, [I32]), [e.i32(1)])
    else:
        e.b.call(e.intrinsic("llvm.x86.sse2.pause", VOID, []), [])


def _cycles(e: Emitter) -> Value:
    """A counter that runs evenly; the cycle counter of AArch64 is the kernel's own, so its timer serves."""
    return e.b.call(e.intrinsic("llvm.readsteadycounter" if e.target.is_arm else "llvm.readcyclecounter", I64, []), [])


def _futex(e: Emitter, p: Value, op: int, value: Value) -> None:
    _syscall(e, _SYS_FUTEX, e.b.ptrtoint(p, I64), e.i64(op), value, e.i64(0))


def _emit_share(module: ir.Module, target: Target) -> None:
    """``ggufc_share(exec, launch, whose, threads, epoch, scratch)``: run what is left of a thread's share of a launch.

    Returns the number of tiles run, or -1 where a later evaluation has begun.
    """
    e = Emitter(module, target, _SHARE, ir.FunctionType(I64, [PTR, I64, I64, I64, I64, PTR]))
    b = e.b
    e.fn.linkage = "internal"
    record, i, whose, threads, epoch, scratch = e.args
    stale = e.i64(-1)
    told = _atomic_load(e, e.at(e.load(PTR, _word(e, record, abi.EXEC_TILES)), i, 8))
    with e.if_(b.icmp_unsigned("!=", b.lshr(told, e.i64(32)), epoch), likely=False):
        b.ret(stale)
    tiles = b.and_(told, e.i64(_LOW))
    each, more = b.udiv(tiles, threads), b.urem(tiles, threads)
    size = b.add(each, b.zext(b.icmp_unsigned("<", whose, more), I64))
    stop = b.add(b.add(b.mul(whose, each), e.imin(whose, more)), size)
    with e.if_(b.icmp_unsigned("==", size, e.i64(0))):
        b.ret(e.i64(0))
    n = e.load(I64, _word(e, record, abi.EXEC_N_LAUNCHES))
    claim = e.at(e.load(PTR, _word(e, record, abi.EXEC_CLAIMS)), b.add(b.mul(whose, n), i), 8 * abi.CLAIM_WORDS)
    entry = e.at(e.load(PTR, _word(e, record, abi.EXEC_LAUNCHES)), i, 8 * abi.LAUNCH_WORDS)
    kernel = e.load(PTR, _word(e, entry, abi.LAUNCH_FN))
    args = e.load(PTR, _word(e, entry, abi.LAUNCH_ARGS))
    params = e.load(PTR, _word(e, record, abi.EXEC_PARAMS))
    high = b.shl(epoch, e.i64(32))
    count = e.var(I64, e.i64(0))
    with e.while_loop("claim") as loop:
        seen = _atomic_load(e, claim)
        ahead = b.trunc(b.sub(b.lshr(seen, e.i64(32)), epoch), I32)
        with e.if_(b.icmp_signed(">", ahead, e.i32(0)), likely=False):
            b.ret(stale)
        # Every word of a complete evaluation has its epoch, so nobody late can take an earlier one for a whole share.
        left = b.select(b.icmp_unsigned("==", ahead, e.i32(0)), b.and_(seen, e.i64(_LOW)), size)
        loop.break_if(b.icmp_unsigned("==", left, e.i64(0)))
        swapped = b.cmpxchg(claim, seen, b.or_(high, b.sub(left, e.i64(1))), "acq_rel", "monotonic")
        loop.continue_if(b.not_(b.extract_value(swapped, 1)))
        b.call(_TypedPointer(kernel), [args, params, b.sub(stop, left), scratch])
        count.set(b.add(count.get(), e.i64(1)))
    b.ret(count.get())


def _emit_run(module: ir.Module, target: Target) -> None:
    """``ggufc_run(pool, tid, exec, epoch)``: one thread's part of one evaluation."""
    e = Emitter(module, target, _RUN, ir.FunctionType(VOID, [PTR, I64, PTR, I64]))
    b = e.b
    e.fn.linkage = "internal"
    pool, tid, record, epoch = e.args
    n = e.load(I64, _word(e, record, abi.EXEC_N_LAUNCHES))
    launches = e.load(PTR, _word(e, record, abi.EXEC_LAUNCHES))
    counters = e.load(PTR, _word(e, record, abi.EXEC_COUNTERS))
    tiles = e.load(PTR, _word(e, record, abi.EXEC_TILES))
    profile = e.load(PTR, _word(e, record, abi.EXEC_PROFILE))
    profiling = b.and_(b.icmp_unsigned("!=", b.ptrtoint(profile, I64), e.i64(0)), b.icmp_signed("==", tid, e.i64(0)))
    threads = e.load(I64, _word(e, pool, abi.POOL_THREADS))
    stride = e.load(I64, _word(e, pool, abi.POOL_SCRATCH_STRIDE))
    scratch = e.gep(e.load(PTR, _word(e, pool, abi.POOL_SCRATCH)), b.mul(tid, stride))
    stale = e.var(I8, ir.Constant(I8, 0))

    def done_word(i: Value) -> Value:
        return _word(e, e.at(counters, i, 8 * abi.COUNTER_WORDS), abi.COUNTER_DONE)

    patience, helped = e.var(I64, e.i64(_SPINS_BEFORE_HELP)), e.var(I64, e.i64(0))

    def share(i: Value, whose: Value) -> None:
        """Run what is left of a share and say so; sets ``stale`` when another evaluation has begun."""
        count = b.call(module.globals[_SHARE], [record, i, whose, threads, epoch, scratch])
        with e.if_(b.icmp_signed("<", count, e.i64(0)), likely=False):
            stale.set(ir.Constant(I8, 1))
        with e.if_(b.icmp_signed(">", count, e.i64(0))):
            b.atomic_rmw("add", done_word(i), count, "release")
            helped.set(e.i64(1))

    def is_stale() -> Value:
        return b.icmp_unsigned("!=", stale.get(), ir.Constant(I8, 0))

    def wait(first: Value, last: Value) -> None:
        """Until launches [first, last) are done, with a hand in them where they take long: at once where the wait before found work, as a
        thread that has no core leaves its share of every launch.
        """
        helped.set(e.i64(0))
        with e.for_range(first, last, name="dep") as j:
            spins, due = e.var(I64, e.i64(0)), e.var(I64, patience.get())
            with e.while_loop("spin") as loop:
                done = _atomic_load(e, done_word(j))
                loop.break_if(b.icmp_unsigned("==", done, _atomic_load(e, e.at(tiles, j, 8))))
                with e.if_(b.icmp_unsigned("!=", b.lshr(done, e.i64(32)), epoch), likely=False):
                    stale.set(ir.Constant(I8, 1))
                loop.break_if(is_stale())
                spins.set(b.add(spins.get(), e.i64(1)))
                _pause(e)
                with e.if_(b.icmp_signed(">=", spins.get(), due.get()), likely=False):
                    due.set(b.add(spins.get(), e.i64(_SPINS_BEFORE_HELP)))
                    with e.for_range(0, threads, name="other") as other:
                        share(j, other)
                with e.if_(b.icmp_signed(">", spins.get(), e.i64(_SPINS_IN_LAUNCH)), likely=False):
                    zero = e.i64(0)
                    _syscall(e, _SYS_SCHED_YIELD, zero, zero, zero, zero)
        patience.set(b.select(b.icmp_signed(">", helped.get(), e.i64(0)), e.i64(1), e.i64(_SPINS_BEFORE_HELP)))

    with e.for_range(0, n, name="launch") as i:
        entry = e.at(launches, i, 8 * abi.LAUNCH_WORDS)
        with e.if_(profiling, likely=False):
            e.store(_cycles(e), e.at(profile, i, 16))
        first = e.load(I64, _word(e, entry, abi.LAUNCH_WAIT))
        with e.if_(b.icmp_signed("<", first, i)):
            wait(first, i)
        with e.if_(profiling, likely=False):
            e.store(_cycles(e), e.gep(e.at(profile, i, 16), 8))
        share(i, tid)
        with e.if_(is_stale(), likely=False):
            e.ret()
    with e.if_(b.icmp_signed("==", tid, e.i64(0))):
        # Launches before the last waiting one are complete already; checking them again costs one load each.
        wait(e.i64(0), n)
        with e.if_(profiling, likely=False):
            e.store(_cycles(e), e.at(profile, n, 16))
    e.ret()


class _TypedPointer:
    """llvmlite reads the callee's function type from ``.function_type``; an opaque pointer has none."""

    def __init__(self, pointer: Value, function_type: ir.FunctionType = KERNEL_TYPE) -> None:
        self._pointer = pointer
        self.function_type = function_type
        self.type = pointer.type

    def get_reference(self) -> str:
        return self._pointer.get_reference()


def _emit_worker(module: ir.Module, target: Target) -> None:
    e = Emitter(module, target, WORKER, _TEAM_TYPE)
    b = e.b
    pool, tid = e.args
    epoch_word = _word(e, pool, abi.POOL_EPOCH)
    sleepers = _word(e, pool, abi.POOL_SLEEPERS)
    seen = e.var(I64, e.i64(0))
    spins = e.var(I64, e.i64(0))
    with e.while_loop("serve") as loop:
        loop.break_if(b.icmp_unsigned("!=", _atomic_load(e, _word(e, pool, abi.POOL_STOP)), e.i64(0)))
        now = _atomic_load(e, epoch_word)
        with e.if_else(b.icmp_unsigned("!=", now, seen.get())) as (work, idle):
            with work:
                record = b.load_atomic(_word(e, pool, abi.POOL_EXEC), "acquire", 8, typ=PTR)
                seen.set(now)
                b.call(module.globals[_RUN], [pool, tid, record, b.and_(now, e.i64(0xFFFFFFFF))])
                spins.set(e.i64(0))
            with idle:
                _pause(e)
                spins.set(b.add(spins.get(), e.i64(1)))
                with e.if_(b.icmp_signed(">", spins.get(), e.i64(_SPINS_IDLE)), likely=False):
                    b.atomic_rmw("add", sleepers, e.i64(1), "seq_cst")
                    _futex(e, epoch_word, _FUTEX_WAIT_PRIVATE, b.and_(now, e.i64(0xFFFFFFFF)))
                    b.atomic_rmw("sub", sleepers, e.i64(1), "seq_cst")
                    spins.set(e.i64(0))
    e.ret()


def _emit_eval(module: ir.Module, target: Target) -> None:
    e = Emitter(module, target, EVAL, ir.FunctionType(VOID, [PTR, PTR]))
    b = e.b
    pool, record = e.args
    n = e.load(I64, _word(e, record, abi.EXEC_N_LAUNCHES))
    launches = e.load(PTR, _word(e, record, abi.EXEC_LAUNCHES))
    params = e.load(PTR, _word(e, record, abi.EXEC_PARAMS))
    counters = e.load(PTR, _word(e, record, abi.EXEC_COUNTERS))
    told = e.load(PTR, _word(e, record, abi.EXEC_TILES))
    epoch_word = _word(e, pool, abi.POOL_EPOCH)
    epoch = b.and_(b.add(e.load(I64, epoch_word), e.i64(1)), e.i64(0xFFFFFFFF))
    high = b.shl(epoch, e.i64(32))
    with e.for_range(0, n, name="reset") as i:
        entry = e.at(launches, i, 8 * abi.LAUNCH_WORDS)
        counter = e.at(counters, i, 8 * abi.COUNTER_WORDS)
        sym = e.load(I64, _word(e, entry, abi.LAUNCH_SYM))
        div = e.load(I64, _word(e, entry, abi.LAUNCH_DIV))
        one = b.icmp_signed("<", sym, e.i64(0))
        value = e.load(I64, e.at(params, b.select(one, e.i64(0), sym), 8))
        value = b.select(one, e.i64(1), value)
        units = b.udiv(b.add(value, b.sub(div, e.i64(1))), div)
        tiles = b.mul(units, e.load(I64, _word(e, entry, abi.LAUNCH_MULT)))
        _atomic_store(e, high, _word(e, counter, abi.COUNTER_DONE))
        _atomic_store(e, b.or_(high, tiles), e.at(told, i, 8))
    _atomic_store(e, record, _word(e, pool, abi.POOL_EXEC))
    _atomic_store(e, epoch, epoch_word, "seq_cst")
    asleep = _atomic_load(e, _word(e, pool, abi.POOL_SLEEPERS), "seq_cst")
    with e.if_(b.icmp_signed(">", asleep, e.i64(0))):
        _futex(e, epoch_word, _FUTEX_WAKE_PRIVATE, e.i64(1 << 30))
    b.call(module.globals[_RUN], [pool, e.i64(0), record, epoch])
    e.ret()


def _emit_memset(module: ir.Module, target: Target) -> None:
    e = Emitter(module, target, "memset", ir.FunctionType(PTR, [PTR, I32, I64]))
    p, value, n = e.args
    byte = e.b.trunc(value, I8)
    with e.for_range(0, n) as i:
        e.store(byte, e.gep(p, i))
    e.b.ret(p)


def _emit_memcpy(module: ir.Module, target: Target) -> None:
    for name in ("memcpy", "memmove"):
        e = Emitter(module, target, name, ir.FunctionType(PTR, [PTR, PTR, I64]))
        to, source, n = e.args
        b = e.b
        forward = b.icmp_unsigned("<=", b.ptrtoint(to, I64), b.ptrtoint(source, I64))
        with e.if_else(forward) as (up, down):
            with up, e.for_range(0, n) as i:
                e.store(e.load(I8, e.gep(source, i)), e.gep(to, i))
            with down, e.for_range(0, n) as i:
                at = b.sub(b.sub(n, e.i64(1)), i)
                e.store(e.load(I8, e.gep(source, at)), e.gep(to, at))
        b.ret(to)
