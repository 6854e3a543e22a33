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

from ggufc.runtime.executor import Executor

from .device import Device
from .executor import CudaExecutor, Progress

__all__ = ["CudaExecutor", "Device", "device_names", "on_device", "open_device"]


@contextmanager
def open_device(index: int = 0) -> Iterator[Device]:
    """GPU ``index``; RuntimeRefusal says what is missing where there is none."""
    from .pycuda_device import PycudaDevice

    device = PycudaDevice(index)
    try:
        yield device
    finally:
        device.close()


def device_names() -> list[str]:
    """Names of the GPUs of this machine; RuntimeRefusal if CUDA cannot be used."""
    from .pycuda_device import device_names

    return device_names()


def on_device(device: Device, progress: Progress | None = None) -> Callable[..., Executor]:
    """What makes a session run on ``device``: its ``executor`` argument."""
    return partial(CudaExecutor, device=device, progress=progress)
