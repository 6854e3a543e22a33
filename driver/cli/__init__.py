"""The command line: ``ggufc COMMAND``.

One file per command, imported when the command runs; this file imports click only, so that ``ggufc --help`` answers at once. ``COMMANDS``
is the list of commands and their one-line help. ``failures`` turns errors into one line on stderr, ``options`` holds what commands share,
``terminal`` the progress bars.
"""

from __future__ import annotations

import importlib

import click

from ggufc import __version__

COMMANDS = {
    "pull": "Fetch a model: an alias, hf:ORG/REPO[:FILE] or an address.",
    "run": "Generate text from a prompt.",
    "chat": "Talk with a model.",
    "compile": "Compile a GGUF model into an artifact.",
    "inspect": "Show what a model or artifact holds and needs.",
    "dump": "Show the graph at any stage, the schedule or the generated code.",
    "opt": "Run passes over IR text.",
    "bench": "Measure prompt and decode speed (pp512, tg128).",
    "perplexity": "Measure the perplexity of a text.",
    "logits": "Run the steps of a golden case and store the logits.",
    "diff": "Compare two evaluations node by node and name the first that differs.",
    "cache": "List or remove cached models and artifacts.",
    "doctor": "Show what ggufc finds on this machine.",
}


class LazyGroup(click.Group):
    """A group whose commands live in ``ggufc.cli.NAME`` and load when asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"ggufc.cli.{cmd_name}").command
        command.short_help = COMMANDS[cmd_name]
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]}, epilog="Documentation: docs/cli.md")
@click.version_option(__version__, prog_name="ggufc")
@click.option("--debug", is_flag=True, help="Show tracebacks instead of one-line errors.")
def cli(debug: bool) -> None:
    """Compile GGUF language models to native code, run them, look inside.

    MODEL is a .gguf file, a compiled artifact, an alias (smollm2, gemma3-270m), hf:ORG/REPO[:FILE] or an http(s) address.
    """
