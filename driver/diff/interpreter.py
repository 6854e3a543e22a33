"""An executor that evaluates graphs with the reference interpreter, and an artifact without code for it.

A ``Session`` over them keeps cells, sequences and states exactly as one over native code does; only what happens between inputs and
outputs differs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ggufc.codegen import frontend
from ggufc.codegen.manifest import model_manifest
from ggufc.codegen.options import CompileOptions
from ggufc.codegen.schedule import form, input_spec
from ggufc.formats.artifact import Manifest, Program, evaluate
from ggufc.formats.gguf_reader import GGUFFile
from ggufc.ir import Graph, Node
from ggufc.ir.interp import interpret
from ggufc.models.model import Model
from ggufc.passes.manager import PassManager
from ggufc.runtime import Artifact, RuntimeRefusal
from ggufc.runtime.binding import NUMPY, Binding
from ggufc.runtime.caches import CacheBuffers
from ggufc.runtime.sizes import DEFAULT_SIZES, Sizes


class GraphArtifact(Artifact):
    """A model's graphs and caches in the place of an artifact: everything a session asks for but launches and code."""

    def __init__(self, file: GGUFFile, manifest: Manifest, graphs: Mapping[str, Graph]) -> None:
        super().__init__(file, manifest, np.empty(0, np.uint8))
        self.graphs = graphs


@contextmanager
def open_graphs(source: Path, options: CompileOptions) -> Iterator[GraphArtifact]:
    """The graphs of a model, after the passes of ``options.pipeline`` (none if it is None)."""
    with frontend.open_model(source) as (file, model):
        graphs = {}
        for name, graph in frontend.program_graphs(model, options):
            if options.pipeline:
                PassManager.parse(options.pipeline).run(graph)
            graphs[name] = graph
        yield GraphArtifact(file, _manifest(file, model, options, graphs), graphs)


def _manifest(file: GGUFFile, model: Model, options: CompileOptions, graphs: Mapping[str, Graph]) -> Manifest:
    programs = [
        Program(
            name,
            launches=[],
            slots=[],
            inputs=[input_spec(node) for node in graph.inputs()],
            outputs={output: [form(d) for d in node.ne] for output, node in graph.outputs.items()},
            reuse_key=sorted(graph.analysis.get("observations", {}).items()),
        )
        for name, graph in graphs.items()
    ]
    return msgspec.structs.replace(model_manifest(file, model, options), programs=programs)


class InterpreterExecutor(Binding):
    """Evaluates one program of a ``GraphArtifact`` in numpy over ordinary cache buffers; ``activations`` as ``ggufc.ir.interpret``."""

    activations = "rounded"
    n_threads = 1
    where = "the reference interpreter"

    def __init__(
        self,
        artifact: GraphArtifact,
        program: str = "eval",
        sizes: Sizes = DEFAULT_SIZES,
        *,
        share: InterpreterExecutor | None = None,
        profile: bool = False,
    ) -> None:
        if sizes.window_rows:
            raise RuntimeRefusal("the interpreter evaluates whole caches; leave compact_windows out")
        self._describe(artifact, program, sizes if share is None else share.sizes)
        self.graph, self._data = artifact.graphs[program], artifact.file.data
        self.caches: CacheBuffers = CacheBuffers(artifact, sizes) if share is None else share.caches
        self.inputs = {spec.name: np.zeros(self._input_values(spec), NUMPY[spec.dtype]) for spec in self.program.inputs}
        self._fix_places = np.zeros(0, np.int64)
        self._results: dict[str, np.ndarray] = {}

    def rebind(self) -> None:
        """Nothing is bound."""

    def replace(self, node: Node, value: Any) -> Any:
        """Sees each node with its value; what it returns, if not None, takes the value's place."""
        return None

    def eval(self, T: int, O: int, R: int, KV: int, head: int = 0, entries: Mapping[str, int] | None = None) -> None:
        """As ``Executor.eval``. ``IRError`` where a graph is wrong."""
        self._check_sizes(T, O, R, KV, head)
        self._set_symbols(self.params, T, O, R, KV, head, entries)
        env = self.env()
        inputs = {}
        for name, spec in self.input_specs.items():
            ne = [evaluate(form, env) for form in spec.ne]
            inputs[name] = self.inputs[name][: math.prod(ne)].reshape(ne[::-1])
        caches = {name: self.caches.view(name) for name in self.caches.specs}
        self.n_evals += 1
        self._results = interpret(self.graph, self._data, inputs, caches, env, trace=self.replace, activations=self.activations)
        for name, rows in caches.items():
            self.caches.view(name)[...] = np.ascontiguousarray(rows).view(np.uint8).reshape(self.caches.view(name).shape)

    def output(self, name: str) -> np.ndarray:
        return np.asarray(self._results[name], np.float32)

    def profile(self) -> np.ndarray:
        raise RuntimeRefusal("the interpreter has no launches to profile")

    def close(self) -> None:
        """Nothing runs beyond an evaluation."""
