"""``ggufc pull``: fetch a model file."""

from __future__ import annotations

from pathlib import Path

import click

from ggufc.cli.options import OutputPath


@click.command()
@click.argument("models", nargs=-1, metavar="MODEL...")
@click.option(
    "-o", "--output", type=OutputPath(path_type=Path), default=None, help="File or existing folder to put it in (default: the cache)."
)
@click.option("--sha256", default="", metavar="DIGEST", help="Refuse a file with another SHA-256.")
@click.option("--list", "list_aliases", is_flag=True, help="List the aliases and stop.")
def command(models: tuple[str, ...], output: Path | None, sha256: str, list_aliases: bool) -> None:
    """Fetch models and print where their files are.

    MODEL is an alias (smollm2, gemma3-270m), hf:ORG/REPO, hf:ORG/REPO:FILE.gguf (or a part of the name, such as Q4_K_M), or an http(s)
    address. Interrupted transfers continue where they stopped. hf: needs `pip install 'ggufc[hub]'` and follows HF_ENDPOINT and HF_TOKEN.
    """
    from ggufc.cli import terminal
    from ggufc.pull import describe, pull
    from ggufc.registry import ALIASES

    if list_aliases:
        for name in sorted(ALIASES):
            click.echo(f"{name:14} {describe(name)}")
        return
    if not models:
        raise click.UsageError("Name a model to fetch; `ggufc pull --list` shows the aliases.")
    if len(models) > 1 and (sha256 or (output is not None and not output.is_dir())):
        raise click.UsageError("Several models need a folder as -o, and --sha256 belongs to a single one.")
    for model in models:
        if detail := describe(model):
            terminal.say(f"{model}: {detail}")
        with terminal.progress() as progress:
            path = pull(model, output, sha256=sha256, progress=progress, quiet=not terminal.is_terminal())
        click.echo(path)
