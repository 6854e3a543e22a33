"""Attention of openpangu: latent rows without a value cache, learned sinks, convolutions on queries, latents and outputs, an indexer.

    q_l = norm(conv(q_a x));  q_h = [K_h^T q_nope | rope(q_rope)];  row = [norm(conv(latent)) | rope(rest)], kept in ``blk.<i>.k``
    p   = softmax over [sinks | visible rows] of (. q_h) / sqrt(d_k);  o_h = V_h (sum over sinks and rows of p times their latent)
    y   = attn_output conv(o)

The sinks' latents are normed like the rows'; that is a weight-only subgraph, which the hoisting pass evaluates at compile time. Sinks stand
outside masks, windows and the indexer's choice. Which rows are read, and how, says ``openpangu_plan``.
"""

from __future__ import annotations

from dataclasses import dataclass

from ggufc.formats.ggml_types import TYPES
from ggufc.ir import Node, Sym, TensorType
from ggufc.ir.dims import IntDim
from ggufc.models.attention import rotate
from ggufc.models.blocks import LINEAR_NODES, NORM_NODES, Builder
from ggufc.models.conv import CONV_NODES, causal_conv
from ggufc.models.errors import ModelError
from ggufc.models.hparams import LatentParams
from ggufc.models.hyper_connections import choose
from ggufc.models.indexer import best_rows, columns, index_scores, selection_mask
from ggufc.models.openpangu_hparams import IndexerParams, OpenPanguLayer, OpenPanguParams
from ggufc.models.openpangu_plan import Block, Plan, plan, top_k
from ggufc.models.regions import REGION_ROWS, compacted, region_mask, region_slots

WINDOW_VIEW, WINDOW_FIRST = Sym("WV"), Sym("WO")
"""Rows of the view that windowed layers read, and its first row."""

_FIXED_NODES = 5 * LINEAR_NODES + 2 * NORM_NODES + 3 * CONV_NODES + 4 + 9 + 8 + 10 + 7
"""Projections, norms, convolutions, rotations; queries; the row and its store; sinks; joined heads and values."""
_INDEXER_NODES = 3 * LINEAR_NODES + NORM_NODES + 8
_READ_NODES = 6
"""Views and decoded form of keys and values, and a mask per window."""


@dataclass(frozen=True)
class Sinks:
    """Learned rows: ``rows`` [r+d_r, N_s] score, ``values`` [N_s, r] are summed."""

    rows: Node
    values: Node


def attention_nodes(hp: OpenPanguParams, layer: OpenPanguLayer, p: Plan) -> int:
    """The most nodes ``attention`` adds."""
    return _FIXED_NODES + (_INDEXER_NODES if layer.indexer is not None else 0) + _READ_NODES + p.nodes


def attention(b: Builder, hp: OpenPanguParams, x: Node, i: int, rows: Node | None) -> Node:
    """Attention of layer ``i`` on the normed input x [E, T] -> [E, T], or [E, O] of the wanted tokens."""
    layer, name = hp.layers[i], f"blk.{i}"
    assert isinstance(layer, OpenPanguLayer) and layer.latent is not None
    p = plan(hp, layer, b.step)
    b.step.observe("flash_attn")  # passes fuse what follows only where the option allows it
    with b.block(f"{name}.attn", attention_nodes(hp, layer, p)):
        q_l = b.linear(x, f"{name}.attn_q_a")
        q_l = b.rms_norm(causal_conv(b, q_l, f"{name}.attn_qa_conv.weight", f"{name}.conv_qa"), f"{name}.attn_q_a_norm")
        q = _queries(b, q_l, layer, layer.latent, i)
        cache = _store_row(b, x, layer, layer.latent, i)
        sinks = _sinks(b, hp, layer.latent, i)
        index = _Index(b, x, q_l, layer, i) if layer.indexer is not None else None
        o = _attend(b, hp, q, cache, sinks, index, layer, layer.latent, p, i)
        o = b.add(
            "mul_mat", _per_head(b, f"{name}.attn_v_b", (layer.latent.rank, layer.latent.n_value, layer.n_head)), o, name=f"{name}.kqv"
        )
        o = b.add("cont", b.add("permute", o, name=f"{name}.kqv.permuted", axes=(0, 2, 1, 3)), name=f"{name}.kqv.cont")
        o = b.add("reshape", o, name=f"{name}.kqv_out", ne=(layer.latent.n_value * layer.n_head, b.step.T))
        o = causal_conv(b, o, f"{name}.attn_o_conv.weight", f"{name}.conv_o")
        return b.linear(o if rows is None else choose(b, o, rows, f"{name}.attn"), f"{name}.attn_output")


