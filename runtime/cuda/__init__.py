"""Running artifacts on NVIDIA GPUs.

    from ggufc.runtime.cuda import on_device, open_device
    with open_device() as device, Session("model.ggufc", executor=on_device(device)) as s: ...

``device`` is the interface a GPU is used through; ``pycuda_device`` and ``library_device`` implement it over pycuda and over the driver
library (loaded when a device is opened, never before), with ``pool`` under both. ``code`` reads an artifact's PTX, ``weights`` and
``caches`` hold them on the device, ``launches`` starts kernels, ``recordings`` replays micro-batches as CUDA graphs, ``executor`` runs
programs. ``division`` says which layers run on the device, ``offload`` runs a program divided so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from ggufc.runtime.artifact import Artifact
from ggufc.runtime.binding import BoundProgram
from ggufc.runtime.errors import RuntimeRefusal
from ggufc.runtime.executor import Executor
from ggufc.runtime.sizes import DEFAULT_SIZES, Sizes

from .device import Device
from .executor import CudaExecutor
from .offload import OffloadExecutor
from .weights import Progress

__all__ = ["CudaExecutor", "Device", "OffloadExecutor", "make_device", "on_device", "open_device"]


@contextmanager
def open_device(index: int = 0, binding: str = "auto") -> Iterator[Device]:
    """GPU ``index`` while the context lasts; as ``make_device`` otherwise."""
    device = make_device(index, binding)
    try:
        yield device
    finally:
        device.close()


def make_device(index: int = 0, binding: str = "auto") -> Device:
    """GPU ``index``, to be closed by the caller; RuntimeRefusal says what is missing where there is none.

    ``binding``: ``pycuda``, ``library`` (the driver library without any package), or ``auto``: pycuda where it is installed.
    """
    if binding == "auto":
        binding = "pycuda" if find_spec("pycuda") else "library"
    if binding == "pycuda":
        from .pycuda_device import PycudaDevice

        return PycudaDevice(index)
    if binding == "library":
        from .library_device import LibraryDevice

        return LibraryDevice(index)
    raise RuntimeRefusal(f"the CUDA binding {binding!r} is unknown; use auto, pycuda or library")


def on_device(
    device: Device, progress: Progress | None = None, n_gpu_layers: int = -1, closing: Callable[[], None] = lambda: None
) -> Callable[..., BoundProgram]:
    """What makes a session run on ``device``: its ``executor`` argument.

    ``n_gpu_layers``: the last N layers, everything with one more than there are, or -1; 0 runs on the CPU. ``progress`` reports the upload
    of weights in bytes. ``closing`` is called when the session closes, wherever it ran.
    """

    def make(artifact: Artifact, program: str = "eval", sizes: Sizes = DEFAULT_SIZES, **options: Any) -> BoundProgram:
        options["closing"] = closing
        if n_gpu_layers == 0:
            return Executor(artifact, program, sizes, **options)
        options |= {"device": device, "progress": progress}
        every = artifact.manifest.n_layer + 1
        wanted = every if n_gpu_layers < 0 else min(n_gpu_layers, every)
        if wanted == every and not any(cache.rest_of for cache in artifact.manifest.caches):
            return CudaExecutor(artifact, program, sizes, **options)
        return OffloadExecutor(artifact, program, sizes, n_gpu_layers=wanted, **options)

    return make
