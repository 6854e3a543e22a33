"""Runs AArch64 code on this machine: a static program without libc around an image, executed by ``qemu-aarch64`` (Debian: qemu-user).

The program holds the image, memory at chosen addresses and a list of calls; it makes the calls, writes the memory asked for to its
standard output and ends.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from llvmlite import ir

from ggufc.codegen.cpu import image, objectcode
from ggufc.codegen.cpu.target import Target, resolve
from ggufc.codegen.emitter import I32, I64, PTR, VOID, Emitter

QEMU = shutil.which("qemu-aarch64")
REASON = "qemu-aarch64 is not installed (Debian: qemu-user), so AArch64 code is only generated, not run"

_CPU = {"aarch64": "cortex-a57", "aarch64-dotprod": "cortex-a76", "aarch64-i8mm": "max"}
"""A CPU that has the level's features and not those of the next: code that needs more stops with an illegal instruction."""

_PAGE = 4096
_START, _TABLE, _SPAWN = 0x10000, 0x20000, 0x30000
_WRITE, _EXIT_GROUP = 64, 94


@dataclass(frozen=True)
class Memory:
    """Bytes at a page-aligned address of the program; ``wanted`` parts come back after the calls."""

    address: int
    data: bytes
    executable: bool = False
    wanted: bool = False


@dataclass(frozen=True)
class Call:
    """``function(*args)``, up to four integers or addresses."""

    function: int
    args: tuple[int, ...]


_SPAWN_CODE = (
    *(0xAA0103E5, 0xAA0203E6, 0xAA0303E7),  # mov x5, x1; mov x6, x2; mov x7, x3: the child keeps registers, not the stack
    *(0xAA0003E1, 0xD281E000, 0xF2A000A0),  # mov x1, x0; mov x0, #0xf00; movk x0, #5, lsl #16: share everything, one thread group
    *(0xD2800002, 0xD2800003, 0xD2800004),  # mov x2, #0; mov x3, #0; mov x4, #0
    *(0xD2801B88, 0xD4000001, 0xB50000C0),  # mov x8, #220 (clone); svc #0; cbnz x0, to the last instruction
    *(0xAA0603E0, 0xAA0703E1, 0xD63F00A0),  # mov x0, x6; mov x1, x7; blr x5
    *(0xD2800BA8, 0xD4000001, 0xD65F03C0),  # mov x8, #93 (exit); svc #0; ret
)


def spawn(function: int, args: tuple[int, int], stack: int) -> Call:
    """A call that starts a thread in ``function(*args)``; ``stack`` is the address after its stack."""
    return Call(_SPAWN, (stack, function, *args))


def execute(target: Target, memory: Sequence[Memory], calls: Sequence[Call]) -> list[bytes]:
    """Make ``calls`` on a CPU of the target's level; the memory that is ``wanted``, in order, as it is afterwards."""
    wanted = [m for m in memory if m.wanted]
    table = [len(calls)]
    for call in calls:
        table += [call.function, *call.args, *[0] * (4 - len(call.args))]
    table += [len(wanted)]
    for m in wanted:
        table += [m.address, len(m.data)]
    code, entry = _program()
    spawn_code = struct.pack(f"<{len(_SPAWN_CODE)}I", *_SPAWN_CODE)
    parts = [
        Memory(_START, code, executable=True),
        Memory(_SPAWN, spawn_code, executable=True),
        Memory(_TABLE, struct.pack(f"<{len(table)}Q", *table)),
        *memory,
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program"
        path.write_bytes(_elf(parts, _START + entry))
        path.chmod(0o755)
        assert QEMU
        done = subprocess.run([QEMU, "-cpu", _CPU[target.level], str(path)], capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, f"the program ended with status {done.returncode}: {done.stderr.decode(errors='replace')}"
    assert len(done.stdout) == sum(len(m.data) for m in wanted)
    out, at = [], 0
    for m in wanted:
        out.append(done.stdout[at : at + len(m.data)])
        at += len(m.data)
    return out


def _elf(parts: Sequence[Memory], entry: int) -> bytes:
    """An executable whose segments are ``parts``."""
    head = 64 + 56 * len(parts)
    at, headers, body = -(-head // _PAGE) * _PAGE, b"", b""
    start = at
    for m in sorted(parts, key=lambda m: m.address):
        assert m.address % _PAGE == 0
        headers += struct.pack("<IIQQQQQQ", 1, 5 if m.executable else 6, at, m.address, m.address, len(m.data), len(m.data), _PAGE)
        body += m.data + bytes(-len(m.data) % _PAGE)
        at = start + len(body)
    ident = b"\x7fELF\x02\x01\x01" + bytes(9)
    header = ident + struct.pack("<HHIQQQIHHHHHH", 2, 183, 1, entry, 64, 0, 0, 64, 56, len(parts), 0, 0, 0)
    return (header + headers).ljust(start, b"\0") + body


@cache
def _program() -> tuple[bytes, int]:
    """Code of the part that makes the calls, and the offset of its first instruction."""
    target = resolve("aarch64")
    module = objectcode.new_module(target, "program")
    e = Emitter(module, target, "start", ir.FunctionType(VOID, []))
    b = e.b
    # mov x8, x4; svc #0; ret
    raw = e.global_const(I32, (0xAA0403E8, 0xD4000001, 0xD65F03C0), "syscall")

    def system(number: int, *args: object) -> ir.Value:
        return b.call(_Callee(raw, ir.FunctionType(I64, [I64] * 5)), [*args, *[e.i64(0)] * (4 - len(args)), e.i64(number)])

    at = e.var(I64, e.i64(_TABLE))

    def word() -> ir.Value:
        value = e.load(I64, b.inttoptr(at.get(), PTR))
        at.set(b.add(at.get(), e.i64(8)))
        return value

    with e.for_range(0, word(), name="call"):
        function = b.inttoptr(word(), PTR)
        b.call(_Callee(function, ir.FunctionType(VOID, [I64] * 4)), [word() for _ in range(4)])
    with e.for_range(0, word(), name="write"):
        address, left = e.var(I64, word()), e.var(I64, word())
        with e.while_loop("piece") as loop:
            loop.break_if(b.icmp_signed("<=", left.get(), e.i64(0)))
            done = system(_WRITE, e.i64(1), address.get(), left.get())
            with e.if_(b.icmp_signed("<=", done, e.i64(0))):
                system(_EXIT_GROUP, e.i64(70))
            address.set(b.add(address.get(), done))
            left.set(b.sub(left.get(), done))
    system(_EXIT_GROUP, e.i64(0))
    e.ret()
    linked = image.link([objectcode.emit_object(target, module)])
    return linked.code, linked.symbols["start"][0]


class _Callee:
    """An address with the function type llvmlite asks a callee for."""

    def __init__(self, pointer: ir.Value, function_type: ir.FunctionType) -> None:
        self._pointer, self.function_type, self.type = pointer, function_type, pointer.type

    def get_reference(self) -> str:
        return self._pointer.get_reference()
