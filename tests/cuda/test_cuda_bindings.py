"""The two bindings to a driver, against stand-ins: what they call, and what they say where something is missing."""

from __future__ import annotations

import ctypes
import sys
import threading
import types

import numpy as np
import pytest

from ggufc.codegen.kernels.rowwise import RmsNorm
from ggufc.formats.abi import PARAMS
from ggufc.runtime.cuda import library_device, open_device
from ggufc.runtime.cuda.device import PtxTooNew
from ggufc.runtime.cuda.library_device import DeviceFacts, LibraryDevice, describe_devices
from ggufc.runtime.errors import RuntimeRefusal
from gpu_harness import ptx_of
from simt_device import SimtDevice

# The driver library


def number(value) -> int:
    return value if isinstance(value, int) else int(value.value or 0)


class FakeLibrary:
    """libcuda over the interpreter: the calls ``LibraryDevice`` makes, with their C types. ``fails`` maps names to statuses."""

    def __init__(self, devices: int = 1, **fails: int) -> None:
        self.devices, self.fails = devices, fails
        self.gpu = SimtDevice(capability=86)
        self.handles: list[object] = [None]
        self.host: dict[int, object] = {}

    def __getattribute__(self, name):
        fails = object.__getattribute__(self, "fails") if name.startswith("cu") else {}
        if name in fails:
            return lambda *args: fails[name]
        found = object.__getattribute__(self, name)
        return (lambda *args: found(*args) or 0) if name.startswith("cu") else found

    def handle(self, value: object) -> int:
        self.handles.append(value)
        return len(self.handles) - 1

    def cuGetErrorString(self, status, text):
        text._obj.value = {2: b"out of memory", 222: b"the provided PTX was compiled with an unsupported toolchain"}.get(
            status, b"unknown error"
        )

    def cuInit(self, flags): ...

    def cuDeviceGetCount(self, count):
        count._obj.value = self.devices

    def cuDeviceGetName(self, text, size, device):
        text.value = b"Fake GPU"

    def cuDeviceGetAttribute(self, out, attribute, device):
        out._obj.value = {16: 84, 75: 8, 76: 6}[attribute]

    def cuDriverGetVersion(self, version):
        version._obj.value = 12080

    def cuDeviceTotalMem_v2(self, size, device):
        size._obj.value = 24 << 30

    def cuDevicePrimaryCtxRetain(self, context, device): ...

    def cuCtxSetCurrent(self, context): ...

    def cuStreamCreate(self, stream, flags): ...

    def cuStreamSynchronize(self, stream):
        self.gpu.synchronize()

    def cuStreamDestroy_v2(self, stream): ...

    def cuDevicePrimaryCtxRelease_v2(self, device): ...

    def cuMemGetInfo_v2(self, free, total):
        free._obj.value = 123 << 20

    def cuMemAlloc_v2(self, address, size):
        address._obj.value = self.gpu.alloc(number(size))

    def cuMemFree_v2(self, address):
        self.gpu.free(number(address))

    def cuMemcpyHtoD_v2(self, to, source, size):
        data = np.frombuffer((ctypes.c_ubyte * number(size)).from_address(number(source)), np.uint8)
        self.gpu.upload(number(to), data)

    def cuMemcpyDtoH_v2(self, to, source, size):
        into = np.frombuffer((ctypes.c_ubyte * number(size)).from_address(number(to)), np.uint8)
        self.gpu.download(number(source), into)

    def cuMemcpyHtoDAsync_v2(self, to, source, size, stream):
        data = np.frombuffer((ctypes.c_ubyte * number(size)).from_address(number(source)), np.uint8)
        self.gpu.send(number(to), data)

    def cuMemcpyDtoHAsync_v2(self, to, source, size, stream):
        into = np.frombuffer((ctypes.c_ubyte * number(size)).from_address(number(to)), np.uint8)
        self.gpu.receive(number(source), into)

    def cuStreamBeginCapture_v2(self, stream, mode):
        assert mode == 1  # other threads may go on
        self.gpu.recording = []

    def cuStreamEndCapture(self, stream, graph):
        graph._obj.value = self.handle(self.gpu.recording)
        self.gpu.recording = None

    def cuGraphInstantiateWithFlags(self, recording, graph, flags):
        recording._obj.value = self.handle(list(self.handles[number(graph)]))

    def cuGraphDestroy(self, graph):
        self.handles[number(graph)] = None

    def cuGraphLaunch(self, recording, stream):
        self.gpu.replay(self.handles[number(recording)])

    def cuGraphExecDestroy(self, recording):
        self.handles[number(recording)] = None

    def cuMemsetD8Async(self, address, value, size, stream):
        self.gpu.fill(number(address), number(size))

    def cuMemHostAlloc(self, pointer, size, flags):
        memory = ctypes.create_string_buffer(number(size))
        pointer._obj.value = ctypes.addressof(memory)
        self.host[pointer._obj.value] = memory

    def cuMemFreeHost(self, pointer):
        del self.host[number(pointer)]

    def cuModuleLoadData(self, module, text):
        module._obj.value = self.handle(self.gpu.load(text.value.decode()))

    def cuModuleGetFunction(self, function, module, name):
        function._obj.value = self.handle(self.gpu.function(self.handles[number(module)], name.value.decode()))

    def cuLaunchKernel(self, function, gx, gy, gz, bx, by, bz, shared, stream, pointers, extra):
        kernel = self.handles[number(function)]
        assert (gy, gz, by, bz, shared, extra) == (1, 1, 1, 1, 0, None)
        words = [ctypes.c_int64.from_address(p).value for p in pointers]
        self.gpu.launch(kernel, gx, bx, words)

    def cuEventCreate(self, event, flags):
        event._obj.value = self.handle(self.gpu.mark())

    def cuEventRecord(self, event, stream):
        self.handles[number(event)] = self.gpu.mark()

    def cuEventElapsedTime(self, milliseconds, start, stop):
        milliseconds._obj.value = self.gpu.elapsed(self.handles[number(start)], self.handles[number(stop)])

    def cuEventDestroy_v2(self, event): ...


