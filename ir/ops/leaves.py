"""Leaves: runtime inputs, weights, caches, constants. Their types are declared (``const`` excepted)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ggufc.ir.errors import IRError
from ggufc.ir.ops.base import Attr, Call, Op, register
from ggufc.ir.ops.inputs import INPUT_KINDS
from ggufc.ir.types import TensorType

if TYPE_CHECKING:
    from ggufc.ir.graph import Node


@register
class Input(Op):
    """A tensor that the runtime fills before each evaluation according to its kind; always contiguous."""

    name = "input"
    headline = "name"
    declared_type = True
    attrs = (
        Attr("name", "str", "name of the input, unique in the graph"),
        Attr("kind", "str", "how the runtime fills it", choices=tuple(INPUT_KINDS)),
        Attr("window", "int", "for kind visible: sliding window in positions, 0 for none", 0),
        Attr("ratio", "int", "for kinds about compressed entries: positions per entry", 0, quiet=True),
        Attr("region", "str", "for kinds about cells: which cells are meant", "", choices=("", "window"), quiet=True),
    )

    def verify(self, node: Node) -> None:
        kind = INPUT_KINDS[node.attrs["kind"]]
        if not node.attrs["name"]:
            raise IRError("input: the name is empty.")
        name = node.attrs["kind"]
        if node.type.dtype != kind.dtype or node.type.rank != kind.rank:
            raise IRError(f"input: kind {name} must be {kind.dtype} with {kind.rank} dimension(s), not {node.type}.")
        if kind.ne0 and node.type.ne[0] != kind.ne0:
            raise IRError(f"input: kind {name} holds (base, lo, hi) per token, so ne[0] must be {kind.ne0}, not {node.type.ne[0]}.")
        if node.attrs["window"] < 0 or (node.attrs["window"] and not kind.window):
            raise IRError(f"input: window = {node.attrs['window']} does not fit kind {name}.")
        if (node.attrs["ratio"] > 0) != kind.ratio:
            raise IRError(f"input: ratio = {node.attrs['ratio']} does not fit kind {name}.")
        if node.attrs["region"] and not kind.region:
            raise IRError(f"input: region = {node.attrs['region']!r} does not fit kind {name}.")


@register
class Weight(Op):
    """A constant tensor: ``tensor`` of the model file, or with ``derived`` an entry of ``graph.derived`` computed at compile time."""

    name = "weight"
    headline = "tensor"
    declared_type = True
    attrs = (
        Attr("tensor", "str", "tensor name in the file; empty or a label for derived weights", ""),
        Attr("derived", "str", "key in graph.derived, empty for a tensor of the file", ""),
    )

    def verify(self, node: Node) -> None:
        if not (node.attrs["tensor"] or node.attrs["derived"]):
            raise IRError("weight: give the name of a tensor or of a derived weight.")
        if node.type.symbols:
            raise IRError(f"weight: the shape of {node.attrs['tensor'] or node.attrs['derived']} must be fixed, not {node.type}.")


@register
class Cache(Op):
    """Version 0 of a persistent resource: ``[row, C]`` in the cache's dtype. ``set_rows`` and ``cpy`` make later versions."""

    name = "cache"
    headline = "name"
    declared_type = True
    attrs = (Attr("name", "str", "name of the resource, such as blk.3.k"),)

    def verify(self, node: Node) -> None:
        if not node.attrs["name"]:
            raise IRError("cache: the name is empty.")
        if node.type.rank != 2:
            raise IRError(f"cache: {node.attrs['name']} must have two dimensions [row, cells], not {node.type}.")


@register
class Const(Op):
    """One f32 number."""

    name = "const"
    headline = "value"
    attrs = (Attr("value", "float", "the number"),)

    def infer(self, operands: Sequence[Node], attrs: Mapping[str, Any]) -> TensorType:
        return TensorType("f32", (1,))

    def evaluate(self, call: Call) -> np.ndarray:
        return np.full(1, call.attrs["value"], np.float32)