def _per_head(b: Builder, name: str, ne: tuple[int, int, int]) -> Node:
    weight = b.weight(f"{name}.weight")
    return weight if len(weight.type.ne) == 3 else b.add("reshape", weight, name=f"{name}.matrices", ne=ne)


def _queries(b: Builder, q_l: Node, layer: OpenPanguLayer, m: LatentParams, i: int) -> Node:
    """Absorbed queries [r+d_r, T, H]."""
    name = f"blk.{i}.attn_q"
    q = b.linear(q_l, f"{name}_b")
    q = b.add("reshape", q, name=f"{name}.heads", ne=(layer.head_dim, layer.n_head, b.step.T))
    q_nope, q_rope = b.parts(q, (m.n_nope, m.n_rot), (f"{name}_nope", f"{name}_rope.plain"))
    q_nope = b.add("permute", q_nope, name=f"{name}_nope.permuted", axes=(0, 2, 1, 3))
    q_abs = b.add("mul_mat", _per_head(b, f"blk.{i}.attn_k_b", (m.n_nope, m.rank, layer.n_head)), q_nope, name=f"{name}_absorbed")
    q_rope = b.add("permute", rotate(b, q_rope, layer, f"{name}_rope"), name=f"{name}_rope.permuted", axes=(0, 2, 1, 3))
    return b.add("concat", q_abs, q_rope, name=f"{name}.rows", dim=0)


def _store_row(b: Builder, x: Node, layer: OpenPanguLayer, m: LatentParams, i: int) -> Node:
    """The layer's cache [r+d_r, rows] after this batch's rows [latent | rotated part] were written."""
    name, step = f"blk.{i}", b.step
    both = b.linear(x, f"{name}.attn_kv_a_mqa")
    c = b.add("view", both, name=f"{name}.attn_kv_a.latent", ne=(m.rank, step.T), nb=(1, m.row), offset=0)
    kp = b.add("view", both, name=f"{name}.attn_k_rope.plain", ne=(m.n_rot, 1, step.T), nb=(1, m.row, m.row), offset=m.rank)
    c = b.rms_norm(causal_conv(b, c, f"{name}.attn_compresskv_conv.weight", f"{name}.conv_kv"), f"{name}.attn_kv_a_norm")
    kp = b.add("reshape", rotate(b, kp, layer, f"{name}.attn_k_rope"), name=f"{name}.attn_k_rope.row", ne=(m.n_rot, step.T))
    row = b.add("concat", c, kp, name=f"{name}.attn_k.rows", dim=0)
    small = compacted(layer, step)
    cache = b.graph.cache(f"{name}.k", TensorType(str(step.observe("type_k")), (m.row, REGION_ROWS if small else step.C)))
    return b.add("set_rows", cache, row, region_slots(b) if small else b.kv_slots, name=f"{name}.k.store")


def _sinks(b: Builder, hp: OpenPanguParams, m: LatentParams, i: int) -> Sinks:
    name = f"blk.{i}.attn_param_sink"
    latents = b.add("rms_norm", _matrix(b, f"{name}_kv"), name=f"{name}.rms", eps=b.hp.norm_eps)
    latents = b.add("mul", latents, b.vector(f"blk.{i}.attn_kv_a_norm.weight"), name=f"{name}.latents")
    rows = b.add("concat", latents, _matrix(b, f"{name}_k_pe"), name=f"{name}.rows", dim=0)
    return Sinks(rows, b.add("cont", b.add("transpose", latents, name=f"{name}.transposed"), name=f"{name}.values"))


