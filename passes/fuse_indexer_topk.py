"""``fuse-indexer-topk``: an indexer's scores and the choice among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ggufc.ir import Graph, Node
from ggufc.ir.dims import IntDim
from ggufc.ir.layout import is_contiguous, layout
from ggufc.ir.ops.cache import is_version
from ggufc.passes.base import PassResult, RulePass
from ggufc.passes.canonicalize import LAYOUT_RULES
from ggufc.passes.fuse_attention import superseded
from ggufc.passes.rules import Match, Rewriter, Rule, any_node, op, rule

OPTION = "fidx"
"""Builder option that forbids the fusion; what the builder observed lies in ``graph.analysis["observations"]``."""

_HUGE = 1e19
"""A boost this large lifts a cell above every score."""


class _Scores(NamedTuple):
    q: Node  # [D, T, G]
    cache: Node
    weights: Node  # [G, T]


class _Visible(NamedTuple):
    cells: Node
    vis: Node
    ne0: IntDim
    sinks: int


@rule("indexer-topk", op("top_k", op("add", any_node("a"), any_node("b"))))
def do_choice(rw: Rewriter, node: Node, m: Match) -> Node | None:
    """``top_k(scores + mask)``, also with a boost of each token's first cell in the mask.

    The fused operator lists what it chose in another order and nothing in place of hidden cells, so whoever reads the choice must take
    it as a set.
    """
    if not _is_set(rw, node, node.type.ne[0]):
        return None
    for a, b in ((m["a"], m["b"]), (m["b"], m["a"])):
        scores, visible = _scores(rw, a), _visible(b)
        if scores is None or visible is None:
            continue
        if a.type.ne != (visible.ne0, scores.q.type.ne[1]) or superseded(rw, scores.cache, node):
            continue
        q = rw.add("permute", scores.q, name=f"{node.name}.q", axes=(0, 2, 1))
        return rw.add(
            "indexer_topk",
            q,
            scores.weights,
            scores.cache,
            visible.cells,
            visible.vis,
            k=node.attrs["k"],
            sinks=visible.sinks,
            ties=node.attrs["ties"],
        )
    return None


def _is_set(rw: Rewriter, chosen: Node, k: IntDim) -> bool:
    """Do all readers mark the elements they find, whatever their order, passing over negative ones? Columns may be taken or joined."""
    users = rw.users(chosen)
    if rw.is_output(chosen) or not users:
        return False
    for user in users:
        if user.op.name == "blend":
            if user.operands[1] is not chosen or user.operands[0] is chosen:
                return False
            continue
        columns = user.op.name in ("view", "cont") or (user.op.name == "concat" and user.attrs["dim"] == 1)
        if not columns or user.type.ne[0] != k or not _is_set(rw, user, k):
            return False
    return True


def _scores(rw: Rewriter, node: Node) -> _Scores | None:
    """``sum over heads of weights * relu(keys . q)``, in either spelling of the sum, read by nothing else."""
    weighted = _summed(rw, node)
    if weighted is None or weighted.op.name != "mul" or not rw.used_once(weighted):
        return None
    relu, factors = weighted.operands
    if relu.op.name != "relu" or not rw.used_once(relu):
        return None
    product = relu.operands[0]
    if product.op.name != "mul_mat" or not rw.used_once(product) or product.type.ne4[3] != 1:
        return None
    keys, q = product.operands
    n_cells, tokens, heads = product.type.ne4[:3]
    found = layout(keys)
    if not is_version(found.root) or found.offset != 0 or found.ne != (q.type.ne[0], n_cells) or found.nb != (1, found.root.type.ne[0]):
        return None
    if found.root.type.ne[0] != q.type.ne[0] or q.type.ne4[3] != 1:
        return None
    weights = layout(factors)
    if weights.root.type.ne != (heads, tokens) or weights.offset != 0 or weights.root.dtype != "f32":
        return None
    if (*weights.ne, 1, 1)[:4] != (1, tokens, heads, 1) or weights.nb[1:3] != (heads, 1):
        return None
    if q.type.rank > 3:
        q = rw.add("reshape", q, ne=q.type.ne[:3])
    return _Scores(q, found.root, weights.root)


def _summed(rw: Rewriter, node: Node) -> Node | None:
    """x [cells, T, heads] where ``node`` [cells, T] is its sum over heads: a ``sum_rows_ext``, or a ``sum_rows`` of a permuted copy."""
    total = node
    while total.is_view:
        if not is_contiguous(total) or not rw.used_once(total):
            return None
        total = total.operands[0]
    if total.op.name not in ("sum_rows", "sum_rows_ext") or not (total is node or rw.used_once(total)):
        return None
    x = total.operands[0]
    if total.op.name == "sum_rows_ext":
        return x if total.attrs["dim"] == 2 and x.type.ne4[:2] == (*node.type.ne, 1)[:2] and x.type.ne4[3] == 1 else None
    if x.op.name == "cont" and rw.used_once(x):
        x = x.operands[0]
    found = layout(x)
    cells, tokens = (*node.type.ne, 1)[:2]
    if (*found.ne, 1)[1:3] != (cells, tokens) or found.offset != 0 or found.nb[:3] != (cells * tokens, 1, cells):
        return None
    source = found.root
    return source if source.type.ne4 == (cells, tokens, found.ne[0], 1) else None


def _visible(node: Node) -> _Visible | None:
    """The cell lists behind a mask, and whether the first cell of each list is boosted."""
    mask, sinks = node, 0
    if node.op.name == "add":
        mask, boost = node.operands if node.operands[0].op.name == "kq_mask" else node.operands[::-1]
        if mask.op.name != "kq_mask" or not _boosts_first(boost, mask):
            return None
        sinks = 1
    if mask.op.name != "kq_mask" or mask.attrs["first"] != 0:
        return None
    cells, vis = mask.operands
    return _Visible(cells, vis, mask.attrs["ne0"], sinks)


def _boosts_first(boost: Node, mask: Node) -> bool:
    """``blend`` of a huge number into zeros at ``cells[base]`` of each token."""
    if boost.op.name != "blend" or boost.attrs["value"] < _HUGE:
        return False
    base, first = boost.operands
    if base.op.name != "fill" or base.attrs["value"] != 0.0 or first.op.name != "get_rows":
        return False
    cells, vis = mask.operands
    lists, bases = (layout(operand) for operand in first.operands)
    whole = lists.root is cells and lists.offset == 0 and lists.ne == (1, *cells.type.ne)
    return whole and bases.root is vis and bases.offset == 0 and bases.ne == vis.type.ne[1:] and bases.nb == (3,)


@dataclass(frozen=True)
class FuseIndexerTopk(RulePass):
    """Products of index keys and queries, ``relu``, head weights, their sum, mask and ``top_k`` -> ``indexer_topk``.

    Precondition: a valid graph, canonicalised; keys are the first rows of a cache, the mask comes from ``kq_mask``, and the choice is read
    as a set. Postcondition: no such sequence is left, and with it no tensor of cells x tokens x heads, unless something else reads
    its scores, or the builder was told not to fuse (option ``fidx``).
    """

    name: ClassVar[str] = "fuse-indexer-topk"
    rules: ClassVar[tuple[Rule, ...]] = (do_choice, *LAYOUT_RULES)

    def apply(self, graph: Graph) -> PassResult:
        """See the class."""
        if graph.analysis.get("observations", {}).get(OPTION, True) is False:
            return PassResult(False, {r.name: 0 for r in self.rules})
        return super().apply(graph)
