"""From a model file to a schedule: everything before machine code. Shared by compilation and ``ggufc dump``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ggufc.codegen.cpu.target import Target, resolve
from ggufc.codegen.lower import lower
from ggufc.codegen.options import CompileOptions
from ggufc.codegen.schedule import Schedule
from ggufc.codegen.weight_plan import WeightPlan
from ggufc.formats.gguf_reader import GGUFFile
from ggufc.ir.graph import Graph
from ggufc.models.model import Model
from ggufc.models.registry import load_model
from ggufc.models.step import Step
from ggufc.passes.manager import PassManager, PassRecord
from ggufc.passes.pipelines import DEFAULT_PIPELINE

PROGRAMS: dict[str, dict[str, bool]] = {"eval": {}, "eval_embd": {"embd_input": True}}
"""Graphs of an artifact: token input, and embeddings input."""


@dataclass
class Compilation:
    """One graph on its way: final graph, pass records, schedule and weights."""

    name: str
    graph: Graph
    records: list[PassRecord]
    schedule: Schedule
    weights: WeightPlan


def build_graph(model: Model, options: CompileOptions, program: str = "eval") -> Graph:
    """The unfused graph as the builder emits it."""
    step = Step({"type_k": options.type_k, "type_v": options.type_v, **PROGRAMS[program]})
    return model.build(step, program)


def run_passes(graph: Graph, options: CompileOptions, on_pass=None) -> list[PassRecord]:  # type: ignore[no-untyped-def]
    """Apply the pipeline of ``options`` to ``graph`` in place."""
    manager = PassManager.parse(options.pipeline if options.pipeline is not None else DEFAULT_PIPELINE)
    return manager.run(graph, print_after=on_pass or ())


def compile_graphs(model: Model, options: CompileOptions) -> list[Compilation]:
    """All programs of the artifact up to their schedules."""
    done = []
    for name in PROGRAMS:
        graph = build_graph(model, options, name)
        records = run_passes(graph, options)
        schedule, weights = lower(graph, name)
        done.append(Compilation(name, graph, records, schedule, weights))
    return done


@contextmanager
def open_model(source: str | os.PathLike[str]) -> Iterator[tuple[GGUFFile, Model]]:
    with GGUFFile.open(Path(source)) as gguf:
        yield gguf, load_model(gguf)


def stages(source: str | os.PathLike[str], options: CompileOptions, program: str = "eval") -> Iterator[tuple[str, Graph]]:
    """(stage, graph) for ``built``, ``after:PASS`` for each pass and ``final``; the graph is a snapshot."""
    with open_model(source) as (_, model):
        graph = build_graph(model, options, program)
        snapshots: list[tuple[str, Graph]] = [("built", graph.clone())]
        run_passes(graph, options, lambda name, g: snapshots.append((f"after:{name}", g.clone())))
        snapshots.append(("final", graph))
    yield from snapshots


def schedule_text(source: str | os.PathLike[str], options: CompileOptions, program: str = "eval") -> str:
    """The schedule of one program as text."""
    with open_model(source) as (_, model):
        graph = build_graph(model, options, program)
        run_passes(graph, options)
        return str(lower(graph, program)[0])


def target_of(options: CompileOptions) -> Target:
    return resolve(options.target)
