"""A program divided between the CPU and a device by layers (``-ngl``).

The same launches in the same order: stretches of the host run in the native driver, those of the device on its stream (``division`` says
which, and what crosses). Caches of offloaded layers are on the device, all others on the host; weights likewise. Of a cache divided by
heads the first part is where its layer runs, the rest on the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np

from ggufc.formats import artifact as fmt
from ggufc.runtime.artifact import Artifact
from ggufc.runtime.caches import Caches, joined
from ggufc.runtime.executor import Executor
from ggufc.runtime.rows import CacheRows
from ggufc.runtime.sizes import DEFAULT_SIZES, Limits, Sizes

from .code import cuda_manifest
from .device import Device
from .division import Stretch, check_caches, divide, places
from .executor import CudaExecutor, Piece
from .weights import Progress


class DividedCaches:
    """Each cache where its layer runs."""

    def __init__(self, caches: list[fmt.Cache], host: Caches, device: Caches) -> None:
        self.n_cells = host.n_cells
        self.specs = {cache.name: cache for cache in caches if cache.name in host.specs or cache.name in device.specs}
        self._host, self._device = host, device

    def _side(self, name: str) -> Caches:
        return self._device if name in self._device.specs else self._host

    def rows(self, name: str) -> CacheRows:
        """The rows of one cache."""
        return self._side(name).rows(name)

    def clear(self, n_rows: int | None = None) -> None:
        """Zero the first ``n_rows`` cells of every cache (all by default), and everything that belongs to sequences."""
        self._host.clear(n_rows)
        self._device.clear(n_rows)

    def clear_rows(self, name: str, first: int, n: int) -> None:
        """Zero ``n`` rows of one cache."""
        self._side(name).clear_rows(name, first, n)


class OffloadExecutor:
    """One program with its last ``n_gpu_layers`` layers on ``device`` (1 to all of them) and the rest on the CPU. Other arguments are those
    of ``Executor``.

    RuntimeRefusal if a cache has users on both sides, or if the device's part does not fit its memory.
    """

    limits: Limits
    n_gpu_layers: int
    _host: Executor
    _device: CudaExecutor

    def __init__(
        self,
        artifact: Artifact,
        program: str = "eval",
        sizes: Sizes = DEFAULT_SIZES,
        *,
        share: OffloadExecutor | None = None,
        profile: bool = False,
        device: Device | None = None,
        n_gpu_layers: int = 0,
        progress: Progress | None = None,
        closing: Callable[[], None] = lambda: None,
    ) -> None:
        if share is not None:
            n_gpu_layers = share.n_gpu_layers
        self.n_gpu_layers = n_gpu_layers
        self.program, n_layer = artifact.program(program), artifact.manifest.n_layer
        writes = cuda_manifest(artifact, device).writes.get(program, [])
        rests = {cache.name for cache in artifact.manifest.caches if cache.rest_of}
        on_device = places(self.program, n_layer, n_gpu_layers, rests)
        host_caches, device_caches = check_caches(self.program, on_device, n_layer, n_gpu_layers, rests)
        self._stretches = divide(self.program, writes, on_device)
        pieces = [Piece(s.launches, s.incoming, s.outgoing) for s in self._stretches if s.on_device]
        segments = [s.launches for s in self._stretches if not s.on_device]
        self._host = Executor(
            artifact, program, sizes, share=None if share is None else share._host, profile=profile, segments=segments, caches=host_caches
        )
        try:
            self._device = CudaExecutor(
                artifact,
                program,
                sizes,
                share=None if share is None else share._device,
                profile=profile,
                device=device,
                progress=progress,
                pieces=pieces,
                caches=device_caches,
                closing=closing,
            )
        except BaseException:
            self._host.close()
            raise
        self.caches = joined(DividedCaches(artifact.manifest.caches, self._host.buffers, self._device.buffers))
        self.inputs, self.input_specs, self.limits = self._host.inputs, self._host.input_specs, self._host.limits
        self._sent = self._device.names("input")
        self._from_device = set(self._device.names("output"))
        self._host_seconds = [0.0] * len(self._stretches)

    @property
    def n_threads(self) -> int:
        return self._host.n_threads

    @property
    def where(self) -> str:
        """What runs the program, in words."""
        return f"{self._device.where} for {self.n_gpu_layers} layers, {self._host.where}"

    @property
    def device(self) -> Device:
        """The device, for measurements."""
        return self._device.device

    @property
    def crossing(self) -> list[Stretch]:
        """The stretches in order, with the slots that cross between them."""
        return self._stretches

    def rebind(self) -> None:
        """Resolve everything again, as if no graph could be reused."""
        self._host.rebind()
        self._device.rebind()

    def eval(self, T: int, O: int, R: int, KV: int, head: int = 0, entries: Mapping[str, int] | None = None) -> None:
        """Evaluate one micro-batch as ``Executor.eval``, stretch by stretch."""
        host, device = self._host, self._device
        host.begin(T, O, R, KV, head, entries)
        device.begin(T, O, R, KV, head, entries)
        env = host.env()
        for name in self._sent:
            used = fmt.numel(self._host.input_of(name).ne, env)
            device.inputs[name][:used] = host.inputs[name][:used]
        done = {True: 0, False: 0}
        for i, stretch in enumerate(self._stretches):
            for slot, form in stretch.incoming.items():
                size = fmt.evaluate(form, env)
                if stretch.on_device:
                    device.staged[slot][:size] = host.slot(slot)[:size]
                else:
                    host.slot(slot)[:size] = device.staged[slot][:size]
            began = time.perf_counter()
            (device if stretch.on_device else host).run(done[stretch.on_device])
            self._host_seconds[i] = time.perf_counter() - began
            done[stretch.on_device] += 1

    def output(self, name: str) -> np.ndarray:
        """f32 view of an output at the sizes of the last ``eval``, numpy order."""
        return (self._device if name in self._from_device else self._host).output(name)

    def profile(self) -> np.ndarray:
        """i64 [launches, 2]: nanoseconds each launch of the last ``eval`` waited and worked, wherever it ran. The host's cycles are scaled
        to the time its stretch took.
        """
        found, cycles = self._device.profile(), self._host.profile()
        for stretch, seconds in zip(self._stretches, self._host_seconds):
            if not stretch.on_device:
                rows = slice(stretch.launches.start, stretch.launches.stop)
                found[rows] = np.rint(cycles[rows] * (1e9 * seconds / max(int(cycles[rows].sum()), 1)))
        return found

    def on_device(self, launch: int) -> bool:
        """Whether a launch runs on the device."""
        return next(s.on_device for s in self._stretches if launch in s.launches)

    def close(self) -> None:
        """Stop the threads and free the device's memory. Safe to call twice."""
        self._device.close()
        self._host.close()
