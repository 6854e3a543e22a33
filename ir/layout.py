"""Where a node's elements lie: chains of views resolved to a root node, an element offset and strides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ggufc.ir.dims import IntDim, divide, evaluate, is_multiple, product
from ggufc.ir.errors import IRError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ggufc.ir.graph import Node


@dataclass(frozen=True)
class Layout:
    """Element ``(i0, i1, ..)`` lies ``offset + sum i*nb`` elements into the contiguous storage of ``root``."""

    root: Node
    offset: IntDim
    ne: tuple[IntDim, ...]
    nb: tuple[IntDim, ...]

    @property
    def contiguous(self) -> bool:
        """Elements follow each other without gaps in ne order (the offset does not matter)."""
        expect: IntDim = 1
        for n, stride in zip(self.ne, self.nb):
            if n != 1 and stride != expect:
                return False
            expect = expect * n
        return True

    @property
    def row_contiguous(self) -> bool:
        """Elements of dimension 0 are adjacent."""
        return self.nb[0] == 1 or self.ne[0] == 1

    def concrete(self, env: Mapping[str, int]) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """(offset, ne, nb) as integers."""
        return evaluate(self.offset, env), tuple(evaluate(d, env) for d in self.ne), tuple(evaluate(d, env) for d in self.nb)


def contiguous_nb(ne: tuple[IntDim, ...]) -> tuple[IntDim, ...]:
    """Element strides of a contiguous tensor."""
    return tuple(product(ne[:i]) for i in range(len(ne)))


def layout(node: Node) -> Layout:
    """Resolves ``node``; a node that is no view is its own contiguous root."""
    if not node.is_view:
        return Layout(node, 0, node.type.ne, contiguous_nb(node.type.ne))
    return node.op.relayout(layout(node.operands[0]), node)


def root(node: Node) -> Node:
    """The node that owns the storage ``node`` looks at."""
    while node.is_view:
        node = node.operands[0]
    return node


def is_contiguous(node: Node) -> bool:
    return layout(node).contiguous


def reshape_layout(base: Layout, ne: tuple[IntDim, ...]) -> Layout:
    """The layout of ``base`` with shape ``ne`` if no copy is needed; raises ``IRError`` otherwise.

    Dimensions may be split, and merged where they lie one after the other. Sizes must match symbolically.
    """
    old = [(n, s) for n, s in zip(base.ne, base.nb) if n != 1]
    nb: list[IntDim] = []
    at = 0
    have: IntDim = 1
    stride: IntDim = 1
    for want in ne:
        if want == 1:
            nb.append(nb[-1] * ne[len(nb) - 1] if nb else 1)
            continue
        if have == 1:
            if at == len(old):
                raise IRError("reshape: the element counts differ.")
            have, stride = old[at]
            at += 1
        while not is_multiple(have, want):
            if at == len(old) or old[at][1] != stride * have:
                raise IRError(
                    f"reshape: a view with ne {_show(base.ne)} and nb {_show(base.nb)} cannot become {_show(ne)} without a copy; "
                    "insert cont before it."
                )
            have = have * old[at][0]
            at += 1
        nb.append(stride)
        stride = stride * want
        have = divide(have, want)
    return Layout(base.root, base.offset, ne, tuple(nb))


def _show(dims: tuple[IntDim, ...]) -> str:
    return "[" + ", ".join(map(str, dims)) + "]"
