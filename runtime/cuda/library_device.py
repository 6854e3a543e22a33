"""The device interface over the driver library itself (libcuda through ctypes): needs a driver, but no package.

Names and signatures follow NVIDIA's CUDA driver API reference.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from ctypes import byref, c_char_p, c_float, c_int, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np

from ggufc.runtime.errors import RuntimeRefusal

from .device import NO_CUDA, REMEDY, PtxTooNew, check_index, megabytes, no_memory_left
from .pool import Pool

_OUT_OF_MEMORY, _NO_DEVICE, _UNSUPPORTED_PTX = 2, 100, 222
_MULTIPROCESSORS, _MAJOR, _MINOR = 16, 75, 76  # device attributes
_THREAD_LOCAL = 1  # capture mode: calls of other threads do not disturb a recording


def load_library() -> Any:
    """libcuda; RuntimeRefusal if this machine has none."""
    for name in ("libcuda.so.1", "libcuda.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise RuntimeRefusal(f"{NO_CUDA}its driver library libcuda is missing; install an NVIDIA driver, {REMEDY}")


class _Driver:
    """Calls by name, with errors as exceptions."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._context: c_void_p | None = None
        self._here = threading.local()

    def enter(self, context: c_void_p) -> None:
        """Make calls of any thread use ``context``: the driver keeps a current one for each."""
        self._context = context

    def error(self, status: int) -> str:
        text = c_char_p()
        self._library.cuGetErrorString(status, byref(text))
        return text.value.decode() if text.value else f"error {status}"

    def has(self, *names: str) -> bool:
        """Whether the library knows all of these calls."""
        return all(hasattr(self._library, name) for name in names)

    def status(self, name: str, *args: Any) -> int:
        if self._context is not None and not getattr(self._here, "entered", False):
            self._here.entered = True
            self("use the context", "cuCtxSetCurrent", self._context)
        return int(getattr(self._library, name)(*args))

    def __call__(self, what: str, name: str, *args: Any) -> None:
        """``what`` completes "the GPU cannot"."""
        status = self.status(name, *args)
        if status == _OUT_OF_MEMORY:
            raise no_memory_left(what)
        if status:
            raise RuntimeRefusal(f"the GPU cannot {what}: {self.error(status)} ({name})")

    def attribute(self, number: int, device: int) -> int:
        """A fact about a device."""
        value = c_int()
        self("tell its properties", "cuDeviceGetAttribute", byref(value), number, device)
        return value.value

    def start(self) -> int:
        """Initialise; the number of devices."""
        status = self.status("cuInit", 0)
        if status and status != _NO_DEVICE:
            raise RuntimeRefusal(f"{NO_CUDA}the driver does not start ({self.error(status)}); check nvidia-smi, {REMEDY}")
        count = c_int()
        if not status:
            self("count devices", "cuDeviceGetCount", byref(count))
        return count.value


@dataclass(frozen=True)
class DeviceFacts:
    """A device of this machine: name, 90 for sm_90, bytes of memory, multiprocessors."""

    name: str
    capability: int
    memory: int
    multiprocessors: int


def describe_devices(library: Any = None) -> tuple[str, list[DeviceFacts]]:
    """Newest CUDA version the driver knows (``12.8``) and the devices of this machine; RuntimeRefusal if CUDA cannot be used at all."""
    driver = _Driver(library or load_library())
    count, version = driver.start(), c_int()
    driver("tell its version", "cuDriverGetVersion", byref(version))
    facts = []
    for i in range(count):
        memory = c_size_t()
        driver("tell its memory", "cuDeviceTotalMem_v2", byref(memory), i)
        capability = 10 * driver.attribute(_MAJOR, i) + driver.attribute(_MINOR, i)
        facts.append(DeviceFacts(_name(driver, i), capability, memory.value, driver.attribute(_MULTIPROCESSORS, i)))
    return f"{version.value // 1000}.{version.value % 1000 // 10}", facts


def _name(driver: _Driver, device: int) -> str:
    text = ctypes.create_string_buffer(256)
    driver("tell its name", "cuDeviceGetName", text, 256, device)
    return text.value.decode()


