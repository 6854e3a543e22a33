"""``ggufc run``: text from a prompt."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ggufc.cli import options

if TYPE_CHECKING:
    from ggufc.runtime import Session


@click.command()
@options.model
@click.option("-p", "--prompt", default=None, help="The prompt; without -p and -f it is read from stdin.")
@click.option("-f", "--file", type=click.Path(allow_dash=True), default=None, help="Read the prompt from this file (- = stdin).")
@options.predict
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without the chat template.")
@click.option("-sys", "--system-prompt", default=None, help="System message of the chat template.")
@click.option(
    "--chat-template",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=None,
    help="A Jinja file instead of the model's template.",
)
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be given several times.")
@click.option("--ignore-eos", is_flag=True, help="Go on after the model's end token.")
@click.option("--context-shift", is_flag=True, help="When the context is full, drop its older half and go on.")
@options.generating
@click.option("--quiet", is_flag=True, help="No line about speed.")
def command(
    model: str,
    prompt: str | None,
    file: str | None,
    n_predict: int,
    raw: bool,
    system_prompt: str | None,
    chat_template: Path | None,
    stop: tuple[str, ...],
    ignore_eos: bool,
    context_shift: bool,
    quiet: bool,
    **given: Any,
) -> None:
    """Generate text with MODEL, which is pulled and compiled first where needed.

    If the model has a chat template, the prompt becomes a user's message and the text its answer; --raw continues the prompt itself. The
    text goes to stdout, a line with the speed of reading the prompt and of decoding to stderr.
    """
    from ggufc.cli import terminal

    if context_shift and given["compact_windows"]:
        raise click.UsageError("--context-shift moves positions, which --compact-windows does not allow; use one of them.")
    text = read_prompt(prompt, file)
    sampling = options.sampling_options(given)
    terminal.accept_any_text()
    with options.open_session(model, given) as session:
        tokens = _prompt_tokens(session, text, raw, system_prompt, chat_template)
        generation = session.generate(tokens, n_predict, sampling, stop, ignore_eos=ignore_eos, context_shift=context_shift)
        ends_line = True
        try:
            for piece in generation:
                terminal.show(piece)
                ends_line = piece.endswith("\n")
        finally:
            if not ends_line:
                terminal.show("\n")
        if generation.finish_reason == "context":
            terminal.say(
                f"the context of {session.cells.size} cells is full; -c sets a larger one, --context-shift goes on with its newer half"
            )
        if not quiet:
            terminal.say(speed_line(session))


def read_prompt(prompt: str | None, file: str | None) -> str:
    """The prompt from -p, -f or stdin; exactly one source. One newline at the end of a file is not part of it."""
    if prompt is not None and file is not None:
        raise click.UsageError("-p and -f both give a prompt; use one of them.")
    if prompt is not None:
        return prompt
    if file is not None and file != "-":
        from ggufc.files import read_text

        text = read_text(Path(file))
    else:
        if file is None and sys.stdin.isatty():
            raise click.UsageError("Give a prompt with -p or -f, or pipe it in; `ggufc chat` holds a conversation.")
        text = sys.stdin.read()
    return text.removesuffix("\n")


def _prompt_tokens(session: Session, text: str, raw: bool, system: str | None, template: Path | None) -> list[int]:
    if raw and (system is not None or template is not None):
        raise click.UsageError("--raw uses no chat template: it goes neither with --system-prompt nor with --chat-template.")
    from ggufc.files import read_text

    # A base model carries no template: its text is continued, which is what it was trained for.
    if raw or (template is None and system is None and "tokenizer.chat_template" not in session.artifact.metadata):
        return session.tokenize(text)
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": text})
    return session.chat_tokens(messages, read_text(template) if template else None)


def speed_line(session: Session) -> str:
    """``prompt 36 tokens, 812.3 tokens/s; decode 119 tokens, 92.1 tokens/s``."""
    stats = session.stats
    return (
        f"prompt {stats.prompt_tokens} tokens, {stats.prompt_rate:.1f} tokens/s; "
        f"decode {stats.decode_tokens} tokens, {stats.decode_rate:.1f} tokens/s ({session.executor.where})"
    )
