"""Operators that move or convert data into a new contiguous tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ggufc.formats.ggml_types import TYPES
from ggufc.ir.dims import IntDim
from ggufc.ir.errors import IRError
from ggufc.ir.ops.base import Attr, Call, Op, Operand, register, repeat_to, repeats_to
from ggufc.ir.storage import Stored, encode
from ggufc.ir.types import TensorType, require_dtype

if TYPE_CHECKING:
    from ggufc.ir.graph import Node


@register
class Cont(Op):
    """A contiguous copy of any view, in the same dtype."""

    name = "cont"
    operands = (Operand("a", "source", "any"),)

    def infer(self, operands: Sequence[Node], attrs: Mapping[str, Any]) -> TensorType:
        a = operands[0].type
        if a.quantised:
            raise IRError(f"cont: {a} is quantised; cast it to f32 instead.")
        return a

    def evaluate(self, call: Call) -> np.ndarray:
        return np.ascontiguousarray(call.args[0])

    def flops(self, node: Node) -> IntDim:
        return 0


@register
class Cast(Op):
    """A contiguous copy in another dtype; floats round to nearest even, quantised types use the reference quantiser."""

    name = "cast"
    operands = (Operand("a", "source", "any"),)
    attrs = (Attr("dtype", "str", "ggml dtype of the result"),)

    def infer(self, operands: Sequence[Node], attrs: Mapping[str, Any]) -> TensorType:
        require_dtype(attrs["dtype"])
        return operands[0].type.with_dtype(attrs["dtype"])

    def evaluate(self, call: Call) -> Any:
        return encode(np.ascontiguousarray(call.args[0]), call.attrs["dtype"])

    def flops(self, node: Node) -> IntDim:
        return 0


@register
class Concat(Op):
    """``b`` appended to ``a`` along dimension ``dim``; all other dimensions and the dtype must be equal.

    Quantised tensors are appended as bytes, so nothing is requantised: their rows are whole blocks, along dimension 0 too.
    """

    name = "concat"
    operands = (Operand("a", "first part", "any", stored=True), Operand("b", "second part", "any", stored=True))
    attrs = (Attr("dim", "int", "dimension to append along"),)

    def infer(self, operands: Sequence[Node], attrs: Mapping[str, Any]) -> TensorType:
        a, b, dim = operands[0].type, operands[1].type, attrs["dim"]
        if not 0 <= dim < 4:
            raise IRError(f"concat: dim = {dim} must lie in 0..3.")
        rank = max(a.rank, b.rank, dim + 1)
        if a.dtype != b.dtype or any(a.ne4[i] != b.ne4[i] for i in range(4) if i != dim):
            raise IRError(f"concat: {a} and {b} must agree in dtype and in all dimensions but {dim}.")
        if dim == 0 and TYPES[a.dtype].row_header:
            raise IRError(f"concat: a row of {a.dtype} begins with a scale of its own, so {a} and {b} cannot be joined along dimension 0.")
        ne = list(a.ne4[:rank])
        ne[dim] = a.ne4[dim] + b.ne4[dim]
        return TensorType(a.dtype, tuple(ne))

    def verify(self, node: Node) -> None:
        if node.type.quantised and any(o.is_view for o in node.operands):
            raise IRError(f"concat: parts of the quantised type {node.type.dtype} must be whole tensors, not views.")

    def evaluate(self, call: Call) -> Any:
        axis = len(call.ne) - 1 - call.attrs["dim"]
        if call.type.quantised:
            return Stored(call.type.dtype, call.ne, np.concatenate([x.rank(len(call.ne)).data for x in call.args], axis=axis))
        parts = [x.array if isinstance(x, Stored) else x for x in call.args]
        lifted = [x.reshape((1,) * (len(call.ne) - x.ndim) + x.shape) for x in parts]
        return encode(np.concatenate(lifted, axis=axis), call.type.dtype)

    def flops(self, node: Node) -> IntDim:
        return 0


@register
class Repeat(Op):
    """``a`` tiled to the shape ``ne``; every dimension must be a whole multiple."""

    name = "repeat"
    operands = (Operand("a", "source", "number"),)
    attrs = (Attr("ne", "dims", "shape of the result"),)

    def infer(self, operands: Sequence[Node], attrs: Mapping[str, Any]) -> TensorType:
        a = operands[0].type
        out = TensorType(a.dtype, attrs["ne"])
        if out.rank < a.rank or not all(repeats_to(s, l) for s, l in zip(a.ne4, out.ne4)):
            raise IRError(f"repeat: {a} cannot be repeated to {out}.")
        return out

    def evaluate(self, call: Call) -> np.ndarray:
        return np.ascontiguousarray(repeat_to(call.args[0], call.shape))

    def flops(self, node: Node) -> IntDim:
        return 0


@register
class Fill(Op):
    """A tensor of the shape and dtype of ``a`` in which every element is ``value``."""

    name = "fill"
    operands = (Operand("a", "gives the shape", "number"),)
    attrs = (Attr("value", "float", "the number"),)

    def infer(self, operands: Sequence[Node], attrs: Mapping[str, Any]) -> TensorType:
        return operands[0].type

    def evaluate(self, call: Call) -> Any:
        return encode(np.full(call.shape, call.attrs["value"], np.float32), call.type.dtype)

    def flops(self, node: Node) -> IntDim:
        return 0
