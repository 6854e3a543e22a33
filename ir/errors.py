"""The error type of this room."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggufc.formats.errors import GgufcError

if TYPE_CHECKING:
    from ggufc.ir.graph import Graph, Node

CONTEXT = 2
"""How many neighbours an error shows on each side of the node."""


class IRError(GgufcError):
    """A graph, type, dimension or text that breaks a rule.

    With ``graph`` and ``node`` the message shows the node's line marked with ``>`` and two neighbours on each side. Errors in text carry
    ``line`` and ``column`` (from 1).
    """

    def __init__(
        self, message: str, *, graph: Graph | None = None, node: Node | None = None, line: int | None = None, column: int | None = None
    ) -> None:
        self.message = message
        self.node = node
        self.line = line
        self.column = column
        super().__init__(message + excerpt(graph, node) if graph is not None and node is not None else message)


def excerpt(graph: Graph, node: Node) -> str:
    """The printed lines around ``node``; a node that is not in the graph yet is shown where it would be inserted."""
    from ggufc.ir.text import print_nodes

    nodes = list(graph.nodes)
    try:
        at = nodes.index(node)
    except ValueError:
        at = graph.cursor
        nodes.insert(at, node)
    lines = print_nodes(nodes)
    first = max(0, at - CONTEXT)
    shown = [("  > " if i == at else "    ") + lines[i] for i in range(first, min(len(lines), at + CONTEXT + 1))]
    return "\n" + "\n".join(shown)