def _matrix(b: Builder, name: str) -> Node:
    weight = b.weight(name)
    return weight if weight.type.dtype == "f32" else b.add("cast", weight, name=f"{name}.f32", dtype="f32")


class _Index:
    """The indexer of one layer: stores its keys at once, gives scores and choices on demand."""

    def __init__(self, b: Builder, x: Node, q_l: Node, layer: OpenPanguLayer, i: int) -> None:
        assert layer.indexer is not None
        self.b, self.name, self.params = b, f"blk.{i}.indexer", layer.indexer
        self.k = top_k(layer, b.step)
        self._x, self._q_l, self._layer = x, q_l, layer
        self._queries: tuple[Node, Node] | None = None
        self._choice: Node | None = None
        self._parts: list[tuple[Block, Node]] = []
        d, step = self.params.head_dim, b.step
        key = b.rms_norm(b.linear(x, f"blk.{i}.attn_indexer_k"), f"blk.{i}.attn_indexer_k_norm")
        key = rotate(b, b.add("reshape", key, name=f"{self.name}.k.head", ne=(d, 1, step.T)), layer, f"{self.name}.k.rope")
        key = b.add("reshape", key, name=f"{self.name}.k.row", ne=(d, step.T))
        cache = b.graph.cache(f"blk.{i}.indexer_k", TensorType(str(step.observe("idx_type_k")), (d, step.C)))
        self.cache = b.add("set_rows", cache, key, b.kv_slots, name=f"blk.{i}.indexer_k.store")

    def choose(self, blocks: tuple[Block, ...], mask: Node) -> None:
        """Scores and choices of all tokens, ``blocks`` of them at a time; ``chosen`` then gives any part of them."""
        b, d = self.b, self.params.head_dim
        q, weights = self._prepared()
        keys = b.add("view", self.cache, name=f"{self.name}.k.view", ne=(d, mask.type.ne[0]), nb=(1, d), offset=0)
        for blk in blocks:
            name = f"{self.name}.{blk.first}" if len(blocks) > 1 else self.name
            part = (columns(b, node, blk.first, blk.n, f"{name}.{what}") for node, what in ((q, "q"), (weights, "w"), (mask, "mask_part")))
            q_part, w_part, mask_part = part
            w_part = w_part if w_part is weights else b.add("cont", w_part, name=f"{name}.w.cont")
            scores = index_scores(b, q_part, keys, w_part, name)
            best = best_rows(b, scores, mask_part, self.k, name, ties="highest")
            self._choice = best if self._choice is None else b.add("concat", self._choice, best, name=f"{name}.chosen", dim=1)

    def chosen(self, blk: Block) -> Node:
        """Rows chosen for the tokens of a block, i32 [k, n]."""
        assert self._choice is not None
        return columns(self.b, self._choice, blk.first, blk.n, f"{self.name}.chosen.{blk.first}")

    def _prepared(self) -> tuple[Node, Node]:
        """Rotated queries [D_i, H_i, T] and head weights [H_i, T]."""
        b, p, layer = self.b, self.params, self._layer
        prefix = self.name.replace(".indexer", ".attn_indexer")
        q = b.add("reshape", b.linear(self._q_l, f"{prefix}_q_b"), name=f"{self.name}.q.heads", ne=(p.head_dim, p.n_head, b.step.T))
        return rotate(b, q, layer, f"{self.name}.q.rope"), b.linear(self._x, f"{prefix}_weights_proj")


