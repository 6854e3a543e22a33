"""``merge-gate-up``: the two projections of a gated feed-forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ggufc.ir import Graph, Node
from ggufc.passes.base import Pass, PassResult
from ggufc.passes.merge_products import is_projection, merge, mergeable
from ggufc.passes.rules import Rewriter


def gate_up_pairs(rw: Rewriter) -> list[list[Node]]:
    """For each ``glu`` the projections its operands come from, biases in between allowed, where both read the same activation."""
    pairs = []
    taken: set[Node] = set()
    for node in rw.graph.nodes:
        if node.op.name != "glu":
            continue
        sources = [source for source in map(_projection, node.operands) if source is not None and is_projection(rw, source)]
        if len(set(sources)) == 2 and sources[0].operands[1] is sources[1].operands[1] and taken.isdisjoint(sources):
            pairs.append(sources)
            taken.update(sources)
    return pairs


def _projection(node: Node) -> Node | None:
    """The product behind a value, past bias additions."""
    while node.op.name == "add":
        node = node.operands[0]
    return node if node.op.name == "mul_mat" else None


@dataclass(frozen=True)
class MergeGateUp(Pass):
    """``glu(mul_mat(Wg, x), mul_mat(Wu, x))`` -> one ``mul_mat`` with ``concat(Wg, Wu)`` and two row views.

    Precondition: activations are fused (``fuse-glu``). Postcondition: no ``glu`` reads two products of one activation with 2-D weights
    of equal dtype that are used nowhere else. Biases stay additions on the views. ``hoist`` evaluates the concatenation.
    """

    name: ClassVar[str] = "merge-gate-up"

    def apply(self, graph: Graph) -> PassResult:
        """See the class."""
        rw = Rewriter(graph)
        groups = [group for pair in gate_up_pairs(rw) for group in mergeable(pair)]
        for group in groups:
            merge(rw, group)
        rw.commit()
        return PassResult(bool(groups), {"gate-up": len(groups)})
