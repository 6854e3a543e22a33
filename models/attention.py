"""Grouped-query attention over a KV cache, for every plain transformer.

What a layer lacks it simply skips: biases, per-head norms and sinks where the file has no such tensor, rotation where
``LayerParams.rope`` is None, a bound of the scores where ``softcap`` is 0.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ggufc.formats.ggml_types import TYPES
from ggufc.ir import Node, TensorType
from ggufc.models.blocks import LINEAR_NODES, NORM_NODES, Builder
from ggufc.models.cache_types import deciding_option
from ggufc.models.caches import CacheInfo, layer_caches, rope_factors
from ggufc.models.errors import ModelError
from ggufc.models.hparams import HParams, LayerParams
from ggufc.models.weights import TensorSpec

PROJECTIONS = ("attn_q", "attn_k", "attn_v", "attn_output")

_PROJECTION_NODES = 4 * LINEAR_NODES
ROTATION_NODES = 2 + 2
"""Rotation of queries and keys; the factor tensor and its cast."""
_HEAD_NODES = 2 * (1 + NORM_NODES) + 1
"""Reshape and per-head norm of q and k; the reshape of v out of a packed product."""
CACHE_NODES = 2 * 3 + 2 + 4
"""Cache, store and view of K and V; the key's reshape before its store; the decoded V of block types; keys, values, queries and result
transformed."""
SCORE_NODES = 2 + 2 + 2 + 1 + 1
"""Permuted queries and scores; their scale and bound; sinks and their cast; soft_max; weighted sum."""
JOIN_NODES = 3 + 1
"""Permute, cont and reshape; the wanted rows."""
ATTENTION_NODES = _PROJECTION_NODES + _HEAD_NODES + ROTATION_NODES + CACHE_NODES + SCORE_NODES + JOIN_NODES


def attention_tensors(
    hp: HParams,
    i: int,
    *,
    biases: Collection[str] = (),
    optional_biases: Collection[str] = (),
    head_norms: bool = False,
    optional_head_norms: bool = False,
    sinks: bool = False,
) -> Iterator[TensorSpec]:
    """Tensors of layer ``i``. ``biases`` and ``optional_biases`` name projections of ``PROJECTIONS`` that must or may have one.

    ``head_norms`` asks for the norms of each head of q and k, ``optional_head_norms`` allows them, ``sinks`` asks for one more logit
    per head.
    """
    layer = hp.layers[i]
    shapes = zip(PROJECTIONS, ((hp.n_embd, layer.q_width), *[(hp.n_embd, layer.kv_width)] * 2, (layer.q_width, hp.n_embd)))
    for name, ne in shapes:
        yield TensorSpec(f"blk.{i}.{name}.weight", ne)
        if name in biases or name in optional_biases:
            yield TensorSpec(f"blk.{i}.{name}.bias", ne[1:], optional=name not in biases)
    if head_norms or optional_head_norms:
        for name in ("attn_q_norm", "attn_k_norm"):
            yield TensorSpec(f"blk.{i}.{name}.weight", (layer.head_dim,), optional=not head_norms)
    if sinks:
        yield TensorSpec(f"blk.{i}.attn_sinks.weight", (layer.n_head,))


def packed_attention_tensors(hp: HParams, i: int) -> Iterator[TensorSpec]:
    """Tensors of layer ``i`` where one matrix projects to all query heads, then all key heads, then all value heads."""
    layer = hp.layers[i]
    yield TensorSpec(f"blk.{i}.attn_qkv.weight", (hp.n_embd, layer.q_width + 2 * layer.kv_width))
    yield TensorSpec(f"blk.{i}.attn_output.weight", (layer.q_width, hp.n_embd))


def attention(b: Builder, x: Node, i: int, *, rows: Node | None = None) -> Node:
    """Attention of layer ``i`` on the normed input x [E, T] -> [E, T], or [E, O] when ``rows`` selects the wanted tokens.

    All tokens store their keys and values before any of them attends; selection happens before the output projection, since
    unwanted rows would only be thrown away.
    """
    layer = b.hp.layers[i]
    with b.block(f"blk.{i}.attn", ATTENTION_NODES):
        q, k, v = _project(b, x, i)
        q = _heads(b, q, i, "q", layer.n_head)
        k = _heads(b, k, i, "k", layer.n_head_kv)
        o = join_heads(b, _attend(b, q, k, v, i), i, layer_cache(b, i, "v").hadamard)
        if rows is not None:
            o = b.add("get_rows", o, rows, name=f"blk.{i}.attn_rows")
        return b.linear(o, f"blk.{i}.attn_output")


def _project(b: Builder, x: Node, i: int) -> tuple[Node, Node, Node]:
    """Queries [D*H, T], keys and values [D*G, T]; views of one product where the file packs the three matrices."""
    name, layer = f"blk.{i}", b.hp.layers[i]
    if not b.has(f"{name}.attn_qkv.weight"):
        q, k, v = (b.linear(x, f"{name}.{part}") for part in PROJECTIONS[:3])
        return q, k, v
    both = b.linear(x, f"{name}.attn_qkv")
    widths = (layer.q_width, layer.kv_width, layer.kv_width)
    q, k, v = b.parts(both, widths, tuple(f"{name}.{part}" for part in PROJECTIONS[:3]))
    return q, k, v


def _heads(b: Builder, x: Node, i: int, which: str, n_head: int) -> Node:
    """Split [D*n_head, T] into heads [D, n_head, T], normalise and rotate each as the layer asks."""
    layer, name = b.hp.layers[i], f"blk.{i}.attn_{which}"
    x = b.add("reshape", x, name=f"{name}.heads", ne=(layer.head_dim, n_head, b.step.T))
    if b.has(f"{name}_norm.weight"):
        x = b.rms_norm(x, f"{name}_norm")
    return rotate(b, x, layer, f"{name}.rope")


def rotate(b: Builder, x: Node, layer: LayerParams, name: str) -> Node:
    """x [D, n_head, T] turned by the tokens' positions; x itself where the layer turns nothing."""
    if layer.rope is None:
        return x
    factors = rope_factors(layer, b.weights, b.step)
    return b.add("rope", x, b.positions, *([b.vector(factors)] if factors else []), name=name, **layer.rope.attrs())


