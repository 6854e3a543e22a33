"""gemma3 (text): five sliding-window layers to one global layer, norms of each head of q and k.

Sliding layers turn with base 10000 unscaled whatever the keys say; the keys' base and scaling belong to the global layers.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Annotated, Any

import msgspec

from ggufc.ir import Graph
from ggufc.models.architecture import Architecture, common_tensors
from ggufc.models.attention import attention_tensors
from ggufc.models.blocks import Builder
from ggufc.models.errors import ModelError
from ggufc.models.ffn import ffn_tensors
from ggufc.models.gemma import sandwich_decoder, sandwich_nodes, sandwich_norm_tensors, scaled_by_embedding_width
from ggufc.models.hparams import DenseKeys, HParams, LayerParams, RopeParams, resolve
from ggufc.models.metadata import Positions, read_keys
from ggufc.models.weights import TensorSpec

GLOBAL_EVERY = 6
"""Layers 5, 11, ... see everything; the period is part of the architecture, not a key."""
LAYERS_27B = 62
"""The 27B model is known by its layer count."""
LOCAL_ROPE_BASE = 10000.0


class Gemma3Keys(DenseKeys, frozen=True, kw_only=True):
    """The shared keys and the window of the sliding layers (itself counted)."""

    window: Positions = msgspec.field(name="attention.sliding_window")
    n_expert: Annotated[int, msgspec.Meta(ge=0, le=0)] = msgspec.field(name="expert_count", default=0)


def read(metadata: Mapping[str, Any]) -> HParams:
    """Hyperparameters, with window, rotation and score scale of each layer."""
    keys = read_keys(Gemma3Keys, metadata, "gemma3")
    hp = resolve(keys, metadata, "gemma3", "neox")
    if hp.n_layer == LAYERS_27B:
        hp = scaled_by_embedding_width(hp)
    return msgspec.structs.replace(hp, layers=tuple(_layer_params(layer, keys, i) for i, layer in enumerate(hp.layers)))


def _layer_params(layer: LayerParams, keys: Gemma3Keys, i: int) -> LayerParams:
    rope = layer.rope
    if rope is None:
        raise ModelError(f"layer {i} of a gemma3 model has no rotation")
    if (i + 1) % GLOBAL_EVERY == 0:
        return layer
    local = RopeParams(mode="neox", n_dims=rope.n_dims, base=LOCAL_ROPE_BASE, n_ctx_orig=rope.n_ctx_orig)
    return msgspec.structs.replace(layer, window=keys.window, rope=local)


def tensors(hp: HParams, present: Container[str]) -> Iterator[TensorSpec]:
    """Tensors of the file."""
    yield from common_tensors(hp)
    for i in range(hp.n_layer):
        yield from sandwich_norm_tensors(hp, i)
        yield from attention_tensors(hp, i, head_norms=True)
        yield from ffn_tensors(hp, i)


def build(b: Builder) -> Graph:
    """The unfused evaluation graph with the output ``logits`` f32 [n_vocab, O]."""
    return sandwich_decoder(b)


GEMMA3 = Architecture("gemma3", read, tensors, build, sandwich_nodes)
