"""One thread at a time in a context."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from .errors import RuntimeRefusal

if TYPE_CHECKING:
    from .context import Context

P = ParamSpec("P")
R = TypeVar("R")


def exclusive(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """A method of an open context that one thread at a time may run, and that thread from within itself.

    Otherwise RuntimeRefusal is raised and nothing has changed. Nobody waits: a context is one conversation, so a second thread in it is a
    mistake that waiting would hide.
    """

    @functools.wraps(method)
    def guarded(context: Context, *args: P.args, **kwargs: P.kwargs) -> R:
        if not context.turn.acquire(blocking=False):
            raise RuntimeRefusal(
                f"{method.__name__}: another thread is using this session; let it finish, or give each thread a session (they can share an "
                "Artifact)"
            )
        try:
            if context.closed:
                raise RuntimeRefusal(f"{method.__name__}: this session is closed; open a new one")
            return method(context, *args, **kwargs)
        finally:
            context.turn.release()

    return guarded
