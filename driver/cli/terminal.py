"""Progress and messages on stderr. On anything but a terminal there are no bars and no colour."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from ggufc.files import Progress


def is_terminal() -> bool:
    """True when a person watches stderr."""
    return sys.stderr.isatty() and os.environ.get("TERM", "") != "dumb"


def say(message: str) -> None:
    """A line for people, on stderr."""
    sys.stderr.write(message + "\n")
    sys.stderr.flush()


@contextlib.contextmanager
def progress(unit: str = "bytes") -> Iterator[Progress | None]:
    """A ``progress(what, done, total)`` function that draws bars, or None when stderr is not a terminal.

    ``unit`` is ``bytes`` (sizes and speed) or ``steps`` (counts). The bars disappear when the block ends.
    """
    if not is_terminal():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        ProgressColumn,
        TaskID,
        TextColumn,
        TimeElapsedColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bars

    amount: list[ProgressColumn] = [DownloadColumn(), TransferSpeedColumn()] if unit == "bytes" else [MofNCompleteColumn()]
    with Bars(
        TextColumn("{task.description}"), BarColumn(), *amount, TimeElapsedColumn(), console=Console(stderr=True), transient=True
    ) as bars:
        tasks: dict[str, TaskID] = {}

        def update(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total or None)
            bars.update(tasks[what], completed=done, total=total or None)

        yield update
