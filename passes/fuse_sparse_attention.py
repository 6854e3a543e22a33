"""``fuse-sparse-attention``: one softmax over rows of two kinds, each with values of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ggufc.ir import Graph, Node
from ggufc.ir.dims import IntDim
from ggufc.ir.layout import layout
from ggufc.ir.ops.cache import is_version
from ggufc.passes.base import PassResult, RulePass
from ggufc.passes.canonicalize import LAYOUT_RULES
from ggufc.passes.fuse_attention import fusion_allowed, stored_rows, superseded, visible_lists
from ggufc.passes.rules import Match, Rewriter, Rule, any_node, op, rule


class _Kind(NamedTuple):
    """Rows of one kind: what holds them, and their lists (cells, vis); no lists where every token sees all of them."""

    rows: Node
    lists: tuple[Node, Node] | None
    n_value: int


_PRODUCT = op("mul_mat", any_node(), any_node(), once=True)


@rule("sparse-attention", op("add", _PRODUCT, _PRODUCT))
def do_two_kinds(rw: Rewriter, node: Node, _m: Match) -> Node | None:
    """``V1 p1 + V2 p2`` with p1 and p2 parts of ``soft_max([K1 q | K2 q], [mask 1 | mask 2], sinks?)``."""
    products = node.operands
    parts = [layout(product.operands[1]) for product in products]
    p = parts[0].root
    if p.op.name != "soft_max" or parts[1].root is not p or len(p.operands) < 2 or node.type.rank != 3:
        return None
    scores, mask, *sinks = p.operands
    joined = all(n.op.name == "concat" and n.attrs["dim"] == 0 for n in (scores, mask))
    if not all(rw.used_once(product.operands[1]) for product in products):
        return None
    if not joined or rw.is_output(p) or set(rw.users(p)) != {product.operands[1] for product in products}:
        return None
    if parts[0].offset != 0:
        products, parts = products[::-1], parts[::-1]
    first, second = (s.operands for s in scores.operands) if all(s.op.name == "mul_mat" for s in scores.operands) else ((), ())
    if not first or first[1] is not second[1] or not _split(p, scores, mask, [part.ne for part in parts], parts[1].offset):
        return None
    q = first[1]
    if q.type.rank != 3 or not isinstance(q.type.ne[2], int):
        return None
    kinds = [
        _kind(rw, node, keys, masked, product.operands[0]) for keys, masked, product in zip((first[0], second[0]), mask.operands, products)
    ]
    if kinds[0] is None or kinds[1] is None or kinds[0].n_value != kinds[1].n_value:
        return None
    # Listed rows of a cache come first; rows that all tokens see whole are the second kind.
    a, b = (kinds[0], kinds[1]) if kinds[0].lists is not None else (kinds[1], kinds[0])
    if a.lists is None or (sinks and b.lists is None):
        return None
    fused = rw.add(
        "sparse_attn",
        _by_token(rw, q, f"{node.name}.q"),
        a.rows,
        *a.lists,
        b.rows,
        *(b.lists or ()),
        *sinks,
        name=f"{node.name}.fused",
        scale=p.attrs["scale"],
        n_value=a.n_value,
    )
    return rw.add("permute", fused, axes=(0, 2, 1))


def _split(p: Node, scores: Node, mask: Node, shapes: list[tuple[IntDim, ...]], offset: IntDim) -> bool:
    """Are the two parts of the probabilities those of the two kinds of rows, for all tokens and heads?"""
    rows = [s.type.ne[0] for s in scores.operands]
    wanted = [(n, *p.type.ne[1:]) for n in rows]
    return shapes == wanted and offset == rows[0] and [m.type.ne[0] for m in mask.operands] == rows


def _kind(rw: Rewriter, node: Node, keys: Node, mask: Node, values: Node) -> _Kind | None:
    if mask.op.name == "fill":
        n_value = _columns_of(keys, values) if mask.attrs["value"] == 0.0 and keys.type.rank == 2 and keys.dtype == "f32" else None
        return _Kind(keys, None, n_value) if n_value is not None else None
    return _cached(rw, node, keys, mask, values)


def _columns_of(rows: Node, values: Node) -> int | None:
    """How many numbers of ``rows`` [D, N] the matrix ``values`` [N, n] transposes, from the first on."""
    if values.op.name == "cont":
        values = values.operands[0]
    found = layout(values)
    n = values.type.ne[1]
    whole = rows.op.name == "concat" and rows.attrs["dim"] == 0 and found.root is layout(rows.operands[0]).root
    if not isinstance(n, int) or found.ne != (rows.type.ne[1], n) or found.offset != 0 or found.nb != (found.root.type.ne[0], 1):
        return None
    return n if (whole and found.root.type.ne[0] == n) or found.root is rows else None


def _cached(rw: Rewriter, node: Node, keys: Node, mask: Node, values: Node) -> _Kind | None:
    """Rows of a cache under a ``kq_mask``, whole or narrowed to a choice; values are the first numbers of the rows."""
    found = visible_lists(rw, mask)
    if found is None:
        return None
    cells, vis, first, ne0 = found
    k, v = stored_rows(keys), stored_rows(values)
    cache, n_value = k.root, v.ne[1]
    if not is_version(cache) or v.root is not cache or not isinstance(n_value, int) or superseded(rw, cache, node):
        return None
    row = cache.type.ne[0]
    if k.ne != (row, ne0) or k.nb != (1, row) or k.offset != first * row:
        return None
    if v.ne[0] != ne0 or v.nb != (row, 1) or v.offset != k.offset:
        return None
    return _Kind(cache, (cells, vis), n_value)


def _by_token(rw: Rewriter, q: Node, name: str) -> Node:
    """q [D, T, H] as [D, H, T]. Of joined parts each is turned, so that joining them puts the heads of a token side by side."""
    if q.op.name == "concat" and q.attrs["dim"] == 0 and rw.users(q):
        parts = [rw.add("permute", part, name=f"{part.name}.tokens", axes=(0, 2, 1)) for part in q.operands]
        return rw.add("concat", *parts, name=name, dim=0)
    return rw.add("permute", q, name=name, axes=(0, 2, 1))


@dataclass(frozen=True)
class FuseSparseAttention(RulePass):
    """Attention over two kinds of rows under one softmax -> ``sparse_attn`` over lists.

    Precondition: a valid graph, canonicalised, after ``fuse-indexer-topk``. Each kind is either rows of a cache under a ``kq_mask``, whole
    or narrowed to a choice, or rows of which every token sees all (learned sinks); values are the first numbers of the rows. Postcondition:
    no such pair is left. Nothing that grows with the cells of a cache but its lists is read or written: over choices the cost grows with
    the number chosen alone. Nothing is fused where the builder was told so (option ``flash_attn``).
    """

    name: ClassVar[str] = "fuse-sparse-attention"
    rules: ClassVar[tuple[Rule, ...]] = (do_two_kinds, *LAYOUT_RULES)

    def apply(self, graph: Graph) -> PassResult:
        """See the class."""
        return super().apply(graph) if fusion_allowed(graph) else PassResult(False, {r.name: 0 for r in self.rules})
