"""The device interface over pycuda, imported when a device is opened and not before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

import numpy as np

from ggufc.runtime.errors import RuntimeRefusal

from .device import NO_CUDA, REMEDY, PtxTooNew, check_index, megabytes, no_memory_left
from .pool import Pool


def _driver(index: int) -> ModuleType:
    """``pycuda.driver``, initialised for the use of device ``index``. RuntimeRefusal says what is missing."""
    try:
        import pycuda.driver as driver
    except ImportError as error:
        missing = "its driver library libcuda" if "libcuda" in str(error) else "the package pycuda"
        what = "install an NVIDIA driver" if "libcuda" in str(error) else "pip install 'ggufc[cuda]'"
        raise RuntimeRefusal(f"{NO_CUDA}{missing} is missing ({error}); {what}, {REMEDY}") from None
    try:
        driver.init()
    except driver.Error as error:
        if "no CUDA-capable device" in str(error):  # also where CUDA_VISIBLE_DEVICES hides all of them
            check_index(index, 0)
        raise RuntimeRefusal(f"{NO_CUDA}the driver does not start ({error}); check nvidia-smi, {REMEDY}") from None
    return driver


class PycudaDevice:
    """GPU ``index`` with a context of its own and one stream."""

    def __init__(self, index: int = 0) -> None:
        self._cuda = cuda = _driver(index)
        check_index(index, cuda.Device.count())
        device = cuda.Device(index)
        major, minor = device.compute_capability()
        self.name, self.capability = device.name(), 10 * major + minor
        self._context = self._call("open a context", device.make_context)
        self._stream = cuda.Stream()
        self._memory: dict[int, Any] = {}
        self._pool = Pool(self._allocate, lambda address: self._memory.pop(address).free())
        self.graphs = hasattr(self._stream, "begin_capture")
        self._closed = False

    def _call(self, what: str, function: Any, *args: Any) -> Any:
        try:
            return function(*args)
        except self._cuda.MemoryError:
            raise no_memory_left(what) from None
        except self._cuda.Error as error:
            raise RuntimeRefusal(f"the GPU cannot {what}: {error}") from None

    def free_memory(self) -> int:
        return int(self._cuda.mem_get_info()[0])

    def _allocate(self, size: int) -> int:
        memory = self._call(f"allocate {megabytes(size)}", self._cuda.mem_alloc, size)
        self._memory[int(memory)] = memory
        return int(memory)

    def alloc(self, size: int) -> int:
        return self._pool.alloc(size)

    def free(self, address: int) -> None:
        if not self._closed:  # closing has freed everything
            self._pool.free(address)

    def upload(self, address: int, data: np.ndarray) -> None:
        if data.nbytes:
            self._call("copy to the device", self._cuda.memcpy_htod, address, np.ascontiguousarray(data))

    def download(self, address: int, into: np.ndarray) -> None:
        self.synchronize()
        if into.nbytes:
            self._call("copy from the device", self._cuda.memcpy_dtoh, into, address)

    def send(self, address: int, data: np.ndarray) -> None:
        if data.nbytes:
            self._call("copy to the device", self._cuda.memcpy_htod_async, address, data, self._stream)

    def receive(self, address: int, into: np.ndarray) -> None:
        if into.nbytes:
            self._call("copy from the device", self._cuda.memcpy_dtoh_async, into, address, self._stream)

    def fill(self, address: int, size: int) -> None:
        if size:
            self._call("clear memory", self._cuda.memset_d8_async, address, 0, size, self._stream)

    def host_array(self, size: int) -> np.ndarray:
        return self._call("pin host memory", self._cuda.pagelocked_zeros, max(size, 1), np.uint8)[:size]

    def load(self, ptx: str) -> Any:
        try:
            return self._cuda.module_from_buffer(ptx.encode() + b"\0")
        except self._cuda.Error as error:
            if "unsupported" in str(error).lower() and "ptx" in str(error).lower():
                raise PtxTooNew(
                    f"the driver does not know this PTX version ({error}); update the driver, or compile for an older target"
                ) from None
            raise RuntimeRefusal(f"the driver refuses the artifact's GPU code: {error}; compile the model again") from None

    def function(self, module: Any, symbol: str) -> Any:
        return self._call(f"find the kernel {symbol}", module.get_function, symbol)

    def launch(self, function: Any, grid: int, block: int, words: Sequence[int]) -> None:
        arguments = [np.int64(w) for w in words]
        self._call("start a kernel", lambda: function(*arguments, grid=(grid, 1, 1), block=(block, 1, 1), stream=self._stream))

    def record(self, issue: Callable[[], None]) -> Any:
        self._call("record", self._stream.begin_capture)
        try:
            issue()
        except BaseException:
            with suppress(self._cuda.Error):
                self._stream.end_capture()
            raise
        graph = self._call("record", self._stream.end_capture)
        # The graph is kept: older versions of pycuda do not tie it to its instance.
        return graph, self._call("make a recording", graph.instantiate)

    def replay(self, recording: Any) -> None:
        self._call("start a recording", recording[1].launch, self._stream)

    def drop(self, recording: Any) -> None:
        """The recording is freed with its last reference."""

    def synchronize(self) -> None:
        self._call("finish", self._stream.synchronize)

    def mark(self) -> Any:
        return self._cuda.Event().record(self._stream)

    def elapsed(self, start: Any, stop: Any) -> float:
        return float(start.time_till(stop))

    def close(self) -> None:
        """Free everything. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._pool.close()
        self._context.pop()
        self._context.detach()
