"""Latent attention (MLA): all heads' keys and values are linear maps of one short latent per cell, plus one rotated key part.

    c = norm(latent of x), kp = rope(rest of attn_kv_a_mqa x)        per token, shared by all heads
    k_h = [K_h c | kp], v_h = V_h c, q_h = [q_nope | rope(q_rope)]   per head; K_h, V_h are the parts of attn_kv_b

The two forms the option ``mla`` chooses between are equal in exact arithmetic:

- *Decompressed* (0): k_h and v_h are stored in an ordinary cache, ``n_head`` heads of ``n_nope + n_rot`` and of ``n_value`` values.
- *Absorbed* (1 to 3): the cache ``blk.<i>.k`` holds one row ``[c | kp]`` of ``rank + n_rot`` values per cell and there is no value
  cache. K_h moves to the query, ``q_h = [K_h^T q_nope | q_rope]``, and V_h behind the weighted sum of latents. Scores see the row as the
  single KV head of all query heads, ``view(k; ne=[rank+n_rot, KV, 1])``; values are its first ``rank`` numbers,
  ``view(k; ne=[KV, rank, 1], nb=[row, 1, row])`` at offset 0 of the same cache version. With the latent first that view begins on a
  block boundary for every cache type, and a fused operator can take ``k`` itself and ``view(k; ne=[rank, C], nb=[1, row])``.

K_h^T and V_h come from ``attn_k_b`` [n_nope, rank, H] and ``attn_v_b`` [rank, n_value, H], or are cut out of ``attn_kv_b``; the
transposition is a weight-only subgraph that the hoisting pass evaluates at compile time.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator

from ggufc.formats.ggml_types import TYPES
from ggufc.ir import Node
from ggufc.ir.dims import is_multiple
from ggufc.models.attention import (
    CACHE_NODES,
    JOIN_NODES,
    ROTATION_NODES,
    SCORE_NODES,
    decoded,
    join_heads,
    layer_cache,
    rotate,
    store,
    transformed,
    weighted_values,
)
from ggufc.models.blocks import LINEAR_NODES, NORM_NODES, Builder
from ggufc.models.cache_types import deciding_option
from ggufc.models.caches import absorbed
from ggufc.models.errors import ModelError
from ggufc.models.hparams import HParams, LatentParams
from ggufc.models.weights import TensorSpec

_QUERY_NODES = 2 * LINEAR_NODES + NORM_NODES + 3 + 4
"""Two products and the norm between them; heads and their two parts; absorbed product, two permutations, concat."""
_LATENT_NODES = LINEAR_NODES + 2 + NORM_NODES + 2
"""Latent, its two parts, norm; joined row."""
_MATRIX_NODES = 2 * 8
"""K and V: weight, its shape, cast, view or transposition, cont, cast, flat shape; the product with it."""
_DECOMPRESSED_NODES = 6
"""Heads of k and v out of their products, values side by side, the rotated part for every head, whole keys and rows."""
LATENT_ATTENTION_NODES = (
    _QUERY_NODES
    + _LATENT_NODES
    + _MATRIX_NODES
    + _DECOMPRESSED_NODES
    + ROTATION_NODES
    + CACHE_NODES
    + SCORE_NODES
    + JOIN_NODES
    + LINEAR_NODES
)


def latent_attention_tensors(hp: HParams, i: int, present: Container[str]) -> Iterator[TensorSpec]:
    """Tensors of layer ``i``: ``attn_kv_b``, or the pair ``attn_k_b`` and ``attn_v_b`` (in three or two dimensions), or all three."""
    name, layer = f"blk.{i}", hp.layers[i]
    m, h, e = _latent(hp, i), layer.n_head, hp.n_embd
    if m.q_rank:
        yield TensorSpec(f"{name}.attn_q_a.weight", (e, m.q_rank))
        yield TensorSpec(f"{name}.attn_q_a_norm.weight", (m.q_rank,))
        yield TensorSpec(f"{name}.attn_q_b.weight", (m.q_rank, layer.q_width))
    else:
        yield TensorSpec(f"{name}.attn_q.weight", (e, layer.q_width))
    yield TensorSpec(f"{name}.attn_kv_a_mqa.weight", (e, m.row))
    yield TensorSpec(f"{name}.attn_kv_a_norm.weight", (m.rank,))
    split = f"{name}.attn_k_b.weight" in present and f"{name}.attn_v_b.weight" in present
    yield TensorSpec(f"{name}.attn_kv_b.weight", (m.rank, h * (m.n_nope + m.n_value)), optional=split)
    if split:
        yield TensorSpec(f"{name}.attn_k_b.weight", (m.n_nope, m.rank, h), also=((m.n_nope, h * m.rank),))
        yield TensorSpec(f"{name}.attn_v_b.weight", (m.rank, m.n_value, h), also=((m.rank, h * m.n_value),))
    yield TensorSpec(f"{name}.attn_output.weight", (h * m.n_value, e))


Select = Callable[[Node, Node], Node | None]
"""``select(x, q_latent)``: the mask [KV, T] that a layer attends under, None for its own; from its normed input and the queries' latent."""


