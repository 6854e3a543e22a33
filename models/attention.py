"""Grouped-query attention over a KV cache, for every plain transformer.

What a layer lacks it simply skips: biases and per-head norms where the file has no such tensor, rotation where ``LayerParams.rope``
is None.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ggufc.formats.ggml_types import TYPES
from ggufc.ir import Node, TensorType
from ggufc.models.blocks import LINEAR_NODES, NORM_NODES, Builder
from ggufc.models.errors import ModelError
from ggufc.models.hparams import HParams
from ggufc.models.weights import TensorSpec

PROJECTIONS = ("attn_q", "attn_k", "attn_v", "attn_output")
ROPE_FACTORS = "rope_freqs.weight"

_PROJECTION_NODES = 4 * LINEAR_NODES
_ROTATION_NODES = 2 * (1 + NORM_NODES + 1) + 2
"""Reshape, per-head norm and rotation of q and k; the factor tensor and its cast."""
_CACHE_NODES = 2 * 3 + 2
"""Cache, store and view of K and V; the key's reshape before its store; the decoded V of block types."""
_SCORE_NODES = 2 + 1 + 4 + 1
"""Permuted queries and scores; soft_max; weighted sum, its permute, cont and reshape; the wanted rows."""
ATTENTION_NODES = _PROJECTION_NODES + _ROTATION_NODES + _CACHE_NODES + _SCORE_NODES


def attention_tensors(
    hp: HParams, i: int, *, biases: Collection[str] = (), optional_biases: Collection[str] = (), head_norms: bool = False
) -> Iterator[TensorSpec]:
    """Tensors of layer ``i``. ``biases`` and ``optional_biases`` name projections of ``PROJECTIONS`` that must or may have one.

    ``head_norms`` asks for the norms of each head of q and k.
    """
    layer = hp.layers[i]
    shapes = zip(PROJECTIONS, ((hp.n_embd, layer.q_width), *[(hp.n_embd, layer.kv_width)] * 2, (layer.q_width, hp.n_embd)))
    for name, ne in shapes:
        yield TensorSpec(f"blk.{i}.{name}.weight", ne)
        if name in biases or name in optional_biases:
            yield TensorSpec(f"blk.{i}.{name}.bias", ne[1:], optional=name not in biases)
    if head_norms:
        yield TensorSpec(f"blk.{i}.attn_q_norm.weight", (layer.head_dim,))
        yield TensorSpec(f"blk.{i}.attn_k_norm.weight", (layer.head_dim,))


def attention(b: Builder, x: Node, i: int, *, rows: Node | None = None) -> Node:
    """Attention of layer ``i`` on the normed input x [E, T] -> [E, T], or [E, O] when ``rows`` selects the wanted tokens.

    All tokens store their keys and values before any of them attends; selection happens before the output projection, since
    unwanted rows would only be thrown away.
    """
    layer = b.hp.layers[i]
    with b.block(f"blk.{i}.attn", ATTENTION_NODES):
        q = b.linear(x, f"blk.{i}.attn_q")
        k = b.linear(x, f"blk.{i}.attn_k")
        v = b.linear(x, f"blk.{i}.attn_v")
        q = _heads(b, q, i, "q", layer.n_head)
        k = _heads(b, k, i, "k", layer.n_head_kv)
        o = _attend(b, q, k, v, i)
        if rows is not None:
            o = b.add("get_rows", o, rows, name=f"blk.{i}.attn_rows")
        return b.linear(o, f"blk.{i}.attn_output")


def _heads(b: Builder, x: Node, i: int, which: str, n_head: int) -> Node:
    """Split [D*n_head, T] into heads [D, n_head, T], normalise and rotate each as the layer asks."""
    layer, name = b.hp.layers[i], f"blk.{i}.attn_{which}"
    x = b.add("reshape", x, name=f"{name}.heads", ne=(layer.head_dim, n_head, b.step.T))
    if b.has(f"{name}_norm.weight"):
        x = b.rms_norm(x, f"{name}_norm")
    if layer.rope is None:
        return x
    factors = [b.vector(ROPE_FACTORS)] if b.has(ROPE_FACTORS) else []
    return b.add("rope", x, b.positions, *factors, name=f"{name}.rope", **layer.rope.attrs())


def _store(b: Builder, rows: Node, i: int, part: str) -> Node:
    """Write rows [D*G, T] into the layer's cache at the tokens' cells; the new version of the cache [D*G, C]."""
    dtype = str(b.step.observe(f"type_{part}"))
    name, head_dim = f"blk.{i}.{part}", b.hp.layers[i].head_dim
    if head_dim % TYPES[dtype].block:
        raise ModelError(
            f"builder option 'type_{part}': heads of {head_dim} values are no whole {dtype} blocks of {TYPES[dtype].block}; choose f16"
        )
    cache = b.graph.cache(name, TensorType(dtype, (b.hp.layers[i].kv_width, b.step.C)))
    return b.add("set_rows", cache, rows, b.kv_slots, name=f"{name}.store")


def _attend(b: Builder, q: Node, k: Node, v: Node, i: int) -> Node:
    """Softmax attention of q [D, H, T] over the cache after k [D, G, T] and v [D*G, T] were stored; heads joined to [D*H, T]."""
    layer, step, name = b.hp.layers[i], b.step, f"blk.{i}"
    d, g, width = layer.head_dim, layer.n_head_kv, layer.kv_width
    keys = _store(b, b.add("reshape", k, name=f"{name}.attn_k.rows", ne=(width, step.T)), i, "k")
    values = _store(b, v, i, "v")
    if values.type.quantised:
        # The transposed view of V would cross blocks, which lie along rows.
        values = b.add("cast", values, name=f"{name}.v.f32", dtype="f32")
    kk = b.add("view", keys, name=f"{name}.k.view", ne=(d, step.KV, g), nb=(1, width, d), offset=0)
    vv = b.add("view", values, name=f"{name}.v.view", ne=(step.KV, d, g), nb=(width, 1, d), offset=0)
    scores = b.add("mul_mat", kk, b.add("permute", q, name=f"{name}.attn_q.permuted", axes=(0, 2, 1, 3)), name=f"{name}.kq")
    p = b.add("soft_max", scores, b.kq_mask(layer.window), name=f"{name}.kq_soft_max", scale=layer.attn_scale)
    o = b.add("permute", b.add("mul_mat", vv, p, name=f"{name}.kqv"), name=f"{name}.kqv.permuted", axes=(0, 2, 1, 3))
    o = b.add("cont", o, name=f"{name}.kqv.cont")
    return b.add("reshape", o, name=f"{name}.kqv_out", ne=(layer.q_width, step.T))
