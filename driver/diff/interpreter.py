"""An executor that evaluates graphs with the reference interpreter, and an artifact without code for it.

A ``Session`` over them keeps cells, sequences and states exactly as one over native code does; only what happens between inputs and
outputs differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ggufc.codegen import frontend
from ggufc.codegen.manifest import cache_specs
from ggufc.codegen.options import CompileOptions
from ggufc.codegen.schedule import form, input_spec
from ggufc.formats import abi
from ggufc.formats.artifact import Manifest, Program, evaluate
from ggufc.formats.gguf_reader import GGUFFile
from ggufc.ir import Graph, Node
from ggufc.ir.interp import interpret
from ggufc.models.model import Model
from ggufc.passes.manager import PassManager
from ggufc.runtime import Artifact
from ggufc.runtime.executor import CacheBuffers, Executor, Limits, pad

Replace = Callable[[Node, Any], Any]
"""Sees each node with its value; what it returns, if not None, takes the value's place."""


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
    return Manifest(
        abi=abi.ABI_VERSION,
        arch=model.arch,
        source_sha256="",
        source_name=file.path.name,
        target="",
        level="",
        features=[],
        n_vocab=model.n_vocab,
        n_ctx_train=model.n_ctx_train,
        n_embd=model.n_embd,
        n_layer=model.n_layer,
        type_k=options.type_k,
        type_v=options.type_v,
        caches=cache_specs(file, model, options),
        programs=programs,
        kernels=[],
        drivers={},
    )


class InterpreterExecutor(Executor):
    """Evaluates one program of a ``GraphArtifact`` in numpy over ordinary cache buffers; ``activations`` as ``ggufc.ir.interpret``."""

    activations = "rounded"
    n_threads = 1

    def __init__(
        self,
        artifact: GraphArtifact,
        program: str = "eval",
        n_threads: int | None = None,
        n_ctx: int = 4096,
        n_ubatch: int = 512,
        n_seq_max: int = 1,
        share: Executor | None = None,
        profile: bool = False,
        window_rows: int = 0,
    ) -> None:
        self.artifact = artifact
        self.graph = artifact.graphs[program]
        self.program = artifact.program(program)
        self.limits = Limits(n_ubatch, pad(n_ctx), n_seq_max) if share is None else share.limits
        self.caches = CacheBuffers(artifact, self.limits.n_cells, 0, n_seq_max) if share is None else share.caches
        self.input_specs = {spec.name: spec for spec in self.program.inputs}
        self.inputs = {spec.name: self._buffer(spec) for spec in self.program.inputs}
        self.params = np.array([self.limits.env()[name] for name in abi.PARAMS], np.int64)
        self.results: dict[str, np.ndarray] = {}
        self.n_evals = 0

    def _buffer(self, spec: Any) -> np.ndarray:
        return np.zeros(self._input_values(spec), np.int32 if spec.dtype == "i32" else np.float32)

    def rebind(self) -> None:
        """Nothing is bound."""

    def replace(self, node: Node, value: Any) -> Any:
        """Called with each node and its value; see ``Replace``."""
        return None

    def eval(self, T: int, O: int, R: int, KV: int, head: int = 0, entries: Mapping[str, int] | None = None) -> None:
        """As ``Executor.eval``. ``IRError`` where a graph is wrong."""
        env = self.limits.env() | {"T": T, "O": O, "R": R, "KV": KV} | dict(entries or {})
        self.params[:] = [env[name] for name in abi.PARAMS]
        inputs = {}
        for name, spec in self.input_specs.items():
            ne = [evaluate(form, env) for form in spec.ne]
            inputs[name] = self.inputs[name][: math.prod(ne)].reshape(ne[::-1])
        caches = {name: self.caches.view(name) for name in self.caches.specs}
        self.n_evals += 1
        data = self.artifact.file.data
        self.results = interpret(self.graph, data, inputs, caches, env, trace=self.replace, activations=self.activations)
        for name, rows in caches.items():
            self.caches.view(name)[...] = np.ascontiguousarray(rows).view(np.uint8).reshape(self.caches.view(name).shape)

    def output(self, name: str) -> np.ndarray:
        return np.asarray(self.results[name], np.float32)

    def close(self) -> None:
        """Nothing runs beyond an evaluation."""
