"""``cache-fixups``: every cache write at a moving offset becomes a slot the runtime patches.

The symbol ``head`` is the cell where the next write goes. A ``cpy`` whose destination starts at ``offset + step * head`` has to be told
the new head before a graph runs again; one that is forgotten keeps writing to the old cell, which shows only much later (runtime-cache
3.4). So the writes are found by analysis instead of being registered by hand, and ``check_fixups`` refuses a graph with one that is not
registered. ``set_rows`` takes its rows as an input and needs no slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ggufc.ir import Graph, Node
from ggufc.ir.dims import Dim, substitute, symbols, to_form
from ggufc.ir.layout import layout
from ggufc.ir.ops.cache import resource
from ggufc.ir.types import block_of
from ggufc.passes.base import Pass, PassResult
from ggufc.passes.errors import PassError

HEAD = "head"
"""Symbol of the moving write position, in cells."""
ANALYSIS = "cache-fixups"


@dataclass(frozen=True)
class CacheFixups(Pass):
    """Register each ``cpy`` whose destination offset depends on ``head`` as ``{node, cache, step, offset}`` (bytes) in
    ``graph.analysis["cache-fixups"]``.

    Precondition: offsets are affine in ``head``; nothing but cache writes depends on it. Postcondition: ``check_fixups`` accepts the
    graph. Entries of an earlier run are dropped, so none survives a change of topology.
    """

    name: ClassVar[str] = ANALYSIS

    def apply(self, graph: Graph) -> PassResult:
        """See the class; raises ``PassError`` for a dependence on ``head`` that no slot can express."""
        found = moving_writes(graph)
        changed = graph.analysis.get(ANALYSIS) != found
        graph.analysis[ANALYSIS] = found
        check_fixups(graph)
        rows = sum(node.op.name == "set_rows" for node in graph.nodes)
        return PassResult(changed, {"slots": len(found), "set_rows": rows})


def moving_writes(graph: Graph) -> list[dict[str, Any]]:
    """The slots the graph needs, in program order."""
    slots: list[dict[str, Any]] = []
    for node in graph.nodes:
        if node.op.name != "cpy" or HEAD not in symbols(layout(node.operands[1]).offset):
            continue
        if not node.name:
            raise PassError(
                f"A write into cache '{resource(node)}' at a moving offset has no name; name the cpy node, its fixup slot refers to it."
            )
        if any(slot["node"] == node.name for slot in slots):
            raise PassError(
                f"Two writes at a moving offset are named '{node.name}'; give each its own name, their fixup slots refer to them."
            )
        slots.append(_slot(node))
    return slots


def check_fixups(graph: Graph) -> None:
    """Refuse a graph with an unregistered moving write, a stale entry, or any other use of ``head``; raises ``PassError``."""
    registered = graph.analysis.get(ANALYSIS, [])
    needed = moving_writes(graph)
    for slot in needed:
        entry = next((entry for entry in registered if entry["node"] == slot["node"]), None)
        if entry is None:
            raise PassError(
                f"Node '{slot['node']}' writes into cache '{slot['cache']}' at an offset that moves with {HEAD}, "
                f"but no fixup slot is registered for it; run the pass {ANALYSIS} after the last change to the graph."
            )
        if entry != slot:
            raise PassError(
                f"The fixup slot of node '{slot['node']}' says {entry}, but the graph has {slot}; run the pass {ANALYSIS} again."
            )
    names = {slot["node"] for slot in needed}
    for entry in registered:
        if entry["node"] not in names:
            raise PassError(
                f"Fixup slot '{entry['node']}' of cache '{entry['cache']}' belongs to no write of this graph; "
                f"run the pass {ANALYSIS} again."
            )
    _refuse_other_uses(graph)


def _slot(node: Node) -> dict[str, Any]:
    """Byte offset of the destination = ``offset`` + head * ``step``, for the cache the write resolves to, whatever its name suggests."""
    where = layout(node.operands[1])
    start = substitute(where.offset, {HEAD: 0})
    step = where.offset - start
    if not isinstance(step, Dim) or step.terms[1:] or step.terms[0][0] != (HEAD,):
        raise PassError(
            f"Node '{node.name}' writes at offset {where.offset}; a fixup slot needs one that is a constant times {HEAD} plus the rest."
        )
    per_cell = step.terms[0][1]
    dtype = where.root.dtype
    return {
        "node": node.name,
        "cache": resource(where.root),
        "step": _bytes(node, dtype, per_cell),
        "offset": {symbol: _bytes(node, dtype, factor) for symbol, factor in to_form(start).items()},
    }


def _bytes(node: Node, dtype: str, elements: int) -> int:
    values, size = block_of(dtype)
    if elements % values:
        raise PassError(
            f"Node '{node.name}' writes {dtype} at a multiple of {elements} elements, which is not a whole number of blocks of {values}."
        )
    return elements // values * size


def _refuse_other_uses(graph: Graph) -> None:
    """A shape, stride or read offset that moves with ``head`` would be baked into a reused graph."""
    destinations = _destination_views(graph)
    for node in graph.nodes:
        if node in destinations:
            continue
        values = [*node.type.ne, *(v for value in node.attrs.values() for v in (value if isinstance(value, tuple) else (value,)))]
        if any(isinstance(v, Dim) and HEAD in symbols(v) for v in values):
            raise PassError(
                f"Node '{node.name}' ({node.op.name}) depends on {HEAD} but is no cache write; "
                "let the value enter as an input, or observe it so that it is in the reuse key."
            )


def _destination_views(graph: Graph) -> set[Node]:
    """Views that only lead to destinations of ``cpy``."""
    users = graph.users()
    result: set[Node] = set()
    for node in reversed(graph.nodes):
        if node.is_view and users[node] and all((u.op.name == "cpy" and u.operands[0] is not node) or u in result for u in users[node]):
            result.add(node)
    return result
