"""From a model file to a schedule: everything before machine code. Shared by compilation and ``ggufc dump``."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ggufc.codegen import keep
from ggufc.codegen.cpu.target import Target, resolve
from ggufc.codegen.errors import CodegenError
from ggufc.codegen.lower import lower
from ggufc.codegen.nvptx.target import split
from ggufc.codegen.options import CompileOptions
from ggufc.codegen.schedule import Schedule
from ggufc.codegen.weight_plan import WeightPlan
from ggufc.formats.gguf_reader import GGUFFile
from ggufc.ir.graph import Graph
from ggufc.models.errors import ModelError
from ggufc.models.model import Model
from ggufc.models.registry import load_model
from ggufc.models.step import Step
from ggufc.passes.manager import PassManager, PassRecord
from ggufc.passes.pipelines import DEFAULT_PIPELINE

PROGRAMS: dict[str, dict[str, bool]] = {"eval": {}, "eval_embd": {"embd_input": True}}
"""Graphs of an artifact: token input, and embeddings input."""

_SESSION_SIZES = re.compile(r"n_ctx_seq > (\d+)\Z")
"""Predicates on sizes that only a session knows: an artifact holds one program for each answer."""


@dataclass
class Compilation:
    """One graph on its way: final graph, pass records, schedule and weights."""

    name: str
    graph: Graph
    records: list[PassRecord]
    schedule: Schedule
    weights: WeightPlan


def step_of(options: CompileOptions, program: str = "eval") -> Step:
    """The builder's step of a program; ``eval@n_ctx_seq > 4096`` is the variant for which that holds."""
    base, _, predicate = program.partition("@")
    if base not in PROGRAMS:
        raise CodegenError(f"there is no program {program!r}; the programs are {', '.join(PROGRAMS)}")
    sizes = {}
    if predicate:
        match = _SESSION_SIZES.match(predicate)
        if match is None:
            raise CodegenError(f"{program!r}: a variant is named after the size it needs, such as {base}@n_ctx_seq > 4096")
        sizes = {"n_ctx_seq": int(match[1]) + 1}
    return Step({**options.for_builder(), **PROGRAMS[base], **sizes})


def build_graph(model: Model, options: CompileOptions, program: str = "eval") -> Graph:
    """The unfused graph as the builder emits it."""
    return model.build(step_of(options, program), program.partition("@")[0])


def program_graphs(model: Model, options: CompileOptions) -> Iterator[tuple[str, Graph]]:
    """(name, unfused graph) of every program, with a variant for each answer to what builders ask about the session's size."""
    for base, special in PROGRAMS.items():
        try:
            graph = build_graph(model, options, base)
        except ModelError:
            if not special:
                raise
            continue  # a model may have no graph of this kind; a session that asks for it is told so
        observed = graph.analysis.get("observations", {})
        variants = [f"{base}@{key}" for key, value in observed.items() if _SESSION_SIZES.match(key) and not value]
        yield base, graph
        for name in variants:
            yield name, build_graph(model, options, name)


def run_passes(graph: Graph, options: CompileOptions, on_pass: Callable[[str, Graph], None] | None = None) -> list[PassRecord]:
    """Apply the pipeline of ``options`` to ``graph`` in place."""
    manager = PassManager.parse(options.pipeline if options.pipeline is not None else DEFAULT_PIPELINE)
    return manager.run(graph, print_after=on_pass or ())


def compile_graphs(model: Model, options: CompileOptions) -> list[Compilation]:
    """All programs of the artifact up to their schedules."""
    done = []
    for name, graph in program_graphs(model, options):
        keep.mark(graph, options.keep)
        records = run_passes(graph, options)
        schedule, weights = lower(graph, name, bool(options.keep))
        done.append(Compilation(name, graph, records, schedule, weights))
    return done


@contextmanager
def open_model(source: str | os.PathLike[str]) -> Iterator[tuple[GGUFFile, Model]]:
    with GGUFFile.open(Path(source)) as gguf:
        yield gguf, load_model(gguf)


def stages(source: str | os.PathLike[str], options: CompileOptions, program: str = "eval") -> Iterator[tuple[str, Graph]]:
    """(stage, graph) for ``built``, ``after:PASS`` for each pass and ``final``; the graph is a snapshot.

    A pass that runs again is ``after:PASS#2`` and so on.
    """
    with open_model(source) as (_, model):
        graph = build_graph(model, options, program)
        snapshots: list[tuple[str, Graph]] = [("built", graph.clone())]
        runs: Counter[str] = Counter()

        def keep_snapshot(name: str, after: Graph) -> None:
            runs[name] += 1
            snapshots.append((f"after:{name}" + (f"#{runs[name]}" if runs[name] > 1 else ""), after.clone()))

        run_passes(graph, options, keep_snapshot)
        snapshots.append(("final", graph))
    yield from snapshots


def schedule_text(source: str | os.PathLike[str], options: CompileOptions, program: str = "eval") -> str:
    """The schedule of one program as text."""
    with open_model(source) as (_, model):
        graph = build_graph(model, options, program)
        run_passes(graph, options)
        return str(lower(graph, program)[0])


def target_of(options: CompileOptions) -> Target:
    return resolve(split(options.target)[0])
