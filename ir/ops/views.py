"""Views: another shape on the same storage. ``layout`` resolves them; they never compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ggufc.ir.dims import IntDim, product
from ggufc.ir.errors import IRError
from ggufc.ir.layout import Layout, layout, reshape_layout
from ggufc.ir.ops.base import Attr, Op, Operand, register, same_numel
from ggufc.ir.types import TensorType

if TYPE_CHECKING:
    from ggufc.ir.graph import Node


class ViewOp(Op):
    """Base of the views."""

    is_view = True
    operands = (Operand("a", "source", "any"),)

    def verify(self, node: Node) -> None:
        found = layout(node)
        if node.type.quantised and not found.row_contiguous:
            raise IRError(f"{self.name}: rows of the quantised type {node.type.dtype} cannot be strided; cast to f32 first.")


@register
class Reshape(ViewOp):
    """The same elements with another shape. The source must be contiguous, or such that no copy is needed (split dimensions)."""

    name = "reshape"
    attrs = (Attr("ne", "dims", "new shape"),)

    def infer(self, operands: Sequence[Node], attrs: Mapping[str, Any]) -> TensorType:
        a = operands[0].type
        if not same_numel(a, attrs["ne"]):
            raise IRError(f"reshape: {a} has {a.numel} elements, the new shape {list(map(str, attrs['ne']))} has {product(attrs['ne'])}.")
        return TensorType(a.dtype, attrs["ne"])

    def relayout(self, base: Layout, node: Node) -> Layout:
        return reshape_layout(base, node.attrs["ne"])


@register
class View(ViewOp):
    """A window into the storage of the source: element ``(i0, i1, ..)`` is ``offset + sum i*nb`` elements after the source's first."""

    name = "view"
    attrs = (
        Attr("ne", "dims", "shape"),
        Attr("nb", "dims", "strides in elements, one per dimension"),
        Attr("offset", "dim", "elements to skip", 0),
    )

    def infer(self, operands: Sequence[Node], attrs: Mapping[str, Any]) -> TensorType:
        if len(attrs["nb"]) != len(attrs["ne"]):
            raise IRError(f"view: {len(attrs['nb'])} strides are given for {len(attrs['ne'])} dimensions.")
        return TensorType(operands[0].type.dtype, attrs["ne"])

    def verify(self, node: Node) -> None:
        super().verify(node)
        found = layout(node)
        size = found.root.type.numel
        if any(isinstance(s, int) and s < 0 for s in found.nb) or (isinstance(found.offset, int) and found.offset < 0):
            raise IRError("view: strides and offset cannot be negative.")
        last = found.offset + _span(found)
        if isinstance(last, int) and isinstance(size, int) and last >= size:
            raise IRError(f"view: element {last} is read, but {found.root.op.name} {found.root.name!r} has only {size} elements.")

    def relayout(self, base: Layout, node: Node) -> Layout:
        return Layout(base.root, base.offset + node.attrs["offset"], node.attrs["ne"], node.attrs["nb"])


def _span(found: Layout) -> IntDim:
    """Distance in elements from the first to the last element of a layout."""
    total: IntDim = 0
    for n, stride in zip(found.ne, found.nb):
        total = total + (n - 1) * stride
    return total


@register
class Permute(ViewOp):
    """Reorders dimensions: source dimension ``i`` becomes result dimension ``axes[i]``.

    A shorter shape is padded with ones first; padding that ends up last is dropped again.
    """

    name = "permute"
    attrs = (Attr("axes", "ints", "a permutation of 0..len-1, at least as long as the source's rank"),)

    def infer(self, operands: Sequence[Node], attrs: Mapping[str, Any]) -> TensorType:
        a, axes = operands[0].type, attrs["axes"]
        if sorted(axes) != list(range(len(axes))) or len(axes) < a.rank or len(axes) > 4:
            raise IRError(f"permute: axes {list(axes)} is no permutation of the dimensions of {a}.")
        return TensorType(a.dtype, _scatter(a.ne, axes, 1))

    def relayout(self, base: Layout, node: Node) -> Layout:
        axes = node.attrs["axes"]
        end = base.nb[-1] * base.ne[-1]
        return Layout(base.root, base.offset, _scatter(base.ne, axes, 1), _scatter(base.nb, axes, end))


def _scatter(values: tuple[IntDim, ...], axes: Sequence[int], filler: IntDim) -> tuple[IntDim, ...]:
    out = [filler] * (max(axes[: len(values)]) + 1)
    for v, to in zip(values, axes):
        out[to] = v
    return tuple(out)


@register
class Transpose(ViewOp):
    """Swaps dimensions 0 and 1."""

    name = "transpose"
    operands = (Operand("a", "source", "any", min_rank=2),)

    def infer(self, operands: Sequence[Node], attrs: Mapping[str, Any]) -> TensorType:
        a = operands[0].type
        return a.with_ne(a.ne[1], a.ne[0], *a.ne[2:])

    def relayout(self, base: Layout, node: Node) -> Layout:
        swap = (1, 0, *range(2, len(base.ne)))
        return Layout(base.root, base.offset, tuple(base.ne[i] for i in swap), tuple(base.nb[i] for i in swap))
