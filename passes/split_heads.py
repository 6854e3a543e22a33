"""``split-heads``: the cache of a layer as two, its first KV heads and the rest, so that each can be in a memory of its own."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import ClassVar

from ggufc.formats.artifact import layer_of
from ggufc.ir import Graph, Node
from ggufc.ir.dims import Dim, IntDim
from ggufc.ir.layout import layout
from ggufc.passes.base import Pass, PassResult
from ggufc.passes.errors import PassError
from ggufc.passes.node_budget import ESTIMATE

ANALYSIS = "split-heads"
REST = ".rest"
"""What the cache of a layer's other heads adds to the name of the first ones'."""


_CHOICE = re.compile(r"(\d+)(?:-(\d+))?:(\d+)\Z")
_BEFORE = "hoist"


def with_split(pipeline: str, choices: Iterable[str]) -> str:
    """``pipeline`` with caches divided as ``choices`` say: ``LAYER:HEADS`` or ``FIRST-LAST:HEADS``. PassError for anything else."""
    passes = []
    for choice in choices:
        match = _CHOICE.match(choice)
        if match is None:
            raise PassError(f"heads are divided by LAYER:HEADS or FIRST-LAST:HEADS, such as 0-3:2, not by {choice!r}")
        passes.append(f"{ANALYSIS}{{first={match[1]},last={match[2] or match[1]},heads={match[3]}}}")
    before, found, after = pipeline.partition(_BEFORE)
    if not found:
        raise PassError(f"heads are divided before the pass {_BEFORE}, which this pipeline does not have: {pipeline}")
    return before + "".join(f"{item}," for item in passes) + found + after


_ALL = 1 << 30


@dataclass(frozen=True)
class SplitHeads(Pass):
    """Attention over the caches of layers ``first`` to ``last`` -> two attentions over caches of their own: KV heads below ``heads``, and
    the others; their results side by side.

    Precondition: attention is fused. Layers whose cache has no more than ``heads`` heads (latent attention has one, which all query heads
    share) or is used otherwise stay whole and are counted as ``whole``; where ``last`` is given they are refused. Postcondition:
    ``graph.analysis["split-heads"]`` maps the name of every divided cache to ``heads``; the cache of the rest is named with
    ``.rest``. Sinks go with their heads. No head's arithmetic changes, so no bit does.
    """

    name: ClassVar[str] = ANALYSIS
    first: int = 0
    last: int = _ALL
    heads: int = 1

    def apply(self, graph: Graph) -> PassResult:
        """See the class."""
        if self.heads < 1 or not 0 <= self.first <= self.last:
            raise PassError(
                f"split-heads divides layers {self.first} to {self.last} after {self.heads} heads; give layers in order, heads from 1"
            )
        attentions = [(layer, node) for node in graph.nodes if node.op.name == "flash_attn" and (layer := _layer(node)) is not None]
        layers = [layer for layer, _ in attentions]
        if layers and max(layers) < self.last < _ALL:
            raise PassError(f"split-heads divides layers {self.first} to {self.last}; the last layer with attention is {max(layers)}")
        found = [node for layer, node in attentions if self.first <= layer <= self.last]
        users = graph.users()
        reasons = {node: why for node in found if (why := self._why_whole(node, users))}
        if self.last < _ALL:
            self._refuse(reasons, bool(found), bool(attentions))
        divided = [node for node in found if node not in reasons]
        if divided:
            _rebuild(graph, divided, self.heads)
        return PassResult(bool(divided), {"divided": len(divided), "whole": len(reasons)})

    def _refuse(self, reasons: dict[Node, str], any_found: bool, any_fused: bool) -> None:
        """PassError for layers that were asked for and have nothing to divide."""
        if not any_fused:
            raise PassError(
                "split-heads: no attention over a cache is fused, and values that are read column by column cannot be divided by heads; "
                "leave flash attention on and the pass fuse-attention in, or divide nothing"
            )
        if not any_found:
            raise PassError(f"split-heads: layers {self.first} to {self.last} have no attention over KV heads; choose layers that have")
        for node, why in reasons.items():
            raise PassError(f"split-heads cannot divide layer {_layer(node)} after {self.heads} heads: {why}")

    def _why_whole(self, attention: Node, users: dict[Node, list[Node]]) -> str:
        """Why the caches of an attention stay whole; empty if each is written once, by rows, and read by this attention only."""
        heads = attention.attrs["n_head_kv"]
        if heads == 1:
            return "all query heads share its one KV head, as in latent attention; leave the layer out"
        if heads <= self.heads:
            return f"it has {heads} KV heads; give fewer, from 1 to {heads - 1}, or leave the layer out"
        for version in attention.operands[1:3]:
            leaf = _leaf(version)
            alone = version.op.name == "set_rows" and version.operands[0] is leaf
            if not alone or users[version] != [attention] or users[leaf] != [version]:
                return f"more than one attention uses the cache {leaf.attrs['name']!r}, or writes to it are not rows; leave the layer out"
        return "keys and values are the same rows; leave the layer out" if attention.operands[1] is attention.operands[2] else ""


def _layer(attention: Node) -> int | None:
    """The layer whose cache an attention reads; None for caches divided already."""
    name = _leaf(attention.operands[1]).attrs["name"]
    return None if name.endswith(REST) else layer_of(name)


def _leaf(version: Node) -> Node:
    while version.op.name != "cache":
        version = version.operands[0]
    return version


def _rebuild(graph: Graph, divided: Collection[Node], heads: int) -> None:
    old, graph.nodes = list(graph.nodes), []
    new: dict[Node, Node] = {}
    firsts: dict[Node, Node] = {}
    rests: dict[Node, Node] = {}
    writes = {version: attention for attention in divided for version in attention.operands[1:3]}
    leaves = {version.operands[0]: attention for version, attention in writes.items()}
    for node in old:
        if node in leaves:
            firsts[node], rests[node] = _leaves(graph, node, heads, leaves[node].attrs["n_head_kv"])
        elif node in writes:
            firsts[node] = _write(graph, node, firsts[node.operands[0]], first=True)
        elif node in divided:
            new[node] = _attentions(graph, node, firsts, rests, heads)
        else:
            node.operands = tuple(new.get(operand, operand) for operand in node.operands)
            graph.nodes.append(node)
    graph.outputs = {name: new.get(node, node) for name, node in graph.outputs.items()}
    graph.analysis[ANALYSIS] = {**graph.analysis.get(ANALYSIS, {}), **{node.attrs["name"]: heads for node in leaves}}
    if ESTIMATE in graph.analysis:
        graph.analysis[ESTIMATE] += max(0, len(graph.nodes) - len(old))


def _leaves(graph: Graph, cache: Node, heads: int, total: int) -> tuple[Node, Node]:
    width, cells = cache.type.ne[0], cache.type.ne[1]
    assert not isinstance(width, Dim)
    first = width // total * heads
    name = cache.attrs["name"]
    kinds = [type(cache.type)(cache.dtype, (rows, cells)) for rows in (first, width - first)]
    return graph.cache(name, kinds[0], loc=cache.loc), graph.cache(name + REST, kinds[1], loc=cache.loc)


def _write(graph: Graph, write: Node, cache: Node, first: bool) -> Node:
    """The write of the first or the last columns of the rows into their cache."""
    _, rows, slots = write.operands
    width, size = rows.type.ne[0], cache.type.ne[0]
    columns = _columns(graph, rows, 0, 0 if first else width - size, size)
    return graph.add("set_rows", cache, columns, slots, name=write.name + ("" if first else REST), loc=write.loc)


def _attentions(graph: Graph, node: Node, firsts: dict[Node, Node], rests: dict[Node, Node], heads: int) -> Node:
    """Attention over the first heads; then, so that what may run in another memory stands together, the rest's writes and attention."""
    q, *versions, cells, vis = node.operands[:5]
    sinks = node.operands[5:]
    total = node.attrs["n_head_kv"]
    per_group = q.type.ne[1] // total

    def attend(caches: list[Node], start: int, count: int, suffix: str) -> Node:
        mine = _columns(graph, q, 1, per_group * start, per_group * count)
        attrs = {**node.attrs, "n_head_kv": count}
        theirs = [_columns(graph, one, 0, per_group * start, per_group * count) for one in sinks]
        return graph.add("flash_attn", mine, *caches, cells, vis, *theirs, name=node.name + suffix, loc=node.loc, **attrs)

    first = attend([firsts[version] for version in versions], 0, heads, "")
    others = [_write(graph, version, rests[version.operands[0]], first=False) for version in versions]
    rest = attend(others, heads, total - heads, REST)
    return graph.add("concat", first, rest, dim=1, name=node.name + ".heads", loc=node.loc)


def _columns(graph: Graph, node: Node, dim: int, start: IntDim, size: IntDim) -> Node:
    """A view of ``size`` entries along ``dim``."""
    where = layout(node)
    ne = (*where.ne[:dim], size, *where.ne[dim + 1 :])
    at = where.offset + start * where.nb[dim]
    return graph.add("view", where.root, ne=ne, nb=where.nb, offset=at, name=f"{node.name}.heads", loc=node.loc)
