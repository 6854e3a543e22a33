"""Expert routing: the choice of experts and their weights in one launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ggufc.codegen.kernels import routing
from ggufc.codegen.lower_fusions import Fusion
from ggufc.codegen.lower_operands import Emit, launch, whole
from ggufc.codegen.schedule import NULL, fixed, form, integer
from ggufc.ir.graph import Node

if TYPE_CHECKING:
    from ggufc.codegen.lower import Lowering


@dataclass
class Routing(Fusion):
    """``expert_choice`` and the ``expert_weights`` of what it chose."""

    def emit(self, low: Lowering) -> None:
        choice, weights = self.nodes
        _route(low, choice, weights)


def match_routing(low: Lowering, node: Node) -> Routing | None:
    if node.op.name != "expert_choice" or node in low.output_of or not low.users[node]:
        return None
    first = low.users[node][0]
    same = first.op.name == "expert_weights" and first.operands == (node.operands[0], node) and first.attrs["gate"] == node.attrs["gate"]
    return Routing(first, (node, first)) if same and first not in low.claimed else None


def _route(low: Lowering, choice: Node | None, weights: Node | None) -> None:
    node = weights or choice
    assert node is not None
    scores, a = node.operands[0], node.attrs
    at, lds, _ = low.rows(scores)
    n, k = fixed(scores.ne[0]), fixed(node.ne[0])
    bias = choice is not None and len(choice.operands) > 1
    spec = routing.Route(
        n, k, node.ne[1], a["gate"], bias, choice is not None, weights is not None,
        weights.attrs["normalise"] if weights is not None else "none", float(weights.attrs["scale"]) if weights is not None else 1.0,
    )  # fmt: skip
    work = low.schedule.new_value(form(scores.type.numel, 4), f"{node.name} (compared)") if choice is not None else NULL
    ids = low.result(choice) if choice is not None else whole(low, node.operands[1], "i32")
    out = low.result(weights) if weights is not None else NULL
    added = whole(low, choice.operands[1]) if choice is not None and bias else NULL
    writes = tuple(i for i, used in ((3, choice), (4, choice), (5, weights)) if used is not None)
    launch(low, spec, (at, integer(lds), added, work, ids, out), writes, node, moved=scores.type.numel * 8)


ROUTING_MATCHERS: tuple[Callable[[Lowering, Node], Fusion | None], ...] = (match_routing,)

ROUTING_RULES: dict[str, Emit] = {
    "expert_choice": lambda low, node: _route(low, node, None),
    "expert_weights": lambda low, node: _route(low, None, node),
}
"""Operator name -> how it is emitted where no fusion claims it."""

ROUTING_OPERANDS = {"expert_choice": 2, "expert_weights": 2}
