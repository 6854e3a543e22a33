"""Keys and hyperparameters of families that have experts after some dense layers, with routing the keys describe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from ggufc.models.errors import ModelError
from ggufc.models.hparams import DenseKeys, HParams, LayerParams, RopeMode, Routing, per_layer, resolve
from ggufc.models.metadata import Experts, Width

GATES: dict[int, Literal["softmax", "sigmoid"]] = {1: "softmax", 2: "sigmoid"}
"""Values of ``expert_gating_func``; 0 and an absent key leave it to the family."""

SCALE_IS_ONE = 1e-5
"""A weight scale this close to 1 is a rounded 1."""

DenseLayers = Annotated[int, msgspec.Meta(ge=0, le=4096)]
WeightScale = Annotated[float, msgspec.Meta(gt=0, le=1e4)]


class ExpertKeys(DenseKeys, frozen=True, kw_only=True):
    """The shared keys and those of experts; all but the first ``n_dense`` layers have them."""

    n_expert: Experts = msgspec.field(name="expert_count")
    n_expert_used: Experts = msgspec.field(name="expert_used_count")
    n_ff_exp: Width = msgspec.field(name="expert_feed_forward_length")
    n_shared: Experts = msgspec.field(name="expert_shared_count", default=0)
    n_dense: DenseLayers = msgspec.field(name="leading_dense_block_count", default=0)
    weights_scale: WeightScale = msgspec.field(name="expert_weights_scale")
    weights_norm: bool = msgspec.field(name="expert_weights_norm", default=False)
    gating: Annotated[int, msgspec.Meta(ge=0, le=2)] = msgspec.field(name="expert_gating_func", default=0)


def resolve_experts(
    keys: ExpertKeys,
    metadata: Mapping[str, Any],
    arch: str,
    mode: RopeMode,
    *,
    default_gate: Literal["softmax", "sigmoid"],
    head_dim: int | None = None,
) -> HParams:
    """As ``hparams.resolve``, with dense layers first and experts, possibly a shared one as wide as ``n_shared`` of them, in the rest."""
    n_dense = min(keys.n_dense, keys.n_layer)
    if n_dense < keys.n_layer and keys.n_expert == 0:
        raise ModelError(f"key {arch}.expert_count is 0, but {arch}.leading_dense_block_count leaves layers {n_dense} and above to experts")
    dense = per_layer(keys.n_ff, keys.n_layer, f"{arch}.feed_forward_length")[:n_dense]
    hp = resolve(keys, metadata, arch, mode, n_ff=(*dense, *[keys.n_ff_exp] * (keys.n_layer - n_dense)), head_dim=head_dim)
    scale = 1.0 if abs(keys.weights_scale - 1.0) <= SCALE_IS_ONE else keys.weights_scale
    routing = Routing(GATES.get(keys.gating, default_gate), normalise=keys.weights_norm, scale=scale)

    def layer_params(layer: LayerParams, i: int) -> LayerParams:
        if i < n_dense:
            return msgspec.structs.replace(layer, n_expert=0, n_expert_used=0)
        return msgspec.structs.replace(layer, routing=routing, n_ff_shared=keys.n_ff_exp * keys.n_shared)

    return msgspec.structs.replace(hp, layers=tuple(layer_params(layer, i) for i, layer in enumerate(hp.layers)))
