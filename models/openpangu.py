"""openpangu (openPangu-2.0-Flash): latent attention with sinks and convolutions, residual streams, sigmoid experts, windows and an indexer.

Layers that the window schedule names see a sliding window; the others, where the schedule exists, choose rows with an indexer. NextN heads
of the file are not part of this graph.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from ggufc.ir import Graph, Node
from ggufc.models.architecture import Architecture
from ggufc.models.blocks import EMBEDDING_NODES, HEAD_NODES, INPUT_NODES, MASK_NODES, NORM_NODES, Builder
from ggufc.models.caches import UNSHIFTABLE, CacheInfo
from ggufc.models.errors import ModelError
from ggufc.models.ffn import FFN_NODES, ffn, ffn_tensors
from ggufc.models.hparams import HParams
from ggufc.models.hyper_connections import CHOOSE_NODES, MIX_OUT_NODES, Site, choose, choose_gates, enter, gates, merge, mix_in, mix_out
from ggufc.models.moe import moe, moe_nodes, moe_tensors
from ggufc.models.openpangu_attention import WINDOW_FIRST, WINDOW_VIEW, attention, attention_nodes, check_cache_types
from ggufc.models.openpangu_hparams import ARCH, OpenPanguLayer, OpenPanguParams, read, remarks, with_tensors
from ggufc.models.openpangu_plan import plan
from ggufc.models.regions import REGION_NODES, REGION_ROWS, REGION_SYMBOLS, compacted
from ggufc.models.step import Step
from ggufc.models.weights import TensorSpec, Weights

SUBLAYERS = ("attn", "mlp")
EXTRA_INPUTS = 2
"""State rows read and written."""


def tensors(hp: HParams, present: Container[str]) -> Iterator[TensorSpec]:
    """Tensors of the base model; NextN heads are left out."""
    hp = _params(hp, present)
    e, s = hp.n_embd, hp.streams
    yield TensorSpec("token_embd.weight", (e, hp.n_vocab))
    yield TensorSpec("output_norm.weight", (e,))
    yield TensorSpec("output.weight", (e, hp.n_vocab))
    yield from _gate_tensors("merge_mhc", s * e, s, 1)
    for i, layer in enumerate(hp.layers):
        assert isinstance(layer, OpenPanguLayer)
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            yield TensorSpec(f"blk.{i}.{name}.weight", (e,))
        yield TensorSpec(f"blk.{i}.block_post_norm.weight", (s * e,), optional=True)
        for sub in SUBLAYERS:
            yield from _gate_tensors(f"blk.{i}.{sub}_mhc", s * e, s * (s + 2), 3)
        yield from _attention_tensors(hp, i, layer)
        if layer.n_expert:
            yield from moe_tensors(hp, i, present, selection_bias=True)
        else:
            yield from ffn_tensors(hp, i)


def _params(hp: HParams, present: Container[str]) -> OpenPanguParams:
    if not isinstance(hp, OpenPanguParams):
        raise ModelError(f"hyperparameters of architecture {hp.arch!r} are no {ARCH} ones")
    return with_tensors(hp, present)


def _gate_tensors(name: str, n_in: int, n_out: int, scales: int) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{name}_phi.weight", (n_in, n_out))
    yield TensorSpec(f"{name}_alpha", (scales,))
    yield TensorSpec(f"{name}_beta", (n_out,))
    yield TensorSpec(f"{name}_gamma", (n_in,))


def _attention_tensors(hp: OpenPanguParams, i: int, layer: OpenPanguLayer) -> Iterator[TensorSpec]:
    m, h, e, name = layer.latent, layer.n_head, hp.n_embd, f"blk.{i}"
    assert m is not None
    shapes: dict[str, tuple[int, ...]] = {
        "attn_q_a": (e, m.q_rank), "attn_q_a_norm": (m.q_rank,), "attn_q_b": (m.q_rank, h * layer.head_dim),
        "attn_kv_a_mqa": (e, m.row), "attn_kv_a_norm": (m.rank,), "attn_output": (h * m.n_value, e),
        "attn_qa_conv": (3, m.q_rank), "attn_compresskv_conv": (3, m.rank), "attn_o_conv": (3, h * m.n_value),
    }  # fmt: skip
    for tensor, ne in shapes.items():
        yield TensorSpec(f"{name}.{tensor}.weight", ne)
    yield TensorSpec(f"{name}.attn_k_b.weight", (m.n_nope, h * m.rank), also=((m.n_nope, m.rank, h),))
    yield TensorSpec(f"{name}.attn_v_b.weight", (m.rank, h * m.n_value), also=((m.rank, m.n_value, h),))
    yield TensorSpec(f"{name}.attn_param_sink_kv", (m.rank, hp.n_sink))
    yield TensorSpec(f"{name}.attn_param_sink_k_pe", (m.n_rot, hp.n_sink))
    if layer.indexer is not None:
        d, n = layer.indexer.head_dim, layer.indexer.n_head
        shapes = {"k": (e, d), "k_norm": (d,), "q_b": (m.q_rank, n * d), "weights_proj": (e, n)}
        for tensor, ne in shapes.items():
            yield TensorSpec(f"{name}.attn_indexer_{tensor}.weight", ne)


def caches(hp: HParams, weights: Weights, step: Step) -> Iterator[CacheInfo]:
    """Latent rows, indexer keys and histories of the convolutions."""
    hp = _params(hp, weights)
    type_k, idx_type = str(step.observe("type_k")), str(step.observe("idx_type_k"))
    check_cache_types(hp, type_k, str(step.observe("type_v")), idx_type)
    for i, layer in enumerate(hp.layers):
        m = layer.latent
        assert isinstance(layer, OpenPanguLayer) and m is not None
        rows = str(REGION_ROWS) if compacted(layer, step) else "C"
        yield CacheInfo(f"blk.{i}.k", i, "k", type_k, m.row, m.row, layer.window, dict(UNSHIFTABLE), rows)
        if layer.indexer is not None:
            d = layer.indexer.head_dim
            yield CacheInfo(f"blk.{i}.indexer_k", i, "indexer_k", idx_type, d, d, 0, dict(UNSHIFTABLE))
        for part, channels in (("conv_qa", m.q_rank), ("conv_kv", m.rank), ("conv_o", layer.n_head * m.n_value)):
            yield CacheInfo(f"blk.{i}.{part}", i, part, "f32", 2 * channels, 2 * channels, 0, {}, "S+1")


def build(b: Builder) -> Graph:
    """The unfused evaluation graph with the output ``logits`` f32 [n_vocab, O]."""
    hp = _params(b.hp, b.weights)
    step = b.step
    check_cache_types(hp, str(step.observe("type_k")), str(step.observe("type_v")), str(step.observe("idx_type_k")))
    b.graph.symbols = (*b.graph.symbols, "S", str(WINDOW_VIEW), str(WINDOW_FIRST), *REGION_SYMBOLS)
    plans = [plan(hp, layer, step) for layer in hp.layers if isinstance(layer, OpenPanguLayer)]
    if any(len(p.blocks) > 1 or len(p.score_blocks) > 1 for p in plans):
        step.fix_tokens()
    x = enter(b, b.embedding(), hp.streams)
    for i in range(hp.n_layer):
        x = _layer(b, hp, x, i, b.out_ids if i == hp.n_layer - 1 else None)
    return b.head(merge(b, x, _site(hp, "merge_mhc")))


def _site(hp: OpenPanguParams, prefix: str) -> Site:
    return Site(prefix, f"{prefix}_phi.weight", f"{prefix}_alpha", f"{prefix}_beta", hp.streams, hp.iterations, 0.0, f"{prefix}_gamma")


def _layer(b: Builder, hp: OpenPanguParams, x: Node, i: int, rows: Node | None) -> Node:
    """One layer on the streams x [E, S, T] -> [E, S, T], or [E, S, O] of the wanted tokens in the last layer."""
    name = f"blk.{i}"
    for sub in SUBLAYERS:
        site = _site(hp, f"{name}.{sub}_mhc")
        with b.block(site.name, site.nodes - MIX_OUT_NODES):
            g = gates(b, x, site)
            y = mix_in(b, x, g.read, site.name)
        if sub == "attn":
            y = attention(b, hp, b.rms_norm(y, f"{name}.attn_norm"), i, rows)
            y = b.rms_norm(y, f"{name}.post_attention_norm")
            if rows is not None:
                x, g = choose(b, x, rows, f"{name}.streams"), choose_gates(b, g, rows, f"{name}.chosen")
        else:
            y = b.rms_norm(y, f"{name}.ffn_norm")
            y = b.rms_norm((moe if hp.layers[i].n_expert else ffn)(b, y, i, "silu"), f"{name}.post_ffw_norm")
        x = mix_out(b, x, y, g, site.name)
    return _block_post_norm(b, x, i) if b.has(f"{name}.block_post_norm.weight") else x


def _block_post_norm(b: Builder, x: Node, i: int) -> Node:
    """All streams of a token normed at once."""
    e, s, n = x.type.ne
    name = f"blk.{i}.block_post_norm"
    flat = b.rms_norm(b.add("reshape", x, name=f"{name}.flat", ne=(e * s, n)), name)
    return b.add("reshape", flat, name=f"{name}.streams", ne=(e, s, n))


def nodes(hp: HParams, weights: Weights, step: Step) -> int:
    """The most nodes of a graph for ``step``: what the blocks promise, with the plan each layer follows."""
    hp = _params(hp, weights)
    merged = _site(hp, "merge_mhc")
    total = INPUT_NODES + EXTRA_INPUTS + REGION_NODES + 2 * MASK_NODES + EMBEDDING_NODES + 2 + HEAD_NODES + merged.merge_nodes
    for i, layer in enumerate(hp.layers):
        assert isinstance(layer, OpenPanguLayer)
        feed_forward = moe_nodes(layer) if layer.n_expert else FFN_NODES
        sites = sum(_site(hp, f"blk.{i}.{sub}_mhc").nodes for sub in SUBLAYERS)
        total += sites + attention_nodes(hp, layer, plan(hp, layer, step)) + feed_forward + 5 * NORM_NODES + 2 + 3 * CHOOSE_NODES
    return total


OPENPANGU = Architecture(ARCH, read, tensors, build, lambda layer: 0, caches, nodes, remarks)
