"""Pointwise operators: one rule for all, and chains of them in one launch.

An expression is evaluated value by value in the order its operators were given, so a chain has the bits its launches would have had.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ggufc.codegen.kernels import elementwise
from ggufc.codegen.kernels.strided import contiguous
from ggufc.codegen.lower_fusions import Fusion
from ggufc.codegen.lower_operands import launch, strided
from ggufc.ir.graph import Node
from ggufc.ir.layout import layout

if TYPE_CHECKING:
    from ggufc.codegen.lower import Lowering

MOST_INPUTS = 3

POINTWISE: dict[str, Callable[[Node], Any]] = {
    **dict.fromkeys(elementwise.UNARY, lambda node: (node.op.name, 0)),
    **dict.fromkeys(elementwise.BINARY, lambda node: (node.op.name, 0, 1)),
    "glu": lambda node: ("mul", (node.attrs["fn"], 0), 1),
    "scale": lambda node: ("scale", 0, float(node.attrs["s"]), float(node.attrs["b"])),
    "softcap": lambda node: ("softcap", 0, float(node.attrs["cap"])),
    "clamp": lambda node: ("clamp", 0, float(node.attrs["min"]), float(node.attrs["max"])),
}
"""Operator name -> its expression over its operands' numbers."""


@dataclass
class Chain(Fusion):
    """``expression`` over ``inputs``, the result of the last of ``nodes``."""

    expression: Any
    inputs: tuple[Node, ...]

    def emit(self, low: Lowering) -> None:
        emit_expression(low, self.anchor, self.expression, self.inputs)


def emit_expression(low: Lowering, node: Node, expression: Any, inputs: tuple[Node, ...]) -> None:
    """One launch that computes ``node``."""
    refs, shapes = zip(*(strided(low, o) for o in inputs))
    spec = elementwise.Elementwise(expression, contiguous("f32", node.ne), tuple(shapes))
    inplace = next(((0, i + 1) for i, o in enumerate(inputs) if same_storage(node, o)), None)
    out = low.result(node)
    launch(low, spec, (out, *refs), (0,), node, inplace)


def pointwise(low: Lowering, node: Node) -> None:
    """The rule of a pointwise operator by itself."""
    emit_expression(low, node, POINTWISE[node.op.name](node), node.operands)


def same_storage(node: Node, operand: Node) -> bool:
    """Whether a pointwise result may overwrite the operand."""
    where = layout(operand)
    return (
        operand.type.ne == node.type.ne
        and where.contiguous
        and where.offset == 0
        and where.ne == where.root.type.ne
        and operand.dtype == "f32"
    )


def match_chains(low: Lowering) -> list[Chain]:
    """Chains among the nodes that nothing has claimed: operators whose results have the shape of the last one's and no other reader."""
    chains: list[Chain] = []
    taken: set[Node] = set()
    for node in reversed(low.graph.nodes):
        if node.op.name not in POINTWISE or node in low.claimed or node in taken:
            continue
        inside, inputs = [node], list(dict.fromkeys(node.operands))
        while (extra := next((o for o in inputs if _joins(low, o, node, taken, inputs)), None)) is not None:
            inside.append(extra)
            at = inputs.index(extra)
            inputs[at : at + 1] = [o for o in dict.fromkeys(extra.operands) if o not in inputs]
        if len(inside) > 1:
            taken.update(inside)
            members = set(inside)
            chains.append(Chain(node, tuple(inside), _expression(node, members, inputs), tuple(inputs)))
    return chains


def _joins(low: Lowering, operand: Node, last: Node, taken: set[Node], inputs: list[Node]) -> bool:
    """Can ``operand`` be computed where it is read? Its reader is inside the chain, being its only one."""
    if operand.op.name not in POINTWISE or operand in low.claimed or operand in taken or operand.type != last.type:
        return False
    if low.single_user(operand) is None:
        return False
    return len({*inputs, *operand.operands} - {operand}) <= MOST_INPUTS


def _expression(node: Node, inside: set[Node], inputs: list[Node]) -> Any:
    """The node's expression with those of its operands in place of their numbers."""
    parts = [_expression(o, inside, inputs) if o in inside else inputs.index(o) for o in node.operands]

    def substitute(e: Any) -> Any:
        if isinstance(e, tuple):
            return (e[0], *(substitute(part) for part in e[1:]))
        return parts[e] if isinstance(e, int) else e

    return substitute(POINTWISE[node.op.name](node))
