"""Running artifacts on NVIDIA GPUs.

    from ggufc.runtime.cuda import on_device, open_device
    with open_device() as device, Session("model.ggufc", executor=on_device(device)) as s: ...

``device`` is the interface a GPU is used through, ``pycuda_device`` its implementation (pycuda is imported when a device is opened, never
before), ``code`` reads an artifact's PTX, ``caches`` holds the KV caches, ``executor`` runs programs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec

from ggufc.runtime.errors import RuntimeRefusal

from .device import Device
from .executor import CudaExecutor
from .weights import Progress

__all__ = ["CudaExecutor", "Device", "device_names", "on_device", "open_device"]


@contextmanager
def open_device(index: int = 0, binding: str = "auto") -> Iterator[Device]:
    """GPU ``index``; RuntimeRefusal says what is missing where there is none.

    ``binding``: ``pycuda``, ``library`` (the driver library without any package), or ``auto``: pycuda where it is installed.
    """
    device = _open(index, binding)
    try:
        yield device
    finally:
        device.close()


def _open(index: int, binding: str) -> Device:
    if binding == "auto":
        binding = "pycuda" if find_spec("pycuda") else "library"
    if binding == "pycuda":
        from .pycuda_device import PycudaDevice

        return PycudaDevice(index)
    if binding == "library":
        from .library_device import LibraryDevice

        return LibraryDevice(index)
    raise RuntimeRefusal(f"the CUDA binding {binding!r} is unknown; use auto, pycuda or library")


def device_names() -> list[str]:
    """Names of the GPUs of this machine; RuntimeRefusal if CUDA cannot be used."""
    from .library_device import device_names

    return device_names()


def on_device(device: Device, progress: Progress | None = None) -> Callable[..., CudaExecutor]:
    """What makes a session run on ``device``: its ``executor`` argument."""
    return partial(CudaExecutor, device=device, progress=progress)
