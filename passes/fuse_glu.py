"""``fuse-glu``: gated activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ggufc.ir import Node
from ggufc.passes.base import RulePass
from ggufc.passes.rules import Match, Rewriter, Rule, any_node, op, rule


def _glu(fn: str) -> Rule:
    @rule(f"glu-{fn}", op("mul", op(fn, any_node("gate"), once=True), any_node("up"), swap=True))
    def do_glu(rw: Rewriter, node: Node, m: Match) -> Node | None:
        """``fn(gate) * up`` of equal shapes; a broadcast product is something else (a gate per row)."""
        if m["gate"].type.ne != m["up"].type.ne:
            return None
        return rw.add("glu", m["gate"], m["up"], fn=fn)

    return do_glu


@dataclass(frozen=True)
class FuseGlu(RulePass):
    """``mul(silu(gate), up)`` and ``mul(gelu(gate), up)`` -> ``glu(gate, up)``.

    Precondition: a valid graph. Postcondition: no ``silu`` or ``gelu`` is read only by a product with a tensor of its shape.
    """

    name: ClassVar[str] = "fuse-glu"
    rules: ClassVar[tuple[Rule, ...]] = (_glu("silu"), _glu("gelu"))
