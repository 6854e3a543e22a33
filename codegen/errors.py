"""The error type of code generation."""

from __future__ import annotations

from ggufc.formats.errors import GgufcError


class CodegenError(GgufcError):
    """A graph, target or option that code cannot be generated for; names the node, the target or the option."""
