"""``memory-plan``: which values of a graph share a buffer.

The planner itself (``memory_planner``) knows intervals only; here they are computed from a graph. Codegen plans its launches with the
same planner.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ggufc.formats.artifact import Affine
from ggufc.ir import Graph, Node
from ggufc.ir.dims import to_form
from ggufc.ir.layout import layout, root
from ggufc.passes.base import Pass, PassResult
from ggufc.passes.memory_planner import REPRESENTATIVE_ENV, Holder, Interval, Plan, PlannedSlot, check_plan, plan

__all__ = [
    "Holder",
    "Interval",
    "MemoryPlan",
    "Plan",
    "PlannedSlot",
    "check_plan",
    "intervals",
    "liveness",
    "plan",
    "size_form",
]

ANALYSIS = "memory-plan"

_IN_PLACE = frozenset(
    [
        "add",
        "sub",
        "mul",
        "div",
        "scale",
        "silu",
        "gelu",
        "relu",
        "sigmoid",
        "tanh",
        "exp",
        "neg",
        "sqrt",
        "softplus",
        "softcap",
        "clamp",
        "glu",
        "rms_norm",
        "norm",
        "rms_norm_mul",
        "soft_max",
        "rope_apply",
    ]
)
"""Operators that read an element (or row, or head) before they write it, so that the result may take an operand's buffer."""


@dataclass(frozen=True)
class MemoryPlan(Pass):
    """Assign buffers by liveness and store them as plain data in ``graph.analysis["memory-plan"]``.

    Precondition: none beyond a valid graph; best run last. Postcondition: the stored plan passed ``check_plan``: no two values that are
    live together share a buffer for any values of the symbols. Options ``t``, ``o``, ``kv`` (also for C and R) are the representative
    sizes at which the planner compares symbolic sizes.
    """

    name: ClassVar[str] = ANALYSIS
    t: int = REPRESENTATIVE_ENV["T"]
    o: int = REPRESENTATIVE_ENV["O"]
    kv: int = REPRESENTATIVE_ENV["KV"]

    def apply(self, graph: Graph) -> PassResult:
        """See the class."""
        sizes = {"T": self.t, "O": self.o, "C": self.kv, "KV": self.kv, "R": self.kv}
        env = {symbol: sizes.get(symbol, 1) for symbol in graph.symbols}
        values = intervals(graph)
        result = plan(values, env)
        check_plan(values, result)
        label = {it.id: it.label for it in values}
        found = {
            "env": env,
            "peak": result.peak(env),
            "live": result.live_peak(env)[1],
            "slots": [{"sizes": list(slot.sizes), "values": [label[member] for member in slot.members]} for slot in result.slots],
        }
        changed = graph.analysis.get(ANALYSIS) != found
        graph.analysis[ANALYSIS] = found
        return PassResult(changed, {"values": len(values), "slots": len(result.slots)})


def needs_buffer(node: Node) -> bool:
    """A computed value that owns storage: no leaf, no view, no version of a cache."""
    return not (node.is_leaf or node.is_view or node.op.writes_cache)


def liveness(graph: Graph) -> dict[Node, int]:
    """For every node the index of the last node that reads its storage, directly or through views; its own index if none does.

    Outputs (and what they are views of) live to the end: index ``len(graph.nodes)``.
    """
    last = {node: index for index, node in enumerate(graph.nodes)}
    for index, node in enumerate(graph.nodes):
        for operand in node.operands:
            last[operand] = max(last[operand], index)
    for node in graph.outputs.values():
        last[node] = len(graph.nodes)
    for node in reversed(graph.nodes):
        if node.is_view:
            source = node.operands[0]
            last[source] = max(last[source], last[node])
    return last


def intervals(graph: Graph) -> list[Interval]:
    """One interval per value that needs a buffer; steps are node indices. Outputs have buffers of their own and are left out."""
    last = liveness(graph)
    results = {root(node) for node in graph.outputs.values()}
    found = []
    for index, node in enumerate(graph.nodes):
        if not needs_buffer(node) or node in results:
            continue
        giver = _giver(node, index, last, results)
        found.append(
            Interval(
                id(node), size_form(node), index, last[node], None if giver is None else id(giver), node.name or f"%{index} {node.op.name}"
            )
        )
    return found


def size_form(node: Node) -> Affine:
    """Bytes of a contiguous value as a form with the symbols of its shape."""
    return to_form(node.type.nbytes, products=True)


def _giver(node: Node, index: int, last: dict[Node, int], results: set[Node]) -> Node | None:
    """The value whose buffer ``node`` may take: read here for the last time, same elements in the same places, read in no other way."""
    if node.op.name not in _IN_PLACE:
        return None
    layouts = [layout(operand) for operand in node.operands]
    for where in layouts:
        owner = where.root
        if not needs_buffer(owner) or owner in results or last[owner] != index or owner.type.nbytes != node.type.nbytes:
            continue
        if where.offset != 0 or not where.contiguous or where.ne != node.type.ne:
            continue
        if any(other is not where and other.root is owner and other != where for other in layouts):
            continue
        return owner
    return None
