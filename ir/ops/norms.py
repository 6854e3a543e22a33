"""Normalisations and sums over dimension 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ggufc.formats.hadamard import walsh_hadamard
from ggufc.ir.dims import IntDim
from ggufc.ir.errors import IRError
from ggufc.ir.ops.base import Attr, Call, Op, Operand, f32, register
from ggufc.ir.types import TensorType

if TYPE_CHECKING:
    from ggufc.ir.graph import Node

_EPS = Attr("eps", "float", "added to the mean square inside the root")


def _rms(x: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


class RowOp(Op):
    """Base of operators that treat each row (dimension 0) by itself and keep the shape."""

    operands: ClassVar[tuple[Operand, ...]] = (Operand("a", "rows"),)
    attrs = (_EPS,)

    def infer(self, operands: Sequence[Node], attrs: Mapping[str, Any]) -> TensorType:
        if attrs.get("eps", 0.0) < 0:
            raise IRError(f"{self.name}: eps = {attrs['eps']} cannot be negative.")
        return operands[0].type.with_dtype("f32")

    def flops(self, node: Node) -> IntDim:
        return node.type.numel * 4


@register
class RmsNorm(RowOp):
    """``a / sqrt(mean(a^2) + eps)`` over dimension 0."""

    name = "rms_norm"

    def evaluate(self, call: Call) -> np.ndarray:
        return f32(_rms(call.f64(0), call.attrs["eps"]))


@register
class Norm(RowOp):
    """``(a - mean) / sqrt(variance + eps)`` over dimension 0."""

    name = "norm"

    def evaluate(self, call: Call) -> np.ndarray:
        x = call.f64(0)
        x = x - np.mean(x, axis=-1, keepdims=True)
        return f32(_rms(x, call.attrs["eps"]))


@register
class RmsNormMul(RowOp):
    """``rms_norm(a) * w`` in one step; ``w`` has one factor per element of a row."""

    name = "rms_norm_mul"
    operands = (Operand("a", "rows"), Operand("w", "factors [ne0]", max_rank=1))

    def infer(self, operands: Sequence[Node], attrs: Mapping[str, Any]) -> TensorType:
        a, w = operands[0].type, operands[1].type
        if w.ne[0] != a.ne[0]:
            raise IRError(f"rms_norm_mul: the weight {w} must have one factor for each of the {a.ne[0]} elements of a row of {a}.")
        return super().infer(operands, attrs)

    def evaluate(self, call: Call) -> np.ndarray:
        return f32(_rms(call.f64(0), call.attrs["eps"]) * call.f64(1))


@register
class SumRows(Op):
    """Sum over dimension 0, which becomes 1."""

    name = "sum_rows"
    operands = (Operand("a", "rows"),)

    def infer(self, operands: Sequence[Node], attrs: Mapping[str, Any]) -> TensorType:
        return TensorType("f32", (1, *operands[0].type.ne[1:]))

    def evaluate(self, call: Call) -> np.ndarray:
        return f32(np.sum(call.f64(0), axis=-1, keepdims=True))

    def flops(self, node: Node) -> IntDim:
        return node.operands[0].type.numel


@register
class SumRowsExt(Op):
    """Sum over dimension ``dim``, which becomes 1: ``sum_rows`` of the permuted tensor without the copy."""

    name = "sum_rows_ext"
    operands = (Operand("a", "tensor"),)
    attrs = (Attr("dim", "int", "dimension to sum over"),)

    def infer(self, operands: Sequence[Node], attrs: Mapping[str, Any]) -> TensorType:
        a, dim = operands[0].type, attrs["dim"]
        if not 0 <= dim < a.rank:
            raise IRError(f"sum_rows_ext: {a} has no dimension {dim}.")
        return TensorType("f32", (*a.ne[:dim], 1, *a.ne[dim + 1 :]))

    def evaluate(self, call: Call) -> np.ndarray:
        return f32(np.sum(call.f64(0), axis=call.args[0].ndim - 1 - call.attrs["dim"], keepdims=True))

    def flops(self, node: Node) -> IntDim:
        return node.operands[0].type.numel


@register
class Hadamard(Op):
    """Orthonormal Walsh-Hadamard transform of each block of ``n`` elements of dimension 0; applying it twice gives the input back."""

    name = "hadamard"
    operands = (Operand("a", "rows"),)
    attrs = (Attr("n", "int", "block size, a power of two that divides ne0"),)

    def infer(self, operands: Sequence[Node], attrs: Mapping[str, Any]) -> TensorType:
        a, n = operands[0].type, attrs["n"]
        row = a.ne[0]
        if n < 1 or n & (n - 1) or not isinstance(row, int) or row % n:
            raise IRError(f"hadamard: n = {n} must be a power of two that divides the row length of {a}.")
        return a.with_dtype("f32")

    def evaluate(self, call: Call) -> np.ndarray:
        return f32(walsh_hadamard(call.f64(0), call.attrs["n"]))

    def flops(self, node: Node) -> IntDim:
        return node.type.numel * (node.attrs["n"].bit_length() - 1)
