"""Attention: masks, softmax, and the fused form that walks the cell lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ggufc.ir.dims import IntDim
from ggufc.ir.errors import IRError
from ggufc.ir.ops.base import Attr, Call, Op, Operand, f32, register
from ggufc.ir.types import TensorType

if TYPE_CHECKING:
    from ggufc.ir.graph import Node


def softmax_rows(x: np.ndarray, sinks: np.ndarray | None = None) -> np.ndarray:
    """Softmax over the last axis; a row that is minus infinity everywhere becomes zeros.

    ``sinks``, broadcast against ``[.., 1]``, is one more logit per row whose probability is dropped.
    """
    top = np.max(x, axis=-1, keepdims=True, initial=-np.inf)
    if sinks is not None:
        top = np.maximum(top, sinks)
    top = np.where(np.isfinite(top), top, 0.0)
    e = np.exp(x - top)
    total = np.sum(e, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks - top)
    return e / np.where(total == 0.0, 1.0, total)


def _check_sinks(op: str, sinks: TensorType, heads: IntDim) -> None:
    if sinks.ne[0] != heads:
        raise IRError(f"{op}: sinks {sinks} must hold one logit for each of the {heads} heads.")


def _visible_type(op: str, cells: TensorType, vis: TensorType) -> IntDim:
    if vis.ne[0] != 3:
        raise IRError(f"{op}: operand vis is {vis}; it holds (base, lo, hi) per token, so ne[0] must be 3.")
    return vis.ne[1]


def visible_cells(op: str, cells: np.ndarray, vis: np.ndarray, limit: int) -> list[np.ndarray]:
    """The cells each token sees: ``cells[base+lo : base+hi]``; raises ``IRError`` for ranges or cells that do not exist."""
    out = []
    for t, (base, lo, hi) in enumerate(vis.tolist()):
        if not 0 <= base + lo <= max(base + hi, base + lo) <= len(cells):
            raise IRError(f"{op}: token {t} sees entries {base + lo}..{base + hi} of a cell list with {len(cells)} entries.")
        seen = cells[base + lo : base + hi]
        if seen.size and (seen.min() < 0 or seen.max() >= limit):
            raise IRError(f"{op}: token {t} sees cell {int(seen.max())}, but only cells 0..{limit - 1} are within reach.")
        out.append(seen)
    return out


def entries_per_token(node: Node) -> IntDim:
    """The most cells each token of a ``flash_attn`` reads: all of the cache, or its own list where ``vis`` comes from ``list_spans``."""
    vis = node.operands[4]
    return vis.operands[0].type.ne[0] if vis.op.name == "list_spans" else node.operands[1].type.ne[1]


@register
class SoftMax(Op):
    """Softmax over dimension 0 of ``scale * a + mask``; the mask is shared by all heads. A fully masked row becomes zeros.

    A head's sink is one more logit, not scaled, whose probability is dropped: ``p_j = e^(s_j) / (e^sink + sum_j e^(s_j))``.
    """

    name = "soft_max"
    operands = (
        Operand("a", "scores [KV, T, H]"),
        Operand("mask", "added to the scaled scores [KV, T]", max_rank=2, optional=True),
        Operand("sinks", "one more logit per head [H]", "f32", max_rank=1, optional=True),
    )
    attrs = (Attr("scale", "float", "factor of the scores", 1.0),)

    def infer(self, operands: Sequence[Node], attrs: Mapping[str, Any]) -> TensorType:
        a = operands[0].type
        if len(operands) > 1 and operands[1].type.ne4[:2] != a.ne4[:2]:
            raise IRError(f"soft_max: mask {operands[1].type} must have dimensions 0 and 1 of {a}.")
        if len(operands) > 2:
            _check_sinks("soft_max", operands[2].type, a.ne4[2])
        return a.with_dtype("f32")

    def evaluate(self, call: Call) -> np.ndarray:
        x = call.f64(0) * call.attrs["scale"]
        if len(call.args) > 1:
            x = x + call.f64(1)
        return f32(softmax_rows(x, call.f64(2)[:, None, None] if len(call.args) > 2 else None))

    def flops(self, node: Node) -> IntDim:
        return node.type.numel * 5


@register
class KqMask(Op):
    """Mask over physical cells ``first .. first+ne0-1``: 0 where the token sees the cell, else minus infinity."""

    name = "kq_mask"
    operands = (
        Operand("cells", "concatenated cell lists [R]", "i32", max_rank=1),
        Operand("vis", "(base, lo, hi) per token [3, T]", "i32", min_rank=2, max_rank=2),
    )
    attrs = (
        Attr("ne0", "dim", "cells covered by a row (KV)"),
        Attr("first", "dim", "the first of them", 0, quiet=True),
    )

    def infer(self, operands: Sequence[Node], attrs: Mapping[str, Any]) -> TensorType:
        return TensorType("f32", (attrs["ne0"], _visible_type("kq_mask", operands[0].type, operands[1].type)))

    def evaluate(self, call: Call) -> np.ndarray:
        out = np.full(call.shape, -np.inf, np.float32)
        first = call.attrs["first"]
        for row, seen in zip(out, visible_cells("kq_mask", call.args[0], call.args[1], first + call.ne[0])):
            if seen.size and seen.min() < first:
                raise IRError(f"kq_mask: a token sees cell {int(seen.min())}, but the mask begins at cell {first}.")
            row[seen - first] = 0.0
        return out

    def flops(self, node: Node) -> IntDim:
        return 0


@register
class FlashAttn(Op):
    """Attention over the visible cells of a cache, without the score matrix.

    ``s = scale * (k . q)``, soft-capped when ``softcap`` is not 0, softmax over the token's visible cells, weighted sum of v. Query head
    ``h`` reads KV head ``h // (H / n_head_kv)``. A token that sees nothing gets zeros. ``v`` may be a view of some columns of the rows
    of ``k``. Sinks are those of ``soft_max``.
    """

    name = "flash_attn"
    operands = (
        Operand("q", "queries [D, H, T]", min_rank=3, max_rank=3),
        Operand("k", "key cache [D*G, C]", "any", min_rank=2, max_rank=2),
        Operand("v", "value cache [Dv*G, C]", "any", min_rank=2, max_rank=2),
        Operand("cells", "concatenated cell lists [R]", "i32", max_rank=1),
        Operand("vis", "(base, lo, hi) per token [3, T]", "i32", min_rank=2, max_rank=2),
        Operand("sinks", "one more logit per head [H]", "f32", max_rank=1, optional=True),
    )
    attrs = (
        Attr("scale", "float", "factor of the scores"),
        Attr("softcap", "float", "bound of the scores, 0 for none", 0.0),
        Attr("n_head_kv", "int", "KV heads (G)"),
    )

    def infer(self, operands: Sequence[Node], attrs: Mapping[str, Any]) -> TensorType:
        q, k, v, cells, vis = (o.type for o in operands[:5])
        d, heads, tokens = q.ne
        g = attrs["n_head_kv"]
        if g < 1 or not isinstance(heads, int) or heads % g:
            raise IRError(f"flash_attn: {heads} query heads cannot share n_head_kv = {g} KV heads.")
        if k.ne[0] != d * g:
            raise IRError(f"flash_attn: rows of the key cache {k} must hold {g} heads of {d} values.")
        if not isinstance(v.ne[0], int) or v.ne[0] % g:
            raise IRError(f"flash_attn: rows of the value cache {v} must hold {g} heads.")
        if k.ne[1] != v.ne[1]:
            raise IRError(f"flash_attn: key cache {k} and value cache {v} have different numbers of cells.")
        if _visible_type("flash_attn", cells, vis) != tokens:
            raise IRError(f"flash_attn: {vis} must have one column for each of the {tokens} tokens of {q}.")
        if attrs["softcap"] < 0:
            raise IRError(f"flash_attn: softcap = {attrs['softcap']} cannot be negative.")
        if len(operands) > 5:
            _check_sinks("flash_attn", operands[5].type, heads)
        return TensorType("f32", (v.ne[0] // g, heads, tokens))

    def evaluate(self, call: Call) -> np.ndarray:
        q, k, v, cells, vis = call.args[:5]
        _, heads, d = q.shape
        g, cap = call.attrs["n_head_kv"], call.attrs["softcap"]
        sinks = call.f64(5).reshape(g, heads // g, 1) if len(call.args) > 5 else None
        out = np.zeros(call.shape, np.float32)
        for t, seen in enumerate(visible_cells("flash_attn", cells, vis, k.shape[0])):
            keys = k[seen].astype(np.float64).reshape(len(seen), g, d)
            values = v[seen].astype(np.float64).reshape(len(seen), g, call.ne[0])
            grouped = q[t].astype(np.float64).reshape(g, heads // g, d)
            scores = call.attrs["scale"] * np.einsum("cgd,ghd->ghc", keys, grouped)
            if cap:
                scores = cap * np.tanh(scores / cap)
            out[t] = f32(np.einsum("ghc,cgd->ghd", softmax_rows(scores, sinks), values).reshape(heads, -1))
        return out

    def flops(self, node: Node) -> IntDim:
        """Upper bound: every token sees every cell, or every entry of its own list (``list_spans``)."""
        d, heads, tokens = node.operands[0].type.ne
        return (d + node.type.ne[0]) * heads * tokens * entries_per_token(node) * 2
