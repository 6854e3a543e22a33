"""deepseek4 (DeepSeek-V4): window and compressed attention, residual streams, experts chosen by score or by token.

The trunk only; predictor blocks at the end of a file are not part of this graph.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator
from typing import Any

from ggufc.ir import Graph, Node
from ggufc.models.architecture import Architecture
from ggufc.models.blocks import EMBEDDING_NODES, HEAD_NODES, INPUT_NODES, MASK_NODES, NORM_NODES, Builder
from ggufc.models.caches import UNSHIFTABLE, CacheInfo
from ggufc.models.compressor import entry_symbols
from ggufc.models.deepseek4_attention import KEY_NAMES, attention, attention_nodes, index_compressor, key_compressor, output_groups
from ggufc.models.deepseek4_hparams import ARCH, CSA, HCA, DeepSeek4Layer, DeepSeek4Params, read, remarks, with_tensors
from ggufc.models.errors import ModelError
from ggufc.models.ffn import Activation
from ggufc.models.hparams import HParams
from ggufc.models.hyper_connections import CHOOSE_NODES, MIX_OUT_NODES, Site, choose, choose_gates, enter, gates, merge, mix_in, mix_out
from ggufc.models.moe import SHARED, moe, moe_nodes, moe_tensors
from ggufc.models.names import first_present
from ggufc.models.regions import REGION_NODES, REGION_ROWS, REGION_SYMBOLS, compacted
from ggufc.models.step import Step
from ggufc.models.weights import TensorSpec, Weights

CACHE_TYPES = ("f16", "bf16", "q8_0")
SUBLAYERS = ("attn", "ffn")
_INPUTS_PER_RATIO = 10
"""Inputs about entries of one ratio, their flattened lists and mask."""
_HASH_NODES = 2
"""The table and its look-up."""


def tensors(hp: HParams, present: Container[str]) -> Iterator[TensorSpec]:
    """Tensors of the trunk under the names this file uses."""
    hp = with_tensors(hp, present)
    e, s = hp.n_embd, hp.streams
    yield TensorSpec("token_embd.weight", (e, hp.n_vocab))
    yield TensorSpec("output_norm.weight", (e,))
    yield TensorSpec("output.weight", (e, hp.n_vocab))
    yield from _gate_tensors(_head_stem(present), s * e, s, 1)
    for i, layer in enumerate(hp.layers):
        assert isinstance(layer, DeepSeek4Layer)
        for sub in SUBLAYERS:
            yield TensorSpec(f"blk.{i}.{sub}_norm.weight", (e,))
            yield from _gate_tensors(f"blk.{i}.hc_{sub}", s * e, s * (s + 2), 3)
        yield from _attention_tensors(hp, i, layer, present)
        if layer.hashed:
            yield TensorSpec(f"blk.{i}.ffn_gate_tid2eid.weight", (layer.n_expert_used, hp.n_vocab), integer=True)
        yield from moe_tensors(hp, i, present, selection_bias=not layer.hashed)


def _head_stem(present: Container[str]) -> str:
    return first_present(present, ("output_hc", "hc_head"), "_fn.weight")


def _gate_tensors(stem: str, n_in: int, n_out: int, scales: int) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{stem}_fn.weight", (n_in, n_out))
    yield TensorSpec(f"{stem}_scale.weight", (scales,))
    yield TensorSpec(f"{stem}_base.weight", (n_out,))


def _attention_tensors(hp: DeepSeek4Params, i: int, layer: DeepSeek4Layer, present: Container[str]) -> Iterator[TensorSpec]:
    e, d, h, name = hp.n_embd, layer.head_dim, layer.n_head, f"blk.{i}"
    yield TensorSpec(f"{name}.attn_sinks.weight", (h,), optional=True)
    yield TensorSpec(f"{name}.attn_q_a.weight", (e, hp.q_rank))
    yield TensorSpec(f"{name}.attn_q_a_norm.weight", (hp.q_rank,))
    yield TensorSpec(f"{name}.attn_q_b.weight", (hp.q_rank, d * h))
    yield TensorSpec(f"{first_present(present, [f'{name}.{n}' for n in KEY_NAMES], '.weight')}.weight", (e, d))
    yield TensorSpec(f"{name}.attn_kv_a_norm.weight", (d,))
    groups, rank = output_groups(present, hp, i)
    yield TensorSpec(f"{name}.attn_output_a.weight", (h * d // groups, rank * groups))
    yield TensorSpec(f"{name}.attn_output_b.weight", (rank * groups, e))
    if layer.ratio in (CSA, HCA):
        yield from key_compressor(present, layer, i).tensors(e)
    if layer.ratio == CSA:
        yield from index_compressor(present, hp, i).tensors(e)
        yield TensorSpec(f"{name}.indexer.proj.weight", (e, hp.n_index_head))
        yield TensorSpec(f"{name}.indexer.attn_q_b.weight", (hp.q_rank, hp.n_index * hp.n_index_head))


def caches(hp: HParams, weights: Weights, step: Step) -> Iterator[CacheInfo]:
    """Raw keys; per layer kind entries, indexer keys and rings. There are no values: keys serve as both."""
    hp = with_tensors(hp, weights)
    type_k, idx_type = check_cache_types(step)
    for i, layer in enumerate(hp.layers):
        assert isinstance(layer, DeepSeek4Layer)
        d, fixed = layer.head_dim, dict(UNSHIFTABLE)
        yield CacheInfo(f"blk.{i}.k", i, "k", type_k, d, d, layer.window, fixed, str(REGION_ROWS) if compacted(layer, step) else "C")
        if layer.ratio not in (CSA, HCA):
            continue
        rows = entry_symbols(layer.ratio)[0]
        yield CacheInfo(f"blk.{i}.entries", i, "entries", type_k, d, d, 0, fixed, rows)
        if layer.ratio == CSA:
            yield CacheInfo(f"blk.{i}.indexer_k", i, "indexer_k", idx_type, hp.n_index, hp.n_index, 0, fixed, rows)
        yield from key_compressor(weights, layer, i).caches()
        if layer.ratio == CSA:
            yield from index_compressor(weights, hp, i).caches()


def check_cache_types(step: Step) -> tuple[str, str]:
    """Types of keys and indexer keys; raises ``ModelError`` for one the family does not have. Without a V cache its type is ignored."""
    for option in ("type_k", "idx_type_k"):
        if step.observe(option) not in CACHE_TYPES:
            raise ModelError(f"builder option {option!r} is {step.observe(option)!r}; {ARCH} supports only {', '.join(CACHE_TYPES)}")
    if step.observe("k_hadamard"):
        raise ModelError(f"builder option 'k_hadamard': {ARCH} has no rotated K cache; leave it out")
    return str(step.observe("type_k")), str(step.observe("idx_type_k"))


def build(b: Builder) -> Graph:
    """The unfused evaluation graph with the output ``logits`` f32 [n_vocab, O]."""
    hp = with_tensors(b.hp, b.weights)
    check_cache_types(b.step)
    ratios = sorted({layer.ratio for layer in hp.layers if isinstance(layer, DeepSeek4Layer)} & {CSA, HCA})
    b.graph.symbols = (*b.graph.symbols, "S", *REGION_SYMBOLS, *(s for ratio in ratios for s in entry_symbols(ratio)))
    if b.step.observe("embd_input") and any(isinstance(layer, DeepSeek4Layer) and layer.hashed for layer in hp.layers):
        raise ModelError("builder option 'embd_input': layers of this model choose experts by token, so embeddings cannot replace tokens")
    x = enter(b, b.embedding(), hp.streams)
    for i in range(hp.n_layer):
        x = _layer(b, hp, x, i, b.out_ids if i == hp.n_layer - 1 else None)
    return b.head(merge(b, x, _site(hp, _head_stem(b.weights))))


def _site(hp: DeepSeek4Params, stem: str) -> Site:
    return Site(stem, f"{stem}_fn.weight", f"{stem}_scale.weight", f"{stem}_base.weight", hp.streams, hp.iterations, hp.stream_eps)


def _layer(b: Builder, hp: DeepSeek4Params, x: Node, i: int, rows: Node | None) -> Node:
    """One layer on the streams x [E, S, T] -> [E, S, T], or [E, S, O] of the wanted tokens in the last layer."""
    name, layer = f"blk.{i}", hp.layers[i]
    assert isinstance(layer, DeepSeek4Layer)
    # Experts chosen by token are looked up for all tokens of the batch; then rows are chosen after them.
    early = rows if not layer.hashed else None
    for sub in SUBLAYERS:
        site = _site(hp, f"{name}.hc_{sub}")
        with b.block(site.name, site.nodes - MIX_OUT_NODES):
            g = gates(b, x, site)
            y = mix_in(b, x, g.read, site.name)
        y = b.rms_norm(y, f"{name}.{sub}_norm")
        if sub == "attn":
            y = attention(b, hp, y, i, early)
            if early is not None:
                x, g = choose(b, x, early, f"{name}.streams"), choose_gates(b, g, early, f"{name}.chosen")
        else:
            y = moe(b, y, i, clamped(layer), _hashed_experts(b, i) if layer.hashed else None)
        x = mix_out(b, x, y, g, site.name)
    return choose(b, x, rows, f"{name}.streams") if rows is not None and early is None else x


def _hashed_experts(b: Builder, i: int) -> Node:
    """Experts i32 [U, T] that a table assigns to each token."""
    name = f"blk.{i}.ffn_gate_tid2eid"
    tokens = b.input("tokens", "tokens", (b.step.T,))
    return b.add("get_rows", b.weight(f"{name}.weight"), tokens, name=name)


def clamped(layer: DeepSeek4Layer) -> Activation:
    """``min(silu(gate), L) * clamp(up, -L, L)``: the bound is on the activated gate, from above only. The shared expert has its own L."""

    def act(b: Builder, gate: Node, up: Node, name: str, suffix: str) -> Node:
        limit = layer.limit_shared if suffix == SHARED else layer.limit
        gate = b.add("silu", gate, name=f"{name}gate{suffix}.silu")
        if limit:
            gate = b.add("clamp", gate, name=f"{name}gate{suffix}.clamped", min=-math.inf, max=limit)
            up = b.add("clamp", up, name=f"{name}up{suffix}.clamped", min=-limit, max=limit)
        return b.add("mul", gate, up, name=f"{name}hidden{suffix}")

    return act


def nodes(hp: HParams, weights: Weights, step: Step) -> int:
    """The most nodes of a graph: the sum of what the blocks promise."""
    hp = with_tensors(hp, weights)
    merged = _site(hp, "output_hc").merge_nodes
    total: Any = (
        INPUT_NODES + REGION_NODES + 2 * _INPUTS_PER_RATIO + MASK_NODES + EMBEDDING_NODES + 2 + HEAD_NODES + merged + 2 * CHOOSE_NODES
    )
    for i, layer in enumerate(hp.layers):
        assert isinstance(layer, DeepSeek4Layer)
        sites = sum(_site(hp, f"blk.{i}.hc_{sub}").nodes for sub in SUBLAYERS)
        total += sites + attention_nodes(layer) + moe_nodes(layer) + _HASH_NODES + 2 * NORM_NODES + 2 * CHOOSE_NODES
    return int(total)


DEEPSEEK4 = Architecture(ARCH, read, tensors, build, lambda layer: 0, caches, nodes, remarks)
