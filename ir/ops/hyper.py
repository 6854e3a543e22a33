"""Fused operators of hyper-connections: gates, reading from and writing to parallel residual streams.

With S streams a sublayer's gates are one column of S*S + 2S numbers per token: S read gates, S write gates, and a matrix of S rows (source
streams) of S columns (destinations, fastest).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ggufc.ir.dims import IntDim
from ggufc.ir.errors import IRError
from ggufc.ir.ops.attention import softmax_rows
from ggufc.ir.ops.base import Attr, Call, Op, Operand, f32, register
from ggufc.ir.ops.elementwise import sigmoid
from ggufc.ir.types import TensorType

if TYPE_CHECKING:
    from ggufc.ir.graph import Node

_STREAMS = Attr("streams", "int", "parallel residual streams (S)")
_ITERATIONS = Attr("iterations", "int", "normalisations of rows and columns, at least 1")
_EPS = Attr("eps", "float", "added to the softmax and to every sum", 0.0)


def sinkhorn(logits: np.ndarray, iterations: int, eps: float) -> np.ndarray:
    """Doubly stochastic matrices from ``[.., row, column]``: softmax of rows plus eps, columns by their sums plus eps, then
    iterations - 1 times rows and columns likewise."""
    m = softmax_rows(logits) + eps
    m = m / (m.sum(axis=-2, keepdims=True) + eps)
    for _ in range(iterations - 1):
        m = m / (m.sum(axis=-1, keepdims=True) + eps)
        m = m / (m.sum(axis=-2, keepdims=True) + eps)
    return m


def _check_iterations(op: str, attrs: Mapping[str, Any]) -> None:
    if attrs["iterations"] < 1 or attrs["eps"] < 0:
        raise IRError(f"{op}: iterations = {attrs['iterations']} must be at least 1 and eps = {attrs['eps']} not negative.")


def _gate_count(op: str, streams: int, t: TensorType) -> IntDim:
    if streams < 1 or t.ne[0] != streams * streams + 2 * streams:
        raise IRError(f"{op}: {t} must hold S*S + 2S = {streams * streams + 2 * streams} numbers per token for {streams} streams.")
    return t.ne4[1]


@register
class Sinkhorn(Op):
    """Each matrix ``[S, S]`` of ``a`` made doubly stochastic, rows being dimension 1 and columns dimension 0; it ends on columns."""

    name = "sinkhorn"
    operands = (Operand("a", "logits [S, S, T]", min_rank=2, max_rank=3),)
    attrs = (_ITERATIONS, _EPS)

    def infer(self, operands: Sequence[Node], attrs: Mapping[str, Any]) -> TensorType:
        a = operands[0].type
        _check_iterations("sinkhorn", attrs)
        if a.ne[0] != a.ne[1]:
            raise IRError(f"sinkhorn: {a} must hold square matrices.")
        return a.with_dtype("f32")

    def evaluate(self, call: Call) -> np.ndarray:
        return f32(sinkhorn(call.f64(0), call.attrs["iterations"], call.attrs["eps"]))

    def flops(self, node: Node) -> IntDim:
        return node.type.numel * 4 * node.attrs["iterations"]


@register
class HcPre(Op):
    """Gates of a sublayer from the projected streams m, per token:

    ``read_s = sigmoid(scale_0 m_s + base_s) + eps``, ``write_s = 2 sigmoid(scale_1 m_{S+s} + base_{S+s})``, and ``sinkhorn`` of
    ``scale_2 m_{2S+uS+c} + base_{2S+uS+c}``; written one after another.
    """

    name = "hc_pre"
    operands = (
        Operand("m", "projected streams [S*S+2S, T]", min_rank=2, max_rank=2),
        Operand("scale", "factors of the three parts [3]", max_rank=1),
        Operand("base", "summands [S*S+2S]", max_rank=1),
    )
    attrs = (_STREAMS, _ITERATIONS, _EPS)

    def infer(self, operands: Sequence[Node], attrs: Mapping[str, Any]) -> TensorType:
        m, scale, base = (o.type for o in operands)
        _check_iterations("hc_pre", attrs)
        _gate_count("hc_pre", attrs["streams"], m)
        if scale.ne[0] != 3 or base.ne[0] != m.ne[0]:
            raise IRError(f"hc_pre: scale {scale} must hold 3 numbers and base {base} one for each of the {m.ne[0]} of {m}.")
        return m.with_dtype("f32")

    def evaluate(self, call: Call) -> np.ndarray:
        m, scale, base = (call.f64(i) for i in range(3))
        s, eps = call.attrs["streams"], call.attrs["eps"]
        x = m * np.repeat(scale, [s, s, s * s]) + base
        matrix = sinkhorn(x[:, 2 * s :].reshape(-1, s, s), call.attrs["iterations"], eps)
        return f32(np.concatenate([sigmoid(x[:, :s]) + eps, 2 * sigmoid(x[:, s : 2 * s]), matrix.reshape(-1, s * s)], axis=1))

    def flops(self, node: Node) -> IntDim:
        return node.type.numel * 4 * (node.attrs["iterations"] + 1)


@register
class HcMix(Op):
    """What a sublayer reads: ``sum_s gates_s x_s``; only the first S numbers of each column of ``gates`` count."""

    name = "hc_mix"
    operands = (Operand("x", "streams [E, S, T]", min_rank=3, max_rank=3), Operand("gates", "[S or more, T]", min_rank=2, max_rank=2))

    def infer(self, operands: Sequence[Node], attrs: Mapping[str, Any]) -> TensorType:
        x, gates = operands[0].type, operands[1].type
        if gates.ne[1] != x.ne[2] or not isinstance(gates.ne[0], int) or not isinstance(x.ne[1], int) or gates.ne[0] < x.ne[1]:
            raise IRError(f"hc_mix: gates {gates} must hold one column per token of {x}, of at least {x.ne[1]} numbers.")
        return TensorType("f32", (x.ne[0], x.ne[2]))

    def evaluate(self, call: Call) -> np.ndarray:
        x = call.f64(0)
        return f32(np.einsum("tse,ts->te", x, call.f64(1)[:, : x.shape[1]]))

    def flops(self, node: Node) -> IntDim:
        return node.operands[0].type.numel * 2


@register
class HcPost(Op):
    """The streams after a sublayer: ``x'_c = write_c y + sum_u matrix[u, c] x_u`` with gates as ``hc_pre`` gives them."""

    name = "hc_post"
    operands = (
        Operand("x", "streams [E, S, T]", min_rank=3, max_rank=3),
        Operand("y", "result of the sublayer [E, T]", min_rank=2, max_rank=2),
        Operand("gates", "[S*S+2S, T]", min_rank=2, max_rank=2),
    )

    def infer(self, operands: Sequence[Node], attrs: Mapping[str, Any]) -> TensorType:
        x, y, gates = (o.type for o in operands)
        if y.ne4[:2] != (x.ne[0], x.ne[2]):
            raise IRError(f"hc_post: the result {y} must have the elements and tokens of the streams {x}.")
        if not isinstance(x.ne[1], int) or _gate_count("hc_post", x.ne[1], gates) != x.ne[2]:
            raise IRError(f"hc_post: gates {gates} must hold one column for each token of {x}.")
        return x.with_dtype("f32")

    def evaluate(self, call: Call) -> np.ndarray:
        x, y, gates = (call.f64(i) for i in range(3))
        s = x.shape[1]
        matrix = gates[:, 2 * s :].reshape(-1, s, s)
        return f32(gates[:, s : 2 * s, None] * y[:, None] + np.einsum("tuc,tue->tce", matrix, x))

    def flops(self, node: Node) -> IntDim:
        streams = node.type.ne[1]
        return node.type.numel * 2 * (streams + 1)
