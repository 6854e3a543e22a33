"""Attention of deepseek4: one key per token that is also its value, over a window of raw rows and compressed entries of older ones.

    q_h = rope(rms(Q_h qr)), qr = norm(attn_q_a x);  k = rope(norm(attn_kv x)), kept in ``blk.<i>.k``
    p   = softmax over [raw rows in the window | entries] of q_h . k / sqrt(D), with a sink logit per head
    o_h = rope^-1(sum p k);  y = attn_output_b of each group of heads' attn_output_a

Ratio 0 reads raw rows only; 128 (HCA) also every complete entry; 4 (CSA) the entries an indexer chooses. Rotation is that of the last
``n_rot`` values of a head; since values carry their own rotation, the output is turned back at the query's position.
"""

from __future__ import annotations

import math
from collections.abc import Container
from typing import Any

from ggufc.ir import Node, Sym, TensorType
from ggufc.ir.dims import IntDim
from ggufc.models.blocks import LINEAR_NODES, NORM_NODES, Builder
from ggufc.models.compressor import COMPRESS_NODES, TAIL_NODES, Compressor, compress, entry_input, entry_symbols, rotate_tail
from ggufc.models.deepseek4_hparams import (
    COMPRESSOR_STEMS,
    CSA,
    HCA,
    INDEXER_STEMS,
    DeepSeek4Layer,
    DeepSeek4Params,
    index_block,
)
from ggufc.models.errors import ModelError
from ggufc.models.hparams import RopeParams
from ggufc.models.hyper_connections import choose
from ggufc.models.indexer import CHOICE_NODES, SCORE_NODES, SELECTION_NODES, best_rows, index_scores, selection_mask
from ggufc.models.names import first_present
from ggufc.models.regions import REGION_ROWS, REGION_VISIBLE, compacted, region_mask, region_slots

_FIXED_NODES = 3 * LINEAR_NODES + 2 * NORM_NODES + 3 + 3 * TAIL_NODES + 4 + 12 + 12
"""Projections; norms; queries and row; rotations; store; attention over raw rows; grouped output."""
_ENTRY_NODES = 12
"""Store of entries, their view and decoded form, scores, joined scores and masks, two parts, product, sum; mask."""
_INDEXER_NODES = COMPRESS_NODES + 2 * LINEAR_NODES + TAIL_NODES + 8 + SCORE_NODES + CHOICE_NODES + SELECTION_NODES


def attention_nodes(layer: DeepSeek4Layer) -> int:
    """The most nodes ``attention`` adds."""
    entries = _ENTRY_NODES + COMPRESS_NODES if layer.ratio in (CSA, HCA) else 0
    return _FIXED_NODES + entries + (_INDEXER_NODES if layer.ratio == CSA else 0)


def key_compressor(present: Container[str], layer: DeepSeek4Layer, i: int) -> Compressor:
    """The compressor of a layer's keys under the tensor names that are present."""
    stem = first_present(present, [f"blk.{i}.{s}" for s in COMPRESSOR_STEMS], "_kv.weight")
    return Compressor(stem, f"blk.{i}.", i, layer.ratio, layer.head_dim, layer.ratio == CSA)


def index_compressor(present: Container[str], hp: DeepSeek4Params, i: int) -> Compressor:
    """The compressor of a CSA layer's indexer keys."""
    stem = first_present(present, [f"blk.{i}.{s}" for s in INDEXER_STEMS], "_kv.weight")
    return Compressor(stem, f"blk.{i}.indexer_", i, CSA, hp.n_index, True)


def attention(b: Builder, hp: DeepSeek4Params, x: Node, i: int, rows: Node | None) -> Node:
    """Attention of layer ``i`` on the normed input x [E, T] -> [E, T], or [E, O] of the wanted tokens."""
    layer, name, step = hp.layers[i], f"blk.{i}", b.step
    assert isinstance(layer, DeepSeek4Layer) and layer.rope is not None
    d, h = layer.head_dim, layer.n_head
    step.observe("flash_attn")  # passes fuse what follows only where the option allows it
    with b.block(f"{name}.attn", attention_nodes(layer)):
        qr = b.rms_norm(b.linear(x, f"{name}.attn_q_a"), f"{name}.attn_q_a_norm")
        q = b.add("reshape", b.linear(qr, f"{name}.attn_q_b"), name=f"{name}.attn_q.heads", ne=(d, h, step.T))
        q = b.add("rms_norm", q, name=f"{name}.attn_q.rms", eps=hp.norm_eps)
        q = rotate_tail(b, q, b.positions, layer.rope, f"{name}.attn_q.rope")
        q = b.add("permute", q, name=f"{name}.attn_q.permuted", axes=(0, 2, 1))
        small = compacted(layer, step)
        keys = [_read(b, _raw(b, x, layer, layer.rope, i), d, REGION_VISIBLE if small else step.KV, f"{name}.k")]
        masks = [region_mask(b, layer.window) if small else b.kq_mask(layer.window)]
        if layer.ratio in (CSA, HCA):
            entries, mask = _entries(b, hp, x, qr, layer, layer.rope, i)
            keys.append(entries)
            masks.append(mask)
        o = _weighted(b, q, keys, masks, layer, i)
        o = b.add("cont", b.add("permute", o, name=f"{name}.kqv.permuted", axes=(0, 2, 1)), name=f"{name}.kqv")
        o = rotate_tail(b, o, b.positions, layer.rope, f"{name}.kqv.rope", inverse=True)
        o = b.add("reshape", o, name=f"{name}.kqv_out", ne=(d * h, step.T))
        return _output(b, hp, o if rows is None else choose(b, o, rows, f"{name}.attn"), i)


