"""Binding a program to memory and running it: one native call per micro-batch.

Binding resolves every argument of every launch to an address once. What differs between micro-batches enters through five parameters, the
input buffers and, for caches written at a moving offset, the program's fixups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ggufc.formats import abi
from ggufc.formats import artifact as fmt
from ggufc.formats.errors import ArtifactError
from ggufc.formats.ggml_types import TYPES

from .artifact import Artifact
from .cpuinfo import physical_cores
from .errors import RuntimeRefusal
from .image import CodeImage
from .memory import Region, align
from .rows import CacheRows, HostPart, of_cells
from .state_inputs import input_values, symbols
from .team import Team
from .windows import REDIRECTED, SUFFIX, redirected

CACHE_PAD = 256
"""Cells are allocated, and visible lengths rounded, in multiples of this (attention walks the cache in tiles)."""

MAX_THREADS = 256
_INDEX = {name: i for i, name in enumerate(abi.PARAMS)}
_MAX_MULT = 1 << 24  # with at most 2^24 tokens, tiles still fit the 32 bits of a claim word
_NUMPY = {"f32": np.float32, "i32": np.int32}
_INPUTS = {
    "tokens": ("i32", 1, "T"),
    "embd": ("f32", 0, "T"),
    "positions": ("i32", 1, "T"),
    "out_ids": ("i32", 1, "O"),
    "kv_slots": ("i32", 1, "T"),
    "kv_cells": ("i32", 1, "R"),
    "visible": ("i32", 3, "T"),
}
"""Kind -> type, values per unit (0 = the model's n_embd) and the symbol that counts units."""


def pad(n: int, to: int = CACHE_PAD) -> int:
    return -(-n // to) * to


@dataclass(frozen=True)
class Limits:
    """Largest sizes a bound program must serve: ``n_ubatch`` tokens, ``n_cells`` cells, ``n_seq_max`` sequences."""

    n_ubatch: int
    n_cells: int
    n_seq_max: int = 1

    def env(self) -> dict[str, int]:
        # Sequences may share cells, so each list of the batch can be as long as the cache.
        lists = min(self.n_seq_max, self.n_ubatch)
        common = {"T": self.n_ubatch, "O": self.n_ubatch, "C": self.n_cells, "KV": self.n_cells, "R": self.n_cells * lists}
        return common | symbols(self.n_ubatch, self.n_cells, self.n_seq_max)


class CacheBuffers:
    """The persistent KV buffers of an artifact, zero-filled. ``view(name)`` is u8 [rows, row bytes].

    Row c is cell c, except that caches of layers with a window have ``window_rows`` rows if that is not 0 (``windows``), and that other
    rows than cells belong to one of ``n_seq_max`` sequences (``state_inputs``).
    """

    def __init__(self, artifact: Artifact, n_cells: int, window_rows: int = 0, n_seq_max: int = 1) -> None:
        self.n_cells = n_cells
        self.n_rows: dict[str, int] = {}
        self.specs = {cache.name: cache for cache in artifact.manifest.caches}
        self.row_bytes: dict[str, int] = {}
        self.offsets: dict[str, int] = {}
        total = 0
        for cache in artifact.manifest.caches:
            info = TYPES.get(cache.dtype)
            if info is None or cache.row <= 0 or cache.row % info.block:
                raise ArtifactError(
                    f"{artifact.path}: cache {cache.name} has rows of {cache.row} values of type {cache.dtype!r}, which cannot be stored"
                )
            self.row_bytes[cache.name] = cache.row // info.block * info.bytes
            self.n_rows[cache.name] = window_rows if window_rows and cache.window else self._rows(artifact, cache, n_seq_max)
            self.offsets[cache.name] = total
            total += align(self.row_bytes[cache.name] * self.n_rows[cache.name])
        self.memory = Region(total, f"a KV cache of {n_cells} cells")

    def _rows(self, artifact: Artifact, cache: fmt.Cache, n_seq_max: int) -> int:
        env = {"C": self.n_cells} | symbols(1, self.n_cells, n_seq_max)
        unknown = {symbol for symbol in cache.rows if symbol and symbol not in env}
        rows = 0 if unknown else fmt.evaluate(cache.rows, env)
        if not 0 < rows < 1 << 40:
            raise ArtifactError(f"{artifact.path}: cache {cache.name} has {cache.rows} rows, which cannot be; compile the model again")
        return rows

    def view(self, name: str) -> np.ndarray:
        row, start, n = self.row_bytes[name], self.offsets[name], self.n_rows[name]
        return self.memory.bytes[start : start + row * n].reshape(n, row)

    def rows(self, name: str) -> CacheRows:
        """The rows of one cache for state files and for moving cells: here in one part."""
        return CacheRows(self.specs[name], [HostPart(self.view(name))])

    def clear(self, n_rows: int | None = None) -> None:
        """Zero the first ``n_rows`` cells of every cache (all by default), and everything that belongs to sequences; rows never written
        stay untouched memory.
        """
        for name, spec in self.specs.items():
            self.view(name)[: n_rows if of_cells(spec) else None] = 0


class Executor:
    """One program of an artifact, bound to memory and threads.

    ``inputs[name]`` are the input buffers (numpy, numpy order), filled by the caller before ``eval``; ``output(name)`` is a view that the
    next ``eval`` overwrites. ``share`` is another executor of the same artifact whose caches, code and threads this one uses.
    ``window_rows`` not 0: caches of layers with a window are compacted to as many rows, and the launches on them read inputs of their own,
    named with ``windows.SUFFIX``.
    """

    window_rows = 0

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
        window_rows: int = 0,
    ) -> None:
        self.window_rows = window_rows if share is None else share.window_rows
        self.artifact = artifact
        self.program = artifact.program(program)
        self.limits: Limits = Limits(n_ubatch, pad(n_ctx), n_seq_max) if share is None else share.limits
        self._owns_team = share is None
        if share is None:
            self.image = CodeImage(artifact.image)
            self.caches = CacheBuffers(artifact, self.limits.n_cells, window_rows, n_seq_max)
            self.team = self._make_team(physical_cores() if n_threads is None else n_threads)
        else:
            self.image, self.caches, self.team = share.image, share.caches, share.team
        self._most = self.limits.env()
        self._max_list = self._most["R"]
        self.n_evals = 0
        self._profile: np.ndarray | None = None
        try:
            self._first_arg: list[int] = []
            self._allocate()
            self._bind()
            if profile:
                self.enable_profile()
        except BaseException:
            self.close()
            raise

    @property
    def n_threads(self) -> int:
        return self.team.n_threads

    def _make_team(self, n_threads: int) -> Team:
        if not 1 <= n_threads <= MAX_THREADS:
            raise RuntimeRefusal(f"n_threads is {n_threads}; give a number from 1 to {MAX_THREADS}")
        manifest = self.artifact.manifest
        scratch = max((kernel.scratch for kernel in manifest.kernels), default=0)
        worker, evaluate = (self.image.address(manifest.drivers[name]) for name in ("ggufc_worker", "ggufc_eval"))
        return Team(worker, evaluate, n_threads, scratch, keep=self.image)

    def _size(self, forms: list[fmt.Affine], what: str) -> list[int]:
        """Values of affine forms at the limits; ArtifactError for a symbol we do not know or a negative size."""
        env = self.limits.env()
        try:
            values = [fmt.evaluate(form, env) for form in forms]
        except KeyError as error:
            raise ArtifactError(
                f"{self.artifact.path}: {what} is sized by the unknown symbol {error.args[0]!r}; compile the model again"
            ) from None
        if any(not 0 <= value < 1 << 48 for value in values):
            raise ArtifactError(f"{self.artifact.path}: {what} has the impossible size {values}; compile the model again")
        return values

    def _allocate(self) -> None:
        program = self.program
        sizes = [max(self._size(slot.sizes, f"slot {i}"), default=0) for i, slot in enumerate(program.slots)]
        self._slot_bytes = sizes
        self._slot_offset: list[int] = []
        total = 0
        for size in sizes:
            self._slot_offset.append(total)
            total += align(size)
        self._arena = Region(total, "activations")
        self.arena_bytes = total
        self.inputs: dict[str, np.ndarray] = {}
        self.input_specs = {spec.name: spec for spec in program.inputs}
        self._outputs: dict[str, Region] = {}
        self._places: dict[tuple[str, str], tuple[int, int]] = {}
        self._keep: list[Region] = []
        for spec in program.inputs:
            for name in [spec.name] + [spec.name + SUFFIX] * (self.window_rows > 0 and spec.kind in REDIRECTED):
                region = Region(4 * self._input_values(spec), f"input {name}")
                self._keep.append(region)
                self._places["input", name] = (region.base, region.size)
                self.inputs[name] = region.bytes.view(_NUMPY[spec.dtype])
        for name in program.outputs:
            region = Region(4 * self._output_values(name), f"output {name}")
            self._outputs[name] = region
            self._places["output", name] = (region.base, region.size)
        for name, offset in self.caches.offsets.items():
            self._places["cache", name] = (self.caches.memory.base + offset, self.caches.row_bytes[name] * self.caches.n_rows[name])

    def _input_values(self, spec: fmt.Input) -> int:
        """Values an input holds at the limits; ArtifactError if this version could not fill it."""
        ne = self._size(spec.ne, f"input {spec.name}")
        if spec.kind in _INPUTS:
            dtype, width, symbol = _INPUTS[spec.kind]
            wanted = (width or self.artifact.manifest.n_embd) * self.limits.env()[symbol]
        else:
            dtype, wanted = "i32", input_values(spec, self.limits.env())
        if not wanted or spec.dtype != dtype or math.prod(ne) != wanted:
            raise ArtifactError(
                f"{self.artifact.path}: input {spec.name} ({spec.kind}) is {spec.dtype}{ne}, which this version cannot fill; "
                "compile the model again"
            )
        return wanted

    def _output_values(self, name: str) -> int:
        """Values an output holds at the limits; ArtifactError for logits that do not fit the model."""
        ne = self._size(self.program.outputs[name], f"output {name}")
        rows = self.limits.n_ubatch
        if name == "logits" and ne != [self.artifact.manifest.n_vocab, rows]:
            raise ArtifactError(
                f"{self.artifact.path}: the logits are {ne} for {rows} rows of {self.artifact.manifest.n_vocab}; compile the model again"
            )
        return math.prod(ne)

    def _weight(self, name: str) -> tuple[int, int]:
        place = self._places.get(("weight", name))
        if place is None:
            data = self.artifact.file.data(name)
            place = self._places["weight", name] = (int(data.__array_interface__["data"][0]), data.size)
        return place

    def _resolved(self) -> tuple[list[int], list[tuple[int, int, int, int, int, int]]]:
        """Arguments of all launches one after another, and (kernel, first argument, symbol, div, mult, wait) per launch.

        Every pointer is checked to start inside its buffer, so a manifest that does not fit its file is refused here and cannot crash a
        kernel's first load.
        """
        launches = self.program.launches
        kernels = [self.image.address(kernel.offset) for kernel in self.artifact.manifest.kernels]
        symbols = {name: i for i, name in enumerate(abi.PARAMS)}
        symbols[""] = -1
        flat: list[int] = []
        rows: list[tuple[int, int, int, int, int, int]] = []
        resolve = self._resolve
        windowed = {name for name, spec in self.caches.specs.items() if spec.window} if self.window_rows else set[str]()
        for index, launch in enumerate(launches):
            wait = index if launch.wait < 0 else launch.wait
            known = 0 <= launch.kernel < len(kernels) and launch.sym in symbols
            if not (known and 1 <= launch.div <= _MAX_MULT and 0 <= launch.mult <= _MAX_MULT and wait <= index):
                raise ArtifactError(f"{self.artifact.path}: launch {index} ({launch.node}) is malformed; compile the model again")
            rows.append((kernels[launch.kernel], len(flat), symbols[launch.sym], launch.div, launch.mult, wait))
            compacted = bool(windowed) and redirected(self.program, launch, windowed, self.input_specs)
            for arg in launch.args:
                flat.append(resolve(self._redirect(arg) if compacted else arg, index))
        return flat, rows

    def _bind(self) -> None:
        """Allocate what the native driver reads and fill it.

        This memory is written in place afterwards and never replaced: a worker that was descheduled may still look at it after an
        evaluation.
        """
        flat, rows = self._resolved()
        self._args = np.zeros(max(len(flat), 1), np.int64)
        self._table = np.zeros((max(len(rows), 1), abi.LAUNCH_WORDS), np.int64)
        self._counters = Region(8 * abi.COUNTER_WORDS * max(len(rows), 1), "launch counters")
        # Symbols that the session fixes; the others differ between micro-batches.
        self.params = np.array([self._most[name] for name in abi.PARAMS], np.int64)
        self._exec = np.zeros(abi.EXEC_WORDS, np.int64)
        self._exec[abi.EXEC_N_LAUNCHES] = len(rows)
        self._exec[abi.EXEC_LAUNCHES] = self._table.__array_interface__["data"][0]
        self._exec[abi.EXEC_PARAMS] = self.params.__array_interface__["data"][0]
        self._exec[abi.EXEC_COUNTERS] = self._counters.base
        self._exec_address = int(self._exec.__array_interface__["data"][0])
        self.team.hold(self._args, self._table, self._counters, self.params, self._exec)
        self._fill(flat, rows)
        self._bind_fixups()

    def _fill(self, flat: list[int], rows: list[tuple[int, int, int, int, int, int]]) -> None:
        if not rows:
            return
        self._args[: len(flat)] = flat
        columns = np.array(rows, dtype=np.int64)
        columns[:, 1] = columns[:, 1] * 8 + self._args.__array_interface__["data"][0]
        order = [abi.LAUNCH_FN, abi.LAUNCH_ARGS, abi.LAUNCH_SYM, abi.LAUNCH_DIV, abi.LAUNCH_MULT, abi.LAUNCH_WAIT]
        self._table[: len(rows), order] = columns
        self._first_arg = [row[1] for row in rows]

    def _resolve(self, arg: fmt.Arg, index: int) -> int:
        kind = arg.kind
        if kind == "slot":
            if not 0 <= arg.value < len(self._slot_bytes):
                raise self._bad_arg(arg, index, f"there are {len(self._slot_bytes)} slots")
            base, size = self._arena.base + self._slot_offset[arg.value], self._slot_bytes[arg.value]
        elif kind == "weight":
            base, size = self._weight(arg.name)
        elif kind == "int":
            if not -(1 << 63) <= arg.value < 1 << 63:
                raise self._bad_arg(arg, index, "the value does not fit 64 bits")
            return arg.value
        elif kind == "null":
            return 0
        else:
            place = self._places.get((kind, arg.name))
            if place is None:
                raise self._bad_arg(arg, index, "there is no such buffer")
            base, size = place
        if not 0 <= arg.offset < max(size, 1):
            raise self._bad_arg(arg, index, f"the offset lies outside its {size} bytes")
        return base + arg.offset

    def _redirect(self, arg: fmt.Arg) -> fmt.Arg:
        """The argument of a launch on compacted caches: slots, list and ranges are those of their rows."""
        if arg.kind == "input" and self.input_specs[arg.name].kind in REDIRECTED:
            return fmt.Arg("input", arg.name + SUFFIX, arg.value, arg.offset)
        return arg

    def _bad_arg(self, arg: fmt.Arg, index: int, why: str) -> ArtifactError:
        node = self.program.launches[index].node
        target = arg.name or arg.value
        return ArtifactError(
            f"{self.artifact.path}: launch {index} ({node}) refers to {arg.kind} {target!r} at byte {arg.offset}: {why}; compile the "
            "model again"
        )

    def _bind_fixups(self) -> None:
        """Prepare the arguments that move with ``head``; each must be this cache's own argument, or the artifact is refused."""
        places, bases, steps = [], [], []
        for fixup in self.program.fixups:
            ok = 0 <= fixup.launch < len(self.program.launches) and 0 <= fixup.arg < len(self.program.launches[fixup.launch].args)
            arg = self.program.launches[fixup.launch].args[fixup.arg] if ok else None
            if arg is None or arg.kind != "cache" or arg.name != fixup.cache or fixup.step != self.caches.row_bytes.get(fixup.cache):
                raise ArtifactError(
                    f"{self.artifact.path}: the fixup of {fixup.node} does not match a write into cache {fixup.cache}; compile the "
                    "model again"
                )
            places.append(self._first_arg[fixup.launch] + fixup.arg)
            bases.append(self._places["cache", fixup.cache][0])
            steps.append(fixup.step)
        self._fix_places, self._fix_bases, self._fix_steps = (np.array(v, np.int64) for v in (places, bases, steps))

    def rebind(self) -> None:
        """Resolve everything again, as if no graph could be reused."""
        self._fill(*self._resolved())

    def eval(self, T: int, O: int, R: int, KV: int, head: int = 0, entries: Mapping[str, int] | None = None) -> None:
        """Evaluate one micro-batch from the input buffers: T tokens, O output rows, R entries of the cell list, KV visible cells.

        ``head`` is the first cell written; only programs with fixups use it. ``entries``: values of the symbols about compressed entries.
        RuntimeRefusal for sizes beyond the limits.
        """
        limits = self.limits
        if not (0 < T <= limits.n_ubatch and 0 <= O <= limits.n_ubatch and 0 <= KV <= limits.n_cells and 0 <= R <= self._max_list):
            raise RuntimeRefusal(
                f"a micro-batch of {T} tokens, {O} rows, {R} list entries and {KV} cells exceeds what was allocated ({limits})"
            )
        if self.team.closed:
            raise RuntimeRefusal("this session is closed; open a new one")
        if self._fix_places.size:
            if not 0 <= head <= limits.n_cells - T:
                raise RuntimeRefusal(f"{T} tokens cannot be written from cell {head} of {limits.n_cells}")
            self._args[self._fix_places] = self._fix_bases + head * self._fix_steps
        self.params[: len(abi.COMMON)] = (T, O, limits.n_cells, KV, R)
        for name, value in (entries or {}).items():
            if not 0 <= value <= self._most[name]:
                raise RuntimeRefusal(f"a micro-batch with {name} = {value} exceeds what was allocated ({self._most[name]})")
            self.params[_INDEX[name]] = value
        self.n_evals += 1
        self.team.eval(self._exec_address)

    def output(self, name: str) -> np.ndarray:
        """f32 view of an output at the sizes of the last ``eval``, numpy order (``ne`` reversed)."""
        if name not in self._outputs:
            raise RuntimeRefusal(f"the program {self.program.name} has no output {name!r}; it has {', '.join(self._outputs) or 'none'}")
        env = dict(zip(abi.PARAMS, (int(v) for v in self.params)))
        ne = [fmt.evaluate(form, env) for form in self.program.outputs[name]]
        count = math.prod(ne)
        return self._outputs[name].bytes.view(np.float32)[:count].reshape(ne[::-1])

    def enable_profile(self, on: bool = True) -> None:
        """Record the cycle counter at each launch; read with ``profile``."""
        self._profile = np.zeros(2 * len(self.program.launches) + 1, np.int64) if on else None
        self._exec[abi.EXEC_PROFILE] = 0 if self._profile is None else self._profile.__array_interface__["data"][0]

    def profile(self) -> np.ndarray:
        """i64 [launches, 2]: cycles thread 0 waited for earlier launches, and worked, in the last ``eval``."""
        if self._profile is None:
            raise RuntimeRefusal("profiling is off; create the executor with profile=True")
        return np.diff(self._profile).reshape(-1, 2)

    def close(self) -> None:
        """Stop the threads if they are this executor's own. Safe to call twice."""
        if self._owns_team:
            self.team.close()

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
