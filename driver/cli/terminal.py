"""Progress and messages on stderr, text on stdout. On anything but a terminal there are no bars and no colour."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from ggufc.files import Progress, size_words

_SMALLEST_SIZE = 1 << 16
"""Totals from here on are sizes in bytes; smaller ones count things."""

_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_VISIBLE |= {code: 0xFFFD for code in range(0x80, 0xA0)}


def is_terminal() -> bool:
    """True when a person watches stderr."""
    return sys.stderr.isatty() and os.environ.get("TERM", "") != "dumb"


def say(message: str) -> None:
    """A line for people, on stderr."""
    sys.stderr.write(message + "\n")
    sys.stderr.flush()


def show(text: str) -> None:
    """Generated text on stdout, at once.

    What a model writes must not steer the terminal: there, control characters appear as the symbols Unicode has for them.
    """
    sys.stdout.write(text.translate(_VISIBLE) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def accept_any_text() -> None:
    """Let stdout replace what its encoding cannot express; a model may write any character."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure:
        reconfigure(errors="replace")


@contextlib.contextmanager
def progress() -> Iterator[Progress | None]:
    """A ``progress(what, done, total)`` function that draws bars, None when stderr is not a terminal. The bars go with the block."""
    if not is_terminal():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[amount]}"), TimeElapsedColumn())
    bars = Bars(*columns, console=Console(stderr=True), transient=True)
    tasks: dict[str, TaskID] = {}

    def update(what: str, done: int, total: int) -> None:
        # Started on first use, because an idle display still rewrites its line, over whatever a child process prints there.
        bars.start()
        amount = amount_words(done, total)
        if what not in tasks:
            tasks[what] = bars.add_task(what, total=total or None, amount=amount)
        bars.update(tasks[what], completed=done, total=total or None, amount=amount)

    try:
        yield update
    finally:
        bars.stop()


def amount_words(done: int, total: int) -> str:
    """``12/30``, ``1.0 MiB / 93.8 MiB``, or what has arrived so far of an unknown total."""
    if max(done, total) < _SMALLEST_SIZE:
        return f"{done}/{total}" if total else str(done)
    return f"{size_words(done)} / {size_words(total)}" if total else size_words(done)
