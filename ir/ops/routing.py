"""Fused operators of expert routing: which experts a token goes to, and with what weights.

The gate turns a router's scores into probabilities: ``softmax`` over all experts, ``sigmoid``, ``sqrt_softplus``, or ``none`` (the scores
themselves). A bias takes part in the choice alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ggufc.ir.dims import IntDim
from ggufc.ir.errors import IRError
from ggufc.ir.ops.attention import softmax_rows
from ggufc.ir.ops.base import Attr, Call, Op, Operand, f32, register
from ggufc.ir.ops.elementwise import sigmoid, softplus
from ggufc.ir.ops.select import largest
from ggufc.ir.storage import check_indices
from ggufc.ir.types import TensorType

if TYPE_CHECKING:
    from ggufc.ir.graph import Node

GATES = ("none", "softmax", "sigmoid", "sqrt_softplus")


def gated(scores: np.ndarray, gate: str) -> np.ndarray:
    """Probabilities of scores [.., experts]."""
    if gate == "softmax":
        return softmax_rows(scores)
    if gate == "sigmoid":
        return np.asarray(sigmoid(scores))
    return np.sqrt(softplus(scores)) if gate == "sqrt_softplus" else scores


@register
class ExpertChoice(Op):
    """The ``k`` experts of each token with the largest ``gate(scores) + bias``, largest first; of equals the lowest number."""

    name = "expert_choice"
    operands = (
        Operand("scores", "router's scores [X, T]", min_rank=2, max_rank=2),
        Operand("bias", "added for the choice alone [X]", max_rank=1, optional=True),
    )
    attrs = (Attr("k", "int", "experts to choose"), Attr("gate", "str", "scores to probabilities", "none", choices=GATES))

    def infer(self, operands: Sequence[Node], attrs: Mapping[str, Any]) -> TensorType:
        scores, *bias = (o.type for o in operands)
        if not isinstance(scores.ne[0], int) or not 1 <= attrs["k"] <= scores.ne[0]:
            raise IRError(f"expert_choice: k = {attrs['k']} must lie between 1 and the experts of {scores}.")
        if bias and bias[0].ne != scores.ne[:1]:
            raise IRError(f"expert_choice: bias {bias[0]} must hold one number for each expert of {scores}.")
        return TensorType("i32", (attrs["k"], scores.ne[1]))

    def evaluate(self, call: Call) -> np.ndarray:
        # Probabilities are rounded before they are compared, as where they are a tensor: equals stay equals.
        p = f32(gated(call.f64(0), call.attrs["gate"]))
        return largest(p + call.args[1] if len(call.args) > 1 else p, call.attrs["k"])

    def flops(self, node: Node) -> IntDim:
        return node.operands[0].type.numel * 4


@register
class ExpertWeights(Op):
    """``scale * gate(scores)`` of the chosen experts; with ``normalise`` "sum" divided by their sum, with "softmax" a softmax."""

    name = "expert_weights"
    operands = (
        Operand("scores", "router's scores [X, T]", min_rank=2, max_rank=2),
        Operand("ids", "chosen experts [k, T]", "i32", min_rank=2, max_rank=2),
    )
    attrs = (
        Attr("gate", "str", "scores to probabilities", "none", choices=GATES),
        Attr("normalise", "str", "what is done with those of the chosen", "none", choices=("none", "sum", "softmax")),
        Attr("scale", "float", "factor", 1.0),
    )

    def infer(self, operands: Sequence[Node], attrs: Mapping[str, Any]) -> TensorType:
        scores, ids = (o.type for o in operands)
        if ids.ne[1] != scores.ne[1]:
            raise IRError(f"expert_weights: {ids} must hold one list for each token of {scores}.")
        return TensorType("f32", ids.ne)

    def evaluate(self, call: Call) -> np.ndarray:
        scores, ids = call.f64(0), call.args[1]
        check_indices("expert_weights", "expert", ids, scores.shape[1])
        w = np.take_along_axis(gated(scores, call.attrs["gate"]), ids.astype(np.int64), axis=1)
        if call.attrs["normalise"] == "softmax":
            w = softmax_rows(w)
        elif call.attrs["normalise"] == "sum":
            w = w / w.sum(axis=1, keepdims=True)
        return f32(w * call.attrs["scale"])

    def flops(self, node: Node) -> IntDim:
        return node.operands[0].type.numel * 4
