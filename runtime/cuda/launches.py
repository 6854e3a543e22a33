"""Starting the launches of a program on a device, and what about a micro-batch decides how they look.

A launch of the schedule becomes the entries of its GPU kernel. Their arguments are fixed when the program is bound; symbols are read from
device memory; only the number of tiles (and of slices, for kernels with extra memory) follows the micro-batch. ``shape`` gathers all that
does, so that micro-batches of one shape can be replayed from a recording.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ggufc.formats import abi, cuda
from ggufc.formats import artifact as fmt
from ggufc.formats.errors import ArtifactError

from .code import LoadedCode
from .device import Device

EXTRA_BUDGET = 64 << 20
"""Bytes for attention's partial results; more only where the fewest tokens that go together need more."""

_ROUNDED = ("R", "KV")
"""Symbols that grow with every token: micro-batches of one shape share the tiles they make, not their values."""

Shape = tuple[int, ...]


class Launches:
    """The launches ``own`` of a program; ``path`` names the artifact in errors."""

    def __init__(self, device: Device, code: LoadedCode, program: fmt.Program, own: Iterable[int], path: object) -> None:
        self._device, self._functions, self._program = device, code.functions, program
        self._first: list[int] = []
        self._args = np.zeros(0, np.int64)
        self._symbols = self._extra = self._extra_size = 0
        self.kernels: dict[int, cuda.CudaKernel] = {}
        for index in sorted(own):
            launch = program.launches[index]
            if not 0 <= launch.kernel < len(code.manifest.kernels):
                raise ArtifactError(
                    f"{path}: a launch refers to kernel {launch.kernel} of {len(code.manifest.kernels)}; compile the model again"
                )
            kernel = code.manifest.kernels[launch.kernel]
            symbols = {f.sym for e in kernel.entries for f in e.grid} | {e.sym for e in kernel.entries}
            if len(launch.args) > kernel.n_args or symbols - {"", *abi.PARAMS}:
                raise ArtifactError(f"{path}: launch {index} ({launch.node}) does not fit its GPU kernel; compile the model again")
            self.kernels[index] = kernel
        self._steps = self._divisors()

    def _divisors(self) -> dict[str, list[int]]:
        """By rounded symbol, the numbers it is divided by."""
        pairs = set()
        for index, kernel in self.kernels.items():
            launch = self._program.launches[index]
            for entry in kernel.entries:
                pairs |= {(f.sym, f.div) for f in entry.grid} if entry.grid else {(launch.sym, launch.div)}
                pairs |= {(entry.sym, 1)}
            if kernel.extra_bytes:
                pairs.add(("R", kernel.extra_div))
        return {symbol: sorted({div for s, div in pairs if s == symbol}) for symbol in _ROUNDED}

    def extra_size(self, most: Mapping[str, int]) -> int:
        """Extra memory at the limits: the budget, less if the largest batch needs less, more if the smallest slice does."""
        size = 0
        for kernel in self.kernels.values():
            per_token = kernel.extra_bytes * -(-most["R"] // kernel.extra_div)
            smallest = per_token * min(kernel.slice_tokens, most["T"])
            size = max(size, smallest, min(per_token * most["T"], EXTRA_BUDGET))
        return size

    def bind(self, args: np.ndarray, first: Sequence[int], symbols: int, extra: int, extra_size: int) -> None:
        """Take the arguments of all launches (``first``: where each launch's begin), the addresses of symbols and extra memory."""
        self._args, self._first = args, list(first)
        self._symbols, self._extra, self._extra_size = symbols, extra, extra_size

    def shape(self, env: Mapping[str, int], most: Mapping[str, int]) -> tuple[Shape, dict[str, int]]:
        """What decides the launches of a micro-batch, and the largest values of the symbols that look the same."""
        top = dict(env)
        for symbol, divisors in self._steps.items():
            top[symbol] = min([most[symbol], *(-(-env[symbol] // d) * d for d in divisors)])
        return tuple(top[name] for name in abi.PARAMS), top

    def start(self, segment: range, env: Mapping[str, int], marks: list[object] | None = None) -> None:
        """Start the launches of ``segment`` in order; ``marks`` gets a mark after each."""
        words = self._args.tolist()
        for index in segment:
            launch, first = self._program.launches[index], self._first[index]
            self._launch(index, launch, words[first : first + len(launch.args)], env)
            if marks is not None:
                marks.append(self._device.mark())

    def _launch(self, index: int, launch: fmt.Launch, words: list[int], env: Mapping[str, int]) -> None:
        kernel = self.kernels[index]
        words = words + [0] * (kernel.n_args - len(words))
        own = launch.mult * (-(-env[launch.sym] // launch.div) if launch.sym else 1)
        if not kernel.extra_bytes:
            self._entries(kernel, words, env, env, 0, own)
            return
        per_token = kernel.extra_bytes * max(1, -(-env["R"] // kernel.extra_div))
        step = max(1, self._extra_size // per_token // kernel.slice_tokens) * kernel.slice_tokens
        for first in range(0, env["T"], step):
            self._entries(kernel, words, env, {**env, "T": min(step, env["T"] - first)}, first, own)

    def _entries(
        self, kernel: cuda.CudaKernel, words: list[int], env: Mapping[str, int], slice_env: Mapping[str, int], first: int, own: int
    ) -> None:
        """Start what applies; ``slice_env`` has the tokens of the slice that begins with ``first``."""
        for entry in kernel.entries:
            if entry.sym and not (entry.low <= env[entry.sym] and (not entry.high or env[entry.sym] <= entry.high)):
                continue
            tiles = cuda.tiles(entry.grid, slice_env) if entry.grid else own
            if tiles:
                arguments = [*words, self._symbols, self._extra, first, tiles]
                self._device.launch(self._functions[entry.symbol], min(tiles, cuda.MAX_GRID), entry.block, arguments)
