"""Hyperparameters of glm-dsa: those of latent attention and routed experts, and the indexer's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ggufc.models.deepseek2 import LatentKeys, latent_layer, latent_params
from ggufc.models.errors import ModelError
from ggufc.models.experts import DenseLayers, resolve_experts
from ggufc.models.hparams import HParams, LayerParams, RopeParams
from ggufc.models.metadata import HeadDim, Heads, Width, read_keys

ARCH = "glm-dsa"
SOFTMAX = 1
"""Value of ``expert_gating_func`` where the key is absent; 0 means the same as 2, a sigmoid."""


class GlmDsaKeys(LatentKeys, frozen=True, kw_only=True):
    """Keys of the family beside those of latent attention (spec/glm-dsa.md, section 1)."""

    q_rank: Width = msgspec.field(name="attention.q_lora_rank")
    gating: Annotated[int, Meta(ge=0, le=2)] = msgspec.field(name="expert_gating_func", default=SOFTMAX)
    n_dense: DenseLayers = msgspec.field(name="leading_dense_block_count", default=0)
    n_nextn: Annotated[int, Meta(ge=0, le=4096)] = msgspec.field(name="nextn_predict_layers", default=0)
    n_index_head: Heads = msgspec.field(name="attention.indexer.head_count")
    index_dim: HeadDim = msgspec.field(name="attention.indexer.key_length")
    top_k: Annotated[int, Meta(ge=1, le=1 << 30)] = msgspec.field(name="attention.indexer.top_k")
    index_types: list[Literal["full", "shared"]] | None = msgspec.field(name="attention.indexer.types", default=None)


def chooses(i: int) -> bool:
    """Whether layer ``i`` chooses for itself and for the layers after it, where the file does not say."""
    return i <= 1 or i % 4 == 2


class IndexerParams(msgspec.Struct, frozen=True):
    """The lightning indexer: ``n_head`` heads of ``head_dim`` values, the first part of them turned by ``rope``, choose ``top_k`` cells."""

    n_head: int
    head_dim: int
    top_k: int
    rope: RopeParams


class GlmDsaLayer(LayerParams, frozen=True, kw_only=True):
    """One layer. A ``full`` one chooses cells; the others read what the nearest full one before them chose. The sizes in ``indexer`` are
    the same in all layers."""

    indexer: IndexerParams
    full: bool


def read(metadata: Mapping[str, Any]) -> HParams:
    """Hyperparameters of the layers that ordinary decoding runs; raises ``ModelError`` where keys contradict each other."""
    keys = read_keys(GlmDsaKeys, metadata, ARCH)
    n_layer = keys.n_layer - keys.n_nextn
    if n_layer < 1:
        raise ModelError(
            f"key {ARCH}.nextn_predict_layers is {keys.n_nextn}, which leaves none of the {keys.n_layer} layers of {ARCH}.block_count"
        )
    latent = latent_params(keys, ARCH)
    hp = resolve_experts(keys, metadata, ARCH, "norm", default_gate="sigmoid", head_dim=latent.n_nope + latent.n_rot)
    rope = hp.layers[0].rope
    if rope is None or keys.index_dim < latent.n_rot or keys.index_dim & (keys.index_dim - 1):
        raise ModelError(
            f"key {ARCH}.attention.indexer.key_length is {keys.index_dim}; it must be a power of two and hold the {latent.n_rot} values of "
            f"{ARCH}.rope.dimension_count"
        )
    indexer = IndexerParams(keys.n_index_head, keys.index_dim, keys.top_k, rope)
    full = _schedule(keys, n_layer)
    layers = tuple(_layer(latent_layer(hp.layers[i], latent, 0.0), indexer, full[i]) for i in range(n_layer))
    return msgspec.structs.replace(hp, n_layer=n_layer, layers=layers)


def _schedule(keys: GlmDsaKeys, n_layer: int) -> list[bool]:
    """Which layers choose: the file's own list, or the rule of the released models."""
    if keys.index_types is None:
        return [chooses(i) for i in range(n_layer)]
    full = [kind == "full" for kind in keys.index_types]
    if len(full) < n_layer or not full[0]:
        raise ModelError(
            f"key {ARCH}.attention.indexer.types has {len(full)} entries, the first of them {'full' if full and full[0] else 'shared'}; it "
            f"must describe all {n_layer} layers, and the first one must choose for itself"
        )
    return full[:n_layer]


def _layer(layer: LayerParams, indexer: IndexerParams, full: bool) -> GlmDsaLayer:
    fields = {name: getattr(layer, name) for name in LayerParams.__struct_fields__}
    return GlmDsaLayer(**fields, indexer=indexer, full=full)
