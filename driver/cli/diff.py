"""``ggufc diff``: two evaluations of the same steps, node by node."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ggufc.cli import options

if TYPE_CHECKING:
    from ggufc.codegen.options import CompileOptions

DIFFERENT = 1
_LONGEST_STEP = 512


@click.command()
@click.argument("model")
@click.argument("case_file", metavar="CASE.json", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--against",
    multiple=True,
    metavar="WHAT",
    help="The right side: interpreter (default), KEY=VALUE (target, passes, type-k, type-v, or an option of the graph such as mla; may be "
    "repeated), or tensors: an .npz file or a folder of .npy files.",
)
@click.option("--interpret", is_flag=True, help="Let the left side be the interpreter too, instead of generated code.")
@click.option("--passes", default=None, metavar="A,B,...", help="Pass pipeline of the left side instead of the default one.")
@click.option("--keep", default="", metavar="NAME,...", help="Nodes (with * and ?) that passes and lowering must leave results of.")
@click.option(
    "--activations",
    type=click.Choice(["rounded", "exact"]),
    default="rounded",
    show_default=True,
    help="Whether the interpreter rounds activations to 8 bits where generated code does.",
)
@click.option("--follow/--no-follow", default=None, help="Let the interpreter go on with the other side's values (default).")
@click.option("--tolerance", multiple=True, metavar="[NAME=]X", help="Largest error: of all nodes, or of nodes or operators with a name.")
@click.option("--names", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="JSON map from names of the tensors to ours.")
@click.option("--save", type=options.output_file, help="Also store the left side's values in this .npz file.")
@click.option("-t", "--threads", type=click.IntRange(1, 256), default=None, help="Threads, instead of the case's.")
@click.option("-ub", "--ubatch-size", type=options.token_count, default=None, help="Micro-batch, instead of the case's.")
@click.option("--first", is_flag=True, help="Stop after the first step with a difference.")
@click.option("--all", "everything", is_flag=True, help="Do not shorten the table.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@options.build
@click.pass_context
def command(
    ctx: click.Context,
    model: str,
    case_file: Path,
    against: tuple[str, ...],
    interpret: bool,
    passes: str | None,
    keep: str,
    activations: str,
    follow: bool | None,
    tolerance: tuple[str, ...],
    names: Path | None,
    save: Path | None,
    threads: int | None,
    ubatch_size: int | None,
    first: bool,
    everything: bool,
    as_json: bool,
    type_k: str | None,
    type_v: str | None,
    target: str,
) -> None:
    """Evaluate the steps of CASE.json twice with MODEL and name the first node that differs.

    By default the code that would run is compared with the reference interpreter, each node from the operands the code computed, so
    that errors do not add up. The exit status is 1 if a node differs by more than its tolerance.
    """
    from ggufc.cli import terminal
    from ggufc.cli.logits import read_case
    from ggufc.codegen.options import CompileOptions
    from ggufc.diff import compare_sides, words
    from ggufc.diff.compare import Tolerances, parse_rules
    from ggufc.diff.report import as_data, show
    from ggufc.diff.walk import Saver, step_names
    from ggufc.errors import DriverError
    from ggufc.files import refuse_to_overwrite
    from ggufc.resolve import is_artifact, model_file
    from ggufc.runtime.logits import check_case, graph_options

    rules = parse_rules(tolerance)
    case = read_case(case_file)
    check_case(case)
    refuse_to_overwrite(save, case_file)
    source = model_file(model, say=terminal.say, quiet=not terminal.is_terminal())
    if is_artifact(source):
        raise DriverError(f"{source} is an artifact; ggufc diff compiles the model itself, so give the model the artifact came from")
    refuse_to_overwrite(save, source, case_file)
    wanted = case.get("options", {})
    chosen = CompileOptions(
        target=target,
        type_k=type_k or wanted.get("type_k", "f16"),
        type_v=type_v or wanted.get("type_v", "f16"),
        pipeline=passes,
        builder=graph_options(wanted) | options.builder_options(),
        keep=f"stored,{keep}" if keep else "stored",
    )
    left = words.side_of(source, chosen, interpret, activations, _compile(model))
    right = words.other_side(source, chosen, against, interpret, activations, _compile(model), names, step_names(case))
    following = words.has_interpreter(left, right) if follow is None else follow
    if following and not words.has_interpreter(left, right):
        raise DriverError("--follow is for the interpreter, and neither side is one; leave it out")
    bounds = Tolerances(following, words.free_bound(left, right), rules)
    saver = Saver() if save else None
    report = compare_sides(
        left, right, case, case_file.parent, _settings(case, threads, ubatch_size), bounds, first_only=first, watch=saver
    )
    if saver and save:
        saver.write(save)
    if not any(batch.entries for batch in report.batches):
        raise DriverError(
            "nothing was compared: no result of one side has a name and size the other knows; ggufc dump --stage built shows our names, "
            "--names translates others"
        )
    if as_json:
        click.echo(json.dumps(as_data(report), indent=2))
    else:
        show(report, sys.stdout, everything)
    if report.first is not None:
        ctx.exit(DIFFERENT)


def _compile(model: str) -> Callable[[CompileOptions], Path]:
    """Artifacts of the model from the cache, or compiled with progress on stderr."""
    from ggufc.api import artifact_for
    from ggufc.cli import terminal

    def artifact(wanted: CompileOptions) -> Path:
        with terminal.progress() as progress:
            return artifact_for(
                model,
                target=wanted.target,
                type_k=wanted.type_k,
                type_v=wanted.type_v,
                passes=wanted.pipeline,
                builder=wanted.builder,
                keep=wanted.keep,
                say=terminal.say,
                progress=progress,
            )

    return artifact


def _settings(case: Mapping[str, Any], threads: int | None, ubatch_size: int | None) -> dict[str, Any]:
    """The arguments of both sessions. Micro-batches are as small as the longest step allows: every result kept takes memory."""
    from ggufc.runtime.logits import session_options

    settings = session_options(case.get("options", {}))
    if threads is not None:
        settings["n_threads"] = threads
    longest = max(
        (len(step["tokens"]) if "tokens" in step else _LONGEST_STEP for step in case["steps"] if "decode" in step["op"]), default=1
    )
    settings["n_ubatch"] = max(1, min(ubatch_size or settings.get("n_ubatch", _LONGEST_STEP), longest))
    return settings
