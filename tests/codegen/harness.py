"""Runs single kernels in the test process: emit, link, map, call with numpy arrays surrounded by sentinel bytes."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

import numpy as np

import aarch64
import amx
from ggufc.codegen.cpu.image import Image
from ggufc.codegen.cpu.target import ARM_LEVELS, LEVELS, Target, host_features, resolve
from ggufc.codegen.kernel_build import build_image
from ggufc.codegen.kernels.base import KernelSpec, symbol
from ggufc.formats.abi import PARAMS
from ggufc.formats.cpustate import request_tiles

SENTINEL = 0xA5
GUARD = 256


def runnable_targets() -> list[Target]:
    """Every feature level this machine can run."""
    have = host_features()
    return [resolve(name) for name, features in LEVELS.items() if have.issuperset(features)]


def emulated_targets() -> list[Target]:
    """The AArch64 levels where an emulator is installed; ``run`` takes them too."""
    return [resolve(name) for name in ARM_LEVELS] if aarch64.QEMU else []


class Loaded:
    """An image mapped executable."""

    def __init__(self, img: Image) -> None:
        size = max(len(img.code), 1)
        self._map = mmap.mmap(-1, size, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        self._map.write(img.code)
        self.code = img.code
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.symbols = img.symbols

    def address(self, name: str) -> int:
        return self.base + self.symbols[name][0]


def build(specs: Sequence[KernelSpec], target: Target) -> Loaded:
    return Loaded(build_image(specs, target, jobs=1)[0])


class Guarded:
    """A copy of an array with sentinel bytes on both sides, 64-byte aligned; ``check`` fails if a kernel wrote outside."""

    def __init__(self, array: np.ndarray) -> None:
        raw = np.full(array.nbytes + 2 * GUARD + 64, SENTINEL, np.uint8)
        start = GUARD + (-(raw.ctypes.data + GUARD)) % 64
        self._raw, self._start, self._size = raw, start, array.nbytes
        self.array = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        self.array[...] = array

    @property
    def address(self) -> int:
        return self._raw.ctypes.data + self._start

    def check(self) -> None:
        outside = np.concatenate([self._raw[: self._start], self._raw[self._start + self._size :]])
        assert (outside == SENTINEL).all(), "a kernel wrote outside its buffer"


def run(
    spec: KernelSpec, target: Target, args: Sequence[np.ndarray | int | None], tiles: int, *, loaded: Loaded | None = None, **params: int
) -> list[np.ndarray | None]:
    """Call ``spec`` for tiles 0..tiles-1; arrays are passed by guarded copy and returned after the call, in argument order."""
    loaded = loaded or build([spec], target)
    guarded = [Guarded(a) if isinstance(a, np.ndarray) else None for a in args]
    if target.is_arm:
        _run_emulated(spec, target, args, guarded, tiles, loaded, params)
        return [g.array if g else None for g in guarded]
    words = np.array([g.address if g else (a or 0) for g, a in zip(guarded, args)], np.int64)
    values = np.array([params.get(name, 0) for name in PARAMS], np.int64)
    scratch = Guarded(np.zeros(max(64, spec.scratch_bytes(target)), np.uint8))
    fn = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)(loaded.address(symbol(spec)))
    if target.has_tiles and target not in runnable_targets():
        amx.run(spec, words, values, tiles, scratch.address)
        tiles = 0
    elif target.has_tiles:
        assert request_tiles()
    for tile in range(tiles):
        fn(words.ctypes.data, values.ctypes.data, tile, scratch.address)
    for g in [*guarded, scratch]:
        if g:
            g.check()
    return [g.array if g else None for g in guarded]


_IMAGE, _DATA = 0x400000, 0x10000000


def _run_emulated(
    spec: KernelSpec,
    target: Target,
    args: Sequence[np.ndarray | int | None],
    guarded: Sequence[Guarded | None],
    tiles: int,
    loaded: Loaded,
    params: dict[str, int],
) -> None:
    """``run`` for AArch64: the same guarded memory at other addresses, in an emulator."""
    scratch = Guarded(np.zeros(max(64, spec.scratch_bytes(target)), np.uint8))
    data, starts = bytearray(), {}
    for g in (*guarded, scratch):
        if g is not None:
            data += bytes(-(len(data) + g._start) % 64)
            starts[id(g)] = len(data)
            data += g._raw.tobytes()

    def place(g: Guarded) -> int:
        return _DATA + starts[id(g)] + g._start

    data += bytes(-len(data) % 64)
    words = np.array([place(g) if g else (a or 0) for g, a in zip(guarded, args)], np.int64)
    values = np.array([params.get(name, 0) for name in PARAMS], np.int64)
    words_at, values_at = _DATA + len(data), _DATA + len(data) + words.nbytes
    data += words.tobytes() + values.tobytes()
    kernel = _IMAGE + loaded.symbols[symbol(spec)][0]
    calls = [aarch64.Call(kernel, (words_at, values_at, tile, place(scratch))) for tile in range(tiles)]
    memory = [aarch64.Memory(_IMAGE, loaded.code, executable=True), aarch64.Memory(_DATA, bytes(data), wanted=True)]
    after = np.frombuffer(aarch64.execute(target, memory, calls)[0], np.uint8)
    for g in (*guarded, scratch):
        if g is not None:
            g._raw[:] = after[starts[id(g)] : starts[id(g)] + len(g._raw)]
            g.check()
