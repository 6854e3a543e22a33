"""Lightning indexer: a small set of heads scores every cached row, and attention reads the best ``k`` only.

    score[s, t] = sum_g weight[g, t] * max(0, q_g[t] . key[s])

Scores have no scale of their own and weights any sign. The choice enters attention as a mask, or as a list of rows to gather. The
composed form here holds a [KV, T, heads] tensor; the fused operator ``indexer_topk`` does not.
"""

from __future__ import annotations

from ggufc.ir import Node
from ggufc.ir.dims import IntDim
from ggufc.models.blocks import Builder

SCORE_NODES = 11
"""Permuted queries, product, relu, three for the weights, product, permute, cont, sum, reshape."""
CHOICE_NODES = 2
"""Masked scores, top_k."""
SELECTION_NODES = 3
"""fill, blend, sum with the mask."""
HIDDEN = -1e30
"""Added to the score of a row that was not chosen: finite, so that no difference of infinities can appear."""


def index_scores(b: Builder, q: Node, keys: Node, weights: Node, name: str) -> Node:
    """q [D, G, T], keys [D, KV], weights [G, T] -> [KV, T]."""
    _, heads, n = q.type.ne
    rows = keys.type.ne[1]
    s = b.add("mul_mat", keys, b.add("permute", q, name=f"{name}.q.permuted", axes=(0, 2, 1, 3)), name=f"{name}.kq")
    s = b.add("relu", s, name=f"{name}.kq_relu")
    w = b.add("reshape", weights, name=f"{name}.weights.rows", ne=(1, heads, n))
    w = b.add("permute", w, name=f"{name}.weights.permuted", axes=(0, 2, 1))
    s = b.add("mul", s, w, name=f"{name}.kq_weighted")
    s = b.add("cont", b.add("permute", s, name=f"{name}.kq.permuted", axes=(1, 2, 0)), name=f"{name}.kq.cont")
    return b.add("reshape", b.add("sum_rows", s, name=f"{name}.scores.sum"), name=f"{name}.scores", ne=(rows, n))


def best_rows(b: Builder, scores: Node, mask: Node, k: int, name: str, *, ties: str = "lowest") -> Node:
    """The ``k`` best visible rows of each token, i32 [k, T]; tokens that see fewer have hidden rows among them.

    The option ``fidx`` is looked at so that it stands among the observations: passes fuse scores and choice only where it allows that.
    """
    b.step.observe("fidx")
    return b.add("top_k", b.add("add", scores, mask, name=f"{name}.scores.masked"), name=f"{name}.top_k", k=k, ties=ties)


def selection_mask(b: Builder, mask: Node, chosen: Node, name: str) -> Node:
    """The mask [KV, T] with every row hidden that is not among ``chosen`` [k, T]. Built from the mask's shape, never by multiplying it."""
    hidden = b.add("fill", mask, name=f"{name}.hidden", value=HIDDEN)
    return b.add("add", mask, b.add("blend", hidden, chosen, name=f"{name}.selected", value=0.0), name=f"{name}.mask")


def columns(b: Builder, x: Node, first: IntDim, n: IntDim, name: str) -> Node:
    """Columns first .. first+n-1 of x [.., T] along its last dimension, as a view; x itself when that is all of it."""
    *inner, total = x.type.ne
    if n == total:
        return x
    nb: list[IntDim] = [1]
    for d in inner:
        nb.append(nb[-1] * d)
    return b.add("view", x, name=name, ne=(*inner, n), nb=tuple(nb), offset=nb[-1] * first)
