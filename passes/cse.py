"""``cse``: common subexpressions, leaves included."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

from ggufc.ir import Graph, Node
from ggufc.passes.base import Pass, PassResult


@dataclass(frozen=True)
class Cse(Pass):
    """Keep the first of several nodes that compute the same value.

    Precondition: a valid graph. Postcondition: no two nodes have equal operator, operands, attributes and type; cache writes are all
    kept, since each is an effect. Every leaf (input, weight, cache, constant) occurs once.
    """

    name: ClassVar[str] = "cse"

    def apply(self, graph: Graph) -> PassResult:
        """One pass in program order suffices: operands are settled before their users."""
        first: dict[Hashable, Node] = {}
        merged: dict[Node, Node] = {}
        kept: list[Node] = []
        for node in graph.nodes:
            if not merged.keys().isdisjoint(node.operands):
                node.operands = tuple(merged.get(operand, operand) for operand in node.operands)
            if node.op.writes_cache:
                kept.append(node)
                continue
            key = _key(node)
            same = first.setdefault(key, node)
            if same is node:
                kept.append(node)
            else:
                merged[node] = same
        graph.nodes = kept
        for name, node in graph.outputs.items():
            graph.outputs[name] = merged.get(node, node)
        return PassResult(bool(merged), {"merged": len(merged)})


def _key(node: Node) -> Hashable:
    operands = [id(operand) for operand in node.operands]
    # b of an elementwise operator is repeated to a, so only operands of equal shape may swap.
    if node.op.commutative and len(operands) == 2 and node.operands[0].type == node.operands[1].type:
        operands.sort()
    # repr tells 0.0 from -0.0 and 1 from 1.0, which compare equal as keys.
    return node.op.name, tuple(operands), repr(sorted(node.attrs.items())), node.type
