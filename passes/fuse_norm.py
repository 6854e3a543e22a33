"""``fuse-norm``: RMS norm and its weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ggufc.ir import Node
from ggufc.passes.base import RulePass
from ggufc.passes.rules import Match, Rewriter, Rule, any_node, op, rule


@rule("rms-norm-mul", op("mul", op("rms_norm", any_node("x"), bind="norm", once=True), any_node("w")))
def do_rms_norm_mul(rw: Rewriter, node: Node, m: Match) -> Node | None:
    """``rms_norm(x) * w`` where w has one factor per element of a row."""
    if m["w"].type.ne != (m["x"].type.ne[0],) or m["w"].is_view:
        return None
    return rw.add("rms_norm_mul", m["x"], m["w"], eps=m["norm"].attrs["eps"])


@dataclass(frozen=True)
class FuseNorm(RulePass):
    """``mul(rms_norm(x), w)`` -> ``rms_norm_mul(x, w)``.

    Precondition: a valid graph. Postcondition: no ``rms_norm`` is read only by a product with a vector of its row length.
    """

    name: ClassVar[str] = "fuse-norm"
    rules: ClassVar[tuple[Rule, ...]] = (do_rms_norm_mul,)
