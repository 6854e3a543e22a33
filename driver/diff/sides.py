"""What can be compared. A side evaluates the steps of a case in a ``Session`` and records the values of every micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ggufc.codegen.options import CompileOptions
from ggufc.diff.interpreter import InterpreterExecutor, open_graphs
from ggufc.diff.recording import CacheRows, Names, Recording
from ggufc.diff.stored import StoredStep
from ggufc.formats.artifact import Cache
from ggufc.ir import Graph, Node, parse_graph
from ggufc.ir.layout import layout
from ggufc.ir.ops.cache import is_version, resource
from ggufc.ir.storage import Stored
from ggufc.runtime import Artifact, Session
from ggufc.runtime.caches import CacheBuffers
from ggufc.runtime.executor import Executor
from ggufc.runtime.rows import of_cells

_TAKE_HOLES = ("blend", "list_spans", "sparse_attn", "flash_attn")
"""Operators that pass over negative entries of a list."""


class GraphSide:
    """A side that evaluates graphs. ``recordings`` are the micro-batches of the step that ran last; ``names`` are the results of each
    program, known once the side is open.
    """

    title = ""

    def __init__(self) -> None:
        self.recordings: list[Recording] = []
        self.leader: Sequence[Recording | StoredStep] = ()
        self.names: dict[str, Names] = {}

    @contextmanager
    def open(self, settings: Mapping[str, Any]) -> Iterator[Session]:
        """A session with ``settings`` (arguments of ``Session``) whose micro-batches are recorded."""
        raise NotImplementedError
        yield

    def start(self, leader: Sequence[Recording | StoredStep]) -> None:
        """Forget the last step. ``leader``: the other side's recordings of the step to come; an interpreter goes on with their values once
        it has recorded its own, so that errors do not add up and every node is judged by itself.
        """
        self.recordings, self.leader = [], leader


class CodeSide(GraphSide):
    """Generated code: an artifact compiled with ``keep``."""

    def __init__(self, artifact: Path, options: CompileOptions, title: str) -> None:
        super().__init__()
        self.path, self.options, self.title = artifact, options, title

    @contextmanager
    def open(self, settings: Mapping[str, Any]) -> Iterator[Session]:
        side = self

        class Recorder(Executor):
            def eval(self, *args: Any, **more: Any) -> None:
                super().eval(*args, **more)
                side.recordings.append(side._record(self))

        with Artifact.open(self.path) as artifact:
            self.names = {name: Names(parse_graph(artifact.graph_text(name))) for name in artifact.program_names}
            with Session(artifact, executor=Recorder, **settings) as session:
                yield session

    def _record(self, executor: Executor) -> Recording:
        names, env = self.names[executor.program.name], executor.env()
        values: dict[Node, np.ndarray] = {}
        for name, node in names.graph.outputs.items():
            found = executor.output(name)
            values[node] = (found.view(np.int32) if node.dtype == "i32" else found).copy()
        buffers = executor.buffers
        caches = {name: _rows(spec, buffers.view(name), env).copy() for name, spec in buffers.specs.items()}
        _clear_spare_rows(buffers)
        return Recording(names, env, values, {name: CacheRows(buffers.specs[name].dtype, rows) for name, rows in caches.items()})


class InterpreterSide(GraphSide):
    """The reference interpreter: the graph as built, or after the passes of ``options.pipeline``.

    ``activations``: ``rounded`` to 8 bits where native products do, or ``exact``. ``edit`` may change a graph before it is evaluated.
    """

    def __init__(
        self,
        source: Path,
        options: CompileOptions,
        title: str,
        activations: str = "rounded",
        edit: Callable[[Graph], None] | None = None,
    ) -> None:
        super().__init__()
        self.source, self.options, self.title, self.activations, self.edit = source, options, title, activations, edit

    @contextmanager
    def open(self, settings: Mapping[str, Any]) -> Iterator[Session]:
        side = self

        class Recorder(InterpreterExecutor):
            activations = side.activations
            step: _Following

            def eval(self, *args: Any, **more: Any) -> None:
                n = len(side.recordings)
                self.step = _Following(self, side.names[self.program.name], side.leader[n] if n < len(side.leader) else None)
                super().eval(*args, **more)
                _clear_spare_rows(self.caches)
                env = self.env()
                side.recordings.append(Recording(self.step.names, env, self.step.values, self.step.caches))

            def replace(self, node: Node, value: Any) -> Any:
                return self.step.see(node, value)

        with open_graphs(self.source, self.options) as artifact:
            for graph in artifact.graphs.values():
                if self.edit:
                    self.edit(graph)
            self.names = {name: Names(graph) for name, graph in artifact.graphs.items()}
            with Session(artifact, executor=Recorder, **settings) as session:
                yield session


class StoredSide:
    """Tensors stored by another run or engine, per step and micro-batch."""

    def __init__(self, steps: Mapping[str, Sequence[StoredStep]], title: str) -> None:
        self.steps, self.title = steps, title

    def step(self, name: str) -> Sequence[StoredStep]:
        """The micro-batches of a step, as far as there are any."""
        return self.steps.get(name, ())

    def tensors(self) -> list[str]:
        """The names of all tensors, each once."""
        return sorted({name for parts in self.steps.values() for part in parts for name in part.arrays})


class _Following:
    """One micro-batch of the interpreter: records values and puts the leader's in their place."""

    def __init__(self, executor: InterpreterExecutor, names: Names, leader: Recording | StoredStep | None) -> None:
        self.executor, self.names, self.leader = executor, names, leader
        self.values: dict[Node, np.ndarray] = {}
        self.caches: dict[str, CacheRows] = {}

    def see(self, node: Node, value: Any) -> Any:
        if node.op.writes_cache:
            return self._cache(node, value)
        if node.is_leaf or (node.is_view and (is_version(root := layout(node).root) or root.is_leaf)):
            return None
        own = np.asarray(value.array if isinstance(value, Stored) else value)
        self.values[node] = own
        other = self.leader.like(node) if self.leader else None
        if other is None or other.size != own.size or isinstance(value, Stored):
            return None
        if own.dtype.kind == "i" and other.size and other.min() < 0 <= own.min():
            users = self.names.readers(node)
            if any(user.op.name not in _TAKE_HOLES for user in users):
                return None
        return np.ascontiguousarray(other, own.dtype).reshape(own.shape)

    def _cache(self, node: Node, value: Stored) -> Stored | None:
        name = resource(node)
        if self.names.last_writes[name] is not node:
            return None
        spec, env = self.executor.caches.specs[name], self.executor.env()
        raw = np.ascontiguousarray(value.data).view(np.uint8).reshape(value.data.shape[0], -1)
        self.caches[name] = CacheRows(spec.dtype, _rows(spec, raw, env).copy())
        other = self.leader.caches.get(name) if self.leader else None
        if other is None or other.dtype != spec.dtype or other.raw.shape != self.caches[name].raw.shape:
            return None
        raw = raw.copy()
        _rows(spec, raw, env)[...] = other.raw
        return Stored.wrap(f"cache {name}", value.dtype, value.ne, raw)


def _clear_spare_rows(buffers: CacheBuffers) -> None:
    """Rows that many tokens write and nobody uses hold what the last writer left; cleared, they never look like a difference."""
    for name, spec in buffers.specs.items():
        if not of_cells(spec) and spec.rows.get(""):
            buffers.view(name)[-1] = 0


def _rows(spec: Cache, rows: np.ndarray, env: Mapping[str, int]) -> np.ndarray:
    """The rows of a cache whose content means something: visible cells, or all that belong to sequences but the spare one."""
    if of_cells(spec):
        return rows[: env["KV"]]
    return rows[:-1] if spec.rows.get("") else rows