class LibraryDevice:
    """GPU ``index`` with its primary context and one stream. ``library`` stands in for libcuda in tests."""

    def __init__(self, index: int = 0, library: Any = None) -> None:
        self._cuda = cuda = _Driver(library or load_library())
        check_index(index, cuda.start())
        self._index, self._closed = index, False
        self._pool = Pool(self._allocate, lambda address: cuda("free memory", "cuMemFree_v2", c_uint64(address)))
        self.graphs = cuda.has("cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuGraphInstantiateWithFlags", "cuGraphLaunch")
        self._events: list[c_void_p] = []
        context, self._stream = c_void_p(), c_void_p()
        self.name, self.capability = _name(cuda, index), 10 * cuda.attribute(_MAJOR, index) + cuda.attribute(_MINOR, index)
        cuda("open a context", "cuDevicePrimaryCtxRetain", byref(context), index)
        cuda.enter(context)
        cuda("make a stream", "cuStreamCreate", byref(self._stream), 0)

    def free_memory(self) -> int:
        free, total = c_size_t(), c_size_t()
        self._cuda("tell its memory", "cuMemGetInfo_v2", byref(free), byref(total))
        return free.value

    def _allocate(self, size: int) -> int:
        address = c_uint64()
        self._cuda(f"allocate {megabytes(size)}", "cuMemAlloc_v2", byref(address), c_size_t(size))
        return address.value

    def alloc(self, size: int) -> int:
        return self._pool.alloc(size)

    def free(self, address: int) -> None:
        if not self._closed:  # closing has freed everything
            self._pool.free(address)

    def upload(self, address: int, data: np.ndarray) -> None:
        data = np.ascontiguousarray(data)
        if data.nbytes:
            self._cuda("copy to the device", "cuMemcpyHtoD_v2", c_uint64(address), c_void_p(data.ctypes.data), c_size_t(data.nbytes))

    def download(self, address: int, into: np.ndarray) -> None:
        self.synchronize()
        if into.nbytes:
            self._cuda("copy from the device", "cuMemcpyDtoH_v2", c_void_p(into.ctypes.data), c_uint64(address), c_size_t(into.nbytes))

    def send(self, address: int, data: np.ndarray) -> None:
        if data.nbytes:
            place, size = c_void_p(data.ctypes.data), c_size_t(data.nbytes)
            self._cuda("copy to the device", "cuMemcpyHtoDAsync_v2", c_uint64(address), place, size, self._stream)

    def receive(self, address: int, into: np.ndarray) -> None:
        if into.nbytes:
            place, size = c_void_p(into.ctypes.data), c_size_t(into.nbytes)
            self._cuda("copy from the device", "cuMemcpyDtoHAsync_v2", place, c_uint64(address), size, self._stream)

    def fill(self, address: int, size: int) -> None:
        if size:
            self._cuda("clear memory", "cuMemsetD8Async", c_uint64(address), ctypes.c_ubyte(0), c_size_t(size), self._stream)

    def host_array(self, size: int) -> np.ndarray:
        pointer = c_void_p()
        self._cuda("pin host memory", "cuMemHostAlloc", byref(pointer), c_size_t(max(size, 1)), 0)
        memory = (ctypes.c_ubyte * max(size, 1)).from_address(pointer.value or 0)
        # Freed with its last array, which may outlive the device.
        weakref.finalize(memory, self._cuda.status, "cuMemFreeHost", pointer).atexit = False
        array = np.ctypeslib.as_array(memory)[:size]
        array[:] = 0
        return array

    def load(self, ptx: str) -> Any:
        module = c_void_p()
        status = self._cuda.status("cuModuleLoadData", byref(module), c_char_p(ptx.encode()))
        if status == _UNSUPPORTED_PTX:
            raise PtxTooNew(
                f"the driver does not know this PTX version ({self._cuda.error(status)}); update it, or compile for an older GPU"
            )
        if status:
            raise RuntimeRefusal(f"the driver refuses the artifact's GPU code: {self._cuda.error(status)}; compile the model again")
        return module

    def function(self, module: Any, symbol: str) -> Any:
        function = c_void_p()
        self._cuda(f"find the kernel {symbol}", "cuModuleGetFunction", byref(function), module, c_char_p(symbol.encode()))
        return function

    def launch(self, function: Any, grid: int, block: int, words: Sequence[int]) -> None:
        values = (c_uint64 * len(words))(*(w & 0xFFFFFFFFFFFFFFFF for w in words))
        base = ctypes.addressof(values)
        pointers = (c_void_p * len(words))(*(base + 8 * i for i in range(len(words))))
        self._cuda("start a kernel", "cuLaunchKernel", function, grid, 1, 1, block, 1, 1, 0, self._stream, pointers, None)

    def record(self, issue: Callable[[], None]) -> Any:
        graph, recording = c_void_p(), c_void_p()
        self._cuda("record", "cuStreamBeginCapture_v2", self._stream, _THREAD_LOCAL)
        try:
            issue()
        finally:  # also after an error: the stream must not stay in recording
            status = self._cuda.status("cuStreamEndCapture", self._stream, byref(graph))
        if status:
            raise RuntimeRefusal(f"the GPU cannot record: {self._cuda.error(status)} (cuStreamEndCapture)")
        try:
            self._cuda("make a recording", "cuGraphInstantiateWithFlags", byref(recording), graph, c_uint64(0))
        finally:
            self._cuda.status("cuGraphDestroy", graph)
        return recording

    def replay(self, recording: Any) -> None:
        self._cuda("start a recording", "cuGraphLaunch", recording, self._stream)

    def drop(self, recording: Any) -> None:
        if not self._closed:
            self._cuda("free a recording", "cuGraphExecDestroy", recording)

    def synchronize(self) -> None:
        self._cuda("finish", "cuStreamSynchronize", self._stream)

    def mark(self) -> Any:
        event = c_void_p()
        self._cuda("measure time", "cuEventCreate", byref(event), 0)
        self._events.append(event)
        self._cuda("measure time", "cuEventRecord", event, self._stream)
        return event

    def elapsed(self, start: Any, stop: Any) -> float:
        milliseconds = c_float()
        self._cuda("measure time", "cuEventElapsedTime", byref(milliseconds), start, stop)
        return milliseconds.value

    def close(self) -> None:
        """Free device memory. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._pool.close()
        for event in self._events:
            self._cuda.status("cuEventDestroy_v2", event)
        self._cuda.status("cuStreamDestroy_v2", self._stream)
        self._cuda.status("cuDevicePrimaryCtxRelease_v2", self._index)
