"""What every executor does with a program before and around running it: sizes, checks, arguments.

An executor binds a program to memory of its own (``executor``: the host's, ``cuda.executor``: a device's). Here is what does not depend on
where that memory is: sizes at the limits, what an input or output must look like, resolving the arguments of launches to addresses, moving
arguments (fixups), and the symbols of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Protocol

import numpy as np

from ggufc.formats import abi
from ggufc.formats import artifact as fmt
from ggufc.formats.errors import ArtifactError

from .artifact import Artifact
from .caches import Caches
from .errors import RuntimeRefusal
from .memory import ALIGNMENT, align
from .rows import of_cells
from .sizes import Limits, Sizes
from .state_inputs import input_values
from .windows import REDIRECTED, SUFFIX, redirected

_INDEX = {name: i for i, name in enumerate(abi.PARAMS)}
_MAX_MULT = 1 << 24  # with at most 2^24 tokens, tiles still fit the 32 bits of a claim word
NUMPY = {"f32": np.float32, "i32": np.int32}
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


class BoundProgram(Protocol):
    """What a session needs of an executor, whichever memory it is bound to."""

    @property
    def program(self) -> fmt.Program: ...

    @property
    def input_specs(self) -> dict[str, fmt.Input]: ...

    @property
    def inputs(self) -> dict[str, np.ndarray]:
        """Buffers to fill before ``eval``, by name; numpy order."""

    @property
    def caches(self) -> Caches: ...

    @property
    def limits(self) -> Limits: ...

    @property
    def n_threads(self) -> int: ...

    @property
    def where(self) -> str:
        """What runs the program, in words."""

    def rebind(self) -> None: ...

    def eval(self, T: int, O: int, R: int, KV: int, head: int = 0, entries: Mapping[str, int] | None = None) -> None: ...

    def output(self, name: str) -> np.ndarray: ...

    def profile(self) -> np.ndarray:
        """i64 [launches, 2]: what each launch of the last ``eval`` waited and worked, all in one unit."""

    def on_device(self, launch: int) -> bool:
        """Whether a launch runs on a GPU."""

    def close(self) -> None: ...


class Binding:
    """One program of an artifact at its limits.

    A subclass calls ``_describe``, fills ``_places`` (what arguments name -> address and bytes) and ``_arena_base``, and then ``_resolved``
    gives the arguments of the launches in ``own`` (all by default). ``inputs[name]`` are the input buffers (numpy, numpy order), which the
    caller fills before ``eval``.
    """

    artifact: Artifact
    program: fmt.Program
    sizes: Sizes
    limits: Limits
    inputs: dict[str, np.ndarray]
    input_specs: dict[str, fmt.Input]
    params: np.ndarray
    n_evals = 0
    own: Collection[int]
    """Launches that run here: all, unless a program is divided between memories (``cuda.offload``)."""

    def _describe(
        self, artifact: Artifact, program: str, sizes: Sizes, own: Collection[int] | None = None, alignment: int = ALIGNMENT
    ) -> None:
        """Look the program up and compute its sizes; RuntimeRefusal or ArtifactError for what cannot be bound."""
        self.artifact, self.program, self.sizes, self.limits = artifact, artifact.program(program), sizes, sizes.limits
        self.own = range(len(self.program.launches)) if own is None else own
        self._most = self.limits.env()
        self.input_specs = {spec.name: spec for spec in self.program.inputs}
        self._buffer_specs = dict(self.input_specs)
        if sizes.window_rows:
            self._buffer_specs |= {name + SUFFIX: spec for name, spec in self.input_specs.items() if spec.kind in REDIRECTED}
        caches = artifact.manifest.caches
        self._windowed = {cache.name for cache in caches if cache.window and sizes.window_rows}
        self._apart = {cache.name for cache in caches if not of_cells(cache)}
        self.params = np.array([self._most[name] for name in abi.PARAMS], np.int64)
        self._places: dict[tuple[str, str], tuple[int, int]] = {}
        self._first_arg: list[int] = []
        self._arena_base = 0
        self._slot_bytes = [max(self._size(slot.sizes, f"slot {i}"), default=0) for i, slot in enumerate(self.program.slots)]
        used = self._used_slots()
        self._slot_offset: list[int] = []
        self.arena_bytes = 0
        for index, size in enumerate(self._slot_bytes):
            self._slot_offset.append(self.arena_bytes)
            self.arena_bytes += align(size, alignment) if index in used else 0

    def _used_slots(self) -> Collection[int]:
        """Slots that own launches touch; others take no memory."""
        if len(self.own) == len(self.program.launches):
            return range(len(self._slot_bytes))
        return {arg.value for i in self.own for arg in self.program.launches[i].args if arg.kind == "slot"}

    def input_of(self, buffer: str) -> fmt.Input:
        """The input an input buffer is for: its own, or that of its copy for compacted caches."""
        return self._buffer_specs[buffer]

    def names(self, kind: str) -> list[str]:
        """What the arguments of own launches name, in order of first use."""
        return list(dict.fromkeys(arg.name for i in sorted(self.own) for arg in self._arguments_of(i) if arg.kind == kind))

    # Sizes

    def _size(self, forms: list[fmt.Affine], what: str) -> list[int]:
        """Values of affine forms at the limits; ArtifactError for a symbol we do not know or a negative size."""
        try:
            values = [fmt.evaluate(form, self._most) for form in forms]
        except KeyError as error:
            raise ArtifactError(
                f"{self.artifact.path}: {what} is sized by the unknown symbol {error.args[0]!r}; compile the model again"
            ) from None
        if any(not 0 <= value < 1 << 48 for value in values):
            raise ArtifactError(f"{self.artifact.path}: {what} has the impossible size {values}; compile the model again")
        return values

    def _input_values(self, spec: fmt.Input) -> int:
        """Values an input holds at the limits; ArtifactError if this version could not fill it."""
        ne = self._size(spec.ne, f"input {spec.name}")
        if spec.kind in _INPUTS:
            dtype, width, symbol = _INPUTS[spec.kind]
            wanted = (width or self.artifact.manifest.n_embd) * self._most[symbol]
        else:
            dtype, wanted = "i32", input_values(spec, self._most)
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

    # Arguments

    def _arguments_of(self, index: int) -> list[fmt.Arg]:
        """The arguments of a launch; on compacted caches, slots, list and ranges are those of their rows."""
        launch = self.program.launches[index]
        if not self._windowed or not redirected(self.program, launch, self._windowed, self.input_specs, self._apart):
            return launch.args
        return [self._redirect(arg) for arg in launch.args]

    def _redirect(self, arg: fmt.Arg) -> fmt.Arg:
        if arg.kind == "input" and self.input_specs[arg.name].kind in REDIRECTED:
            return fmt.Arg("input", arg.name + SUFFIX, arg.value, arg.offset)
        return arg

    def _resolved(self, n_kernels: int) -> list[int]:
        """Arguments of all launches one after another (``_first_arg``: where each launch's begin); those of launches that run elsewhere
        are 0.

        Every pointer is checked to start inside its buffer, so a manifest that does not fit its file is refused here and cannot crash a
        kernel's first load.
        """
        flat: list[int] = []
        self._first_arg = []
        for index, launch in enumerate(self.program.launches):
            wait = index if launch.wait < 0 else launch.wait
            known = 0 <= launch.kernel < n_kernels and (launch.sym in _INDEX or not launch.sym)
            if not (known and 1 <= launch.div <= _MAX_MULT and 0 <= launch.mult <= _MAX_MULT and wait <= index):
                raise ArtifactError(f"{self.artifact.path}: launch {index} ({launch.node}) is malformed; compile the model again")
            self._first_arg.append(len(flat))
            if index not in self.own:
                flat.extend([0] * len(launch.args))
                continue
            flat.extend(self._resolve(arg, index) for arg in self._arguments_of(index))
        return flat

    def _weight(self, name: str) -> tuple[int, int]:
        """Address and bytes of a weight."""
        raise NotImplementedError

    def _resolve(self, arg: fmt.Arg, index: int) -> int:
        kind = arg.kind
        if kind == "slot":
            if not 0 <= arg.value < len(self._slot_bytes):
                raise self._bad_arg(arg, index, f"there are {len(self._slot_bytes)} slots")
            base, size = self._arena_base + self._slot_offset[arg.value], self._slot_bytes[arg.value]
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

    def _bad_arg(self, arg: fmt.Arg, index: int, why: str) -> ArtifactError:
        node = self.program.launches[index].node
        target = arg.name or arg.value
        return ArtifactError(
            f"{self.artifact.path}: launch {index} ({node}) refers to {arg.kind} {target!r} at byte {arg.offset}: {why}; compile the "
            "model again"
        )

    def _bind_fixups(self, row_bytes: Mapping[str, int]) -> None:
        """Prepare the arguments that move with ``head``; each must be this cache's own argument, or the artifact is refused."""
        places, bases, steps = [], [], []
        for fixup in self.program.fixups:
            ok = 0 <= fixup.launch < len(self.program.launches) and 0 <= fixup.arg < len(self.program.launches[fixup.launch].args)
            arg = self.program.launches[fixup.launch].args[fixup.arg] if ok else None
            if arg is not None and fixup.launch not in self.own:
                continue
            if arg is None or arg.kind != "cache" or arg.name != fixup.cache or fixup.step != row_bytes.get(fixup.cache):
                raise ArtifactError(
                    f"{self.artifact.path}: the fixup of {fixup.node} does not match a write into cache {fixup.cache}; compile the "
                    "model again"
                )
            places.append(self._first_arg[fixup.launch] + fixup.arg)
            bases.append(self._places["cache", fixup.cache][0])
            steps.append(fixup.step)
        self._fix_places, self._fix_bases, self._fix_steps = (np.array(v, np.int64) for v in (places, bases, steps))

    # A micro-batch

    def _check_sizes(self, T: int, O: int, R: int, KV: int, head: int) -> None:
        """RuntimeRefusal for a micro-batch beyond the limits."""
        limits = self.limits
        if not (0 < T <= limits.n_ubatch and 0 <= O <= limits.n_ubatch and 0 <= KV <= limits.n_cells and 0 <= R <= self._most["R"]):
            raise RuntimeRefusal(
                f"a micro-batch of {T} tokens, {O} rows, {R} list entries and {KV} cells exceeds what was allocated ({limits})"
            )
        if self.program.fixups and not 0 <= head <= limits.n_cells - T:
            raise RuntimeRefusal(f"{T} tokens cannot be written from cell {head} of {limits.n_cells}")

    def _set_symbols(self, args: np.ndarray, T: int, O: int, R: int, KV: int, head: int, entries: Mapping[str, int] | None) -> None:
        """Put the symbols of a checked micro-batch into ``params`` and what moves with ``head`` into the arguments."""
        if self._fix_places.size:
            args[self._fix_places] = self._fix_bases + head * self._fix_steps
        self.params[: len(abi.COMMON)] = (T, O, self.limits.n_cells, KV, R)
        for name, value in (entries or {}).items():
            if not 0 <= value <= self._most[name]:
                raise RuntimeRefusal(f"a micro-batch with {name} = {value} exceeds what was allocated ({self._most[name]})")
            self.params[_INDEX[name]] = value

    def on_device(self, launch: int) -> bool:
        """Whether a launch runs on a GPU."""
        return False

    def env(self) -> dict[str, int]:
        """The symbols of the last micro-batch."""
        return dict(zip(abi.PARAMS, self.params.tolist()))

    def _shaped(self, name: str, buffers: Mapping[str, np.ndarray]) -> np.ndarray:
        """Output ``name`` of f32 buffers at the sizes of the last micro-batch, numpy order (``ne`` reversed)."""
        if name not in buffers:
            raise RuntimeRefusal(f"the program {self.program.name} has no output {name!r}; it has {', '.join(buffers) or 'none'}")
        env = self.env()
        ne = [fmt.evaluate(form, env) for form in self.program.outputs[name]]
        return buffers[name][: math.prod(ne)].reshape(ne[::-1])
