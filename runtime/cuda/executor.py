"""The executor on a GPU: the same programs, inputs and outputs as ``runtime.executor.Executor``, with memory and launches on a device.

Weights go to the device once and are shared (``weights``). A micro-batch copies its inputs and the graph's symbols from pinned memory,
starts the entries of every launch in order on one stream, and copies the outputs to pinned memory; the whole of it is recorded and replayed
where the device can (``recordings``). Attention needs extra memory for partial results; where its budget is too small for all tokens, the
tokens go through it in slices, which changes no bit.

An executor may hold only some stretches of a program's launches (``Piece``): those of offloaded layers (``offload``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from ggufc.formats import abi
from ggufc.formats import artifact as fmt
from ggufc.runtime.artifact import Artifact
from ggufc.runtime.binding import NUMPY, Binding
from ggufc.runtime.caches import CacheLayout, joined
from ggufc.runtime.errors import RuntimeRefusal
from ggufc.runtime.memory import align
from ggufc.runtime.sizes import DEFAULT_SIZES, Sizes

from .caches import DeviceCaches
from .code import LoadedCode, load_code
from .device import Device, megabytes
from .launches import Launches
from .pool import ALIGNMENT
from .recordings import Recordings
from .weights import DeviceWeights, Progress, hold

_SLACK = 64 << 20
"""What drivers and contexts take beside our buffers."""


@dataclass(frozen=True)
class Piece:
    """A stretch of launches; activation slots copied to the device before it and from it afterwards, with the bytes to copy."""

    launches: range
    incoming: Mapping[int, fmt.Affine] = field(default_factory=dict)
    outgoing: Mapping[int, fmt.Affine] = field(default_factory=dict)


@dataclass
class _Shared:
    """What the executors of one session share: the device, its code, caches and weights, and whether the owner is open."""

    device: Device
    code: LoadedCode
    caches: DeviceCaches
    weights: DeviceWeights
    others: list[CudaExecutor] = field(default_factory=list)
    closed: bool = False


@dataclass
class _Buffer:
    """Device memory and, for what is exchanged with the host, its pinned counterpart."""

    address: int
    host: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))


class CudaExecutor(Binding):
    """One program of an artifact on ``device``. Other arguments are those of ``Executor``; the number of threads means nothing here.

    ``progress(done, total)`` reports the upload of weights in bytes. ``pieces`` are the stretches of launches that run here (all by
    default), ``caches`` the caches they need. RuntimeRefusal, before anything is allocated, if memory does not suffice. Closing the
    executor frees its memory and calls ``closing``; the device stays the caller's.
    """

    def __init__(
        self,
        artifact: Artifact,
        program: str = "eval",
        sizes: Sizes = DEFAULT_SIZES,
        *,
        share: CudaExecutor | None = None,
        profile: bool = False,
        device: Device | None = None,
        progress: Progress | None = None,
        pieces: Sequence[Piece] | None = None,
        caches: Collection[str] | None = None,
        closing: Callable[[], None] = lambda: None,
    ) -> None:
        self._owned: list[int] = []
        self._owner, self._closing = share is None, closing
        self._marks: list[list[Any]] | None = None
        if share is None:
            if device is None:
                raise RuntimeRefusal("a CUDA executor needs a device; open one with ggufc.runtime.cuda.open_device()")
            self._device, self._code = device, load_code(artifact, device)
        else:
            if not isinstance(share, CudaExecutor):
                raise RuntimeRefusal("a CUDA executor can share memory with another CUDA executor only")
            self._device, self._code, sizes = share._device, share._code, share.sizes
        own = None if pieces is None else frozenset(i for piece in pieces for i in piece.launches)
        self._describe(artifact, program, sizes, own, ALIGNMENT)
        self._pieces = [Piece(range(len(self.program.launches)))] if pieces is None else list(pieces)
        self._launches = Launches(self._device, self._code, self.program, self.own, artifact.path)
        weights = hold(self._device, artifact)
        try:
            layout = CacheLayout(artifact, sizes, caches, ALIGNMENT) if share is None else None
            self._check_memory(weights, layout)
            if share is None:
                shared = DeviceCaches(artifact, sizes, self._device, caches)
                self._owned.append(shared.base)
                self._shared = _Shared(self._device, self._code, shared, weights)
            else:
                self._shared = share._shared
            self.caches = joined(self._shared.caches)
            self._allocate()
            weights.upload(artifact, self.names("weight"), progress)
            self._bind()
            self._recordings = Recordings(self._device)
            if profile:
                self.enable_profile()
        except BaseException:
            self._free()
            weights.release()
            raise
        self._weights: DeviceWeights | None = weights
        if share is not None:
            self._shared.others.append(self)

    @property
    def n_threads(self) -> int:
        return 1

    @property
    def where(self) -> str:
        """What runs the program, in words."""
        return f"{self._device.name}, {self.target}"

    @property
    def buffers(self) -> DeviceCaches:
        """The caches as they lie on the device."""
        return self._shared.caches

    @property
    def device(self) -> Device:
        """The device, for measurements."""
        return self._device

    @property
    def target(self) -> str:
        """Architecture of the code in use, such as ``sm_90``."""
        return self._code.target

    @property
    def recordings(self) -> Recordings:
        """The recorded micro-batches, for measurements."""
        return self._recordings

    # Memory

    def _exchanged(self) -> dict[tuple[str, str], tuple[int, str]]:
        """(bytes at the limits, dtype) of inputs that own launches read and outputs they write."""
        inputs, outputs = set(self.names("input")), set(self.names("output"))
        found = {("input", name): (4 * self._input_values(s), s.dtype) for name, s in self._buffer_specs.items() if name in inputs}
        return found | {("output", name): (4 * self._output_values(name), "f32") for name in self.program.outputs if name in outputs}

    def _check_memory(self, weights: DeviceWeights, caches: CacheLayout | None) -> None:
        """Refuse before allocating, with the sum that was needed. ``caches`` None: they are there already."""
        data = self.artifact.file.data
        sizes = {"weights": sum(data(name).size for name in weights.missing(self.names("weight")))}
        if caches is not None:
            sizes["caches"] = caches.size
        sizes["activations"] = self.arena_bytes
        sizes["inputs and outputs"] = sum(align(size, ALIGNMENT) for size, _ in self._exchanged().values())
        sizes["attention"] = self._launches.extra_size(self._most)
        needed, free = sum(sizes.values()) + _SLACK, self._device.free_memory()
        if needed > free:
            parts = ", ".join(f"{name} {megabytes(size)}" for name, size in {**sizes, "driver": _SLACK}.items())
            windows = any(cache.window for cache in self.artifact.manifest.caches) and not self.sizes.window_rows
            raise RuntimeRefusal(
                f"{self._device.name} has {megabytes(free)} free, {megabytes(needed)} are needed ({parts}); use "
                f"a smaller n_ctx or n_ubatch, a smaller cache type, {'compact_windows, ' * windows}fewer layers on the device (-ngl), or "
                "run on the CPU"
            )

    def _alloc(self, size: int) -> int:
        address = self._device.alloc(size)
        self._owned.append(address)
        return address

    def _allocate(self) -> None:
        device = self._device
        self._arena_base = self._alloc(self.arena_bytes)
        self._extra_size = self._launches.extra_size(self._most)
        self._extra = self._alloc(self._extra_size) if self._extra_size else 0
        symbols = device.host_array(8 * len(abi.PARAMS))
        symbols[:] = self.params.view(np.uint8)
        self._symbols = _Buffer(self._alloc(symbols.size), symbols)
        self.params = symbols.view(np.int64)
        self._buffers: dict[tuple[str, str], _Buffer] = {}
        for key, (size, dtype) in self._exchanged().items():
            buffer = _Buffer(self._alloc(size), device.host_array(size).view(NUMPY[dtype]))
            self._buffers[key] = buffer
            self._places[key] = (buffer.address, size)
        self.inputs = {name: np.zeros(self._input_values(spec), NUMPY[spec.dtype]) for name, spec in self._buffer_specs.items()}
        self.inputs |= {name: buffer.host for (kind, name), buffer in self._buffers.items() if kind == "input"}
        self._outputs = {name: buffer.host for (kind, name), buffer in self._buffers.items() if kind == "output"}
        crossing = {slot for piece in self._pieces for slot in (*piece.incoming, *piece.outgoing)}
        self.staged = {slot: device.host_array(self._slot_bytes[slot]) for slot in sorted(crossing)}
        """Pinned copies of the activation slots that cross to or from the host."""
        caches = self._shared.caches
        for name, offset in caches.offsets.items():
            self._places["cache", name] = (caches.base + offset, caches.bytes_of(name))

    def _weight(self, name: str) -> tuple[int, int]:
        return self._shared.weights.places[name]

    # Launches

    def _bind(self) -> None:
        self._args = np.array(self._resolved(len(self._code.manifest.kernels)), np.int64)
        self._launches.bind(self._args, self._first_arg, self._symbols.address, self._extra, self._extra_size)
        self._bind_fixups(self._shared.caches.row_bytes)

    def rebind(self) -> None:
        """Resolve everything again, as if no graph could be reused."""
        self._recordings.clear()
        self._bind()

    def eval(self, T: int, O: int, R: int, KV: int, head: int = 0, entries: Mapping[str, int] | None = None) -> None:
        """Evaluate one micro-batch as ``Executor.eval``; the outputs have arrived on return."""
        self.begin(T, O, R, KV, head, entries)
        for index in range(len(self._pieces)):
            self.run(index)

    def begin(self, T: int, O: int, R: int, KV: int, head: int = 0, entries: Mapping[str, int] | None = None) -> None:
        """Take the sizes of a micro-batch; ``run`` then evaluates it piece by piece."""
        self._check_sizes(T, O, R, KV, head)
        if self._shared.closed or self._weights is None:
            raise RuntimeRefusal("this session is closed; open a new one")
        self._set_symbols(self._args, T, O, R, KV, head, entries)
        self.n_evals += 1
        if self._marks is not None:
            self._marks = [[] for _ in self._pieces]

    def run(self, index: int) -> None:
        """Run one piece: copy in what it reads, start its launches, copy out what it made, wait. The slots in ``staged`` are the caller's
        to fill and to read.
        """
        env = self.env()
        shape, top = self._launches.shape(env, self._most)
        piece = self._pieces[index]
        marks = None if self._marks is None else self._marks[index]

        def issue() -> None:
            if marks is not None:
                marks.append(self._device.mark())
            self._copy_in(piece, top, first=index == 0)
            if marks is not None:
                marks.append(self._device.mark())
            self._launches.start(piece.launches, env, marks)
            self._copy_out(piece, top, last=index == len(self._pieces) - 1)

        if marks is not None or self.program.fixups:  # a recording has fixed arguments and no marks
            issue()
        else:
            self._recordings.run((index, shape), issue)
        self._device.synchronize()

    def _copy_in(self, piece: Piece, env: Mapping[str, int], first: bool) -> None:
        device = self._device
        if first:
            device.send(self._symbols.address, self._symbols.host)
            for (kind, name), buffer in self._buffers.items():
                if kind == "input":
                    used = fmt.numel(self.input_of(name).ne, env)
                    device.send(buffer.address, buffer.host[:used])
        for slot, size in piece.incoming.items():
            device.send(self._slot_address(slot), self.staged[slot][: fmt.evaluate(size, env)])

    def _copy_out(self, piece: Piece, env: Mapping[str, int], last: bool) -> None:
        device = self._device
        for slot, size in piece.outgoing.items():
            device.receive(self._slot_address(slot), self.staged[slot][: fmt.evaluate(size, env)])
        for name, array in self._outputs.items() if last else ():
            used = fmt.numel(self.program.outputs[name], env)
            device.receive(self._buffers["output", name].address, array[:used])

    def _slot_address(self, slot: int) -> int:
        return self._arena_base + self._slot_offset[slot]

    def output(self, name: str) -> np.ndarray:
        """f32 view of an output at the sizes of the last ``eval``, numpy order."""
        return self._shaped(name, self._outputs)

    # Profile and end

    def enable_profile(self, on: bool = True) -> None:
        """Mark every launch; read with ``profile``."""
        self._marks = [] if on else None

    def profile(self) -> np.ndarray:
        """i64 [launches, 2]: nanoseconds each launch of the last ``eval`` waited and worked. Launches follow one another, so only the first
        of a piece waits: for what is copied to the device. 0 for launches that do not run here.
        """
        if self._marks is None:
            raise RuntimeRefusal("profiling is off; create the executor with profile=True")
        found = np.zeros((len(self.program.launches), 2), np.int64)
        for piece, marks in zip(self._pieces, self._marks):
            spent = [round(1e6 * self._device.elapsed(a, b)) for a, b in pairwise(marks)]
            if spent:
                found[piece.launches.start, 0] = spent[0]
                found[piece.launches.start : piece.launches.stop, 1] = spent[1:]
        return found

    def on_device(self, launch: int) -> bool:
        """Whether a launch runs on a GPU: all do."""
        return True

    def _free(self) -> None:
        for address in self._owned:
            self._device.free(address)
        self._owned.clear()

    def close(self) -> None:
        """Free this executor's memory, and with that of a session's first executor all others'. Safe to call twice."""
        if self._weights is None:
            return
        if self._owner:
            self._shared.closed = True
            for other in self._shared.others:
                other.close()
        self._recordings.clear()
        self._free()
        self._weights.release()
        self._weights = None
        if self._owner:
            self._closing()

    def __enter__(self) -> CudaExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
