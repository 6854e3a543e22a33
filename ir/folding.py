"""A graph as boxes and arrows for drawings: weights written into their users, repeated layers folded into one box."""

from __future__ import annotations

from dataclasses import dataclass, field

import networkx as nx

from ggufc.formats.artifact import layer_of
from ggufc.ir.errors import IRError
from ggufc.ir.graph import Graph, Node
from ggufc.ir.text import print_graph, value


@dataclass(frozen=True)
class Box:
    """One box: its lines of text and its kind (``op``, ``view``, ``leaf``, ``output``, ``fold``)."""

    key: str
    lines: tuple[str, ...]
    kind: str


@dataclass
class Picture:
    """Boxes in program order and arrows between their keys."""

    title: str
    boxes: dict[str, Box] = field(default_factory=dict)
    arrows: dict[tuple[str, str], None] = field(default_factory=dict)

    def digraph(self) -> nx.DiGraph:
        """The same as a networkx graph. Folding can close a circle only through a folded box; such arrows are left out."""
        g = nx.DiGraph()
        g.add_nodes_from(self.boxes)
        order = {key: i for i, key in enumerate(self.boxes)}
        g.add_edges_from((a, b) for a, b in self.arrows if order[a] < order[b])
        return g


def layers(g: Graph) -> dict[Node, int | None]:
    """The layer of every node; one without a name belongs where its latest operand does."""
    found: dict[Node, int | None] = {}
    for n in g.nodes:
        own = layer_of(n.name)
        if own is None and not n.name:
            own = max((i for i in (found.get(o) for o in n.operands) if i is not None), default=None)
        found[n] = own
    return found


def fold(g: Graph, layer: int | None = None) -> Picture:
    """The picture of ``g``. Without ``layer`` each distinct layer is shown once, and runs of layers that repeat one shown before become a
    box ``x29``; with ``layer`` only that layer and what feeds it is shown. Raises ``IRError`` if the layer does not exist."""
    where = layers(g)
    numbers = sorted({i for i in where.values() if i is not None})
    if layer is not None and layer not in numbers:
        known = f"{numbers[0]} to {numbers[-1]}" if numbers else "no named layers"
        raise IRError(f"Graph {g.name!r} has no layer {layer}; it has {known}.")
    keys = _layer_keys(g, where, numbers)
    picture = Picture(printable(f"{g.name}{f' ({g.arch})' if g.arch else ''}{'' if layer is None else f', layer {layer}'}"))
    index = {n: f"n{i}" for i, n in enumerate(g.nodes)}
    wanted = set(g.nodes) if layer is None else {n for n in g.nodes if where[n] == layer}
    feeding = {o for n in wanted for o in n.operands} - wanted

    def box_key(n: Node) -> str:
        i = where[n]
        return keys[i] if layer is None and i is not None and i in keys else index[n]

    for n in g.nodes:
        if n.op.name == "weight" or (n not in wanted and n not in feeding):
            continue
        key = box_key(n)
        if key not in picture.boxes:
            picture.boxes[key] = _fold_box(key, n, keys, where, g) if key != index[n] else _box(key, n, n in wanted)
        for o in n.operands if n in wanted else ():
            source = box_key(o)
            if o.op.name != "weight" and source != key:
                picture.arrows[source, key] = None
    for i, (name, n) in enumerate(g.outputs.items()):
        if n in wanted:
            picture.boxes[f"out{i}"] = Box(f"out{i}", (printable(f"output {name}"), str(n.type)), "output")
            picture.arrows[box_key(n), f"out{i}"] = None
    return picture


def repeated_layers(g: Graph) -> dict[int, int]:
    """Layers that are made like an earlier one -> the first such layer."""
    where = layers(g)
    return _repeats(g, where, sorted({i for i in where.values() if i is not None}))


def _repeats(g: Graph, where: dict[Node, int | None], numbers: list[int]) -> dict[int, int]:
    content: dict[int, list[tuple[str, ...]]] = {i: [] for i in numbers}
    for n in g.nodes:
        i = where[n]
        if i is not None:
            content[i].append(_signature(n, f"blk.{i}."))
    first: dict[tuple[tuple[str, ...], ...], int] = {}
    found = {i: first.setdefault(tuple(content[i]), i) for i in numbers}
    return {i: like for i, like in found.items() if like != i}


def _layer_keys(g: Graph, where: dict[Node, int | None], numbers: list[int]) -> dict[int, str]:
    """Layers to be folded -> key of their box; consecutive ones that repeat the same layer share a box."""
    keys: dict[int, str] = {}
    like = _repeats(g, where, numbers)
    for i, first in like.items():
        keys[i] = keys[i - 1] if like.get(i - 1) == first else f"fold{i}"
    return keys


def folded_text(g: Graph) -> str:
    """Nodes and outputs of ``g`` with each kind of layer once; a line tells which layers are made like it. It does not parse."""
    where, like = layers(g), repeated_layers(g)
    head, *lines = print_graph(g).splitlines()
    out = [head]
    told: set[int] = set()
    for node, line in zip(g.nodes, lines):
        i = where[node]
        if i is None or i not in like:
            out.append(line)
        elif i not in told:
            last = i
            while like.get(last + 1) == like[i]:
                last += 1
            told.update(range(i, last + 1))
            span = f"blk.{i}" if last == i else f"blk.{i} .. blk.{last}"
            nodes = sum(layer == i for layer in where.values())
            out.append(f"  # {span}: as blk.{like[i]}, {nodes} nodes each")
    outputs = [line for line in lines[len(g.nodes) :] if line.startswith("  output ")]
    return "\n".join([*out, *outputs, "}"]) + "\n"


def _signature(n: Node, prefix: str) -> tuple[str, ...]:
    def general(s: str) -> str:
        return s.replace(prefix, "blk.*.")

    attrs = (f"{a.name}={general(value(n.attrs[a.name]))}" for a in n.op.attrs)
    return (n.op.name, general(n.name), str(n.type), *attrs)


def _fold_box(key: str, n: Node, keys: dict[int, str], where: dict[Node, int | None], g: Graph) -> Box:
    members = [i for i, k in keys.items() if k == key]
    nodes = sum(where[m] in members for m in g.nodes)
    span = f"blk.{members[0]}" if len(members) == 1 else f"blk.{members[0]} .. blk.{members[-1]}"
    return Box(key, (f"x{len(members)}", span, f"{nodes} nodes"), "fold")


def _box(key: str, n: Node, inside: bool) -> Box:
    head = n.op.name if n.name in ("", n.op.name) else f"{n.op.name}  {n.name}"
    weights = tuple(f"{o.name}: {o.type}" for o in n.operands if o.op.name == "weight")
    kind = "leaf" if n.is_leaf or not inside else "view" if n.is_view else "op"
    return Box(key, tuple(map(printable, (head, *weights, str(n.type)))), kind)


def printable(s: str) -> str:
    """``s`` with control and other unprintable characters written as escapes: XML and CSV readers do not take them."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in s)
