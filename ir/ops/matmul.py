"""Matrix products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ggufc.ir.dims import IntDim
from ggufc.ir.errors import IRError
from ggufc.ir.ops.base import Call, Op, Operand, f32, register, repeats_to
from ggufc.ir.storage import check_indices, round_activations
from ggufc.ir.types import TensorType

if TYPE_CHECKING:
    from ggufc.ir.graph import Node


@register
class MulMat(Op):
    """``y[n, t] = sum_k a[k, n] * b[k, t]`` for each matrix of dimensions 2 and 3.

    ``b`` may have a multiple of ``a``'s matrices: matrix ``h`` of ``b`` meets matrix ``h // (B2 / b2)`` of ``a`` (grouped-query attention).
    """

    name = "mul_mat"
    operands = (Operand("a", "weights [K, N, b2, b3]", "any", min_rank=2), Operand("b", "activations [K, T, B2, B3]"))

    def infer(self, operands: Sequence[Node], attrs: Mapping[str, Any]) -> TensorType:
        a, b = operands[0].type, operands[1].type
        if a.dtype == "i32":
            raise IRError(f"mul_mat: operand a is {a}; integers cannot be multiplied.")
        if a.ne[0] != b.ne[0]:
            raise IRError(f"mul_mat: {a} and {b} differ in dimension 0, which is summed over.")
        if not all(repeats_to(s, l) for s, l in zip(a.ne4[2:], b.ne4[2:])):
            raise IRError(f"mul_mat: dimensions 2 and 3 of {b} must be multiples of those of {a}.")
        return TensorType("f32", (a.ne[1], *b.ne[1:]))

    def evaluate(self, call: Call) -> np.ndarray:
        a, b = call.args
        if call.round_activations:
            b = round_activations(b, call.types[0].dtype)
        a = a.reshape((1,) * (4 - a.ndim) + a.shape)
        b4 = b.reshape((1,) * (4 - b.ndim) + b.shape)
        for axis in (0, 1):
            a = np.repeat(a, b4.shape[axis] // a.shape[axis], axis=axis) if a.shape[axis] != b4.shape[axis] else a
        y = np.matmul(b4.astype(np.float64), a.astype(np.float64).swapaxes(-1, -2))
        return f32(y).reshape(call.shape)

    def flops(self, node: Node) -> IntDim:
        return node.type.numel * node.operands[0].type.ne[0] * 2


@register
class MulMatId(Op):
    """Products with chosen experts: ``y[n, u, t] = sum_k a[k, n, ids[u, t]] * b[k, u or 0, t]``."""

    name = "mul_mat_id"
    operands = (
        Operand("a", "experts [K, N, X]", "any", min_rank=3, max_rank=3),
        Operand("b", "activations [K, U or 1, T]", min_rank=3, max_rank=3),
        Operand("ids", "chosen experts [U, T]", "i32", min_rank=2, max_rank=2),
    )

    def infer(self, operands: Sequence[Node], attrs: Mapping[str, Any]) -> TensorType:
        a, b, ids = (o.type for o in operands)
        if a.ne[0] != b.ne[0]:
            raise IRError(f"mul_mat_id: {a} and {b} differ in dimension 0, which is summed over.")
        if b.ne[1] not in (1, ids.ne[0]) or b.ne[2] != ids.ne[1]:
            raise IRError(f"mul_mat_id: activations {b} do not fit the expert ids {ids}; dimension 1 must be 1 or {ids.ne[0]}.")
        return TensorType("f32", (a.ne[1], *ids.ne))

    def evaluate(self, call: Call) -> np.ndarray:
        a, b, ids = call.args
        check_indices("mul_mat_id", "expert", ids, a.shape[0])
        if call.round_activations:
            b = round_activations(b, call.types[0].dtype)
        out = np.empty(call.shape, np.float32)
        for t, u in np.ndindex(*ids.shape):
            row = b[t, u if b.shape[1] > 1 else 0].astype(np.float64)
            out[t, u] = f32(a[ids[t, u]].astype(np.float64) @ row)
        return out

    def flops(self, node: Node) -> IntDim:
        return node.type.numel * node.operands[0].type.ne[0] * 2
