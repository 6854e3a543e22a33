"""``hoist``: weight-only subgraphs are computed once, at compile time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ggufc.ir import Graph, Node, print_graph
from ggufc.passes.base import Pass, PassResult
from ggufc.passes.rules import Rewriter

DERIVED_OUTPUT = "value"
"""Name of the single output of a derived weight's graph."""


@dataclass(frozen=True)
class Hoist(Pass):
    """Turn every maximal subgraph that reads only weights and constants into a ``weight`` node with attr ``derived``.

    Precondition: a valid graph. Postcondition: the graph computes nothing from weights alone; views of weights stay views, since they
    cost nothing and a copy would double the weight. ``graph.derived`` holds one graph with the output ``value`` per distinct
    computation.
    """

    name: ClassVar[str] = "hoist"

    def apply(self, graph: Graph) -> PassResult:
        """See the class."""
        constant = _weight_only(graph)
        rw = Rewriter(graph)
        texts = {print_graph(sub): key for key, sub in graph.derived.items()}
        hoisted = 0
        for node in [n for n in graph.nodes if n in constant and _is_frontier(rw, n, constant)]:
            sub = _extract(graph, node)
            text = print_graph(sub)
            key = texts.get(text)
            if key is None:
                key = _fresh_key(graph, node)
                graph.derived[key] = sub
                texts[text] = key
            rw.at = node
            rw.replace(node, rw.add("weight", type=node.type, derived=key, name=key))
            hoisted += 1
        rw.commit()
        if hoisted:
            graph.remove_dead()
        return PassResult(bool(hoisted), {"hoisted": hoisted})


def _weight_only(graph: Graph) -> set[Node]:
    """Nodes that depend on weights and constants alone and whose shape no symbol enters; leaves included."""
    constant: set[Node] = set()
    for node in graph.nodes:
        if node.is_leaf:
            if node.op.name in ("weight", "const"):
                constant.add(node)
        elif constant.issuperset(node.operands) and not node.type.symbols and not node.op.writes_cache:
            constant.add(node)
    return constant


def _is_frontier(rw: Rewriter, node: Node, constant: set[Node]) -> bool:
    """Is ``node`` a computation whose value the rest of the graph reads, directly or through views?"""
    if node.is_leaf or node.is_view:
        return False
    stack = [node]
    while stack:
        n = stack.pop()
        if rw.is_output(n):
            return True
        for user in rw.users(n):
            if user not in constant:
                return True
            if user.is_view:
                stack.append(user)
    return False


def _extract(graph: Graph, node: Node) -> Graph:
    """The subgraph that computes ``node``; derived weights it reads are inlined, so that derived graphs depend on file tensors only."""
    sub = Graph("derived", graph.arch)
    copies: dict[Node, Node] = {}
    sub.outputs[DERIVED_OUTPUT] = _copy(graph, node, sub, copies)
    return sub


def _copy(graph: Graph, node: Node, into: Graph, copies: dict[Node, Node]) -> Node:
    if node in copies:
        return copies[node]
    derived = node.attrs.get("derived") if node.op.name == "weight" else None
    if derived:
        source = graph.derived[derived]
        copies[node] = _copy(source, source.outputs[DERIVED_OUTPUT], into, copies)
        return copies[node]
    operands = [_copy(graph, operand, into, copies) for operand in node.operands]
    attrs = {key: value for key, value in node.attrs.items() if key != "name"}
    declared = node.type if node.op.declared_type else None
    copies[node] = into.add(node.op.name, *operands, name=node.name, type=declared, **attrs)
    return copies[node]


def _fresh_key(graph: Graph, node: Node) -> str:
    base = node.name or node.op.name
    return next(key for key in _candidates(base) if key not in graph.derived)


def _candidates(base: str) -> Iterator[str]:
    yield base
    number = 2
    while True:
        yield f"{base}#{number}"
        number += 1
