"""``ggufc opt``: IR text in, passes, IR text out."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

import click

from ggufc.cli import options


@click.command()
@click.argument("text", type=click.File("r", encoding="utf-8"), default="-", metavar="[FILE]")
@click.option("--passes", default=None, metavar="A,B,...", help="Pipeline, e.g. canonicalize,cse,dce; `default` is the compiler's own.")
@click.option("--print-after", default="", metavar="A,B|all", help="Also print the graph after these passes (on stderr).")
@click.option("--time", "show_time", is_flag=True, help="Print what each pass did and took (on stderr).")
@click.option("--list", "list_passes", is_flag=True, help="List the passes and stop.")
@options.output
def command(text: TextIO, passes: str | None, print_after: str, show_time: bool, list_passes: bool, output: Path | None) -> None:
    """Run passes over IR text from FILE or stdin (-).

    Without --passes the text is parsed, verified and printed in its canonical form.
    """
    if list_passes:
        click.echo(describe_passes())
        return
    from ggufc.files import write_text
    from ggufc.ir import parse_graph, print_graph
    from ggufc.passes import DEFAULT_PIPELINE
    from ggufc.passes.manager import PassManager, format_records

    graph = parse_graph(text.read())
    manager = PassManager.parse(DEFAULT_PIPELINE if passes == "default" else passes or "")
    wanted = [name.strip() for name in print_after.split(",") if name.strip()]
    records = manager.run(graph, print_after=wanted)
    for record in records:
        if record.text:
            click.echo(f"# after {record.name}\n{record.text}", err=True)
    if show_time:
        click.echo(format_records(records), err=True)
    result = print_graph(graph)
    if output:
        write_text(output, result)
    else:
        click.echo(result, nl=not result.endswith("\n"))


def describe_passes() -> str:
    """One line per pass: its name, options and the first line of its docstring."""
    from ggufc.passes.pipelines import REGISTRY

    lines = []
    for name, kind in sorted(REGISTRY.items()):
        names = kind.option_names()
        shown = f"{name}{{{','.join(names)}}}" if names else name
        lines.append(f"{shown:28} {(kind.__doc__ or '').strip().splitlines()[0]}")
    return "\n".join(lines)
