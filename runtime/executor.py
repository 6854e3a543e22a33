"""Running a program on the CPU: one native call per micro-batch.

What binding means for any executor is in ``binding``. Here memory is the host's, and the launches become a table the native driver reads.
What differs between micro-batches enters through the symbols, the input buffers and, for caches written at a moving offset, the program's
fixups.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from ggufc.formats import abi
from ggufc.formats.cpustate import TILE_FEATURES, request_tiles

from .artifact import Artifact
from .binding import NUMPY, Binding
from .caches import CacheBuffers, joined
from .cpuinfo import physical_cores
from .errors import RuntimeRefusal, require_integer
from .image import CodeImage
from .memory import Region
from .sizes import DEFAULT_SIZES, Sizes
from .team import Team

MAX_THREADS = 256
_SYMBOL = {name: i for i, name in enumerate(abi.PARAMS)} | {"": -1}


class Executor(Binding):
    """One program of an artifact, bound to memory and threads, as large as ``sizes``.

    ``inputs[name]`` are the input buffers (numpy, numpy order), filled by the caller before ``eval``; ``output(name)`` is a view that the
    next ``eval`` overwrites. ``share`` is another executor of the same artifact whose sizes, caches, code and threads this
    one uses. Launches on compacted caches (``Sizes.window_rows``) read inputs of their own, named with ``windows.SUFFIX``. ``segments`` are
    the stretches of launches that run here (``run``), all in one by default; ``caches`` names the caches they need. ``closing`` is called
    when an executor that shares nobody's memory closes.
    """

    def __init__(
        self,
        artifact: Artifact,
        program: str = "eval",
        sizes: Sizes = DEFAULT_SIZES,
        *,
        share: Executor | None = None,
        profile: bool = False,
        segments: Sequence[range] | None = None,
        caches: Collection[str] | None = None,
        closing: Callable[[], None] = lambda: None,
    ) -> None:
        self._owns_team = share is None
        own = None if segments is None else frozenset(i for part in segments for i in part)
        self._describe(artifact, program, sizes if share is None else share.sizes, own)
        self._segments = [range(len(self.program.launches))] if segments is None else list(segments)
        if share is None:
            self.image = CodeImage(artifact.image)
            self.buffers = CacheBuffers(artifact, sizes, caches)
            self.team = self._make_team(physical_cores() if sizes.n_threads is None else sizes.n_threads)
        else:
            self.image, self.buffers, self.team = share.image, share.buffers, share.team
        self.caches = joined(self.buffers)
        self._profile: list[np.ndarray] | None = None
        self._closing: Callable[[], None] | None = None
        try:
            self._allocate()
            self._bind()
            if profile:
                self.enable_profile()
        except BaseException:
            self.close()
            raise
        self._closing = closing

    @property
    def n_threads(self) -> int:
        return self.team.n_threads

    @property
    def where(self) -> str:
        """What runs the program, in words."""
        return f"{self.n_threads} threads"

    def _make_team(self, n_threads: int) -> Team:
        require_integer("n_threads", n_threads, 1, MAX_THREADS)
        manifest = self.artifact.manifest
        if not TILE_FEATURES.isdisjoint(manifest.features) and not request_tiles():
            raise RuntimeRefusal(
                f"the system does not let this process use tile registers, which the code (level {manifest.level}) needs; compile the "
                "model with --target avx512vbmi"
            )
        scratch = max((kernel.scratch for kernel in manifest.kernels), default=0)
        worker, evaluate = (self.image.address(manifest.drivers[name]) for name in ("ggufc_worker", "ggufc_eval"))
        return Team(worker, evaluate, n_threads, scratch, keep=self.image)

    def _allocate(self) -> None:
        self._arena = Region(self.arena_bytes, "activations")
        self._arena_base = self._arena.base
        self.inputs: dict[str, np.ndarray] = {}
        self._outputs: dict[str, np.ndarray] = {}
        self._keep: list[Region] = []
        for name, spec in self._buffer_specs.items():
            self.inputs[name] = self._region("input", name, 4 * self._input_values(spec)).view(NUMPY[spec.dtype])
        for name in self.program.outputs:
            self._outputs[name] = self._region("output", name, 4 * self._output_values(name)).view(np.float32)
        for name, offset in self.buffers.offsets.items():
            self._places["cache", name] = (self.buffers.memory.base + offset, self.buffers.bytes_of(name))

    def _region(self, kind: str, name: str, size: int) -> np.ndarray:
        region = Region(size, f"{kind} {name}")
        self._keep.append(region)
        self._places[kind, name] = (region.base, region.size)
        return region.bytes

    def _weight(self, name: str) -> tuple[int, int]:
        place = self._places.get(("weight", name))
        if place is None:
            data = self.artifact.file.data(name)
            place = self._places["weight", name] = (int(data.__array_interface__["data"][0]), data.size)
        return place

    def _bind(self) -> None:
        """Allocate what the native driver reads and fill it.

        This memory is written in place afterwards and never replaced: a worker that was descheduled may still look at it after an
        evaluation.
        """
        flat = self._arguments()
        n_launches = len(self.program.launches)
        self._args = np.zeros(max(len(flat), 1), np.int64)
        self._table = np.zeros((max(n_launches, 1), abi.LAUNCH_WORDS), np.int64)
        self._counters = Region(8 * abi.COUNTER_WORDS * max(n_launches, 1), "launch counters")
        self._tiles = np.zeros(max(n_launches, 1), np.int64)
        self._claims = Region(8 * abi.CLAIM_WORDS * max(n_launches, 1) * self.n_threads, "claim words")
        self._exec = np.zeros((max(len(self._segments), 1), abi.EXEC_WORDS), np.int64)
        table, base = (int(a.__array_interface__["data"][0]) for a in (self._table, self._exec))
        for record, segment in zip(self._exec, self._segments):
            record[abi.EXEC_N_LAUNCHES] = len(segment)
            record[abi.EXEC_LAUNCHES] = table + 8 * abi.LAUNCH_WORDS * segment.start
            record[abi.EXEC_PARAMS] = self.params.__array_interface__["data"][0]
            record[abi.EXEC_COUNTERS] = self._counters.base + 8 * abi.COUNTER_WORDS * segment.start
            record[abi.EXEC_TILES] = int(self._tiles.__array_interface__["data"][0]) + 8 * segment.start
            record[abi.EXEC_CLAIMS] = self._claims.base + 8 * abi.CLAIM_WORDS * self.n_threads * segment.start
        self._execs = [base + 8 * abi.EXEC_WORDS * i for i in range(len(self._segments))]
        self.team.hold(self._args, self._table, self._counters, self._tiles, self._claims, self.params, self._exec)
        self._fill(flat)
        self._bind_fixups(self.buffers.row_bytes)

    def _arguments(self) -> list[int]:
        return self._resolved(len(self.artifact.manifest.kernels))

    def _fill(self, flat: list[int]) -> None:
        """Write arguments and launches; a launch waits within its segment, whose launches count from 0."""
        launches = self.program.launches
        if not launches:
            return
        self._args[: len(flat)] = flat
        kernels = [self.image.address(kernel.offset) for kernel in self.artifact.manifest.kernels]
        base = int(self._args.__array_interface__["data"][0])
        rows = np.zeros((len(launches), 6), np.int64)
        for segment in self._segments:
            for index in segment:
                launch, first = launches[index], 8 * self._first_arg[index] + base
                wait = max(index if launch.wait < 0 else launch.wait, segment.start) - segment.start
                rows[index] = (kernels[launch.kernel], first, _SYMBOL[launch.sym], launch.div, launch.mult, wait)
        order = [abi.LAUNCH_FN, abi.LAUNCH_ARGS, abi.LAUNCH_SYM, abi.LAUNCH_DIV, abi.LAUNCH_MULT, abi.LAUNCH_WAIT]
        self._table[: len(rows), order] = rows

    def rebind(self) -> None:
        """Resolve everything again, as if no graph could be reused."""
        self._fill(self._arguments())

    def eval(self, T: int, O: int, R: int, KV: int, head: int = 0, entries: Mapping[str, int] | None = None) -> None:
        """Evaluate one micro-batch from the input buffers: T tokens, O output rows, R entries of the cell list, KV visible cells.

        ``head`` is the first cell written; only programs with fixups use it. ``entries``: values of the symbols about compressed entries.
        RuntimeRefusal for sizes beyond the limits.
        """
        self.begin(T, O, R, KV, head, entries)
        for index in range(len(self._segments)):
            self.run(index)

    def begin(self, T: int, O: int, R: int, KV: int, head: int = 0, entries: Mapping[str, int] | None = None) -> None:
        """Take the sizes of a micro-batch; ``run`` then evaluates it segment by segment."""
        self._check_sizes(T, O, R, KV, head)
        if self.team.closed:
            raise RuntimeRefusal("this session is closed; open a new one")
        self._set_symbols(self._args, T, O, R, KV, head, entries)
        self.n_evals += 1

    def run(self, segment: int) -> None:
        """Run the launches of one segment."""
        self.team.eval(self._execs[segment])

    def output(self, name: str) -> np.ndarray:
        """f32 view of an output at the sizes of the last ``eval``, numpy order (``ne`` reversed)."""
        return self._shaped(name, self._outputs)

    def slot(self, index: int) -> np.ndarray:
        """u8 bytes of an activation slot."""
        at = self._slot_offset[index]
        return self._arena.bytes[at : at + self._slot_bytes[index]]

    def enable_profile(self, on: bool = True) -> None:
        """Record the cycle counter at each launch; read with ``profile``."""
        counts = [np.zeros(2 * len(segment) + 1, np.int64) for segment in self._segments]
        for record, words in zip(self._exec, counts):
            record[abi.EXEC_PROFILE] = words.__array_interface__["data"][0] if on else 0
        self._profile = counts if on else None

    def profile(self) -> np.ndarray:
        """i64 [launches, 2]: cycles thread 0 waited for earlier launches, and worked, in the last ``eval``; 0 for launches that do not run
        here.
        """
        if self._profile is None:
            raise RuntimeRefusal("profiling is off; create the executor with profile=True")
        found = np.zeros((len(self.program.launches), 2), np.int64)
        for segment, words in zip(self._segments, self._profile):
            found[segment.start : segment.stop] = np.diff(words).reshape(-1, 2)
        return found

    def close(self) -> None:
        """Stop the threads if they are this executor's own. Safe to call twice."""
        if not self._owns_team:
            return
        self.team.close()
        closing, self._closing = self._closing, None
        if closing is not None:
            closing()

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