def layer_cache(b: Builder, i: int, part: str) -> CacheInfo:
    """The cache ``part`` of layer ``i``."""
    (info,) = (cache for cache in layer_caches(b.hp, i, b.weights, b.step) if cache.part == part)
    return info


def transformed(b: Builder, x: Node, block: int) -> Node:
    """``x`` under the transform a cache is stored in (``CacheInfo.hadamard``), or out of it; x itself where there is none."""
    return b.add("hadamard", x, name=f"{x.name}.hadamard", n=block) if block else x


def store(b: Builder, rows: Node, i: int, part: str) -> Node:
    """Write rows [width, T] into a cache of layer ``i`` at the tokens' cells; the new version of the cache [width, C]."""
    info = layer_cache(b, i, part)
    if info.head_dim % TYPES[info.dtype].block:
        raise ModelError(
            f"builder option {deciding_option(b.step, part, i, b.hp.n_layer)!r}: heads of {info.head_dim} values are no whole {info.dtype} "
            f"blocks of {TYPES[info.dtype].block}; choose f16"
        )
    if part == "v" and TYPES[info.dtype].block > 1 and not b.step.observe("flash_attn"):
        raise ModelError(
            f"builder option {deciding_option(b.step, 'v', i, b.hp.n_layer)!r}: without flash attention values are read column by "
            f"column, which {info.dtype} cannot be; choose f16, or leave flash_attn on"
        )
    cache = b.graph.cache(info.name, TensorType(info.dtype, (info.width, b.step.C)))
    return b.add("set_rows", cache, transformed(b, rows, info.hadamard), b.kv_slots, name=f"{info.name}.store")


def _attend(b: Builder, q: Node, k: Node, v: Node, i: int) -> Node:
    """Attention of q [D, H, T] over the cache after k [D, G, T] and v [D*G, T] were stored -> [D, T, H]."""
    layer, step, name = b.hp.layers[i], b.step, f"blk.{i}"
    d, g, width = layer.head_dim, layer.n_head_kv, layer.kv_width
    keys = store(b, b.add("reshape", k, name=f"{name}.attn_k.rows", ne=(width, step.T)), i, "k")
    values = decoded(b, store(b, v, i, "v"), f"{name}.v")
    kk = b.add("view", keys, name=f"{name}.k.view", ne=(d, step.KV, g), nb=(1, width, d), offset=0)
    vv = b.add("view", values, name=f"{name}.v.view", ne=(step.KV, d, g), nb=(width, 1, d), offset=0)
    q = transformed(b, q, layer_cache(b, i, "k").hadamard)
    return weighted_values(b, q, kk, vv, i)


def decoded(b: Builder, values: Node, name: str) -> Node:
    """Values of a block type as f32: a transposed view would cross blocks, which lie along rows."""
    return b.add("cast", values, name=f"{name}.f32", dtype="f32") if values.type.quantised else values


def weighted_values(b: Builder, q: Node, kk: Node, vv: Node, i: int, mask: Node | None = None) -> Node:
    """Softmax attention of q [D, H, T] over keys [D, KV, G] and transposed values [KV, Dv, G] -> [Dv, T, H], under ``mask`` [KV, T] or
    the layer's own.

    With a bound of the scores the scale comes before it and so cannot be left to the softmax.
    """
    layer, name = b.hp.layers[i], f"blk.{i}"
    b.step.observe("flash_attn")  # passes fuse what follows only where the option allows it
    scores = b.add("mul_mat", kk, b.add("permute", q, name=f"{name}.attn_q.permuted", axes=(0, 2, 1, 3)), name=f"{name}.kq")
    scale = layer.attn_scale
    if layer.softcap:
        scores = b.add("scale", scores, name=f"{name}.kq_scaled", s=scale)
        scores = b.add("softcap", scores, name=f"{name}.kq_capped", cap=layer.softcap)
        scale = 1.0
    sinks = [b.vector(f"{name}.attn_sinks.weight")] if b.has(f"{name}.attn_sinks.weight") else []
    mask = b.kq_mask(layer.window) if mask is None else mask
    p = b.add("soft_max", scores, mask, *sinks, name=f"{name}.kq_soft_max", scale=scale)
    return b.add("mul_mat", vv, p, name=f"{name}.kqv")


def join_heads(b: Builder, o: Node, i: int, block: int = 0) -> Node:
    """Heads side by side: o [Dv, T, H] -> [Dv*H, T], out of the values' transform of ``block`` values if there is one."""
    name = f"blk.{i}"
    width = o.type.ne[0] * b.hp.layers[i].n_head
    o = b.add("permute", o, name=f"{name}.kqv.permuted", axes=(0, 2, 1, 3))
    o = transformed(b, b.add("cont", o, name=f"{name}.kqv.cont"), block)
    return b.add("reshape", o, name=f"{name}.kqv_out", ne=(width, b.step.T))