def latent_attention(b: Builder, x: Node, i: int, *, rows: Node | None = None, select: Select | None = None, select_nodes: int = 0) -> Node:
    """Latent attention of layer ``i`` on the normed input x [E, T] -> [E, T], or [E, O] when ``rows`` selects the wanted tokens.

    ``select``, which adds at most ``select_nodes`` nodes, narrows what the tokens see.
    """
    with b.block(f"blk.{i}.attn", LATENT_ATTENTION_NODES + select_nodes):
        latent = _query_latent(b, x, i)
        q_nope, q_rope = _queries(b, latent, i)
        c, kp = _cell(b, x, i)
        mask = select(x, latent) if select is not None else None
        o = (_absorbed if absorbed(b.step) else _decompressed)(b, q_nope, q_rope, c, kp, i, mask)
        o = join_heads(b, o, i, 0 if absorbed(b.step) else layer_cache(b, i, "v").hadamard)
        if rows is not None:
            o = b.add("get_rows", o, rows, name=f"blk.{i}.attn_rows")
        return b.linear(o, f"blk.{i}.attn_output")


def _latent(hp: HParams, i: int) -> LatentParams:
    latent = hp.layers[i].latent
    if latent is None:
        raise ModelError(f"layer {i} of this {hp.arch} model has no latent attention")
    return latent


def _query_latent(b: Builder, x: Node, i: int) -> Node:
    """The queries' normed latent [q_rank, T]; x itself where queries are projected directly."""
    name = f"blk.{i}.attn_q_a"
    return b.rms_norm(b.linear(x, name), f"{name}_norm") if _latent(b.hp, i).q_rank else x


def _queries(b: Builder, latent: Node, i: int) -> tuple[Node, Node]:
    """The plain part [n_nope, H, T] (a view) and the rotated part [n_rot, H, T] of the queries."""
    name, layer, m = f"blk.{i}.attn_q", b.hp.layers[i], _latent(b.hp, i)
    q = b.linear(latent, f"{name}_b" if m.q_rank else name)
    q = b.add("reshape", q, name=f"{name}.heads", ne=(layer.head_dim, layer.n_head, b.step.T))
    q_nope, q_rope = b.parts(q, (m.n_nope, m.n_rot), (f"{name}_nope", f"{name}_rope.plain"))
    return q_nope, rotate(b, q_rope, layer, f"{name}_rope")


def _cell(b: Builder, x: Node, i: int) -> tuple[Node, Node]:
    """What a token adds to the cache: its normed latent [rank, T] and the rotated key part [n_rot, 1, T]."""
    name, m = f"blk.{i}.attn_kv_a", _latent(b.hp, i)
    both = b.linear(x, f"{name}_mqa")
    c = b.add("view", both, name=f"{name}.latent", ne=(m.rank, b.step.T), nb=(1, m.row), offset=0)
    kp = b.add("view", both, name=f"blk.{i}.attn_k_rope.plain", ne=(m.n_rot, 1, b.step.T), nb=(1, m.row, m.row), offset=m.rank)
    return b.rms_norm(c, f"{name}_norm"), rotate(b, kp, b.hp.layers[i], f"blk.{i}.attn_k_rope")


