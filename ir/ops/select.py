"""Choosing and rearranging by index: row look-up, sorting, largest elements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ggufc.ir.dims import IntDim
from ggufc.ir.errors import IRError
from ggufc.ir.ops.base import Attr, Call, Op, Operand, register
from ggufc.ir.storage import Stored, check_indices
from ggufc.ir.types import TensorType

if TYPE_CHECKING:
    from ggufc.ir.graph import Node


@register
class GetRows(Op):
    """Rows of ``a`` by index, dequantised to f32: row ``idx[t]`` for each ``t``. Rows of an i32 table stay i32.

    With more dimensions each matrix of ``a`` has its own list of rows: a[K, N, B], idx[U, B] -> [K, U, B].
    """

    name = "get_rows"
    operands = (
        Operand("a", "tables [K, N, B, B3]", "any", min_rank=2, stored=True),
        Operand("idx", "rows wanted [U, B, B3]", "i32", max_rank=3),
    )

    def infer(self, operands: Sequence[Node], attrs: Mapping[str, Any]) -> TensorType:
        a, idx = operands[0].type, operands[1].type
        if a.ne4[2:] != idx.ne4[1:3]:
            raise IRError(f"get_rows: {idx} must have one list of rows for each matrix of {a}.")
        return TensorType("i32" if a.dtype == "i32" else "f32", (a.ne[0], *idx.ne))

    def evaluate(self, call: Call) -> np.ndarray:
        table, idx = call.args
        dtype = np.int32 if call.type.dtype == "i32" else np.float32
        check_indices("get_rows", "row", idx, table.ne[1] if isinstance(table, Stored) else table.shape[-2])
        if isinstance(table, Stored) and len(table.ne) == 2:
            return np.asarray(table.rows(idx.reshape(-1)), dtype=dtype).reshape(call.shape)
        values = table.array if isinstance(table, Stored) else table
        # Sizes are spelled out: a micro-batch without wanted rows has no matrices, and -1 would be ambiguous.
        matrices = values.reshape(math.prod(values.shape[:-2]), *values.shape[-2:])
        lists = idx.reshape(len(matrices), idx.shape[-1], 1)
        return np.take_along_axis(matrices, lists, axis=1).astype(dtype).reshape(call.shape)

    def flops(self, node: Node) -> IntDim:
        return 0


@register
class Argsort(Op):
    """Indices that sort each row (dimension 0); equal elements keep the order of their indices."""

    name = "argsort"
    operands = (Operand("a", "rows"),)
    attrs = (Attr("order", "str", "direction", "asc", choices=("asc", "desc")),)

    def infer(self, operands: Sequence[Node], attrs: Mapping[str, Any]) -> TensorType:
        return operands[0].type.with_dtype("i32")

    def evaluate(self, call: Call) -> np.ndarray:
        x = call.f64(0)
        return np.argsort(x if call.attrs["order"] == "asc" else -x, axis=-1, kind="stable").astype(np.int32)


def largest(x: np.ndarray, k: int, ties: str = "lowest") -> np.ndarray:
    """``top_k`` of the last axis: i32, largest first, -1 where the row has fewer than ``k`` elements."""
    n = x.shape[-1]
    order = np.argsort(-x, axis=-1, kind="stable") if ties == "lowest" else n - 1 - np.argsort(-x[..., ::-1], axis=-1, kind="stable")
    out = np.full((*x.shape[:-1], k), -1, np.int32)
    out[..., :n] = order[..., :k]
    return out


@register
class TopK(Op):
    """Indices of the ``k`` largest elements of each row, largest first; a row of fewer than ``k`` elements ends in -1.

    Of equal elements the lowest index comes first, or the highest with ``ties`` highest.
    """

    name = "top_k"
    operands = (Operand("a", "rows"),)
    attrs = (
        Attr("k", "int", "how many"),
        Attr("ties", "str", "which of equal elements comes first", "lowest", choices=("lowest", "highest"), quiet=True),
    )

    def infer(self, operands: Sequence[Node], attrs: Mapping[str, Any]) -> TensorType:
        a, k = operands[0].type, attrs["k"]
        if k < 1 or (isinstance(a.ne[0], int) and k > a.ne[0]):
            raise IRError(f"top_k: k = {k} must lie between 1 and the row length of {a}.")
        return TensorType("i32", (k, *a.ne[1:]))

    def evaluate(self, call: Call) -> np.ndarray:
        return largest(call.f64(0), call.attrs["k"], call.attrs["ties"])

    def flops(self, node: Node) -> IntDim:
        return node.operands[0].type.numel


@register
class Blend(Op):
    """A copy of ``a`` in which the elements ``idx[.., row]`` of each row are set to ``value``; negative indices are passed over."""

    name = "blend"
    operands = (Operand("a", "rows"), Operand("idx", "elements to replace, per row", "i32"))
    attrs = (Attr("value", "float", "the number written"),)

    def infer(self, operands: Sequence[Node], attrs: Mapping[str, Any]) -> TensorType:
        a, idx = operands[0].type, operands[1].type
        if a.ne4[1:] != idx.ne4[1:]:
            raise IRError(f"blend: {idx} must have one list of indices for each row of {a}.")
        return a.with_dtype("f32")

    def evaluate(self, call: Call) -> np.ndarray:
        out = np.array(call.args[0], dtype=np.float32)
        idx = call.args[1]
        check_indices("blend", "element", np.maximum(idx, 0), out.shape[-1])
        rows, lists = out.reshape(-1, out.shape[-1]), idx.reshape(-1, idx.shape[-1])
        for row, wanted in zip(rows, lists):
            row[wanted[wanted >= 0]] = np.float32(call.attrs["value"])
        return out

    def flops(self, node: Node) -> IntDim:
        return 0