def _raw(b: Builder, x: Node, layer: DeepSeek4Layer, rope: RopeParams, i: int) -> Node:
    """The layer's raw rows [D, C] after this batch's keys were written."""
    name, d, step = f"blk.{i}", layer.head_dim, b.step
    matrix = first_present(b.weights, [f"{name}.{n}" for n in KEY_NAMES], ".weight")
    k = b.add("mul_mat", b.weight(f"{matrix}.weight"), x, name=f"{name}.attn_kv")
    k = b.add("reshape", b.rms_norm(k, f"{name}.attn_kv_a_norm"), name=f"{name}.attn_k.head", ne=(d, 1, step.T))
    k = b.add("reshape", rotate_tail(b, k, b.positions, rope, f"{name}.attn_k.rope"), name=f"{name}.attn_k.rows", ne=(d, step.T))
    small = compacted(layer, step)
    cache = b.graph.cache(f"{name}.k", TensorType(str(step.observe("type_k")), (d, REGION_ROWS if small else step.C)))
    return b.add("set_rows", cache, k, region_slots(b) if small else b.kv_slots, name=f"{name}.k.store")


KEY_NAMES = ("attn_kv", "attn_kv_latent", "attn_kv_a_mqa")


def _read(b: Builder, cache: Node, width: int, rows: IntDim, name: str) -> Node:
    """Rows 0 .. rows-1 of a resource; block types decoded, since the same rows are read transposed as values."""
    view = b.add("view", cache, name=f"{name}.view", ne=(width, rows), nb=(1, width), offset=0)
    return b.add("cast", view, name=f"{name}.f32", dtype="f32") if view.type.quantised else view


def _entries(b: Builder, hp: DeepSeek4Params, x: Node, qr: Node, layer: DeepSeek4Layer, rope: RopeParams, i: int) -> tuple[Node, Node]:
    """Compressed entries [D, V] of a layer after this batch's were written, and which of them each token reads [V, T]."""
    name, ratio = f"blk.{i}", layer.ratio
    rows, _, visible, _ = (Sym(s) for s in entry_symbols(ratio))
    new = compress(b, x, key_compressor(b.weights, layer, i), rope)
    cache = b.graph.cache(f"{name}.entries", TensorType(str(b.step.observe("type_k")), (layer.head_dim, rows)))
    cache = b.add("set_rows", cache, new, entry_input(b, "entry_slots", ratio), name=f"{name}.entries.store")
    cells, seen = entry_input(b, "entry_cells", ratio), entry_input(b, "entry_visible", ratio)
    mask = b.shared(f"entry_mask_{ratio}", lambda mask_name: b.add("kq_mask", cells, seen, name=mask_name, ne0=visible))
    if ratio == CSA:
        mask = _choice(b, hp, x, qr, mask, rope, i)
    return _read(b, cache, layer.head_dim, visible, f"{name}.entries"), mask


