"""The rules every graph must keep. ``verify`` runs after each pass and when text is read.

Cache versions. A *version* is a ``cache`` leaf or the result of a write (``set_rows``, ``cpy``); a write *supersedes* the version it
names. A node *reads* a version if one of its operands is that version or a chain of views on it (views themselves read nothing, and a
write does not read what it supersedes). The rules:

1. a resource has one ``cache`` leaf;
2. a version is superseded at most once, so the versions of a resource form a chain;
3. a read of a version stands before the write that supersedes it: memory holds one version at a time;
4. an output may name only the last version of a resource.
"""

from __future__ import annotations

import json
from typing import Any

from ggufc.formats.ggml_types import TYPES
from ggufc.ir.dims import symbols
from ggufc.ir.errors import IRError
from ggufc.ir.graph import Graph, Node, infer_type
from ggufc.ir.layout import root
from ggufc.ir.ops.cache import is_version, resource, written_version
from ggufc.ir.order import cache_reads
from ggufc.ir.types import TensorType, require_dtype


def verify(g: Graph) -> None:
    """Raises ``IRError``, with the node and its neighbours, at the first rule that ``g`` breaks."""
    for symbol in g.symbols:
        if g.symbols.count(symbol) > 1:
            raise IRError(f"Graph {g.name!r} declares symbol {symbol} twice.")
    _verify_nodes(g)
    _verify_leaves(g)
    _verify_versions(g)
    _verify_outputs(g)
    _verify_derived(g)
    _verify_analysis(g)


def _verify_nodes(g: Graph) -> None:
    seen: set[Node] = set()
    declared = frozenset(g.symbols)
    for n in g.nodes:
        for o in n.operands:
            if o not in seen:
                why = "stands behind it" if o in g.nodes else "is not part of the graph"
                raise IRError(f"{n.op.name} uses {o!r}, which {why}; operands must be defined before their users.", graph=g, node=n)
        if n in seen:
            raise IRError("The node is listed twice.", graph=g, node=n)
        seen.add(n)
        _verify_node(g, n)
        unknown = used_symbols(n) - declared
        if unknown:
            raise IRError(f"Symbol {min(unknown)} is not declared by graph {g.name!r}({', '.join(g.symbols)}).", graph=g, node=n)


def _verify_node(g: Graph, n: Node) -> None:
    """Attributes in canonical form, operands as declared, the stated type equal to the inferred one."""
    stated = n.type
    try:
        require_dtype(stated.dtype)
        # repr tells 1 from 1.0 and a list from a tuple: what is not canonical would print as something else.
        if repr(n.op.canonical_attrs(n.attrs)) != repr(n.attrs):
            raise IRError(f"{n.op.name}: attributes are not in canonical form; create nodes with Graph.add.")
        infer_type(n, stated)
        _check_size(stated)
    except IRError as e:
        raise IRError(e.message, graph=g, node=n) from None
    finally:
        n.type = stated


def _check_size(t: TensorType) -> None:
    """A quantised row must be whole blocks."""
    if t.quantised and isinstance(t.ne[0], int):
        block = TYPES[t.dtype].block
        if t.ne[0] % block:
            raise IRError(f"{t}: rows of {t.dtype} must be multiples of {block} values.")


def used_symbols(n: Node) -> frozenset[str]:
    """Symbols in a node's type and attributes."""
    found = n.type.symbols
    for a in n.op.attrs:
        v: Any = n.attrs.get(a.name)
        if a.kind == "dim":
            found |= symbols(v)
        elif a.kind == "dims":
            for d in v:
                found |= symbols(d)
    return found


def _verify_leaves(g: Graph) -> None:
    """One input and one cache per name; every use of a file tensor states the same type."""
    inputs: set[str] = set()
    caches: set[str] = set()
    weights: dict[tuple[str, str], Node] = {}
    for n in g.nodes:
        if n.op.name in ("input", "cache"):
            names = inputs if n.op.name == "input" else caches
            if n.attrs["name"] in names:
                raise IRError(f"A second {n.op.name} is called {n.attrs['name']!r}.", graph=g, node=n)
            names.add(n.attrs["name"])
        elif n.op.name == "weight":
            key = (n.attrs["derived"], "" if n.attrs["derived"] else n.attrs["tensor"])
            first = weights.setdefault(key, n)
            if first.type != n.type:
                raise IRError(f"Weight {n.name!r} is {n.type} here but {first.type} before.", graph=g, node=n)


def _verify_versions(g: Graph) -> None:
    superseded: dict[Node, Node] = {}
    for n in g.nodes:
        for version in cache_reads(n):
            if version in superseded:
                by = superseded[version]
                raise IRError(
                    f"{n.op.name} reads a version of cache {resource(version)!r} that {by.op.name} {by.name!r} has already superseded; "
                    "read the newer version, or move the read before the write.",
                    graph=g,
                    node=n,
                )
        if n.op.writes_cache:
            old = written_version(n)
            if old in superseded:
                raise IRError(
                    f"{n.op.name} writes a version of cache {resource(old)!r} that was superseded before; write the newest version.",
                    graph=g,
                    node=n,
                )
            superseded[old] = n
    for key, node in g.outputs.items():
        version = root(node)
        if is_version(version) and version in superseded:
            raise IRError(f"Output {key!r} names an old version of cache {resource(version)!r}.", graph=g, node=superseded[version])


def _verify_outputs(g: Graph) -> None:
    listed = set(g.nodes)
    for key, node in g.outputs.items():
        if node not in listed:
            raise IRError(f"Output {key!r} is {node!r}, which is not part of graph {g.name!r}.")


def _verify_derived(g: Graph) -> None:
    for n in g.nodes:
        key = n.attrs["derived"] if n.op.name == "weight" else ""
        if not key:
            continue
        if key not in g.derived:
            raise IRError(f"Derived weight {key!r} has no entry in graph.derived.", graph=g, node=n)
        value = g.derived[key].outputs.get("value")
        if value is not None and value.type != n.type:
            raise IRError(f"Derived weight {key!r} is {n.type} here but its graph computes {value.type}.", graph=g, node=n)
    for key, sub in g.derived.items():
        if list(sub.outputs) != ["value"]:
            raise IRError(f"Derived weight {key!r} must have exactly one output called value, not {', '.join(sub.outputs) or 'none'}.")
        if sub.symbols:
            raise IRError(f"Derived weight {key!r} cannot use symbols ({', '.join(sub.symbols)}): it is computed at compile time.")
        for n in sub.nodes:
            if n.op.name in ("input", "cache"):
                raise IRError(f"Derived weight {key!r} may be computed from weights only.", graph=sub, node=n)
        if sub.derived:
            raise IRError(f"Derived weight {key!r} contains derived weights of its own; put them into its graph instead.")
        verify(sub)


def _verify_analysis(g: Graph) -> None:
    for key, data in g.analysis.items():
        try:
            same = json.loads(json.dumps(data, allow_nan=False)) == data
        except (TypeError, ValueError) as e:
            raise IRError(f"The result of analysis {key!r} is not plain data: {e}.") from None
        if not same:
            raise IRError(f"The result of analysis {key!r} does not survive printing; use lists, numbers, strings, and strings as keys.")
