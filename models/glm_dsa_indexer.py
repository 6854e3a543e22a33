"""glm-dsa's lightning indexer: which layers choose, what they keep per cell, and the mask their choice makes of the causal one.

    k = H [rope(k_0) | k_1], k = norm(attn_k n) * w + b          one key head of d values per cell, kept in ``blk.<i>.indexer_k``
    q = H [rope(q_0) | q_1]                                      h heads, from the queries' latent
    score[s, t] = sum_j w[j, t] max(0, q_j[t] . k[s]) / sqrt(d h)

H is the orthonormal Walsh-Hadamard transform: it cancels in the products and spreads outliers before keys are rounded. The rotated part
comes first, and keeps YaRN's magnitude, unlike in the attention beside it. The first cell of the token's own sequence that is still
present is always chosen. Spec: glm-dsa, sections 3 and 4.
"""

from __future__ import annotations

import math

from ggufc.formats.ggml_types import TYPES
from ggufc.ir import Node, TensorType
from ggufc.models.blocks import LINEAR_NODES, Builder
from ggufc.models.errors import ModelError
from ggufc.models.glm_dsa_hparams import GlmDsaLayer, IndexerParams
from ggufc.models.indexer import CHOICE_NODES, SCORE_NODES, SELECTION_NODES, best_rows, index_scores, selection_mask

SINK_BOOST = 1e20
"""Added to the score of a sequence's first cell. Finite: a hidden cell stays hidden."""

INDEXER_NODES = (3 * LINEAR_NODES + 5 + 5 + 3) + (5 + 1) + SCORE_NODES + CHOICE_NODES + SELECTION_NODES + 6
"""Projections; norm of the key with its weight, bias and their casts; heads, rotation and transform of both sides; cache, store, view and
the scale of the head weights; what follows from them; the mask with the boost."""


def active(b: Builder) -> bool:
    """Whether layers read only what is chosen for them."""
    if not b.step.observe("dsa"):
        return False
    if not b.step.observe("mla != 0"):
        raise ModelError("builder option 'dsa' needs the cache of latents; set builder option 'mla' to 1, 2 or 3")
    return True


def top_k(params: IndexerParams, b: Builder) -> int:
    """Cells a token keeps: the option ``dsa_top_k``, or the model's number."""
    return int(b.step.observe("dsa_top_k")) or params.top_k


TENSORS = ("attn_k.weight", "k_norm.weight", "k_norm.bias", "attn_q_b.weight", "proj.weight")
"""What ``blk.<i>.indexer`` has in a file that can choose."""


def choose(b: Builder, x: Node, q_latent: Node, layer: GlmDsaLayer, i: int) -> Node | None:
    """Stores the tokens' index keys; the mask of what is chosen [KV, T], None where everything is.

    ``x`` [E, T] is the layer's normed input, ``q_latent`` [rq, T] the queries' normed latent. A step without a size of ``KV`` gets a graph
    that chooses always: a choice of more cells than there are is a choice of all.
    """
    p, name, step = layer.indexer, f"blk.{i}.indexer", b.step
    for part in TENSORS:
        if not b.has(f"{name}.{part}"):
            raise ModelError(
                f"the file has no tensor '{name}.{part}', which layer {i} needs to choose cells; leave builder option 'dsa' off, or "
                "use a file with indexer tensors"
            )
    cache = _store_key(b, x, p, i)
    k = top_k(p, b)
    if step.says("KV") and not step.observe(f"KV > {k}"):
        return None
    q = b.linear(q_latent, f"{name}.attn_q_b")
    q = b.add("reshape", q, name=f"{name}.q.heads", ne=(p.head_dim, p.n_head, step.T))
    q = _transform(b, q, p, f"{name}.q")
    weights = b.add("scale", b.linear(x, f"{name}.proj"), name=f"{name}.weights", s=1.0 / math.sqrt(p.head_dim * p.n_head))
    keys = b.add("view", cache, name=f"{name}.k.view", ne=(p.head_dim, step.KV), nb=(1, p.head_dim), offset=0)
    scores = index_scores(b, q, keys, weights, name)
    chosen = best_rows(b, scores, _mask_with_sinks(b), k, name)
    return selection_mask(b, b.kq_mask(0), chosen, name)


def _store_key(b: Builder, x: Node, p: IndexerParams, i: int) -> Node:
    """The index keys [d, C] after this batch's were written."""
    name, step = f"blk.{i}.indexer", b.step
    dtype = str(step.observe("idx_type_k"))
    if p.head_dim % TYPES[dtype].block:
        raise ModelError(
            f"builder option 'idx_type_k': index keys of {p.head_dim} values are no whole {dtype} blocks of {TYPES[dtype].block}; choose "
            "f16"
        )
    k = b.add("norm", b.linear(x, f"{name}.attn_k"), name=f"{name}.k.plain_norm", eps=b.hp.norm_eps)
    k = b.add("mul", k, b.vector(f"{name}.k_norm.weight"), name=f"{name}.k.scaled_norm")
    k = b.add("add", k, b.vector(f"{name}.k_norm.bias"), name=f"{name}.k_norm")
    k = _transform(b, b.add("reshape", k, name=f"{name}.k.head", ne=(p.head_dim, 1, step.T)), p, f"{name}.k")
    k = b.add("reshape", k, name=f"{name}.k.row", ne=(p.head_dim, step.T))
    cache = b.graph.cache(f"blk.{i}.indexer_k", TensorType(dtype, (p.head_dim, step.C)))
    return b.add("set_rows", cache, k, b.kv_slots, name=f"blk.{i}.indexer_k.store")


def _transform(b: Builder, heads: Node, p: IndexerParams, name: str) -> Node:
    """Heads [d, n, T] with their first part turned, then transformed."""
    turned = b.add("rope", heads, b.positions, name=f"{name}.rope", **p.rope.attrs())
    return b.add("hadamard", turned, name=f"{name}.hadamard", n=p.head_dim)


def _mask_with_sinks(b: Builder) -> Node:
    """The causal mask [KV, T] with the boost on the first present cell of each token's sequence, one node for all layers.

    Cell lists are sorted by position, so that cell is the first entry of the token's list (``runtime-cache``, 6.7).
    """

    def make(name: str) -> Node:
        step, mask = b.step, b.kq_mask(0)
        visible = b.input("visible", "visible", (3, step.T), window=0)
        base = b.add("view", visible, name=f"{name}.base", ne=(step.T,), nb=(3,), offset=0)
        lists = b.add("reshape", b.kv_cells, name=f"{name}.lists", ne=(1, step.R))
        first = b.add("get_rows", lists, base, name=f"{name}.first")
        boost = b.add("blend", b.add("fill", mask, name=f"{name}.none", value=0.0), first, name=f"{name}.boost", value=SINK_BOOST)
        return b.add("add", mask, boost, name=name)

    return b.shared("indexer.sinks", make)