def test_a_kernel_through_the_library():
    """Memory, modules, launches and marks with the C types of the driver API."""
    library = FakeLibrary()
    device = LibraryDevice(0, library)
    assert (device.name, device.capability, device.free_memory()) == ("Fake GPU", 86, 123 << 20)
    spec = RmsNorm(96, 1e-5, True, False)
    x = device.host_array(4 * 2 * 96).view(np.float32).reshape(2, 96)
    x[:] = np.random.default_rng(0).standard_normal((2, 96))
    w, params = np.full(96, 2, np.float32), np.zeros(len(PARAMS), np.int64)
    places = [device.alloc(a.nbytes) for a in (x, w, x, params)]
    for place, a in zip(places, (x, w, x, params)):
        device.upload(place, a)
    device.fill(places[2], x.nbytes)
    function = device.function(device.load(ptx_of(spec)), describe_symbol(spec))
    start = device.mark()
    device.launch(function, 2, 32 * 4, [places[0], 96, places[1], 0, 0, places[2], 96, places[3], 0, 0, 2])
    assert device.elapsed(start, device.mark()) > 0
    out = np.empty_like(x)
    device.download(places[2], out)
    assert np.abs(out - 2 * x / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-5)).max() < 1e-5
    device.free(places.pop())
    device.close()
    device.close()
    assert not library.gpu.allocated
    del x, a
    assert not library.host


def test_a_recording_through_the_library():
    """Copies from and to pinned memory and a kernel, recorded once, replayed with other numbers."""
    library = FakeLibrary()
    device = LibraryDevice(0, library)
    assert device.graphs
    spec = RmsNorm(96, 1e-5, True, False)
    x, y = (device.host_array(4 * 96).view(np.float32) for _ in range(2))
    at, to, w, params = (device.alloc(n) for n in (4 * 96, 4 * 96, 4 * 96, 8 * len(PARAMS)))
    device.upload(w, np.ones(96, np.float32))
    device.upload(params, np.zeros(len(PARAMS), np.int64))
    function = device.function(device.load(ptx_of(spec)), describe_symbol(spec))

    def issue() -> None:
        device.send(at, x)
        device.launch(function, 1, 128, [at, 96, w, 0, 0, to, 96, params, 0, 0, 1])
        device.receive(to, y)

    x[:] = 7
    recording = device.record(issue)
    device.synchronize()
    assert not y.any()
    for value in (2.0, -3.0):
        x[:] = value
        device.replay(recording)
        device.synchronize()
        assert np.abs(y - np.sign(value)).max() < 1e-5
    device.drop(recording)
    device.close()


