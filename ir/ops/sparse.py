"""Fused operators of sparse attention: rows chosen by an indexer, lists of rows, attention over lists.

Lists are those of ``kq_mask`` and ``flash_attn``: token t sees ``cells[base+lo : base+hi]`` for its column (base, lo, hi) of ``vis``.
Entries of -1 are holes that stand for no row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ggufc.ir.dims import IntDim
from ggufc.ir.errors import IRError
from ggufc.ir.ops.attention import softmax_rows
from ggufc.ir.ops.base import Attr, Call, Op, Operand, f32, register
from ggufc.ir.ops.select import largest
from ggufc.ir.types import TensorType

if TYPE_CHECKING:
    from ggufc.ir.graph import Node

UNMASKED_ABOVE = -1e29
"""Mask values above this leave a column visible; selection masks hide with -1e30, ordinary ones with minus infinity."""


def listed_rows(op: str, cells: np.ndarray, vis: np.ndarray, limit: int) -> list[np.ndarray]:
    """The rows each token sees, holes left out; raises ``IRError`` for ranges or rows that do not exist."""
    out = []
    for t, (base, lo, hi) in enumerate(vis.tolist()):
        if not 0 <= base + lo <= max(base + hi, base + lo) <= len(cells):
            raise IRError(f"{op}: token {t} sees entries {base + lo}..{base + hi} of a list with {len(cells)} entries.")
        seen = cells[base + lo : base + hi]
        seen = seen[seen != -1]
        if seen.size and (seen.min() < 0 or seen.max() >= limit):
            raise IRError(
                f"{op}: token {t} lists row {int(seen.min() if seen.min() < 0 else seen.max())}, but there are rows 0..{limit - 1}."
            )
        out.append(seen)
    return out


def _check_columns(op: str, vis: TensorType, tokens: IntDim) -> None:
    if vis.ne != (3, tokens):
        raise IRError(f"{op}: {vis} must hold (base, lo, hi) for each of the {tokens} tokens.")


_CELLS = Operand("cells", "concatenated lists of rows [R]", "i32", max_rank=1)
_VIS = Operand("vis", "(base, lo, hi) per token [3, T]", "i32", min_rank=2, max_rank=2)


@register
class IndexerTopK(Op):
    """The ``k`` listed rows with the largest ``sum_g weights[g] * max(0, q_g . keys[row])`` for each token, in the order of its list,
    then -1.

    Of equal scores the one listed first wins, or the one listed last with ``ties`` highest. The first ``sinks`` entries of a list, counted
    from its base, win over all scores where the token sees them. Where lists ascend these are the rows of ``top_k`` of the masked scores,
    without a tensor of rows x heads x tokens. The order makes the choice of a token that sees no more than ``k`` rows its list itself, so
    what attends to it adds up the same numbers in the same order as without a choice.
    """

    name = "indexer_topk"
    operands = (
        Operand("q", "queries [D, G, T]", min_rank=3, max_rank=3),
        Operand("weights", "weight of each head [G, T]", min_rank=2, max_rank=2),
        Operand("keys", "cached keys [D, C]", "any", min_rank=2, max_rank=2),
        _CELLS,
        _VIS,
    )
    attrs = (
        Attr("k", "int", "rows to choose"),
        Attr("sinks", "int", "entries at the base of a list that are always chosen", 0, quiet=True),
        Attr("ties", "str", "which of equal scores wins", "lowest", choices=("lowest", "highest"), quiet=True),
    )

    def infer(self, operands: Sequence[Node], attrs: Mapping[str, Any]) -> TensorType:
        q, weights, keys, _, vis = (o.type for o in operands)
        if q.ne[0] != keys.ne[0] or weights.ne != q.ne[1:]:
            raise IRError(f"indexer_topk: queries {q} do not fit keys {keys} or weights {weights}.")
        if attrs["k"] < 1:
            raise IRError(f"indexer_topk: k = {attrs['k']} must be at least 1.")
        if not 0 <= attrs["sinks"] <= attrs["k"]:
            raise IRError(f"indexer_topk: sinks = {attrs['sinks']} must lie between 0 and k = {attrs['k']}.")
        _check_columns("indexer_topk", vis, q.ne[2])
        return TensorType("i32", (attrs["k"], q.ne[2]))

    def evaluate(self, call: Call) -> np.ndarray:
        q, weights, keys, cells, vis = call.args
        out = np.full(call.shape, -1, np.int32)
        for t, rows in enumerate(listed_rows("indexer_topk", cells, vis, keys.shape[0])):
            table, scores = keys[rows].astype(np.float64), np.zeros(len(rows))
            for head, weight in zip(q[t].astype(np.float64), weights[t].astype(np.float64)):
                scores += weight * np.maximum(table @ head, 0.0)
            scores[: max(0, call.attrs["sinks"] - int(vis[t, 1]))] = np.inf
            best = largest(scores, call.attrs["k"], call.attrs["ties"])
            best = np.sort(best[best >= 0])
            out[t, : len(best)] = rows[best]
        return out

    def flops(self, node: Node) -> IntDim:
        """Upper bound: every token lists every row."""
        d, heads, tokens = node.operands[0].type.ne
        return (d + 1) * heads * tokens * node.operands[2].type.ne[1] * 2


@register
class MaskToIndex(Op):
    """Columns of each row of ``mask`` that it leaves visible, ascending, at most ``k``, then -1. More than ``k`` is an error."""

    name = "mask_to_index"
    operands = (Operand("mask", "0 for visible, -1e30 or less for hidden [N, T]", min_rank=2, max_rank=2),)
    attrs = (Attr("k", "int", "length of the lists"),)

    def infer(self, operands: Sequence[Node], attrs: Mapping[str, Any]) -> TensorType:
        if attrs["k"] < 1:
            raise IRError(f"mask_to_index: k = {attrs['k']} must be at least 1.")
        return TensorType("i32", (attrs["k"], operands[0].type.ne[1]))

    def evaluate(self, call: Call) -> np.ndarray:
        out = np.full(call.shape, -1, np.int32)
        for t, row in enumerate(call.args[0]):
            seen = np.flatnonzero(row > UNMASKED_ABOVE)
            if len(seen) > call.attrs["k"]:
                raise IRError(f"mask_to_index: token {t} sees {len(seen)} columns, more than the k = {call.attrs['k']} of a list.")
            out[t, : len(seen)] = seen
        return out

    def flops(self, node: Node) -> IntDim:
        return node.operands[0].type.numel


@register
class ListSpans(Op):
    """The ``vis`` of lists laid one after another: column t is (t*k, 0, n) for ``lists`` [k, T], n without the -1 at the end of a list.

    With it ``flash_attn`` walks the lists instead of whole cell lists, so that its cost grows with k alone.
    """

    name = "list_spans"
    operands = (Operand("lists", "one list of rows per token [k, T]", "i32", min_rank=2, max_rank=2),)

    def infer(self, operands: Sequence[Node], attrs: Mapping[str, Any]) -> TensorType:
        return TensorType("i32", (3, operands[0].type.ne[1]))

    def evaluate(self, call: Call) -> np.ndarray:
        t, k = call.args[0].shape
        lengths = ((call.args[0] >= 0) * np.arange(1, k + 1)).max(axis=1, initial=0)
        return np.stack([np.arange(t) * k, np.zeros(t), lengths], axis=1).astype(np.int32)

    def flops(self, node: Node) -> IntDim:
        return 0


@register
class SparseAttn(Op):
    """Attention of all heads over listed rows that are keys and, in their first ``n_value`` numbers, values.

    One softmax covers the rows of ``k`` that a token lists, then those of ``more`` that it lists in ``more_cells`` (all of ``more`` where
    that is not given), and a logit per head without a value (``sinks``, not scaled; with lists only). A token that sees nothing gets
    zeros. Rows of one kind alone are ``flash_attn``'s.
    """

    name = "sparse_attn"
    operands = (
        Operand("q", "queries [D, H, T]", min_rank=3, max_rank=3),
        Operand("k", "cached rows [D, C]", "any", min_rank=2, max_rank=2),
        _CELLS,
        _VIS,
        Operand("more", "rows of a second kind [D, N]", "any", min_rank=2, max_rank=2),
        Operand("more_cells", "lists of those [R2]", "i32", max_rank=1, optional=True),
        Operand("more_vis", "(base, lo, hi) per token [3, T]", "i32", min_rank=2, max_rank=2, optional=True),
        Operand("sinks", "one more logit per head [H]", max_rank=1, optional=True),
    )
    attrs = (Attr("scale", "float", "factor of the scores"), Attr("n_value", "int", "numbers of a row that are its value"))

    def infer(self, operands: Sequence[Node], attrs: Mapping[str, Any]) -> TensorType:
        q, k, _, vis, more, *lists = (o.type for o in operands)
        if k.ne[0] != q.ne[0] or more.ne[0] != q.ne[0]:
            raise IRError(f"sparse_attn: rows must have the {q.ne[0]} numbers of the queries {q}.")
        if len(lists) == 1:
            raise IRError("sparse_attn: more_cells needs more_vis as well.")
        if len(lists) == 3 and lists[2].ne[0] != q.ne[1]:
            raise IRError(f"sparse_attn: sinks {lists[2]} must hold one logit for each of the {q.ne[1]} heads.")
        if not isinstance(q.ne[0], int) or not 1 <= attrs["n_value"] <= q.ne[0]:
            raise IRError(f"sparse_attn: n_value = {attrs['n_value']} must lie between 1 and the row length {q.ne[0]}.")
        for columns in (vis, *lists[1:2]):
            _check_columns("sparse_attn", columns, q.ne[2])
        return TensorType("f32", (attrs["n_value"], *q.ne[1:]))

    def evaluate(self, call: Call) -> np.ndarray:
        q, k, cells, vis, more, *rest = call.args
        first = listed_rows("sparse_attn", cells, vis, k.shape[0])
        second = listed_rows("sparse_attn", rest[0], rest[1], more.shape[0]) if rest else [np.arange(len(more))] * len(q)
        sinks = rest[2].astype(np.float64)[:, None] if len(rest) > 2 else None
        out = np.zeros(call.shape, np.float32)
        for t, (mine, others) in enumerate(zip(first, second)):
            rows = np.concatenate([k[mine], more[others]]).astype(np.float64)
            p = softmax_rows(call.attrs["scale"] * (q[t].astype(np.float64) @ rows.T), sinks)
            out[t] = f32(p @ rows[:, : call.attrs["n_value"]])
        return out

    def flops(self, node: Node) -> IntDim:
        """Upper bound: every entry of the lists is seen by every token."""
        d, heads, tokens = node.operands[0].type.ne
        return (d + node.attrs["n_value"]) * heads * tokens * node.operands[2].type.ne[0] * 2
