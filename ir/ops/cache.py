"""Writes into persistent resources. Each yields a new version; the old one may no longer be read after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ggufc.ir.dims import IntDim
from ggufc.ir.errors import IRError
from ggufc.ir.layout import layout, root
from ggufc.ir.ops.base import Call, Op, Operand, register
from ggufc.ir.storage import Stored
from ggufc.ir.types import TensorType

if TYPE_CHECKING:
    from ggufc.ir.graph import Node


def is_version(node: Node) -> bool:
    """Whether the node is a version of a cache: the leaf itself or the result of a write."""
    return node.op.name == "cache" or node.op.writes_cache


def written_version(node: Node) -> Node:
    """The version that a write (``set_rows``, ``cpy``) supersedes."""
    return node.operands[0] if node.op.name == "set_rows" else root(node.operands[1])


def resource(node: Node) -> str:
    """Name of the cache that a version belongs to."""
    while node.op.writes_cache:
        node = written_version(node)
    return str(node.attrs.get("name", ""))


@register
class SetRows(Op):
    """Writes row ``t`` of ``src``, converted to the cache's dtype, to row ``idx[t]`` of the cache. Later tokens win equal indices."""

    name = "set_rows"
    operands = (
        Operand("cache", "version to supersede [row, C]", "any", min_rank=2, max_rank=2, stored=True),
        Operand("src", "rows [row, T]", min_rank=2, max_rank=2),
        Operand("idx", "destination cells [T]", "i32", max_rank=1),
    )
    writes_cache = True

    def infer(self, operands: Sequence[Node], attrs: Mapping[str, Any]) -> TensorType:
        cache, src, idx = (o.type for o in operands)
        if src.ne[0] != cache.ne[0]:
            raise IRError(f"set_rows: rows of {src} do not have the length of the cache's rows, {cache}.")
        if idx.ne[0] != src.ne[1]:
            raise IRError(f"set_rows: {idx} must hold one index for each row of {src}.")
        return cache

    def verify(self, node: Node) -> None:
        if not is_version(node.operands[0]):
            raise IRError(f"set_rows: operand cache must be a version of a cache, not the result of {node.operands[0].op.name}.")

    def evaluate(self, call: Call) -> Stored:
        cache, src, idx = call.args
        return cache.with_rows(idx, src)

    def flops(self, node: Node) -> IntDim:
        return 0


@register
class Cpy(Op):
    """Copies ``a``, converted, into a view of a cache; the result is the cache's new version. A moving offset needs a fixup slot."""

    name = "cpy"
    operands = (Operand("a", "source"), Operand("dst", "view of a cache version", "any", stored=True))
    writes_cache = True

    def infer(self, operands: Sequence[Node], attrs: Mapping[str, Any]) -> TensorType:
        a, dst = operands[0].type, operands[1].type
        if a.numel != dst.numel:
            raise IRError(f"cpy: {a} has {a.numel} elements, the destination {dst} has {dst.numel}.")
        return root(operands[1]).type

    def verify(self, node: Node) -> None:
        dst = node.operands[1]
        if not is_version(root(dst)):
            raise IRError(f"cpy: the destination must be a view of a cache, not of {root(dst).op.name}.")
        if dst.type.quantised and not layout(dst).contiguous:
            raise IRError(f"cpy: the destination {dst.type} is quantised and must be contiguous.")

    def evaluate(self, call: Call) -> Stored:
        source, target = call.args
        return target.assign(source)

    def flops(self, node: Node) -> IntDim:
        return 0
