"""Rotary position embedding, whole or split into a table of cosines and sines and its application.

Formulas: plain, linear and YaRN scaling as in the YaRN paper (arXiv 2309.00071). Pair ``i`` turns by
``s*theta*(1-r) + theta*r`` with ``theta = p * base^(-2i/n_dims) / ff_i``; NORM pairs are elements (2i, 2i+1), NEOX pairs (i, i + n_dims/2).
Elements from ``n_dims`` on pass unchanged. ``inverse`` turns by the negative angle: where the magnitude is 1 it undoes the rotation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ggufc.ir.dims import IntDim
from ggufc.ir.errors import IRError
from ggufc.ir.ops.base import Attr, Call, Op, Operand, f32, register
from ggufc.ir.types import TensorType

if TYPE_CHECKING:
    from ggufc.ir.graph import Node

MODE = Attr("mode", "str", "which elements form a pair", choices=("norm", "neox"))
N_DIMS = Attr("n_dims", "int", "elements of a head that turn, even")
ANGLES = (
    N_DIMS,
    Attr("base", "float", "frequency base"),
    Attr("freq_scale", "float", "position scale s = 1/factor", 1.0),
    Attr("ext_factor", "float", "weight of YaRN's extrapolation, 0 for linear scaling", 0.0),
    Attr("attn_factor", "float", "magnitude of the result", 1.0),
    Attr("beta_fast", "float", "YaRN: turns within the original context above which frequencies are kept", 32.0),
    Attr("beta_slow", "float", "YaRN: turns below which frequencies are scaled", 1.0),
    Attr("n_ctx_orig", "int", "YaRN: original context length", 0),
    Attr("inverse", "bool", "turn back: sines are negated", False, quiet=True),
)
"""Attributes that decide the table: those of ``rope`` without ``mode``."""


def yarn_ramp(attrs: Mapping[str, Any]) -> np.ndarray:
    """YaRN's r per pair: 1 keeps the frequency, 0 scales it."""
    n, base, ctx = attrs["n_dims"], attrs["base"], attrs["n_ctx_orig"]

    def corner(beta: float) -> float:
        return n * math.log(ctx / (2 * math.pi * beta)) / (2 * math.log(base))

    lo = max(0, math.floor(corner(attrs["beta_fast"])))
    hi = min(n - 1, math.ceil(corner(attrs["beta_slow"])))
    return 1.0 - np.clip((np.arange(n // 2) - lo) / max(0.001, hi - lo), 0.0, 1.0)


def angle_table(attrs: Mapping[str, Any], pos: np.ndarray, ff: np.ndarray | None) -> np.ndarray:
    """f32 array ``[T, n_dims]``: cosine at 2i, sine at 2i+1, both times the magnitude."""
    n, s, ext = attrs["n_dims"], attrs["freq_scale"], attrs["ext_factor"]
    frequency = attrs["base"] ** (-2.0 * np.arange(n // 2) / n)
    if ff is not None:
        frequency = frequency / ff.astype(np.float64)[: n // 2]
    theta = pos.astype(np.float64)[:, None] * frequency
    phi, magnitude = s * theta, attrs["attn_factor"]
    if ext != 0.0:
        r = yarn_ramp(attrs) * ext
        phi = phi * (1.0 - r) + theta * r
        magnitude = magnitude * (1.0 + 0.1 * math.log(1.0 / s))
    out = np.empty((len(pos), n), np.float32)
    out[:, 0::2] = magnitude * np.cos(phi)
    out[:, 1::2] = magnitude * np.sin(-phi if attrs["inverse"] else phi)
    return out


def rotate(a: np.ndarray, table: np.ndarray, mode: str, n_dims: int) -> np.ndarray:
    """Applies a table ``[T, n_dims]`` to heads ``[.., T, H, D]``."""
    x = a.astype(np.float64)
    out = x.copy()
    c = table[:, None, 0::2].astype(np.float64)
    s = table[:, None, 1::2].astype(np.float64)
    half = n_dims // 2
    first, second = (slice(0, n_dims, 2), slice(1, n_dims, 2)) if mode == "norm" else (slice(0, half), slice(half, n_dims))
    u, v = x[..., first], x[..., second]
    out[..., first] = u * c - v * s
    out[..., second] = u * s + v * c
    return f32(out)


def check_angles(op: str, attrs: Mapping[str, Any], ff: TensorType | None) -> None:
    n = attrs["n_dims"]
    if n < 2 or n % 2:
        raise IRError(f"{op}: n_dims = {n} must be even and at least 2.")
    if attrs["base"] <= 0 or attrs["freq_scale"] <= 0:
        raise IRError(f"{op}: base = {attrs['base']} and freq_scale = {attrs['freq_scale']} must be above 0.")
    if attrs["ext_factor"] != 0 and (min(attrs["n_ctx_orig"], attrs["beta_fast"], attrs["beta_slow"]) <= 0 or attrs["base"] == 1):
        raise IRError(f"{op}: YaRN (ext_factor {attrs['ext_factor']}) needs n_ctx_orig, beta_fast and beta_slow above 0, and a base but 1.")
    if ff is not None and (not isinstance(ff.ne[0], int) or ff.ne[0] < n // 2):
        raise IRError(f"{op}: the frequency factors {ff} must have at least n_dims/2 = {n // 2} entries.")


def check_heads(op: str, a: TensorType, n_dims: int, tokens: IntDim) -> None:
    if isinstance(a.ne[0], int) and a.ne[0] < n_dims:
        raise IRError(f"{op}: n_dims = {n_dims} exceeds the head size of {a}.")
    if a.ne[2] != tokens:
        raise IRError(f"{op}: {a} has {a.ne[2]} tokens in dimension 2, but {tokens} positions are given.")


_HEADS = Operand("a", "heads [D, H, T]", min_rank=3, max_rank=3)
_POS = Operand("pos", "position of each token [T]", "i32", max_rank=1)
_FF = Operand("ff", "divisors of the frequencies [n_dims/2]", "f32", max_rank=1, optional=True)


@register
class Rope(Op):
    """Turns the first ``n_dims`` elements of each head by angles proportional to the token's position."""

    name = "rope"
    operands = (_HEADS, _POS, _FF)
    attrs = (MODE, *ANGLES)

    def infer(self, operands: Sequence[Node], attrs: Mapping[str, Any]) -> TensorType:
        a = operands[0].type
        check_angles("rope", attrs, operands[2].type if len(operands) > 2 else None)
        check_heads("rope", a, attrs["n_dims"], operands[1].type.ne[0])
        return a.with_dtype("f32")

    def evaluate(self, call: Call) -> np.ndarray:
        table = angle_table(call.attrs, call.args[1], call.args[2] if len(call.args) > 2 else None)
        return rotate(call.args[0], table, call.attrs["mode"], call.attrs["n_dims"])

    def flops(self, node: Node) -> IntDim:
        return node.type.numel * 3


@register
class RopeTable(Op):
    """The cosines (at 2i) and sines (at 2i+1) that ``rope`` uses, magnitude included: f32 ``[n_dims, T]``."""

    name = "rope_table"
    operands = (_POS, _FF)
    attrs = ANGLES

    def infer(self, operands: Sequence[Node], attrs: Mapping[str, Any]) -> TensorType:
        check_angles("rope_table", attrs, operands[1].type if len(operands) > 1 else None)
        return TensorType("f32", (attrs["n_dims"], operands[0].type.ne[0]))

    def evaluate(self, call: Call) -> np.ndarray:
        return angle_table(call.attrs, call.args[0], call.args[1] if len(call.args) > 1 else None)

    def flops(self, node: Node) -> IntDim:
        return node.type.numel * 4


@register
class RopeApply(Op):
    """Turns heads by a table of ``rope_table``; with the same attributes the pair gives the same bits as ``rope``."""

    name = "rope_apply"
    operands = (_HEADS, Operand("table", "cosines and sines [n_dims, T]", "f32", min_rank=2, max_rank=2))
    attrs = (MODE, N_DIMS)

    def infer(self, operands: Sequence[Node], attrs: Mapping[str, Any]) -> TensorType:
        a, table, n = operands[0].type, operands[1].type, attrs["n_dims"]
        if n < 2 or n % 2 or table.ne[0] != n:
            raise IRError(f"rope_apply: n_dims = {n} must be even and equal to ne[0] of the table {table}.")
        check_heads("rope_apply", a, n, table.ne[1])
        return a.with_dtype("f32")

    def evaluate(self, call: Call) -> np.ndarray:
        return rotate(call.args[0], call.args[1], call.attrs["mode"], call.attrs["n_dims"])

    def flops(self, node: Node) -> IntDim:
        return node.type.numel * 3
