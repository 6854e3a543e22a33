"""Operators of recurrent layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ggufc.ir.dims import IntDim
from ggufc.ir.errors import IRError
from ggufc.ir.ops.base import Call, Op, Operand, f32, register
from ggufc.ir.types import TensorType

if TYPE_CHECKING:
    from ggufc.ir.graph import Node


@register
class SsmConv(Op):
    """Causal depthwise convolution: ``y[ch, t] = sum_tap w[tap, ch] * x[t + tap, ch]``.

    ``x`` ``[K-1+T, C]`` holds, per channel, the K-1 carried values and then the new ones. The number of new tokens is ``ne0 - (K-1)``.
    """

    name = "ssm_conv"
    operands = (
        Operand("x", "carried and new values [K-1+T, C]", min_rank=2, max_rank=2),
        Operand("w", "taps [K, C]", min_rank=2, max_rank=2),
    )

    def infer(self, operands: Sequence[Node], attrs: Mapping[str, Any]) -> TensorType:
        x, w = operands[0].type, operands[1].type
        if x.ne[1] != w.ne[1]:
            raise IRError(f"ssm_conv: {x} and the taps {w} differ in the number of channels.")
        tokens = x.ne[0] - w.ne[0] + 1
        if isinstance(tokens, int) and tokens < 0:
            raise IRError(f"ssm_conv: rows of {x} are shorter than the {w.ne[0]} taps less one.")
        return TensorType("f32", (x.ne[1], tokens))

    def evaluate(self, call: Call) -> np.ndarray:
        x, w = call.f64(0), call.f64(1)
        out = np.zeros(call.shape)
        for tap in range(w.shape[1]):
            out += (x[:, tap : tap + call.ne[1]] * w[:, tap : tap + 1]).T
        return f32(out)

    def flops(self, node: Node) -> IntDim:
        return node.type.numel * node.operands[1].type.ne[0] * 2
