"""Elementwise operators. Operands may be strided views in any float dtype; results are contiguous f32, rounded once from float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ggufc.ir.dims import IntDim
from ggufc.ir.errors import IRError
from ggufc.ir.ops.base import OPS, Attr, Call, Op, Operand, f32, register, repeat_to, require_repeat
from ggufc.ir.types import TensorType

if TYPE_CHECKING:
    from ggufc.ir.graph import Node


def silu(x: np.ndarray) -> np.ndarray:
    """``x / (1 + e^-x)``."""
    return x * sigmoid(x)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """``1 / (1 + e^-x)``, without overflow."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, e) / (1.0 + e)


def gelu(x: np.ndarray) -> np.ndarray:
    """The tanh form ``0.5 x (1 + tanh(sqrt(2/pi) x (1 + 0.044715 x^2)))``."""
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * x * (1.0 + 0.044715 * x * x)))


def relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0.0)


def softplus(x: np.ndarray) -> np.ndarray:
    """``ln(1 + e^x)``."""
    return np.logaddexp(0.0, x)


GLU_FUNCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {"silu": silu, "gelu": gelu}


class Unary(Op):
    """Base of functions of one element."""

    operands = (Operand("a", "argument"),)
    fn: ClassVar[Callable[[np.ndarray], np.ndarray]]

    def infer(self, operands: Sequence[Node], attrs: Mapping[str, Any]) -> TensorType:
        return operands[0].type.with_dtype("f32")

    def evaluate(self, call: Call) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            return f32(type(self).fn(call.f64(0)))


def _unary(name: str, fn: Callable[[np.ndarray], np.ndarray], doc: str) -> None:
    register(type(name.capitalize(), (Unary,), {"name": name, "fn": staticmethod(fn), "__doc__": doc, "__module__": __name__}))


_unary("silu", silu, "``a / (1 + e^-a)``.")
_unary("gelu", gelu, "GELU in its tanh form.")
_unary("relu", relu, "``max(a, 0)``.")
_unary("sigmoid", sigmoid, "``1 / (1 + e^-a)``.")
_unary("tanh", np.tanh, "Hyperbolic tangent.")
_unary("exp", np.exp, "``e^a``.")
_unary("neg", np.negative, "``-a``.")
_unary("sqrt", np.sqrt, "Square root.")
_unary("softplus", softplus, "``ln(1 + e^a)``.")


class Binary(Op):
    """Base of arithmetic on two tensors; the second is repeated to the shape of the first (ggml's broadcasting)."""

    operands = (Operand("a", "gives the shape"), Operand("b", "repeated to a"))
    fn: ClassVar[Callable[[np.ndarray, np.ndarray], np.ndarray]]

    def infer(self, operands: Sequence[Node], attrs: Mapping[str, Any]) -> TensorType:
        require_repeat(self.name, operands[1].type, operands[0].type)
        return operands[0].type.with_dtype("f32")

    def evaluate(self, call: Call) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            return f32(type(self).fn(call.f64(0), repeat_to(call.f64(1), call.shape)))


def _binary(name: str, fn: Callable[[np.ndarray, np.ndarray], np.ndarray], doc: str, commutative: bool) -> None:
    members = {"name": name, "fn": staticmethod(fn), "commutative": commutative, "__doc__": doc, "__module__": __name__}
    register(type(name.capitalize(), (Binary,), members))


_binary("add", np.add, "``a + b``.", True)
_binary("sub", np.subtract, "``a - b``.", False)
_binary("mul", np.multiply, "``a * b``.", True)
_binary("div", np.divide, "``a / b``.", False)


class Parametric(Op):
    """Base of functions of one element with constant parameters."""

    operands = (Operand("a", "argument"),)

    def infer(self, operands: Sequence[Node], attrs: Mapping[str, Any]) -> TensorType:
        return operands[0].type.with_dtype("f32")


@register
class Scale(Parametric):
    """``s * a + b``."""

    name = "scale"
    attrs = (Attr("s", "float", "factor"), Attr("b", "float", "summand", 0.0))

    def evaluate(self, call: Call) -> np.ndarray:
        return f32(call.attrs["s"] * call.f64(0) + call.attrs["b"])


@register
class Softcap(Parametric):
    """``cap * tanh(a / cap)``: keeps values within ``(-cap, cap)``."""

    name = "softcap"
    attrs = (Attr("cap", "float", "bound, above 0"),)

    def infer(self, operands: Sequence[Node], attrs: Mapping[str, Any]) -> TensorType:
        if attrs["cap"] <= 0:
            raise IRError(f"softcap: cap = {attrs['cap']} must be above 0.")
        return super().infer(operands, attrs)

    def evaluate(self, call: Call) -> np.ndarray:
        cap = call.attrs["cap"]
        return f32(cap * np.tanh(call.f64(0) / cap))


@register
class Clamp(Parametric):
    """``min(max(a, min), max)``."""

    name = "clamp"
    attrs = (Attr("min", "float", "lower bound"), Attr("max", "float", "upper bound"))

    def infer(self, operands: Sequence[Node], attrs: Mapping[str, Any]) -> TensorType:
        if attrs["min"] > attrs["max"]:
            raise IRError(f"clamp: min = {attrs['min']} lies above max = {attrs['max']}.")
        return super().infer(operands, attrs)

    def evaluate(self, call: Call) -> np.ndarray:
        return f32(np.clip(call.f64(0), call.attrs["min"], call.attrs["max"]))


@register
class Glu(Op):
    """Gated unit ``fn(gate) * up``; both operands have the same shape."""

    name = "glu"
    operands = (Operand("gate", "argument of the activation"), Operand("up", "factor"))
    attrs = (Attr("fn", "str", "activation", choices=tuple(GLU_FUNCTIONS)),)

    def infer(self, operands: Sequence[Node], attrs: Mapping[str, Any]) -> TensorType:
        gate, up = operands[0].type, operands[1].type
        if gate.ne != up.ne:
            raise IRError(f"glu: gate {gate} and up {up} must have the same shape.")
        return gate.with_dtype("f32")

    def evaluate(self, call: Call) -> np.ndarray:
        return f32(GLU_FUNCTIONS[call.attrs["fn"]](call.f64(0)) * call.f64(1))

    def flops(self, node: Node) -> IntDim:
        return node.type.numel * 2


UNARY = frozenset(name for name, op in OPS.items() if isinstance(op, Unary))
"""Names of the one-element functions without parameters."""
BINARY = frozenset(name for name, op in OPS.items() if isinstance(op, Binary))
"""Names of the two-operand arithmetic operators."""
