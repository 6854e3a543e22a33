"""glm-dsa (GLM-5): the latent attention and experts of deepseek2, and an indexer that narrows what each token reads.

With the option ``dsa`` some layers score all cells and keep the best (``glm_dsa_indexer``); the layers up to the next such one read the
same cells. Without it attention is dense, and nothing of the indexer is built. NextN layers at the end of the file are not part of this
graph.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

import msgspec

from ggufc.ir import Graph, Node
from ggufc.models.architecture import RESIDUAL_NODES, Architecture, common_tensors, norm_tensors
from ggufc.models.blocks import EMBEDDING_NODES, HEAD_NODES, INPUT_NODES, MASK_NODES, NORM_NODES, Builder
from ggufc.models.caches import UNSHIFTABLE, CacheInfo, layer_caches
from ggufc.models.errors import ModelError
from ggufc.models.ffn import ffn_tensors
from ggufc.models.glm_dsa_hparams import ARCH, GlmDsaLayer, read
from ggufc.models.glm_dsa_indexer import INDEXER_NODES, active, choose
from ggufc.models.hparams import HParams
from ggufc.models.latent import LATENT_ATTENTION_NODES, latent_attention, latent_attention_tensors
from ggufc.models.moe import moe_tensors
from ggufc.models.prenorm import feed_forward_nodes, pre_norm_decoder
from ggufc.models.step import Step
from ggufc.models.weights import TensorSpec, Weights


def tensors(hp: HParams, present: Container[str]) -> Iterator[TensorSpec]:
    """Tensors of the file. K and V maps come apart, experts merged, and every expert layer has a selection bias; indexers may be missing,
    which the option ``dsa`` then refuses. Those of layers that use another layer's choice are never read."""
    yield from common_tensors(hp, tied=False)
    for i, layer in enumerate(hp.layers):
        name = f"blk.{i}"
        yield from norm_tensors(hp, i, "attn_norm", "ffn_norm")
        split = {f"{name}.attn_k_b.weight", f"{name}.attn_v_b.weight"}
        yield from (spec for spec in latent_attention_tensors(hp, i, split) if spec.name != f"{name}.attn_kv_b.weight")
        if _layer(hp, i).full:
            yield from _indexer_tensors(hp, i)
        if layer.n_expert:
            # An empty file has no merged, packed or split forms to choose among: the plain one is asked for.
            yield from (msgspec.structs.replace(spec, optional=False) for spec in moe_tensors(hp, i, (), selection_bias=True))
        else:
            yield from ffn_tensors(hp, i)


def _indexer_tensors(hp: HParams, i: int) -> Iterator[TensorSpec]:
    layer = _layer(hp, i)
    p, name = layer.indexer, f"blk.{i}.indexer"
    assert layer.latent is not None
    yield TensorSpec(f"{name}.attn_q_b.weight", (layer.latent.q_rank, p.n_head * p.head_dim), optional=True)
    yield TensorSpec(f"{name}.attn_k.weight", (hp.n_embd, p.head_dim), optional=True)
    yield TensorSpec(f"{name}.k_norm.weight", (p.head_dim,), optional=True)
    yield TensorSpec(f"{name}.k_norm.bias", (p.head_dim,), optional=True)
    yield TensorSpec(f"{name}.proj.weight", (hp.n_embd, p.n_head), optional=True)


def _layer(hp: HParams, i: int) -> GlmDsaLayer:
    layer = hp.layers[i]
    if not isinstance(layer, GlmDsaLayer):
        raise ModelError(f"hyperparameters of architecture {hp.arch!r} are no {ARCH} ones")
    return layer


def caches(hp: HParams, weights: Weights, step: Step) -> Iterator[CacheInfo]:
    """Latent rows of every layer, and index keys of the layers that choose, where anything is chosen at all."""
    sparse = bool(step.observe("dsa"))
    idx_type = str(step.observe("idx_type_k"))
    for i in range(hp.n_layer):
        layer = _layer(hp, i)
        yield from layer_caches(hp, i, weights, step)
        if sparse and layer.full:
            d = layer.indexer.head_dim
            yield CacheInfo(f"blk.{i}.indexer_k", i, "indexer_k", idx_type, d, d, 0, dict(UNSHIFTABLE))


def build(b: Builder) -> Graph:
    """The unfused evaluation graph with the output ``logits`` f32 [n_vocab, O]."""
    return pre_norm_decoder(b, attend=_Attention(b))


class _Attention:
    """Attention of one layer after the other; the last choice made stays in force."""

    def __init__(self, b: Builder) -> None:
        self.sparse = active(b)
        self.mask: Node | None = None

    def __call__(self, b: Builder, x: Node, i: int, *, rows: Node | None = None) -> Node:
        if not self.sparse:
            return latent_attention(b, x, i, rows=rows)

        layer = _layer(b.hp, i)

        def select(x: Node, q_latent: Node) -> Node | None:
            if layer.full:
                self.mask = choose(b, x, q_latent, layer, i)
            return self.mask

        return latent_attention(b, x, i, rows=rows, select=select, select_nodes=INDEXER_NODES if layer.full else 0)


def nodes(hp: HParams, weights: Weights, step: Step) -> int:
    """The most nodes of a graph for ``step``: what the blocks promise."""
    sparse = bool(step.observe("dsa"))
    total = INPUT_NODES + MASK_NODES + EMBEDDING_NODES + HEAD_NODES
    for i in range(hp.n_layer):
        layer = _layer(hp, i)
        total += 2 * (NORM_NODES + RESIDUAL_NODES) + LATENT_ATTENTION_NODES + feed_forward_nodes(layer)
        total += INDEXER_NODES if sparse and layer.full else 0
    return total


GLM_DSA = Architecture(ARCH, read, tensors, build, lambda layer: 0, caches, nodes)
