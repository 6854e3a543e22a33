"""Where a session runs: ``--device`` and ``-ngl`` on the command line, ``device`` and ``n_gpu_layers`` in Python.

``auto`` uses the first GPU if layers are asked for and there is one, and the CPU otherwise; ``cuda`` or ``cuda:N`` insists on a GPU and
puts all layers there unless told otherwise; ``cpu``, or no layers, never looks for one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ggufc.errors import DriverError
from ggufc.files import Progress
from ggufc.runtime.errors import RuntimeRefusal, require_integer

if TYPE_CHECKING:
    from ggufc.runtime.cuda import Device

Say = Callable[[str], None]
_DEVICE = re.compile(r"(auto|cpu|cuda(?::(\d+))?)\Z")
ALL = -1
UPLOAD = "weights to the device"
"""What progress calls the upload."""


def parse(device: str) -> tuple[str, int]:
    """(``auto``, ``cpu`` or ``cuda``, number of the GPU). DriverError for anything else."""
    match = _DEVICE.match(device) if isinstance(device, str) else None
    if match is None:
        raise DriverError(f"--device {device!r} is unknown; use auto, cpu, cuda or cuda:N (N counts from 0)")
    return match[1].partition(":")[0], int(match[2] or 0)


@dataclass
class Placement:
    """``device`` None: the CPU. Otherwise the last ``n_gpu_layers`` layers run on it (-1: all); ``close`` it, or let a session do so."""

    device: Device | None = None
    n_gpu_layers: int = 0

    def target(self, text: str) -> str:
        """The compile target ``text``, with code for the device where it names no GPU."""
        if self.device is None or "cuda:" in text:
            return text
        from ggufc.runtime.cuda.code import target_for

        return f"{text},{target_for(self.device)}"

    def session_options(self, progress: Progress | None = None, close: bool = True) -> dict[str, Any]:
        """What ``Session`` needs to run here; with ``close`` the session closes the device when it closes."""
        if self.device is None:
            return {}
        from ggufc.runtime.cuda import on_device

        def uploaded(done: int, total: int) -> None:
            if progress:
                progress(UPLOAD, done, total)

        closing = {"closing": self.device.close} if close else {}
        return {"executor": on_device(self.device, uploaded, self.n_gpu_layers, **closing)}

    @property
    def words(self) -> str:
        """For a line of a report: ``NVIDIA H200, all layers``; nothing for the CPU."""
        if self.device is None:
            return ""
        return f"{self.device.name}, {'all' if self.n_gpu_layers < 0 else self.n_gpu_layers} layers"

    def close(self) -> None:
        if self.device is not None:
            self.device.close()

    def __enter__(self) -> Placement:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def choose(device: str = "auto", n_gpu_layers: int | None = None, say: Say = lambda _: None) -> Placement:
    """Open what the options ask for. ``say`` tells when a GPU was asked for and there is none; RuntimeRefusal if it was insisted on."""
    kind, index = parse(device)
    if n_gpu_layers is not None:
        require_integer("-ngl (n_gpu_layers)", n_gpu_layers, 0, 1 << 31)
    if kind == "cpu" or n_gpu_layers == 0 or (kind == "auto" and n_gpu_layers is None):
        return Placement()
    from ggufc.runtime import cuda

    try:
        opened = cuda.make_device(index)
    except RuntimeRefusal as why:
        if kind == "cuda":
            raise
        say(f"-ngl {n_gpu_layers} has no effect: {why}")
        return Placement()
    return Placement(opened, ALL if n_gpu_layers is None else n_gpu_layers)
