"""``fuse-attention``: scores, mask, softmax and weighted sum over a cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ggufc.formats.ggml_types import TYPES
from ggufc.ir import Graph, Node
from ggufc.ir.dims import IntDim
from ggufc.ir.layout import Layout, layout
from ggufc.ir.ops.cache import is_version, written_version
from ggufc.passes.base import PassResult, RulePass
from ggufc.passes.canonicalize import LAYOUT_RULES
from ggufc.passes.rules import Body, Match, Pattern, Rewriter, Rule, any_node, op, rule

OPTION = "flash_attn"
HIDDEN = -1e29
"""Mask values below this leave no probability."""

_HEADS_TO_ROWS = (0, 2, 1, 3)
"""[D, T, H] <-> [D, H, T]."""

_CHOSEN_MASK = op(
    "add",
    op("kq_mask", bind="mask"),
    op("blend", op("fill", bind="hidden"), any_node("chosen"), bind="selected"),
    bind="chosen_mask",
    swap=True,
)

_SCORES = op("mul_mat", any_node("kk"), any_node("qp"), once=True, bind="scores")


def _weighted_sum(scores: Pattern, sinks: bool) -> Pattern:
    others = (any_node("sinks"),) if sinks else ()
    return op("mul_mat", any_node("vv"), op("soft_max", scores, op("kq_mask", bind="mask"), *others, once=True, bind="p"))


def _with_and_without_sinks(name: str, scores: Pattern, body: Body) -> tuple[Rule, Rule]:
    return rule(name, _weighted_sum(scores, False))(body), rule(f"{name}-sinks", _weighted_sum(scores, True))(body)


def do_plain(rw: Rewriter, node: Node, m: Match) -> Node | None:
    """``mul_mat(V, soft_max(mul_mat(K, Q), mask; scale))``."""
    return _fuse(rw, node, m, m["p"].attrs["scale"], 0.0)


def do_softcap(rw: Rewriter, node: Node, m: Match) -> Node | None:
    """Scores bounded by ``cap * tanh(s / cap)`` before the mask; a scale in the softmax would come after the bound, so it must be 1."""
    return _fuse(rw, node, m, 1.0, m["cap"].attrs["cap"])


def do_softcap_scaled(rw: Rewriter, node: Node, m: Match) -> Node | None:
    """As before, with the score scale as a node of its own."""
    if m["s"].attrs["b"] != 0.0:
        return None
    return _fuse(rw, node, m, m["s"].attrs["s"], m["cap"].attrs["cap"])


@rule(
    "flash-attention-chosen",
    op(
        "mul_mat",
        any_node("vv"),
        op(
            "soft_max",
            _SCORES,
            _CHOSEN_MASK,
            once=True,
            bind="p",
        ),
    ),
)
def do_chosen(rw: Rewriter, node: Node, m: Match) -> Node | None:
    """A mask that hides all but a choice of cells per token: attention over lists of the chosen ones."""
    if not _hides(m):
        return None
    return _fuse(rw, node, m, m["p"].attrs["scale"], 0.0)


_SOFTCAP = op("softcap", _SCORES, once=True, bind="cap")
_SOFTCAP_SCALED = op("softcap", op("scale", _SCORES, once=True, bind="s"), once=True, bind="cap")
ATTENTION_RULES: tuple[Rule, ...] = (
    *_with_and_without_sinks("flash-attention", _SCORES, do_plain),
    *_with_and_without_sinks("flash-attention-softcap", _SOFTCAP, do_softcap),
    *_with_and_without_sinks("flash-attention-softcap-scaled", _SOFTCAP_SCALED, do_softcap_scaled),
    do_chosen,
)


def _fuse(rw: Rewriter, node: Node, m: Match, scale: float, softcap: float) -> Node | None:
    """The fused operator gives [Dv, H, T]; the product it replaces is [Dv, T, H], hence the permutation, which meets its inverse."""
    if softcap and m["p"].attrs["scale"] != 1.0:
        return None
    queries, kk, vv = m["qp"], m["kk"], m["vv"]
    ne0 = m["mask"].attrs["ne0"]
    heads = queries.type.ne4[2]
    k_heads = _cache_heads(kk, ne0, along_cells=1)
    if k_heads is None:
        return None
    v_heads = _cache_heads(vv, ne0, along_cells=0) or _part_of_rows(vv, ne0, k_heads)
    if v_heads is None or k_heads[1] != v_heads[1]:
        return None
    if any(superseded(rw, cache, node) for cache, _ in (k_heads, v_heads)):
        return None
    n_head_kv = k_heads[1]
    if queries.type.ne4[3] != 1 or not isinstance(heads, int) or heads % n_head_kv:
        return None
    cells, visible = _chosen_lists(rw, m["chosen"], m["mask"], m["chosen_mask"]) if "chosen" in m else m["mask"].operands
    values = v_heads[0]
    if _is_part(vv, values):
        # Latent attention: the values are some of the numbers of a key row.
        values = rw.add("view", values, ne=(vv.type.ne[1], values.type.ne[1]), nb=(1, values.type.ne[0]), offset=stored_rows(vv).offset)
    q = rw.add("permute", queries, name=f"{node.name}.q", axes=_HEADS_TO_ROWS[: max(3, queries.type.rank)])
    if q.type.rank > 3:
        q = rw.add("reshape", q, ne=q.type.ne[:3])
    fused = rw.add(
        "flash_attn",
        q,
        k_heads[0],
        values,
        cells,
        visible,
        m.get("sinks"),
        scale=scale,
        softcap=softcap,
        n_head_kv=n_head_kv,
        name=f"{node.name}.fused",
    )
    return rw.add("permute", fused, axes=_HEADS_TO_ROWS[: max(3, node.type.rank)])


def _chosen_lists(rw: Rewriter, chosen: Node, mask: Node, chosen_mask: Node) -> tuple[Node, Node]:
    """The lists of chosen cells laid one after another, and their spans.

    ``indexer_topk`` of the same cell lists chose visible cells only. Any other choice may hold hidden ones: there the mask says what it
    left over, in the order of the cells.
    """
    lists = chosen
    if lists.op.name != "indexer_topk" or lists.operands[3:5] != mask.operands:
        lists = rw.add("mask_to_index", chosen_mask, name=f"{lists.name}.visible", k=lists.type.ne[0])
    k, tokens = lists.type.ne
    cells = rw.add("reshape", lists, name=f"{lists.name}.cells", ne=(k * tokens,))
    return cells, rw.add("list_spans", lists, name=f"{lists.name}.spans")


def visible_lists(rw: Rewriter, mask: Node) -> tuple[Node, Node, IntDim, IntDim] | None:
    """(cells, vis, first row, rows) of a ``kq_mask``, whole or narrowed to a choice per token; None for any other mask."""
    if mask.op.name == "kq_mask":
        return (*mask.operands, mask.attrs["first"], mask.attrs["ne0"])
    m = _CHOSEN_MASK.match(rw, mask)
    if m is None or not _hides(m) or m["mask"].attrs["first"] != 0:
        return None
    return (*_chosen_lists(rw, m["chosen"], m["mask"], mask), 0, m["mask"].attrs["ne0"])


def _hides(m: Match) -> bool:
    """Does the mask leave what was chosen, and hide all else?"""
    return m["hidden"].attrs["value"] <= HIDDEN and m["selected"].attrs["value"] == 0.0 and isinstance(m["chosen"].type.ne[0], int)


def fusion_allowed(graph: Graph) -> bool:
    """Whether the option ``flash_attn`` leaves attention to be fused."""
    return graph.analysis.get("observations", {}).get(OPTION, True) is not False


def superseded(rw: Rewriter, version: Node, node: Node) -> bool:
    """Is the cache written again before ``node``? Scores may have been computed earlier; a fused operator reads caches late."""
    return any(
        user.op.writes_cache and written_version(user) is version and rw.stands_before(user, node) for user in _through_views(rw, version)
    )


def _through_views(rw: Rewriter, node: Node) -> Iterator[Node]:
    for user in rw.users(node):
        yield user
        if user.is_view:
            yield from _through_views(rw, user)


def _cache_heads(view: Node, n_cells: IntDim, along_cells: int) -> tuple[Node, int] | None:
    """(cache version, KV heads) if ``view`` shows the first ``n_cells`` rows of a whole cache head by head.

    ``along_cells`` is the dimension that counts cells: 1 for keys [D, KV, G], 0 for values [KV, D, G].
    """
    found = stored_rows(view)
    cache = found.root
    if not is_version(cache):
        return None
    row = cache.type.ne[0]
    ne = (*found.ne, 1, 1)[:4]
    nb = (*found.nb, 0, 0)[:4]
    size, heads = ne[1 - along_cells], ne[2]
    if not (isinstance(row, int) and isinstance(size, int) and isinstance(heads, int)) or ne[3] != 1 or size * heads != row:
        return None
    if found.offset != 0 or ne[along_cells] != n_cells or nb[along_cells] != row:
        return None
    if nb[1 - along_cells] != 1 or (heads > 1 and nb[2] != size):
        return None
    return cache, heads


def stored_rows(view: Node) -> Layout:
    """The layout of ``view`` in what holds its numbers, also through their decoding.

    Builders decode quantised rows before they view them column by column; fused operators decode rows as they read them.
    """
    found = layout(view)
    if found.root.op.name == "cast" and found.root.dtype == "f32":
        rows = layout(found.root.operands[0])
        if rows.contiguous:
            return Layout(rows.root, found.offset + rows.offset, found.ne, found.nb)
    return found


def _is_part(values: Node, cache: Node) -> bool:
    return bool(values.type.ne4[1] * values.type.ne4[2] != cache.type.ne[0])


def _part_of_rows(values: Node, n_cells: IntDim, keys: tuple[Node, int]) -> tuple[Node, int] | None:
    """As ``_cache_heads`` for values [KV, Dv] that are some numbers of each row of the keys' cache, whose rows are a single head."""
    cache, heads = keys
    found = stored_rows(values)
    row, blocks = cache.type.ne[0], TYPES[cache.dtype].block
    size, offset = values.type.ne4[1], found.offset
    if found.root is not cache or heads != 1 or values.type.ne4[2:] != (1, 1):
        return None
    if not (isinstance(row, int) and isinstance(size, int) and isinstance(offset, int)) or offset + size > row:
        return None
    if found.ne[0] != n_cells or found.nb[:2] != (row, 1) or offset % blocks or size % blocks:
        return None
    return cache, 1


@dataclass(frozen=True)
class FuseAttention(RulePass):
    """The unfused attention sequence with a ``kq_mask`` -> ``flash_attn`` over the cell lists.

    Precondition: a valid graph in which keys and values are whole-row views of caches (any dtype, or decoded to f32), or values are part
    of the key rows of a single KV head, and the mask comes from ``kq_mask``, narrowed to a choice of cells per token or not. Sinks come
    along. Postcondition: no such sequence is left, unless something else reads its scores or probabilities. ``flash_attn`` never reads
    the padded ``KV``, so a graph in which all attention is fused serves every number of visible cells; over a choice its cost grows with
    the number chosen alone. Nothing is fused where the builder was told so (option ``flash_attn``).
    """

    name: ClassVar[str] = "fuse-attention"
    rules: ClassVar[tuple[Rule, ...]] = (*ATTENTION_RULES, *LAYOUT_RULES)

    def apply(self, graph: Graph) -> PassResult:
        """See the class."""
        return super().apply(graph) if fusion_allowed(graph) else PassResult(False, {r.name: 0 for r in self.rules})
