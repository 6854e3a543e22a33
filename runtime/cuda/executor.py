"""The executor on a GPU: the same programs, inputs and outputs as ``runtime.executor.Executor``, with memory and launches on a device.

Weights go to the device once and are shared by the programs of an artifact. A micro-batch uploads its inputs and the graph's symbols,
starts the entries of every launch in order on one stream, and fetches the outputs. Attention needs extra memory for partial results; where
its budget is too small for all tokens, the tokens go through it in slices, which changes no bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ggufc.formats import abi, cuda
from ggufc.formats import artifact as fmt
from ggufc.formats.errors import ArtifactError
from ggufc.runtime.artifact import Artifact
from ggufc.runtime.errors import RuntimeRefusal
from ggufc.runtime.executor import Executor, Limits, pad
from ggufc.runtime.memory import align
from ggufc.runtime.rows import of_cells, row_bytes

from .caches import DeviceCaches
from .code import LoadedCode, load_code
from .device import Device, megabytes

_ALIGN = 256
EXTRA_BUDGET = 64 << 20
"""Bytes for attention's partial results; more only where a single token needs more."""
_SLACK = 64 << 20
"""What drivers and contexts take beside our buffers."""
_UPLOAD_CHUNK = 64 << 20

_STATES = "this model keeps state per sequence, which GPUs do not hold yet; run it on the CPU"

Progress = Callable[[int, int], None]


@dataclass
class _Shared:
    """What the executors of one artifact share: the device, its code and caches, weights by name, and the owner's open state."""

    device: Device
    code: LoadedCode
    caches: DeviceCaches
    weights: dict[str, tuple[int, int]] = field(default_factory=dict)
    closed: bool = False


@dataclass
class _Place:
    """Device memory by address; stands where the CPU executor has a ``Region``."""

    base: int
    size: int


class _NoImage:
    """Kernels are numbers on the device: their addresses in the native image do not matter."""

    def address(self, offset: int) -> int:
        return 0


