"""The error type of this room."""

from __future__ import annotations

from ggufc.formats.errors import GgufcError


class PassError(GgufcError):
    """A pipeline that does not parse, a pass whose postcondition fails, or an analysis that refuses the graph."""
