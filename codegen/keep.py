"""Keeping intermediate results: values between launches become outputs beside the logits, for comparing ways of computing one graph.

What is kept is named ``keep:NODE``. With ``STORED`` an artifact has exactly the launches it always has, and only the places change in
which their results lie: a result that never leaves its launch stays unknown. Patterns such as ``blk.3.*`` name nodes that must exist as
results, so neither passes nor lowering fuse them into others.
"""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from ggufc.codegen.errors import CodegenError
from ggufc.codegen.schedule import Ref, form
from ggufc.ir.graph import Graph, Node

if TYPE_CHECKING:
    from ggufc.codegen.lower import Lowering

PREFIX = "keep:"
STORED = "stored"
_DTYPES = ("f32", "i32")


def patterns(keep: str) -> list[str]:
    """The node names asked for, with ``*`` and ``?``; none for ``stored`` alone."""
    return [part for part in (p.strip() for p in keep.split(",")) if part and part != STORED]


def mark(graph: Graph, keep: str) -> None:
    """Make outputs of the nodes of an unfused graph that ``keep`` names. Raises ``CodegenError`` for a name that no node has."""
    computed: set[Node] = set()
    known = set(graph.outputs.values())
    matched = dict.fromkeys(patterns(keep), False)
    for node in graph.nodes:
        if node.op.name in ("input", "cache") or any(operand in computed for operand in node.operands):
            computed.add(node)
        found = [pattern for pattern in matched if node.name and fnmatchcase(node.name, pattern)]
        for pattern in found:
            matched[pattern] = True
        if found and node in computed and _is_result(node) and node not in known:
            graph.outputs[_fresh(graph, node)] = node
    missing = [pattern for pattern, hit in matched.items() if not hit]
    if missing:
        raise CodegenError(f"no node is called {missing[0]!r}, so it cannot be kept; ggufc dump --stage built shows the names")


def expose(low: Lowering) -> None:
    """Let every value that is a node's result lie in an output of its own, and name it in the graph's outputs."""
    moved: dict[int, str] = {}
    known = set(low.graph.outputs.values())
    for node in low.graph.nodes:
        at = low.storage.get(node)
        if at is None or at.kind != "value" or node in known or not _is_result(node):
            continue
        moved[at.value] = name = _fresh(low.graph, node)
        low.graph.outputs[name] = node
        low.schedule.outputs[name] = [form(d) for d in node.ne]
    low.schedule.steps = [replace(step, args=tuple(_moved(arg, moved) for arg in step.args)) for step in low.schedule.steps]


def _moved(arg: Ref, moved: dict[int, str]) -> Ref:
    return Ref("output", moved[arg.value], 0, arg.offset) if arg.kind == "value" and arg.value in moved else arg


def _is_result(node: Node) -> bool:
    return bool(node.name) and node.dtype in _DTYPES and not node.is_leaf and not node.is_view and not node.op.writes_cache


def _fresh(graph: Graph, node: Node) -> str:
    """A name no output has: nodes may share one."""
    name, n = PREFIX + node.name, 1
    while name in graph.outputs:
        n += 1
        name = f"{PREFIX}{node.name}#{n}"
    return name
