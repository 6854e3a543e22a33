"""Structural equality of graphs: the same nodes in the same order, whatever the objects are."""

from __future__ import annotations

from typing import Any

from ggufc.ir.graph import Graph, Node


def structural_equal(a: Graph, b: Graph) -> bool:
    """Whether two graphs agree in everything that prints."""
    return difference(a, b) == ""


def difference(a: Graph, b: Graph) -> str:
    """The first difference between two graphs in words; empty if there is none."""
    for what in ("name", "arch", "symbols"):
        if getattr(a, what) != getattr(b, what):
            return f"{what}: {getattr(a, what)!r} and {getattr(b, what)!r}"
    if len(a.nodes) != len(b.nodes):
        return f"number of nodes: {len(a.nodes)} and {len(b.nodes)}"
    at_a = {n: i for i, n in enumerate(a.nodes)}
    at_b = {n: i for i, n in enumerate(b.nodes)}
    for i, (m, n) in enumerate(zip(a.nodes, b.nodes)):
        left, right = _parts(m, at_a), _parts(n, at_b)
        for what in left:
            if left[what] != right[what]:
                return f"node {i}, {what}: {left[what]} and {right[what]}"
    outputs = [[(key, at.get(n)) for key, n in g.outputs.items()] for g, at in ((a, at_a), (b, at_b))]
    if outputs[0] != outputs[1]:
        return f"outputs: {outputs[0]} and {outputs[1]}"
    if list(a.derived) != list(b.derived):
        return f"derived weights: {list(a.derived)} and {list(b.derived)}"
    for key in a.derived:
        found = difference(_anonymous(a.derived[key]), _anonymous(b.derived[key]))
        if found:
            return f"derived weight {key!r}, {found}"
    if repr(a.analysis) != repr(b.analysis):
        return f"analyses: {a.analysis} and {b.analysis}"
    return ""


def _parts(n: Node, at: dict[Node, int]) -> dict[str, Any]:
    # repr tells 1 from 1.0 and 0.0 from -0.0, which == does not.
    return {
        "operator": n.op.name,
        "operands": [at.get(o) for o in n.operands],
        "attributes": repr(sorted(n.attrs.items())),
        "type": n.type,
        "name": n.name,
        "loc": n.loc,
    }


def _anonymous(g: Graph) -> Graph:
    """A derived graph without the header that its section does not print."""
    return Graph("", "", (), g.nodes, g.outputs, g.derived, g.analysis)