def _absorbed(b: Builder, q_nope: Node, q_rope: Node, c: Node, kp: Node, i: int, mask: Node | None) -> Node:
    """Attention of absorbed queries over rows [c | kp], values being their latents -> [n_value, T, H]."""
    name, m, step = f"blk.{i}", _latent(b.hp, i), b.step
    kp = b.add("reshape", kp, name=f"{name}.attn_k_rope.row", ne=(m.n_rot, step.T))
    keys = store(b, b.add("concat", c, kp, name=f"{name}.attn_k.rows", dim=0), i, "k")
    block = TYPES[keys.dtype].block
    if m.rank % block or m.n_rot % block:
        raise ModelError(
            f"builder option {deciding_option(step, 'k', i, b.hp.n_layer)!r}: a latent of {m.rank} values and {m.n_rot} rotated ones are "
            f"no whole {keys.dtype} blocks of {block}; choose f16"
        )
    q_nope = b.add("permute", q_nope, name=f"{name}.attn_q_nope.permuted", axes=(0, 2, 1, 3))
    q_abs = b.add("mul_mat", _key_matrices(b, i), q_nope, name=f"{name}.attn_q_absorbed")
    q_abs = b.add("permute", q_abs, name=f"{name}.attn_q_absorbed.permuted", axes=(0, 2, 1, 3))
    q = b.add("concat", q_abs, q_rope, name=f"{name}.attn_q.rows", dim=0)
    turned = layer_cache(b, i, "k").hadamard
    q = transformed(b, q, turned)
    kk = b.add("view", keys, name=f"{name}.k.view", ne=(m.row, step.KV, 1), nb=(1, m.row, m.row), offset=0)
    latents = decoded(b, keys, f"{name}.k")
    vv = b.add("view", latents, name=f"{name}.k.latents", ne=(step.KV, m.rank, 1), nb=(m.row, 1, m.row), offset=0)
    latents = transformed(b, weighted_values(b, q, kk, vv, i, mask), turned)
    return b.add("mul_mat", _value_matrices(b, i), latents, name=f"{name}.attn_v_b")


def _decompressed(b: Builder, q_nope: Node, q_rope: Node, c: Node, kp: Node, i: int, mask: Node | None) -> Node:
    """Attention over the keys and values of each head -> [n_value, T, H]."""
    name, layer, m, step = f"blk.{i}", b.hp.layers[i], _latent(b.hp, i), b.step
    h, d, v_width = layer.n_head, layer.head_dim, layer.n_head * m.n_value
    if b.has(f"{name}.attn_kv_b.weight"):
        both = b.add("mul_mat", b.weight(f"{name}.attn_kv_b.weight"), c, name=f"{name}.attn_kv_b")
        both = b.add("reshape", both, name=f"{name}.attn_kv_b.heads", ne=(m.n_nope + m.n_value, h, step.T))
        k_nope, v = b.parts(both, (m.n_nope, m.n_value), (f"{name}.attn_k_nope", f"{name}.attn_v.heads"))
        v = b.add("reshape", b.add("cont", v, name=f"{name}.attn_v.cont"), name=f"{name}.attn_v", ne=(v_width, step.T))
    else:
        kt = _transposed(b, _key_matrices(b, i), f"{name}.attn_k_b.transposed")
        kt = b.add("reshape", kt, name=f"{name}.attn_k_b.flat", ne=(m.rank, m.n_nope * h))
        k_nope = b.add("mul_mat", kt, c, name=f"{name}.attn_k_b")
        k_nope = b.add("reshape", k_nope, name=f"{name}.attn_k_nope", ne=(m.n_nope, h, step.T))
        vt = b.add("reshape", _value_matrices(b, i), name=f"{name}.attn_v_b.flat", ne=(m.rank, v_width))
        v = b.add("mul_mat", vt, c, name=f"{name}.attn_v")
    kp = b.add("repeat", kp, name=f"{name}.attn_k_rope.heads", ne=(m.n_rot, h, step.T))
    k = b.add("concat", k_nope, kp, name=f"{name}.attn_k", dim=0)
    keys = store(b, b.add("reshape", k, name=f"{name}.attn_k.rows", ne=(layer.kv_width, step.T)), i, "k")
    values = decoded(b, store(b, v, i, "v"), f"{name}.v")
    kk = b.add("view", keys, name=f"{name}.k.view", ne=(d, step.KV, h), nb=(1, layer.kv_width, d), offset=0)
    vv = b.add("view", values, name=f"{name}.v.view", ne=(step.KV, m.n_value, h), nb=(v_width, 1, m.n_value), offset=0)
    q = transformed(b, b.add("concat", q_nope, q_rope, name=f"{name}.attn_q.whole", dim=0), layer_cache(b, i, "k").hadamard)
    return weighted_values(b, q, kk, vv, i, mask)