def test_a_failed_recording_leaves_the_stream_usable():
    library = FakeLibrary(cuStreamEndCapture=901)
    device = LibraryDevice(0, library)
    with pytest.raises(RuntimeRefusal, match=r"cannot record: unknown error \(cuStreamEndCapture\)"):
        device.record(lambda: None)
    library.fails.clear()
    with pytest.raises(ZeroDivisionError):
        device.record(lambda: 1 // 0)
    assert library.gpu.recording is None


def test_every_thread_gets_the_context():
    """The driver keeps a current context per thread: the first call of another thread sets it there, once."""
    entered: list[int] = []

    class Counting(FakeLibrary):
        def cuCtxSetCurrent(self, context):
            entered.append(threading.get_ident())

    device = LibraryDevice(0, Counting())
    worker = threading.Thread(target=lambda: [device.free_memory() for _ in range(3)])
    worker.start()
    worker.join()
    device.free_memory()
    assert len(entered) == 2 and len(set(entered)) == 2


def test_what_outlives_a_closed_device_frees_nothing():
    library = FakeLibrary()
    device = LibraryDevice(0, library)
    address, recording = device.alloc(100), device.record(lambda: None)
    device.close()
    device.free(address)
    device.drop(recording)
    assert not library.gpu.allocated


def test_old_drivers_have_no_recordings():
    class Old(FakeLibrary):
        def __getattribute__(self, name):
            if name == "cuGraphInstantiateWithFlags":
                raise AttributeError(name)
            return super().__getattribute__(name)

    assert not LibraryDevice(0, Old()).graphs


def describe_symbol(spec: RmsNorm) -> str:
    from ggufc.codegen.nvptx import describe

    (entry,) = describe(spec).entries
    assert entry.block == 128
    return entry.symbol


@pytest.mark.parametrize(
    "library, why",
    [
        (FakeLibrary(devices=0), r"device 0 does not exist: no CUDA device is visible"),
        (FakeLibrary(cuInit=100), r"device 0 does not exist: no CUDA device is visible"),
        (FakeLibrary(cuInit=999), r"the driver does not start \(unknown error\); check nvidia-smi"),
        (FakeLibrary(cuDevicePrimaryCtxRetain=2), r"no memory left to open a context; use a smaller n_ctx"),
        (FakeLibrary(cuStreamCreate=1), r"the GPU cannot make a stream: unknown error \(cuStreamCreate\)"),
    ],
)
def test_what_a_driver_refuses(library, why):
    with pytest.raises(RuntimeRefusal, match=why):
        LibraryDevice(0, library)


def test_refusals_of_an_open_device():
    with pytest.raises(RuntimeRefusal, match=r"device 3 does not exist: there are 2 CUDA devices"):
        LibraryDevice(3, FakeLibrary(devices=2))
    library = FakeLibrary(cuMemAlloc_v2=2, cuModuleLoadData=222)
    device = LibraryDevice(0, library)
    with pytest.raises(RuntimeRefusal, match=r"no memory left to allocate 64 MiB"):
        device.alloc(64 << 20)
    with pytest.raises(PtxTooNew, match=r"does not know this PTX version \(the provided PTX"):
        device.load("")
    library.fails["cuModuleLoadData"] = 218
    with pytest.raises(RuntimeRefusal, match=r"refuses the artifact's GPU code: unknown error; compile the model again"):
        device.load("")
    assert describe_devices(FakeLibrary(devices=2)) == ("12.8", 2 * [DeviceFacts("Fake GPU", 86, 24 << 30, 84)])


def test_machines_without_the_library(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(library_device.ctypes, "CDLL", missing)
    with (
        pytest.raises(RuntimeRefusal, match=r"driver library libcuda is missing; install an NVIDIA driver"),
        open_device(binding="library"),
    ):
        pass
    with (
        pytest.raises(RuntimeRefusal, match=r"'magic' is unknown; use auto, pycuda or library"),
        open_device(binding="magic"),
    ):
        pass


# Pycuda


def fake_pycuda(monkeypatch, **parts) -> None:
    class Error(Exception):
        pass

    driver = types.ModuleType("pycuda.driver")
    driver.Error, driver.MemoryError, driver.init = Error, type("MemoryError", (Error,), {}), lambda: None
    driver.Device = type("Device", (), {"count": staticmethod(lambda: 0)})
    for name, value in parts.items():
        setattr(driver, name, value(driver))
    package = types.ModuleType("pycuda")
    package.driver = driver
    monkeypatch.setitem(sys.modules, "pycuda", package)
    monkeypatch.setitem(sys.modules, "pycuda.driver", driver)


def test_pycuda_without_driver_or_device(monkeypatch):
    """The words of the other binding, also where the library itself sees that all devices are hidden."""

    def broken(driver, why):
        def init():
            raise driver.Error(why)

        return init

    for init, words in (
        (lambda driver: broken(driver, "cuInit failed: unknown error"), r"the driver does not start \(cuInit failed.*nvidia-smi"),
        (lambda driver: broken(driver, "cuInit failed: no CUDA-capable device is detected"), "device 0 .*: no CUDA device is visible"),
        (lambda driver: lambda: None, "device 0 does not exist: no CUDA device is visible"),
    ):
        fake_pycuda(monkeypatch, init=init)
        with pytest.raises(RuntimeRefusal, match=words), open_device(binding="pycuda"):
            pass


def test_pycuda_tells_a_missing_library_from_a_missing_package(monkeypatch):
    import builtins

    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith("pycuda."):
            raise ImportError("libcuda.so.1: cannot open shared object file")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with (
        pytest.raises(RuntimeRefusal, match=r"libcuda is missing .* install an NVIDIA driver"),
        open_device(binding="pycuda"),
    ):
        pass
