"""Program order: who reads and writes which cache version, and the stable topological sort that respects it."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from ggufc.ir.errors import IRError
from ggufc.ir.layout import root
from ggufc.ir.ops.cache import is_version, written_version

if TYPE_CHECKING:
    from ggufc.ir.graph import Graph, Node


def cache_reads(node: Node) -> list[Node]:
    """The cache versions whose data ``node`` reads, directly or through views. Views themselves read nothing."""
    if node.is_view:
        return []
    written = written_version(node) if node.op.writes_cache else None
    found = dict.fromkeys(r for r in map(root, node.operands) if is_version(r) and r is not written)
    return list(found)


def dependencies(g: Graph) -> dict[Node, list[Node]]:
    """For every node what must come before it: its operands, and for a write of a cache all reads of the version it supersedes."""
    readers: dict[Node, list[Node]] = {}
    for n in g.nodes:
        for version in cache_reads(n):
            readers.setdefault(version, []).append(n)
    before: dict[Node, list[Node]] = {}
    for n in g.nodes:
        reads = readers.get(written_version(n), []) if n.op.writes_cache else []
        before[n] = list(dict.fromkeys((*n.operands, *(r for r in reads if r is not n))))
    return before


def topological_order(g: Graph) -> list[Node]:
    """The nodes sorted so that dependencies come first; otherwise the present order is kept. Raises ``IRError`` on a cycle."""
    rank = {n: i for i, n in enumerate(g.nodes)}
    before = dependencies(g)
    waiting = {n: len(deps) for n, deps in before.items()}
    after: dict[Node, list[Node]] = {n: [] for n in g.nodes}
    for n, deps in before.items():
        for d in deps:
            if d not in after:
                raise IRError(f"An operand, {d!r}, is not part of the graph.", graph=g, node=n)
            after[d].append(n)
    ready = [rank[n] for n in g.nodes if not waiting[n]]
    out: list[Node] = []
    while ready:
        n = g.nodes[heapq.heappop(ready)]
        out.append(n)
        for user in after[n]:
            waiting[user] -= 1
            if not waiting[user]:
                heapq.heappush(ready, rank[user])
    if len(out) < len(g.nodes):
        stuck = next(n for n in g.nodes if waiting[n])
        raise IRError("The graph has a cycle through this node.", graph=g, node=stuck)
    return out
