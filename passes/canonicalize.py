"""``canonicalize``: one spelling for each meaning, so that later patterns need to know only that one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ggufc.ir import IRError, Node
from ggufc.ir.layout import Layout, is_contiguous, layout, reshape_layout, root
from ggufc.ir.ops.cache import is_version
from ggufc.passes.base import RulePass
from ggufc.passes.rules import Match, Rewriter, Rule, any_node, op, rule

_VIEWS = "reshape view permute transpose"


def same_elements(a: Layout, b: Layout) -> bool:
    """Do two layouts with one root name the same elements in the same order? Strides of dimensions of size 1 do not matter."""
    return a.root is b.root and a.offset == b.offset and a.ne == b.ne and all(n == 1 or s == t for n, s, t in zip(a.ne, a.nb, b.nb))


def contiguous(rw: Rewriter, node: Node) -> Node:
    """``node``, or a contiguous copy of it where it is strided or may be overwritten by the next write to its cache."""
    return node if is_contiguous(node) and not is_version(root(node)) else rw.add("cont", node, name=f"{node.name}.cont")


@rule("view-of-same", op(_VIEWS, any_node("x")))
def do_view_of_same(rw: Rewriter, node: Node, m: Match) -> Node | None:
    """A view that shows exactly what a view further up its chain, or the storage itself, already is."""
    mine = layout(node)
    found = None
    x = m["x"]
    while True:
        if x.type == node.type and same_elements(layout(x), mine):
            found = x
        if not x.is_view:
            return found
        x = x.operands[0]


@rule("reshape-of-view", op("reshape", op("reshape permute", any_node("x"))))
def do_reshape_of_view(rw: Rewriter, node: Node, m: Match) -> Node | None:
    """Only the last shape counts where reshaping without the step between shows the same elements in the same order."""
    try:
        direct = reshape_layout(layout(m["x"]), node.attrs["ne"])
    except IRError:
        return None
    return rw.add("reshape", m["x"], ne=node.attrs["ne"]) if same_elements(direct, layout(node)) else None


@rule("view-of-view", op("view", op(_VIEWS, any_node("x"), bind="inner")))
def do_view_of_view(rw: Rewriter, node: Node, m: Match) -> Node:
    """``view`` counts strides in the elements of the root, so of the inner view only the offset remains."""
    skipped = layout(m["inner"]).offset - layout(m["x"]).offset
    return rw.add("view", m["x"], ne=node.attrs["ne"], nb=node.attrs["nb"], offset=node.attrs["offset"] + skipped)


@rule("transpose-to-permute", op("transpose", any_node("x")))
def do_transpose(rw: Rewriter, node: Node, m: Match) -> Node:
    """``transpose`` is the permutation of dimensions 0 and 1."""
    return rw.add("permute", m["x"], axes=(1, 0, *range(2, node.type.rank)))


@rule("permute-of-permute", op("permute", op("permute", any_node("x"), bind="inner")))
def do_permute_of_permute(rw: Rewriter, node: Node, m: Match) -> Node:
    """Source dimension i goes to ``inner[i]`` and from there to ``outer[inner[i]]``."""
    outer, inner = node.attrs["axes"], m["inner"].attrs["axes"]
    inner = (*inner, *range(len(inner), len(outer)))
    return rw.add("permute", m["x"], axes=tuple(outer[to] for to in inner))


@rule("cont-of-contiguous", op("cont", any_node("x")))
def do_cont(rw: Rewriter, node: Node, m: Match) -> Node | None:
    """A copy of what is contiguous already. A copy out of a cache stays: it may have to outlive the next write."""
    if is_version(root(m["x"])) or not is_contiguous(m["x"]):
        return None
    return m["x"]


@rule("cast-to-same", op("cast", any_node("x")))
def do_cast(rw: Rewriter, node: Node, m: Match) -> Node | None:
    """A cast to the dtype the operand has is a copy at most."""
    x = m["x"]
    if x.dtype != node.dtype or (x.type.quantised and (is_version(root(x)) or not is_contiguous(x))):
        return None
    return contiguous(rw, x)


@rule("scale-by-one", op("scale", any_node("x")))
def do_scale(rw: Rewriter, node: Node, m: Match) -> Node | None:
    """``1 * x + 0``."""
    if node.attrs["s"] != 1.0 or node.attrs["b"] != 0.0 or m["x"].type != node.type:
        return None
    return contiguous(rw, m["x"])


@rule("neutral-operand", op("add sub mul div", any_node("x"), op("const", bind="c")))
def do_neutral(rw: Rewriter, node: Node, m: Match) -> Node | None:
    """``x + 0``, ``x - 0``, ``x * 1``, ``x / 1``; all but the first are exact, ``-0.0 + 0`` loses its sign unless rewritten."""
    neutral = 0.0 if node.op.name in ("add", "sub") else 1.0
    if m["c"].attrs["value"] != neutral or m["x"].type != node.type:
        return None
    return contiguous(rw, m["x"])


@rule("repeat-once", op("repeat", any_node("x")))
def do_repeat(rw: Rewriter, node: Node, m: Match) -> Node | None:
    """A repeat to the shape the operand has."""
    return contiguous(rw, m["x"]) if m["x"].type == node.type else None


LAYOUT_RULES: tuple[Rule, ...] = (
    do_view_of_same,
    do_reshape_of_view,
    do_view_of_view,
    do_transpose,
    do_permute_of_permute,
    do_cont,
)
"""Views and copies only: what fusions that introduce views add to their own rules."""

ARITHMETIC_RULES: tuple[Rule, ...] = (do_cast, do_scale, do_neutral, do_repeat)


@dataclass(frozen=True)
class Canonicalize(RulePass):
    """Remove views, copies and arithmetic that change nothing, and merge chains of views.

    Precondition: a valid graph. Postcondition: no ``reshape`` whose source's source would do, ``permute`` of ``permute``,
    ``transpose``, ``view`` of a view; no ``cont`` of a contiguous operand outside caches; no scale by one, no neutral summand or
    factor. Values do not change, except that ``-0.0 + 0`` keeps its sign.
    """

    name: ClassVar[str] = "canonicalize"
    rules: ClassVar[tuple[Rule, ...]] = LAYOUT_RULES + ARITHMETIC_RULES
