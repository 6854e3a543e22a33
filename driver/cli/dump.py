"""``ggufc dump``: the graph at any stage of compilation, and what becomes of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from ggufc.cli import options

if TYPE_CHECKING:
    from ggufc.codegen.compile import CompileOptions
    from ggufc.ir import Graph

FORMATS = ("text", "folded", "json", "dot", "svg", "csv", "html")
_TEXT_STAGES = ("schedule", "llvm", "asm")
_PTX = "ptx"


@click.command()
@options.model
@click.option(
    "--graph", "graph_name", default="eval", show_default=True, metavar="NAME", help="The graph: eval, or eval_embd (embeddings as input)."
)
@click.option(
    "--stage", default="final", show_default=True, metavar="STAGE", help="built, after:PASS, final, schedule, llvm, asm or ptx[:sm_90]."
)
@click.option("--format", "form", type=click.Choice(FORMATS), default="text", show_default=True, help="How to print a graph.")
@click.option("--layer", type=click.IntRange(0), default=None, help="Only this layer (blk.N).")
@options.output
@options.build
@click.option("--passes", default=None, metavar="A,B,...", help="Pass pipeline instead of the default one.")
def command(
    model: str,
    graph_name: str,
    stage: str,
    form: str,
    layer: int | None,
    output: Path | None,
    type_k: str | None,
    type_v: str | None,
    target: str,
    passes: str | None,
) -> None:
    """Print the graph of MODEL at a stage of its compilation.

    Stages: `built` (as the builder emits it), `after:PASS` (a second run is `after:PASS#2`), `final`, `schedule` (launches and buffers),
    `llvm` and `asm` (generated kernels), `ptx` (GPU kernels; `ptx:sm_90` for an architecture). Text goes back in through `ggufc opt`. An
    artifact holds its final graphs, and PTX if it was compiled for GPUs.
    """
    from ggufc.cli import terminal
    from ggufc.codegen.compile import CompileOptions
    from ggufc.errors import DriverError
    from ggufc.files import refuse_to_overwrite, write_text
    from ggufc.resolve import is_artifact, model_file

    if (stage in _TEXT_STAGES or stage.partition(":")[0] == _PTX) and (form != "text" or layer is not None):
        raise DriverError(f"--stage {stage} is plain text: it has no --format {form} and no --layer")
    with terminal.progress() as progress:
        path = model_file(model, say=terminal.say, progress=progress, quiet=not terminal.is_terminal())
    refuse_to_overwrite(output, path)
    if is_artifact(path):
        held = _artifact_ptx(path, stage)
        result = _render(_artifact_graph(path, stage, graph_name), form, layer) if held is None else held
    else:
        compile_options = CompileOptions(
            target=target, type_k=type_k or "f16", type_v=type_v or "f16", pipeline=passes, builder=options.builder_options()
        )
        code = _text_stage(path, compile_options, stage, graph_name)
        result = _render(_stage_graph(path, compile_options, stage, graph_name), form, layer) if code is None else code
    if output:
        write_text(output, result)
    else:
        sys.stdout.write(result if result.endswith("\n") else result + "\n")


def _artifact_graph(path: Path, stage: str, name: str) -> Graph:
    from ggufc.errors import DriverError
    from ggufc.ir import parse_graph
    from ggufc.runtime import Artifact

    if stage != "final":
        raise DriverError(
            f"{path} is an artifact, which holds its final graphs only (and PTX); use --stage final, or dump the model it came from"
        )
    with Artifact.open(path, to_run=False) as artifact:
        return parse_graph(artifact.graph_text(name))


def _artifact_ptx(path: Path, stage: str) -> str | None:
    """The PTX in an artifact, if ``stage`` is ``ptx`` (the first architecture it holds) or ``ptx:ARCH``."""
    from ggufc.errors import DriverError
    from ggufc.runtime import Artifact

    kind, _, arch = stage.partition(":")
    if kind != _PTX:
        return None
    from ggufc.runtime.cuda.code import cuda_manifest, ptx_text

    with Artifact.open(path, to_run=False) as artifact:
        manifest = cuda_manifest(artifact)
        if arch and arch not in manifest.targets:
            raise DriverError(f"{path} holds PTX for {', '.join(manifest.targets)}, not for {arch}; use --stage ptx:{manifest.targets[0]}")
        return ptx_text(artifact, manifest, manifest.targets.index(arch) if arch else 0)


def _text_stage(path: Path, compile_options: CompileOptions, stage: str, name: str) -> str | None:
    from ggufc.codegen import compile as compiler

    kind, _, arch = stage.partition(":")
    if kind == _PTX:
        from ggufc.formats.cuda import split_target

        cpu = split_target(compile_options.target)[0]
        target = f"{cpu},cuda:{arch}" if arch else compile_options.target
        return compiler.ptx_text(path, msgspec.structs.replace(compile_options, target=target), name)

    texts = {"schedule": compiler.schedule_text, "llvm": compiler.llvm_text, "asm": compiler.asm_text}
    return texts[stage](path, compile_options, name) if stage in texts else None


def _stage_graph(path: Path, compile_options: CompileOptions, stage: str, name: str) -> Graph:
    from ggufc.cli import terminal
    from ggufc.codegen.compile import stages
    from ggufc.errors import DriverError

    found = dict(stages(path, compile_options, name))
    wanted = stage.removesuffix("#1") if stage.startswith("after:") else stage
    if wanted not in found:
        raise DriverError(f"there is no stage {stage!r}; the stages are {', '.join([*found, *_TEXT_STAGES, _PTX])}")
    runs = [other for other in found if other.startswith(f"{wanted}#")]
    if runs and wanted == stage:
        terminal.say(f"{wanted.removeprefix('after:')} runs {len(runs) + 1} times, this is after the first; see also {', '.join(runs)}")
    return found[wanted]


def _render(graph: Graph, form: str, layer: int | None) -> str:
    from ggufc.errors import DriverError
    from ggufc.ir.export import export

    if layer is None or form in {"dot", "svg", "html"}:
        return export(graph, form, layer=layer)
    if form == "json":
        raise DriverError("--format json describes a whole graph; use text, csv, dot, svg or html with --layer")
    wanted = _layer_nodes(graph, layer)
    if form == "csv":
        header, *rows = export(graph, "csv").splitlines(keepends=True)
        return header + "".join(row for index, row in enumerate(rows) if index in wanted)
    return _layer_text(graph, layer, wanted)


def _layer_nodes(graph: Graph, layer: int) -> set[int]:
    """Indices of the layer's nodes and of what they read."""
    from ggufc.errors import DriverError
    from ggufc.ir.folding import layers

    where = layers(graph)
    index = {node: i for i, node in enumerate(graph.nodes)}
    own = [node for node in graph.nodes if where[node] == layer]
    if not own:
        last = max((i for i in where.values() if i is not None), default=-1)
        known = f"it has layers 0 to {last}" if last >= 0 else "no node is named after a layer"
        raise DriverError(f"the graph {graph.name!r} has no layer {layer}; {known}")
    return {index[node] for node in own} | {index[operand] for node in own for operand in node.operands}


def _layer_text(graph: Graph, layer: int, wanted: set[int]) -> str:
    from ggufc.ir.text import print_node

    numbers = {node: f"%{i}" for i, node in enumerate(graph.nodes)}
    lines = [print_node(graph.nodes[i], numbers) for i in sorted(wanted)]
    return "\n".join([f"# layer {layer} of graph @{graph.name} and what it reads, numbered as in the whole graph", *lines]) + "\n"