class CudaExecutor(Executor):
    """One program of an artifact on ``device``. Other arguments are those of ``Executor``; ``n_threads`` is accepted and means nothing.

    ``progress(done, total)`` reports the upload of weights in bytes. RuntimeRefusal, before anything is allocated, if memory does not
    suffice. The device stays the caller's: closing the executor frees its memory only.
    """

    def __init__(
        self,
        artifact: Artifact,
        program: str = "eval",
        n_threads: int | None = None,
        n_ctx: int = 4096,
        n_ubatch: int = 512,
        n_seq_max: int = 1,
        share: Executor | None = None,
        profile: bool = False,
        device: Device | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.artifact = artifact
        if not all(of_cells(cache) for cache in artifact.manifest.caches):
            raise RuntimeRefusal(f"{artifact.path}: {_STATES}")
        self.program = artifact.program(program)
        self.image = _NoImage()  # type: ignore[assignment]
        self._marks: list[Any] | None = None
        self._owned: list[int] = []
        self._first_arg: list[int] = []
        self.n_evals = 0
        self._owner = share is None
        if share is None:
            if device is None:
                raise RuntimeRefusal("a CUDA executor needs a device; open one with ggufc.runtime.cuda.open_device()")
            self.limits = Limits(n_ubatch, pad(n_ctx), n_seq_max)
            code = load_code(artifact, device)
            self._device, self._code = device, code
            self._check_memory(cached=0)
            self._shared = _Shared(device, code, DeviceCaches(artifact.manifest.caches, self.limits.n_cells, device))
            self._owned.append(self._shared.caches.base)
        else:
            if not isinstance(share, CudaExecutor):
                raise RuntimeRefusal("a CUDA executor can share memory with another CUDA executor only")
            self.limits, self._shared = share.limits, share._shared
            self._device, self._code = self._shared.device, self._shared.code
            self._check_memory(cached=self._shared.caches.size)
        self.caches = self._shared.caches  # type: ignore[assignment]
        self._max_list = self.limits.env()["R"]
        try:
            self._allocate()
            self._upload_weights(progress)
            self._bind()
            if profile:
                self.enable_profile()
        except BaseException:
            self.close()
            raise

    @property
    def n_threads(self) -> int:
        return 1

    @property
    def target(self) -> str:
        """Architecture of the code in use, such as ``sm_90``."""
        return self._code.target

    # -- memory ------------------------------------------------------------------------------------------------------

    def _weight_names(self) -> list[str]:
        return list(dict.fromkeys(arg.name for launch in self.program.launches for arg in launch.args if arg.kind == "weight"))

    def _sizes(self) -> dict[str, int]:
        """Bytes this program needs on the device, by purpose (caches excluded)."""
        slots = sum(align(max(self._size(slot.sizes, f"slot {i}"), default=0), _ALIGN) for i, slot in enumerate(self.program.slots))
        ends = [spec.ne for spec in self.program.inputs] + list(self.program.outputs.values())
        edges = sum(align(4 * math.prod(self._size(ne, "an input or output")), _ALIGN) for ne in ends)
        return {"activations": slots, "inputs and outputs": edges, "attention": self._extra_size()}

    def _extra_size(self) -> int:
        """Extra memory: the budget, less if the largest batch needs less, more if one token does."""
        env = self.limits.env()
        most = 0
        for launch in self.program.launches:
            kernel = self._kernel(launch.kernel)
            per_token = kernel.extra_bytes * -(-env["R"] // kernel.extra_div)
            most = max(most, per_token, min(per_token * env["T"], EXTRA_BUDGET))
        return most

    def _kernel(self, index: int) -> cuda.CudaKernel:
        kernels = self._code.manifest.kernels
        if not 0 <= index < len(kernels):
            raise ArtifactError(f"{self.artifact.path}: a launch refers to kernel {index} of {len(kernels)}; compile the model again")
        return kernels[index]

    def _check_memory(self, cached: int) -> None:
        """Refuse before allocating, with the sum that was needed."""
        manifest = self.artifact.manifest
        held = self._shared.weights if not self._owner else {}
        sizes = {"weights": sum(self.artifact.file.data(name).size for name in self._weight_names() if name not in held)}
        if not cached:
            sizes["caches"] = sum(align(row_bytes(cache) * self.limits.n_cells, _ALIGN) for cache in manifest.caches)
        sizes.update(self._sizes())
        needed, free = sum(sizes.values()) + _SLACK, self._device.free_memory()
        if needed > free:
            parts = ", ".join(f"{name} {megabytes(size)}" for name, size in sizes.items())
            raise RuntimeRefusal(
                f"{self._device.name} has {megabytes(free)} free, {megabytes(needed)} are needed ({parts}); use a smaller n_ctx or "
                "n_ubatch, a smaller cache type, or run on the CPU"
            )

    def _alloc(self, size: int) -> int:
        address = self._device.alloc(size)
        self._owned.append(address)
        return address

    def _allocate(self) -> None:
        device, program = self._device, self.program
        self._slot_bytes = [max(self._size(slot.sizes, f"slot {i}"), default=0) for i, slot in enumerate(program.slots)]
        self._slot_offset, total = [], 0
        for size in self._slot_bytes:
            self._slot_offset.append(total)
            total += align(size, _ALIGN)
        self.arena_bytes = total
        self._arena = _Place(self._alloc(total), total)  # type: ignore[assignment]
        self._extra = _Place(0, self._extra_size())
        if self._extra.size:
            self._extra.base = self._alloc(self._extra.size)
        self._symbols = self._alloc(8 * len(abi.PARAMS))
        self.inputs: dict[str, np.ndarray] = {}
        self.input_specs = {spec.name: spec for spec in program.inputs}
        self._places: dict[tuple[str, str], tuple[int, int]] = {}
        self._host_outputs: dict[str, np.ndarray] = {}
        for spec in program.inputs:
            size = 4 * self._input_values(spec)
            self._places["input", spec.name] = (self._alloc(size), size)
            self.inputs[spec.name] = device.host_array(size).view(np.float32 if spec.dtype == "f32" else np.int32)
        for name in program.outputs:
            size = 4 * self._output_values(name)
            self._places["output", name] = (self._alloc(size), size)
            self._host_outputs[name] = device.host_array(size).view(np.float32)
        for name, offset in self.caches.offsets.items():
            place = self._shared.caches.base + offset
            self._places["cache", name] = (place, self.caches.row_bytes[name] * self.caches.n_cells)

    def _upload_weights(self, progress: Progress | None) -> None:
        held = self._shared.weights
        missing = [name for name in self._weight_names() if name not in held]
        total, done = sum(self.artifact.file.data(name).size for name in missing), 0
        for name in missing:
            data = self.artifact.file.data(name).reshape(-1).view(np.uint8)
            address = self._alloc(data.size)
            for at in range(0, data.size, _UPLOAD_CHUNK):
                part = data[at : at + _UPLOAD_CHUNK]
                self._device.upload(address + at, part)
                done += part.size
                if progress:
                    progress(done, total)
            held[name] = (address, data.size)

    def _weight(self, name: str) -> tuple[int, int]:
        return self._shared.weights[name]

    # -- launches ----------------------------------------------------------------------------------------------------

    def _bind(self) -> None:
        flat, rows = self._resolved()
        self._args = np.array(flat, np.int64)
        self.params = np.zeros(len(abi.PARAMS), np.int64)
        self._first_arg = [row[1] for row in rows]
        for index, launch in enumerate(self.program.launches):
            kernel = self._kernel(launch.kernel)
            if len(launch.args) > kernel.n_args or any(f.sym and f.sym not in abi.PARAMS for e in kernel.entries for f in e.grid):
                raise ArtifactError(
                    f"{self.artifact.path}: launch {index} ({launch.node}) does not fit its GPU kernel; compile the model again"
                )
        self._bind_fixups()

    def rebind(self) -> None:
        """Resolve everything again, as if no graph could be reused."""
        self._bind()

    def eval(self, T: int, O: int, R: int, KV: int, head: int = 0, entries: Mapping[str, int] | None = None) -> None:
        """Evaluate one micro-batch as ``Executor.eval``; the outputs have arrived on return."""
        if entries:
            raise RuntimeRefusal(_STATES)
        self._check_sizes(T, O, R, KV)
        if self._fix_places.size:
            if not 0 <= head <= self.limits.n_cells - T:
                raise RuntimeRefusal(f"{T} tokens cannot be written from cell {head} of {self.limits.n_cells}")
            self._args[self._fix_places] = self._fix_bases + head * self._fix_steps
        for name, value in (("T", T), ("O", O), ("C", self.limits.n_cells), ("KV", KV), ("R", R)):
            self.params[abi.PARAMS.index(name)] = value
        env = dict(zip(abi.PARAMS, self.params.tolist()))
        self.n_evals += 1
        device = self._device
        device.upload(self._symbols, self.params)
        for name, spec in self.input_specs.items():
            used = math.prod(fmt.evaluate(form, env) for form in spec.ne)
            device.upload(self._places["input", name][0], self.inputs[name][:used])
        words = self._args.tolist()
        marks = [device.mark()] if self._marks is not None else None
        for launch, first in zip(self.program.launches, self._first_arg):
            self._launch(launch, words[first : first + len(launch.args)], env)
            if marks is not None:
                marks.append(device.mark())
        for name in self._host_outputs:
            array = self.output(name)
            if array.size:
                device.download(self._places["output", name][0], array.reshape(-1))
        device.synchronize()
        self._marks = marks

    def _launch(self, launch: fmt.Launch, words: list[int], env: dict[str, int]) -> None:
        kernel = self._kernel(launch.kernel)
        words = words + [0] * (kernel.n_args - len(words))
        own = launch.mult * (-(-env[launch.sym] // launch.div) if launch.sym else 1)
        if not kernel.extra_bytes:
            self._entries(kernel, words, env, env, 0, own)
            return
        per_token = kernel.extra_bytes * max(1, -(-env["R"] // kernel.extra_div))
        step = max(1, self._extra.size // per_token)
        for first in range(0, env["T"], step):
            self._entries(kernel, words, env, {**env, "T": min(step, env["T"] - first)}, first, own)

    def _entries(
        self, kernel: cuda.CudaKernel, words: list[int], env: dict[str, int], slice_env: dict[str, int], first: int, own: int
    ) -> None:
        """Start what applies; ``slice_env`` has the tokens of the slice that begins with ``first``."""
        for entry in kernel.entries:
            if entry.sym and not (entry.low <= env[entry.sym] and (not entry.high or env[entry.sym] <= entry.high)):
                continue
            tiles = cuda.tiles(entry.grid, slice_env) if entry.grid else own
            if tiles:
                arguments = [*words, self._symbols, self._extra.base, first, tiles]
                self._device.launch(self._code.functions[entry.symbol], min(tiles, cuda.MAX_GRID), entry.block, arguments)

    def _check_sizes(self, T: int, O: int, R: int, KV: int) -> None:
        limits = self.limits
        if not (0 < T <= limits.n_ubatch and 0 <= O <= limits.n_ubatch and 0 <= KV <= limits.n_cells and 0 <= R <= self._max_list):
            raise RuntimeRefusal(
                f"a micro-batch of {T} tokens, {O} rows, {R} list entries and {KV} cells exceeds what was allocated ({limits})"
            )
        if self._shared.closed:
            raise RuntimeRefusal("this session is closed; open a new one")

    def output(self, name: str) -> np.ndarray:
        """f32 view of an output at the sizes of the last ``eval``, numpy order."""
        if name not in self._host_outputs:
            raise RuntimeRefusal(
                f"the program {self.program.name} has no output {name!r}; it has {', '.join(self._host_outputs) or 'none'}"
            )
        env = dict(zip(abi.PARAMS, (int(v) for v in self.params)))
        ne = [fmt.evaluate(form, env) for form in self.program.outputs[name]]
        return self._host_outputs[name][: math.prod(ne)].reshape(ne[::-1])

    # -- profile and end ---------------------------------------------------------------------------------------------

    def enable_profile(self, on: bool = True) -> None:
        """Mark every launch; read with ``profile``."""
        self._marks = [] if on else None

    def profile(self) -> np.ndarray:
        """i64 [launches]: nanoseconds between the marks of the last ``eval``."""
        if self._marks is None:
            raise RuntimeRefusal("profiling is off; create the executor with profile=True")
        pairs = zip(self._marks[:-1], self._marks[1:])
        return np.array([round(1e6 * self._device.elapsed(a, b)) for a, b in pairs], np.int64)

    def close(self) -> None:
        """Free the memory if it is this executor's own. Safe to call twice."""
        if self._owner and hasattr(self, "_shared"):
            self._shared.closed = True
            self._shared.weights.clear()
        for address in self._owned:
            self._device.free(address)
        self._owned.clear()
