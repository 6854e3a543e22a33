"""Runs AMX kernels without AMX: the tile instructions of the emitted code become calls of functions over tiles in numpy.

Everything else of the kernel is the machine code of the strongest AVX-512 level. The emulation refuses what the instructions refuse:
tiles without a configuration, and products of shapes that do not fit.
"""

from __future__ import annotations

import ctypes
import re
from functools import cache

import llvmlite.binding as llvm
import numpy as np

from ggufc.codegen.cpu import objectcode
from ggufc.codegen.cpu.target import host_features, resolve
from ggufc.codegen.emitter import Emitter
from ggufc.codegen.kernels.base import KernelSpec, symbol

AMX, HOST = resolve("amx"), resolve("avx512vbmi")
RUNS = host_features().issuperset(HOST.features)
REASON = "the emulation of AMX runs the rest of a kernel as AVX-512 code, which this machine lacks"

_P, _I8, _I64 = ctypes.c_void_p, ctypes.c_int8, ctypes.c_int64


class Tiles:
    """The tile state of one thread. ``products`` counts; the first violation is kept in ``problem``."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, int]] | None = None
        self.data = np.zeros((8, 16, 64), np.uint8)
        self.products = 0
        self.problem = ""

    def check(self, ok: bool, problem: str) -> bool:
        if not ok:
            self.problem = self.problem or problem
        return ok

    def shape(self, tile: int) -> tuple[int, int]:
        """(rows, bytes per row); (0, 0) is refused by the instructions."""
        rows, columns = self.shapes[tile] if self.shapes else (0, 0)
        self.check(bool(rows and columns), f"tile {tile} is used without a configuration")
        return rows, columns

    def ldtilecfg(self, p: int) -> None:
        config = ctypes.string_at(p, 64)
        ok = config[0] == 1 and not any(config[1:16]) and not any(config[32:48]) and not any(config[56:])
        shapes = [(config[48 + i], int.from_bytes(config[16 + 2 * i : 18 + 2 * i], "little")) for i in range(8)]
        ok = ok and all(rows <= 16 and columns <= 64 and columns % 4 == 0 and bool(rows) == bool(columns) for rows, columns in shapes)
        self.check(ok, f"malformed configuration {config.hex()}")
        self.shapes = shapes
        self.data[:] = 0

    def tilerelease(self) -> None:
        self.shapes = None
        self.data[:] = 0

    def tilezero(self, tile: int) -> None:
        self.shape(tile)
        self.data[tile] = 0

    def tileloadd64(self, tile: int, p: int, stride: int) -> None:
        rows, columns = self.shape(tile)
        self.data[tile] = 0
        for r in range(rows):
            self.data[tile, r, :columns] = np.frombuffer(ctypes.string_at(p + r * stride, columns), np.uint8)

    def tilestored64(self, tile: int, p: int, stride: int) -> None:
        rows, columns = self.shape(tile)
        for r in range(rows):
            ctypes.memmove(p + r * stride, self.data[tile, r, :columns].tobytes(), columns)

    def tdpbsud(self, c: int, a: int, b: int) -> None:
        (m, wide), (rows, deep), (quads, columns) = self.shape(c), self.shape(a), self.shape(b)
        if not self.check(m == rows and deep == 4 * quads and columns == wide, f"shapes {m}x{wide} += {rows}x{deep} * {quads}x{columns}"):
            return
        left = self.data[a, :m, :deep].view(np.int8).astype(np.int32)
        right = self.data[b, :quads, :wide].reshape(quads, wide // 4, 4).astype(np.int32)
        right = right.transpose(0, 2, 1).reshape(deep, wide // 4)
        self.data[c, :m, :wide].view(np.int32)[...] += left @ right
        self.products += 1


_TYPES = {
    "ldtilecfg": [_P],
    "tilerelease": [],
    "tilezero": [_I8],
    "tileloadd64": [_I8, _P, _I64],
    "tilestored64": [_I8, _P, _I64],
    "tdpbsud": [_I8, _I8, _I8],
}
STATE = Tiles()
_CALLBACKS = {}
for _name, _types in _TYPES.items():
    _CALLBACKS[_name] = ctypes.CFUNCTYPE(None, *_types)(lambda *args, name=_name: getattr(STATE, name)(*args))


@cache
def _function(spec: KernelSpec) -> tuple[object, ctypes._CFuncPtr]:
    """The emulated kernel, compiled once."""
    module = objectcode.new_module(AMX, symbol(spec))
    spec.emit(Emitter(module, AMX, symbol(spec)))
    text, count = re.subn(
        r'@"?llvm\.x86\.(ldtilecfg|tilerelease|tilezero|tileloadd64|tilestored64|tdpbsud)"?', r"@emulated_\1", str(module)
    )
    assert count, "the kernel uses no tiles"
    for name, callback in _CALLBACKS.items():
        llvm.add_symbol(f"emulated_{name}", ctypes.cast(callback, _P).value)
    objectcode.target_machine(HOST)
    parsed = llvm.parse_assembly(text)
    machine = llvm.Target.from_triple(HOST.triple).create_target_machine(cpu="x86-64", features=HOST.feature_string(), opt=2, jit=True)
    engine = llvm.create_mcjit_compiler(parsed, machine)
    engine.finalize_object()
    return engine, ctypes.CFUNCTYPE(None, _P, _P, _I64, _P)(engine.get_function_address(symbol(spec)))


def run(spec: KernelSpec, words: np.ndarray, values: np.ndarray, tiles: int, scratch: int) -> None:
    """Call ``spec`` for all tiles with the tile instructions emulated; ``STATE.products`` tells how many products of tiles there were."""
    _, fn = _function(spec)
    STATE.products, STATE.problem = 0, ""
    for tile in range(tiles):
        fn(words.ctypes.data, values.ctypes.data, tile, scratch)
    assert not STATE.problem, STATE.problem
    assert STATE.shapes is None, "the kernel kept its tile configuration"