def _attend(
    b: Builder,
    hp: OpenPanguParams,
    q: Node,
    cache: Node,
    sinks: Sinks,
    index: _Index | None,
    layer: OpenPanguLayer,
    m: LatentParams,
    p: Plan,
    i: int,
) -> Node:
    """Weighted latents [r, T, H] of all queries, block by block."""
    name = f"blk.{i}"
    mask = _mask(b, layer, p)
    if index is not None and p.score_blocks:
        index.choose(p.score_blocks, mask)
    keys: Node | None = None
    out: Node | None = None
    for blk in p.blocks:
        at = f"{name}.{blk.first}" if len(p.blocks) > 1 else name
        if blk.gather:
            assert index is not None
            o = _gathered(b, q, cache, sinks, index.chosen(blk), layer, m, blk, at)
        else:
            if keys is None:
                keys = _keys(b, cache, layer, m, p, mask.type.ne[0], name)
            part = columns(b, mask, blk.first, blk.n, f"{at}.mask")
            if index is not None and p.score_blocks:
                part = selection_mask(b, part, index.chosen(blk), f"{at}.indexer")
            o = _masked(b, q, keys, sinks, part, layer, m, blk, at)
        out = o if out is None else b.add("concat", out, o, name=f"{at}.kqv.latents.upto", dim=1)
    assert out is not None
    return out


def _mask(b: Builder, layer: OpenPanguLayer, p: Plan) -> Node:
    """[rows, T]: 0 where a token sees a row. One node per window and region."""
    step, suffix = b.step, f"_w{layer.window}" if layer.window else ""
    if compacted(layer, step):
        return region_mask(b, layer.window)
    if not p.window_view:
        return b.kq_mask(layer.window)
    visible = b.input(f"visible{suffix}", "visible", (3, step.T), window=layer.window)
    return b.shared(
        f"kq_mask{suffix}_view", lambda name: b.add("kq_mask", b.kv_cells, visible, name=name, ne0=WINDOW_VIEW, first=WINDOW_FIRST)
    )


def _keys(b: Builder, cache: Node, layer: OpenPanguLayer, m: LatentParams, p: Plan, visible: IntDim, name: str) -> Node:
    """The rows that masks are about, [r+d_r, visible]; block types are decoded whole, since a transposed view would cross blocks."""
    first: IntDim = WINDOW_FIRST if p.window_view else 0
    keys = b.add("view", cache, name=f"{name}.k.view", ne=(m.row, visible), nb=(1, m.row), offset=first * m.row)
    return b.add("cast", keys, name=f"{name}.k.f32", dtype="f32") if keys.type.quantised else keys


def _masked(
    b: Builder, q: Node, keys: Node, sinks: Sinks, mask: Node, layer: OpenPanguLayer, m: LatentParams, blk: Block, name: str
) -> Node:
    """One block against [sinks | rows] under a mask -> [r, n, H]."""
    n_sink, h = sinks.rows.type.ne[1], layer.n_head
    q = _block_queries(b, q, blk, name)
    s_sink = b.add("mul_mat", sinks.rows, q, name=f"{name}.kq_sinks")
    s = b.add("concat", s_sink, b.add("mul_mat", keys, q, name=f"{name}.kq"), name=f"{name}.kq_all", dim=0)
    free = b.add("view", s_sink, name=f"{name}.kq_sinks.head", ne=(n_sink, blk.n), nb=(1, n_sink), offset=0)
    free = b.add("fill", free, name=f"{name}.sinks.mask", value=0.0)
    p = b.add(
        "soft_max", s, b.add("concat", free, mask, name=f"{name}.mask_all", dim=0), name=f"{name}.kq_soft_max", scale=layer.attn_scale
    )
    total, rows = p.type.ne[0], keys.type.ne[1]
    nb = (1, total, total * blk.n)
    p_sink = b.add("view", p, name=f"{name}.kq_soft_max.sinks", ne=(n_sink, blk.n, h), nb=nb, offset=0)
    p_rows = b.add("view", p, name=f"{name}.kq_soft_max.rows", ne=(rows, blk.n, h), nb=nb, offset=n_sink)
    values = b.add("view", keys, name=f"{name}.v.view", ne=(rows, m.rank), nb=(m.row, 1), offset=0)
    o = b.add("mul_mat", values, p_rows, name=f"{name}.kqv.rows")
    return b.add("add", o, b.add("mul_mat", sinks.values, p_sink, name=f"{name}.kqv.sinks"), name=f"{name}.kqv.latents")