def _key_matrices(b: Builder, i: int) -> Node:
    """K_h^T for every head, [n_nope, rank, H]."""
    name, m, h = f"blk.{i}", _latent(b.hp, i), b.hp.layers[i].n_head
    if b.has(f"{name}.attn_k_b.weight"):
        return _three_dimensional(b, f"{name}.attn_k_b", (m.n_nope, m.rank, h))
    whole = b.weight(f"{name}.attn_kv_b.weight")
    quantised = whole.type.quantised
    if quantised:
        whole = b.add("cast", whole, name=f"{name}.attn_kv_b.f32", dtype="f32")
    ne, nb = (m.rank, m.n_nope, h), (1, m.rank, m.rank * (m.n_nope + m.n_value))
    keys = b.add("view", whole, name=f"{name}.attn_kv_b.keys", ne=ne, nb=nb, offset=0)
    return _transposed(b, keys, f"{name}.attn_k_b.derived", requantise=quantised)


def _value_matrices(b: Builder, i: int) -> Node:
    """V_h for every head, [rank, n_value, H]; of ``attn_kv_b`` a view of whole rows, which no block type minds."""
    name, m, h = f"blk.{i}", _latent(b.hp, i), b.hp.layers[i].n_head
    if b.has(f"{name}.attn_v_b.weight"):
        return _three_dimensional(b, f"{name}.attn_v_b", (m.rank, m.n_value, h))
    ne, nb = (m.rank, m.n_value, h), (1, m.rank, m.rank * (m.n_nope + m.n_value))
    return b.add("view", b.weight(f"{name}.attn_kv_b.weight"), name=f"{name}.attn_kv_b.values", ne=ne, nb=nb, offset=m.rank * m.n_nope)


def _three_dimensional(b: Builder, name: str, ne: tuple[int, int, int]) -> Node:
    """A weight as one matrix per head; some files store all heads' rows in one matrix."""
    weight = b.weight(f"{name}.weight")
    return weight if len(weight.type.ne) == 3 else b.add("reshape", weight, name=f"{name}.matrices", ne=ne)


def _transposed(b: Builder, w: Node, name: str, requantise: bool = False) -> Node:
    """Each matrix of w [a, b, H] transposed, [b, a, H]. A block type cannot keep its blocks; q8_0 (f16 for odd lengths) takes its place."""
    if w.type.quantised:
        w, requantise = b.add("cast", w, name=f"{name}.f32", dtype="f32"), True
    w = b.add("cont", b.add("transpose", w, name=f"{name}.view"), name=name)
    if not requantise:
        return w
    dtype = "q8_0" if is_multiple(w.type.ne[0], TYPES["q8_0"].block) else "f16"
    return b.add("cast", w, name=f"{name}.{dtype}", dtype=dtype)