def _choice(b: Builder, hp: DeepSeek4Params, x: Node, qr: Node, mask: Node, rope: RopeParams, i: int) -> Node:
    """The mask of entries narrowed to the indexer's best; its keys are compressed like the layer's, turned by a Hadamard transform.

    The keys are kept in every step, whether or not the choice matters in it.
    """
    name, step, n, d = f"blk.{i}.indexer", b.step, hp.n_index_head, hp.n_index
    rows, _, visible, _ = (Sym(s) for s in entry_symbols(CSA))
    block = index_block(d)
    new = b.add("hadamard", compress(b, x, index_compressor(b.weights, hp, i), rope), name=f"{name}.k.hadamard", n=block)
    cache = b.graph.cache(f"{name}_k", TensorType(str(step.observe("idx_type_k")), (d, rows)))
    cache = b.add("set_rows", cache, new, entry_input(b, "entry_slots", CSA), name=f"{name}_k.store")
    k = int(step.observe("dsa_top_k")) or hp.top_k
    if step.says(f"V{CSA}") and not step.observe(f"V{CSA} > {k}"):
        return mask
    q = b.add("reshape", b.linear(qr, f"{name}.attn_q_b"), name=f"{name}.q.heads", ne=(d, n, step.T))
    q = b.add("hadamard", rotate_tail(b, q, b.positions, rope, f"{name}.q.rope"), name=f"{name}.q.hadamard", n=block)
    w = b.add("scale", b.linear(x, f"{name}.proj"), name=f"{name}.weights", s=1.0 / math.sqrt(d * n))
    keys = b.add("view", cache, name=f"{name}_k.view", ne=(d, visible), nb=(1, d), offset=0)
    best = best_rows(b, index_scores(b, q, keys, w, name), mask, k, name)
    return selection_mask(b, mask, best, name)


def _weighted(b: Builder, q: Node, keys: list[Node], masks: list[Node], layer: DeepSeek4Layer, i: int) -> Node:
    """q [D, T, H] over all key blocks under one softmax, the keys being their own values -> [D, T, H]."""
    name = f"blk.{i}"
    _, n, h = q.type.ne
    parts = ("raw", "entries")
    scores = [b.add("mul_mat", k, q, name=f"{name}.kq.{part}") for k, part in zip(keys, parts)]
    s, mask = scores[0], masks[0]
    if len(keys) > 1:
        s = b.add("concat", s, scores[1], name=f"{name}.kq", dim=0)
        mask = b.add("concat", mask, masks[1], name=f"{name}.mask", dim=0)
    sinks = [b.vector(f"{name}.attn_sinks.weight")] if b.has(f"{name}.attn_sinks.weight") else []
    p = b.add("soft_max", s, mask, *sinks, name=f"{name}.kq_soft_max", scale=layer.attn_scale)
    total = p.type.ne[0]
    out: Node | None = None
    offset: IntDim = 0
    for k, part in zip(keys, parts):
        rows = k.type.ne[1]
        weights = p
        if len(keys) > 1:
            nb = (1, total, total * n)
            weights = b.add("view", p, name=f"{name}.kq_soft_max.{part}", ne=(rows, n, h), nb=nb, offset=offset)
        offset = rows
        values = b.add("transpose", k, name=f"{name}.v.{part}")
        o = b.add("mul_mat", values, weights, name=f"{name}.kqv.{part}")
        out = o if out is None else b.add("add", out, o, name=f"{name}.kqv.sum")
    assert out is not None
    return out


def _output(b: Builder, hp: DeepSeek4Params, o: Node, i: int) -> Node:
    """Heads [D*H, N] group by group through ``attn_output_a``, all groups through ``attn_output_b`` -> [E, N]."""
    name = f"blk.{i}.attn_output"
    n = o.type.ne[1]
    width = hp.layers[i].q_width
    groups, rank = output_groups(b.weights, hp, i)
    a = b.add("reshape", b.weight(f"{name}_a.weight"), name=f"{name}_a.matrices", ne=(width // groups, rank, groups))
    o = b.add("reshape", o, name=f"{name}.groups", ne=(width // groups, groups, n))
    o = b.add("mul_mat", a, b.add("permute", o, name=f"{name}.permuted", axes=(0, 2, 1)), name=f"{name}_a")
    o = b.add("cont", b.add("permute", o, name=f"{name}_a.permuted", axes=(0, 2, 1)), name=f"{name}_a.cont")
    return b.linear(b.add("reshape", o, name=f"{name}_a.joined", ne=(rank * groups, n)), f"{name}_b")


def output_groups(tensors: Any, hp: DeepSeek4Params, i: int) -> tuple[int, int]:
    """Groups of heads and values per group; tensor shapes tell what keys leave out. ``tensors`` maps names to things with ``ne``."""
    layer = hp.layers[i]
    width = layer.n_head * layer.head_dim
    shapes = {p: tuple(tensors[f"blk.{i}.attn_output_{p}.weight"].ne) for p in "ab"} if not (hp.groups and hp.output_rank) else {}
    groups = hp.groups or width // max(1, int(shapes["a"][0]))
    rank = hp.output_rank or int(shapes["b"][0]) // max(1, groups)
    if not groups or layer.n_head % groups or not rank:
        raise ModelError(f"layer {i} cannot cut its {layer.n_head} heads into {groups} groups of equal size for attn_output_a")
    return groups, rank
