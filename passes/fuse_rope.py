"""``fuse-rope``: angles apart from their application."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ggufc.ir import Node
from ggufc.passes.base import RulePass
from ggufc.passes.rules import Match, Rewriter, Rule, op, rule


@rule("rope-split", op("rope"))
def do_split(rw: Rewriter, node: Node, m: Match) -> Node:
    """Cosines and sines depend on the position only; all heads, q and k, and all layers with one setting share them."""
    x, pos, *factors = node.operands
    attrs = {key: value for key, value in node.attrs.items() if key != "mode"}
    table = rw.add("rope_table", pos, *factors, name=f"{node.name}.table", **attrs)
    return rw.add("rope_apply", x, table, mode=node.attrs["mode"], n_dims=node.attrs["n_dims"])


@dataclass(frozen=True)
class FuseRope(RulePass):
    """``rope(x, pos, ff)`` -> ``rope_apply(x, rope_table(pos, ff))``.

    Precondition: a valid graph. Postcondition: no ``rope`` is left. Equal tables are left to ``cse``, which makes one of them.
    """

    name: ClassVar[str] = "fuse-rope"
    rules: ClassVar[tuple[Rule, ...]] = (do_split,)
