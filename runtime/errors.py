"""The runtime's error type, and checks of arguments that raise it."""

from __future__ import annotations

import operator
from collections.abc import Iterable

from ggufc.formats.errors import GgufcError


def require_integer(what: str, value: object, low: int, high: int) -> None:
    """Raise ``RuntimeRefusal`` unless ``value`` is a whole number from ``low`` to ``high``."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = low - 1
    if isinstance(value, bool) or not low <= number <= high:
        raise RuntimeRefusal(f"{what} is {value!r}; give a whole number from {low} to {high}")


def require_text(what: str, value: object) -> None:
    """Raise ``RuntimeRefusal`` unless ``value`` is a text."""
    if not isinstance(value, str):
        raise RuntimeRefusal(f"{what} is {value!r}; give a text")


def token_list(what: str, value: Iterable[int]) -> list[int]:
    """``value`` as a list of ints; ``RuntimeRefusal`` unless it holds whole numbers and nothing else. Bytes are text, not tokens."""
    try:
        if isinstance(value, (bytes, bytearray)):
            raise TypeError
        return [operator.index(token) for token in value]
    except TypeError:
        raise RuntimeRefusal(f"{what} is {value!r}; give token ids, which are whole numbers") from None


class RuntimeRefusal(GgufcError):
    """An operation that was refused before anything changed; the message names the operation and the way out.

    ``soft`` is True where the same call can succeed later or in smaller pieces (a full cache, a pending shift that is impossible): a
    caller may free cells or retry with half the batch. A hard refusal is a wrong option or an impossible request.
    """

    def __init__(self, message: str, *, soft: bool = False) -> None:
        super().__init__(message)
        self.soft = soft
