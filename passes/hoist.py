"""``hoist``: weight-only subgraphs are computed once, at compile time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
        known = {_meaning(sub): key for key, sub in graph.derived.items()}
        hoisted = 0
        for node in [n for n in graph.nodes if n in constant and _is_frontier(rw, n, constant)]:
            sub = _extract(graph, rw.in_order(_ancestors(node)))
            meaning = _meaning(sub)
            key = known.get(meaning)
            if key is None:
                key = known[meaning] = _fresh_key(graph, node)
                graph.derived[key] = sub
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


def _extract(graph: Graph, sources: list[Node]) -> Graph:
    """The subgraph that computes the last of ``sources``, which are it and all it depends on, in order.

    Derived weights it reads are inlined, so that derived graphs depend on file tensors only.
    """
    sub = Graph("derived", graph.arch)
    copies: dict[Node, Node] = {}
    for source in sources:
        derived = source.attrs["derived"] if source.op.name == "weight" else ""
        if derived:
            inner = graph.derived[derived]
            for part in inner.nodes:
                copies[part] = _copy(part, sub, copies)
            copies[source] = copies[inner.outputs[DERIVED_OUTPUT]]
        else:
            copies[source] = _copy(source, sub, copies)
    sub.outputs[DERIVED_OUTPUT] = copies[sources[-1]]
    return sub


def _ancestors(node: Node) -> set[Node]:
    """``node`` and everything it is computed from."""
    found = {node}
    stack = [node]
    while stack:
        for operand in stack.pop().operands:
            if operand not in found:
                found.add(operand)
                stack.append(operand)
    return found


def _copy(node: Node, into: Graph, copies: Mapping[Node, Node]) -> Node:
    attrs = {key: value for key, value in node.attrs.items() if key != "name"}
    declared = node.type if node.op.declared_type else None
    return into.add(node.op.name, *(copies[operand] for operand in node.operands), name=node.name, type=declared, **attrs)


def _meaning(sub: Graph) -> str:
    """The text of a derived graph without the names of its computed nodes: equal for equal computations."""
    anonymous = sub.clone()
    for node in anonymous.nodes:
        if not node.is_leaf:
            node.name = node.loc = ""
    return print_graph(anonymous)


def _fresh_key(graph: Graph, node: Node) -> str:
    base = node.name or node.op.name
    return next(key for key in _candidates(base) if key not in graph.derived)


def _candidates(base: str) -> Iterator[str]:
    yield base
    number = 2
    while True:
        yield f"{base}#{number}"
        number += 1
