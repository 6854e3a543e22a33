"""Compiles a small graph of its own, without a model around it, and evaluates the native code: how tests run what a pass made of a graph.

An artifact holds one program per graph, so the forms of one graph (before and after a pass) run over the same weights in one file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from ggufc.codegen.artifact_writer import write_artifact
from ggufc.codegen.cpu.target import resolve
from ggufc.codegen.frontend import Compilation
from ggufc.codegen.kernel_build import build_image
from ggufc.codegen.lower import lower
from ggufc.codegen.manifest import make_manifest
from ggufc.codegen.options import CompileOptions
from ggufc.formats.gguf_reader import GGUFFile
from ggufc.formats.gguf_writer import GGUFWriter
from ggufc.formats.quants.quantize import quantize
from ggufc.ir import Graph, print_graph
from ggufc.models.caches import CacheInfo
from ggufc.runtime import Artifact
from ggufc.runtime.executor import Executor
from ggufc.runtime.sizes import Sizes

Arguments = tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray], Mapping[str, np.ndarray], Mapping[str, int]]
"""Weights (f32 or i32), inputs, caches (rows of numbers, or of bytes where quantised) and symbols, as ``ggufc.ir.interpret`` takes them."""

_COMMON = ("T", "O", "R", "KV", "C")


def compile_graphs(graphs: Mapping[str, Graph], weights: Mapping[str, np.ndarray], folder: Path, target: str = "native") -> Path:
    """An artifact with a program per graph. The graphs declare the same caches and take ``embd`` of one width, if any."""
    source, output = folder / "weights.gguf", folder / "graphs.ggufc"
    with GGUFWriter(source) as out:
        out.add("general.architecture", "graphs")
        for name, values in {"unused": np.zeros(32, np.float32), **weights}.items():
            out.add_tensor(name, tuple(reversed(values.shape)), "i32" if values.dtype.kind == "i" else "f32", np.ascontiguousarray(values))
    compilations = [Compilation(name, graph, [], *lower(graph, name)) for name, graph in graphs.items()]
    specs = list(dict.fromkeys(spec for c in compilations for spec in c.schedule.kernels()))
    level = resolve(target)
    image, kernels = build_image(specs, level, jobs=1)
    first = next(iter(graphs.values()))
    caches = [CacheInfo(n.attrs["name"], 0, "k", n.dtype, int(n.ne[0]), int(n.ne[0]), 0, {}, str(n.ne[1])) for n in first.find("cache")]
    width = next((int(n.ne[0]) for n in first.inputs() if n.attrs["kind"] == "embd"), 1)
    model = SimpleNamespace(arch="graphs", n_vocab=1, n_ctx_train=256, n_embd=width, n_layer=1, caches=lambda options: caches)
    with GGUFFile.open(source) as file:
        manifest = make_manifest(file, model, CompileOptions(), level, compilations, specs, kernels, image)  # type: ignore[arg-type]
        stored = {w.name: (c.weights, w) for c in compilations for w in c.weights.stored.values()}
        write_artifact(output, file, manifest, {c.name: print_graph(c.graph) for c in compilations}, image, list(stored.values()))
    return output


def run(artifact: Path, program: str, arguments: Arguments, n_threads: int = 1) -> dict[str, np.ndarray]:
    """The outputs of one micro-batch, numpy order; weights are the artifact's own. Cells beyond those given hold NaN."""
    _, inputs, caches, env = arguments
    with Artifact.open(artifact) as opened, Executor(opened, program, Sizes(n_ctx=256, n_ubatch=16, n_threads=n_threads)) as executor:
        for name, rows in caches.items():
            dtype = executor.buffers.specs[name].dtype
            raw = rows if rows.dtype == np.uint8 else quantize(dtype, rows)
            view = executor.buffers.view(name)
            view[:] = 0xFF
            view[: len(rows)] = raw.view(np.uint8).reshape(len(rows), -1)
        for name in executor.inputs:
            values = inputs[name].reshape(-1)
            executor.inputs[name][: values.size] = values
        entries = {name: value for name, value in env.items() if name not in _COMMON and not name.startswith("C")}
        executor.eval(env["T"], env["O"], env.get("R", 0), env.get("KV", 0), entries=entries)
        outputs = dict(executor.program.outputs)
        return {name: executor.output(name).copy() for name in outputs}