def _gathered(
    b: Builder, q: Node, cache: Node, sinks: Sinks, chosen: Node, layer: OpenPanguLayer, m: LatentParams, blk: Block, name: str
) -> Node:
    """One block against [sinks | its chosen rows], each token its own -> [r, n, H]. Every token sees all of its chosen rows."""
    k, n_sink, h = chosen.type.ne[0], sinks.rows.type.ne[1], layer.n_head
    if chosen.is_view:
        chosen = b.add("cont", chosen, name=f"{name}.chosen")
    flat = b.add("reshape", chosen, name=f"{name}.chosen.flat", ne=(k * blk.n,))
    rows = b.add(
        "reshape", b.add("get_rows", cache, flat, name=f"{name}.k.gathered"), name=f"{name}.k.gathered.tokens", ne=(m.row, k, blk.n)
    )
    q = b.add("permute", _block_queries(b, q, blk, name), name=f"{name}.attn_q.tokens", axes=(0, 2, 1))
    s_sink = b.add("mul_mat", sinks.rows, q, name=f"{name}.kq_sinks")
    s = b.add("concat", s_sink, b.add("mul_mat", rows, q, name=f"{name}.kq"), name=f"{name}.kq_all", dim=0)
    p = b.add("soft_max", s, name=f"{name}.kq_soft_max", scale=layer.attn_scale)
    nb = (1, n_sink + k, (n_sink + k) * h)
    p_sink = b.add("view", p, name=f"{name}.kq_soft_max.sinks", ne=(n_sink, h, blk.n), nb=nb, offset=0)
    p_rows = b.add("view", p, name=f"{name}.kq_soft_max.rows", ne=(k, h, blk.n), nb=nb, offset=n_sink)
    values = b.add("view", rows, name=f"{name}.v.gathered", ne=(k, m.rank, blk.n), nb=(m.row, 1, m.row * k), offset=0)
    o = b.add("mul_mat", values, p_rows, name=f"{name}.kqv.rows")
    o = b.add("add", o, b.add("mul_mat", sinks.values, p_sink, name=f"{name}.kqv.sinks"), name=f"{name}.kqv.tokens")
    return b.add("permute", o, name=f"{name}.kqv.latents", axes=(0, 2, 1))


def _block_queries(b: Builder, q: Node, blk: Block, name: str) -> Node:
    """Queries of a block, [r+d_r, n, H]."""
    row, tokens, h = q.type.ne
    if blk.n == tokens:
        return q
    return b.add("view", q, name=f"{name}.attn_q.block", ne=(row, blk.n, h), nb=(1, row, row * tokens), offset=blk.first * row)


def check_cache_types(hp: OpenPanguParams, type_k: str, type_v: str, idx_type: str) -> None:
    """Raises ``ModelError`` for a cache type the family does not have. There is no value cache, but its option is checked all the same."""
    options = (
        ("type_k", type_k, ("f32", "f16", "q8_0")),
        ("type_v", type_v, ("f32", "f16")),
        ("idx_type_k", idx_type, ("f32", "f16", "bf16", "q8_0")),
    )
    for option, found, allowed in options:
        if found not in allowed:
            raise ModelError(f"builder option {option!r} is {found!r}; {hp.arch} supports {', '.join(allowed)}")
    layer = hp.layers[0]
    latent = layer.latent
    block = TYPES[type_k].block
    if latent is not None and (latent.rank % block or latent.row % block or layer.head_dim % block):
        raise ModelError(
            f"builder option 'type_k': {type_k} needs a latent ({latent.rank}), a row ({latent.row}) and heads ({layer.head_dim}) of whole "
            f"blocks of {block} values; choose f16 or f32"
        )
    indexer: IndexerParams | None = next((one.indexer for one in hp.layers if isinstance(one, OpenPanguLayer) and one.indexer), None)
    if indexer is not None and indexer.head_dim % TYPES[idx_type].block:
        raise ModelError(
            f"builder option 'idx_type_k': {idx_type} does not divide indexer keys of {indexer.head_dim} values; choose f16 or f32"
        )
