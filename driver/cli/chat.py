"""``ggufc chat``: a conversation."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ggufc.cli import options

if TYPE_CHECKING:
    from ggufc.runtime import Session

_HELP = "/clear forgets the conversation, /exit (or Ctrl-D) ends it; a line that ends in \\ continues on the next."


@click.command()
@options.model
@click.option("-sys", "--system-prompt", default=None, help="What the model is told first.")
@click.option(
    "--chat-template",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=None,
    help="A Jinja file instead of the model's template.",
)
@options.predict
@options.generating
def command(model: str, system_prompt: str | None, chat_template: Path | None, n_predict: int, **given: Any) -> None:
    """Talk with MODEL. The KV cache is kept between turns, so only what is new is evaluated.

    Ctrl-C stops an answer. Lines from a pipe are taken as one message each.
    """
    from ggufc.cli import terminal
    from ggufc.files import read_text
    from ggufc.runtime import chat

    sampling = options.sampling_options(given)
    terminal.accept_any_text()
    with options.open_session(model, given) as session:
        template = read_text(chat_template) if chat_template else chat.template_of(session.artifact.metadata)
        if not chat_template and chat.is_built_in(session.artifact.metadata):
            terminal.say("the model has no chat template; the one of its family is used")
        conversation = Conversation(session, template, system_prompt, n_predict, sampling)
        if sys.stdin.isatty():
            terminal.say(_HELP)
        while (message := read_message()) is not None:
            if message in {"/exit", "/quit"}:
                break
            if message in {"/clear", "/help"}:
                if message == "/clear":
                    conversation.clear()
                terminal.say("the conversation was forgotten" if message == "/clear" else _HELP)
            elif message:
                conversation.answer(message)


def read_message() -> str | None:
    """The next message, None at the end of the input."""
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  (gives input() a history and editing)
    lines: list[str] = []
    while True:
        try:
            line = input("> " if interactive and not lines else "")
        except EOFError:
            return "\n".join(lines) if lines else None
        if not line.endswith("\\"):
            return "\n".join([*lines, line]).strip()
        lines.append(line[:-1])


class Conversation:
    """Messages so far and how to answer the next one."""

    def __init__(self, session: Session, template: str, system: str | None, n_predict: int, sampling: Any) -> None:
        self._session, self._template, self._system = session, template, system
        self._n_predict, self._sampling = n_predict, sampling
        self.messages: list[dict[str, str]] = []
        self.clear()

    def clear(self) -> None:
        """Start over, with the system message if there is one."""
        self.messages = [{"role": "system", "content": self._system}] if self._system is not None else []

    def answer(self, message: str) -> None:
        """Stream the answer to stdout and remember both. A message that does not fit is refused and forgotten."""
        from ggufc.cli import terminal
        from ggufc.runtime import RuntimeRefusal

        asked = [*self.messages, {"role": "user", "content": message}]
        pieces: list[str] = []
        try:
            tokens = self._session.chat_tokens(asked, self._template)
            generation = self._session.generate(tokens, self._n_predict, self._sampling, reuse_prefix=True)
            try:
                for piece in generation:
                    pieces.append(piece)
                    terminal.show(piece)
            except KeyboardInterrupt:
                terminal.show(" [stopped]")
            terminal.show("\n")
        except RuntimeRefusal as refusal:
            if not refusal.soft:
                raise
            terminal.say(f"{refusal}; /clear starts a new conversation")
            return
        if generation.finish_reason == "context":
            terminal.say(f"the context of {self._session.cells.size} cells is full; /clear starts a new conversation")
        self.messages = [*asked, {"role": "assistant", "content": "".join(pieces)}]
