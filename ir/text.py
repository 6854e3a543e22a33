"""The printed form of a graph. ``parse`` reads it back; see there for the grammar.

    graph @decode(T, C) arch "llama" {
      %0 = input "tokens" {kind = "tokens", window = 0} : i32[T]
      %1 = get_rows(%2, %0) {name = "embd"} : f32[576, T]
      output "logits" = %1
    }

Every attribute is printed, except quiet ones (see ``ops.base.Attr``) that have their default; a node's ``name`` and ``loc`` stand
among them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from ggufc.ir.graph import UNKNOWN, Graph, Node, default_name
from ggufc.ir.ops.base import Attr

INDENT = "  "
WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")


def print_graph(g: Graph) -> str:
    """The whole graph as text, ending in a newline. ``parse_graph`` gives an equal graph back, and printing that gives equal text."""
    arch = f" arch {quote(g.arch)}" if g.arch else ""
    return f"graph @{name(g.name)}({', '.join(g.symbols)}){arch} {{\n" + "".join(_body(g, INDENT)) + "}\n"


def _body(g: Graph, indent: str) -> Iterable[str]:
    numbers: dict[Node, str] = {}
    for line in _lines(g.nodes, numbers):
        yield f"{indent}{line}\n"
    for key, node in g.outputs.items():
        yield f"{indent}output {quote(key)} = {_ref(node, numbers)}\n"
    for key, sub in g.derived.items():
        yield f"{indent}derived {quote(key)} {{\n"
        yield from _body(sub, indent + INDENT)
        yield f"{indent}}}\n"
    for key, data in g.analysis.items():
        block = json.dumps(data, indent=2, ensure_ascii=False).replace("\n", "\n" + indent)
        yield f"{indent}analysis {quote(key)} = {block}\n"


def print_nodes(nodes: Iterable[Node]) -> list[str]:
    """One line per node, numbered by position; operands outside the list print as ``%?``."""
    return list(_lines(nodes, {}))


def _lines(nodes: Iterable[Node], numbers: dict[Node, str]) -> Iterable[str]:
    for i, n in enumerate(nodes):
        numbers[n] = f"%{i}"
        yield print_node(n, numbers)


def print_node(node: Node, numbers: dict[Node, str]) -> str:
    """``%12 = mul_mat(%3, %11) {name = "blk.0.attn_q"} : f32[576, T]``."""
    op = node.op
    if op.is_leaf:
        head = f" {value(node.attrs[op.headline])}" if op.headline in node.attrs else ""
    else:
        head = f"({', '.join(_ref(o, numbers) for o in node.operands)})"
    declared = {a.name for a in op.attrs}
    shown: list[tuple[str, Any]] = []
    if node.name and "name" not in declared and not (op.declared_type and node.name == default_name(node)):
        shown.append(("name", node.name))
    shown += [(a.name, node.attrs[a.name]) for a in op.attrs if a.name != op.headline and a.name in node.attrs and not _hidden(a, node)]
    if node.loc:
        shown.append(("loc", node.loc))
    attrs = f" {{{', '.join(f'{k} = {value(v)}' for k, v in shown)}}}" if shown else ""
    return f"{numbers[node]} = {op.name}{head}{attrs} : {'?' if node.type is UNKNOWN else node.type}"


def _hidden(a: Attr, node: Node) -> bool:
    return a.quiet and node.attrs[a.name] == a.default


def _ref(node: Node, numbers: dict[Node, str]) -> str:
    return numbers.get(node, "%?")


def value(v: Any) -> str:
    """An attribute's value; floats always carry a point, an exponent or ``inf``, so that their kind is visible."""
    if isinstance(v, bool):
        return "true" if v else "false"
    if isinstance(v, float):
        return repr(v)
    if isinstance(v, str):
        return quote(v)
    if isinstance(v, (tuple, list)):
        return f"[{', '.join(value(x) for x in v)}]"
    return str(v)


def quote(s: str) -> str:
    return json.dumps(s, ensure_ascii=False)


def name(s: str) -> str:
    """Graph names that are plain words print bare, others quoted."""
    return s if WORD.fullmatch(s) else quote(s)
