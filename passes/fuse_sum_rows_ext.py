"""``fuse-sum-rows-ext``: sums over a dimension that was first brought to the front by a copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ggufc.ir import Node
from ggufc.ir.layout import is_contiguous
from ggufc.passes.base import RulePass
from ggufc.passes.canonicalize import LAYOUT_RULES
from ggufc.passes.rules import Match, Rewriter, Rule, any_node, op, rule

_PERMUTED = op("permute", any_node("x"), bind="permuted")


@rule("sum-of-permuted-copy", op("sum_rows", op("cont", _PERMUTED, once=True)))
def do_copy(rw: Rewriter, node: Node, m: Match) -> Node | None:
    """``sum_rows(cont(permute(x)))``: the summed dimension shrinks where it stands, and what is left is permuted instead."""
    return _sum(rw, node, m)


@rule("sum-of-permuted", op("sum_rows", _PERMUTED))
def do_view(rw: Rewriter, node: Node, m: Match) -> Node | None:
    """The same without a copy between: a sum over a strided dimension visits memory against its order."""
    return _sum(rw, node, m)


def _sum(rw: Rewriter, node: Node, m: Match) -> Node | None:
    x, axes = m["x"], m["permuted"].attrs["axes"]
    dim = axes.index(0)
    if dim == 0 or dim >= x.type.rank:
        return None
    total = rw.add("sum_rows_ext", x, dim=dim)
    back = rw.add("permute", total, axes=axes)
    return back if is_contiguous(back) else rw.add("cont", back)


@dataclass(frozen=True)
class FuseSumRowsExt(RulePass):
    """``sum_rows`` of a permuted tensor, copied or not -> ``sum_rows_ext`` over the dimension itself.

    Precondition: a valid graph, canonicalised (transpositions are permutations). Postcondition: no ``sum_rows`` reads a permutation that
    brought another dimension to the front, unless something else reads the copy. The sum is rounded to f32 after each summand.
    """

    name: ClassVar[str] = "fuse-sum-rows-ext"
    rules: ClassVar[tuple[Rule, ...]] = (do_copy, do_view, *LAYOUT_RULES)
