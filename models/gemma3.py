"""gemma3 (text): five sliding-window layers to one global layer, a norm after each branch as well as before it, norms of each head
of q and k, gelu feed-forward.

Sliding layers turn with base 10000 unscaled whatever the keys say; the keys' base and scaling belong to the global layers. Gemma's
"1 + w" norm is already folded into the stored weights.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping
from typing import Annotated, Any

import msgspec
import numpy as np

from ggufc.ir import Graph, Node
from ggufc.models.architecture import RESIDUAL_NODES, Architecture, common_tensors, decoder, norm_tensors, residual
from ggufc.models.attention import ATTENTION_NODES, attention, attention_tensors
from ggufc.models.blocks import NORM_NODES, Builder
from ggufc.models.errors import ModelError
from ggufc.models.ffn import FFN_NODES, ffn, ffn_tensors
from ggufc.models.hparams import DenseKeys, HParams, LayerParams, RopeParams, resolve
from ggufc.models.metadata import Positions, read_keys
from ggufc.models.weights import TensorSpec

GLOBAL_EVERY = 6
"""Layers 5, 11, ... see everything; the period is part of the architecture, not a key."""
LAYERS_27B = 62
"""The 27B model, known by its layer count, scales scores by the width per head of the embedding instead of the head size."""
LOCAL_ROPE_BASE = 10000.0


class Gemma3Keys(DenseKeys, frozen=True, kw_only=True):
    """The shared keys and the window of the sliding layers (itself counted)."""

    window: Positions = msgspec.field(name="attention.sliding_window")
    n_expert: Annotated[int, msgspec.Meta(ge=0, le=0)] = msgspec.field(name="expert_count", default=0)


def read(metadata: Mapping[str, Any]) -> HParams:
    """Hyperparameters, with window, rotation and score scale of each layer."""
    keys = read_keys(Gemma3Keys, metadata, "gemma3")
    hp = resolve(keys, metadata, "gemma3", "neox")
    return msgspec.structs.replace(hp, layers=tuple(_layer_params(hp, keys, i) for i in range(hp.n_layer)))


def _layer_params(hp: HParams, keys: Gemma3Keys, i: int) -> LayerParams:
    layer = hp.layers[i]
    rope = layer.rope
    if rope is None:
        raise ModelError(f"layer {i} of a gemma3 model has no rotation")
    if hp.n_layer == LAYERS_27B:
        width = hp.n_embd // layer.n_head
        if width == 0:
            raise ModelError(
                f"key gemma3.embedding_length is {hp.n_embd}, less than the {layer.n_head} heads of gemma3.attention.head_count"
            )
        layer = msgspec.structs.replace(layer, attn_scale=1.0 / math.sqrt(width))
    if (i + 1) % GLOBAL_EVERY == 0:
        return layer
    local = RopeParams(mode="neox", n_dims=rope.n_dims, base=LOCAL_ROPE_BASE, n_ctx_orig=rope.n_ctx_orig)
    return msgspec.structs.replace(layer, window=keys.window, rope=local)


def tensors(hp: HParams, present: Container[str]) -> Iterator[TensorSpec]:
    """Tensors of the file."""
    yield from common_tensors(hp)
    for i in range(hp.n_layer):
        yield from norm_tensors(hp, i, "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
        yield from attention_tensors(hp, i, head_norms=True)
        yield from ffn_tensors(hp, i)


def build(b: Builder) -> Graph:
    """The unfused evaluation graph with the output ``logits`` f32 [n_vocab, O]; token embeddings are scaled by sqrt(E) in f32."""
    return decoder(b, _layer, embd_scale=float(np.sqrt(np.float32(b.hp.n_embd))))


def _layer(b: Builder, x: Node, i: int, rows: Node | None) -> Node:
    branch = attention(b, b.rms_norm(x, f"blk.{i}.attn_norm"), i, rows=rows)
    x = residual(b, x, b.rms_norm(branch, f"blk.{i}.post_attention_norm"), f"blk.{i}.attn_residual", rows)
    branch = ffn(b, b.rms_norm(x, f"blk.{i}.ffn_norm"), i, "gelu")
    return residual(b, x, b.rms_norm(branch, f"blk.{i}.post_ffw_norm"), f"blk.{i}.ffn_residual")


def _layer_nodes(layer: LayerParams) -> int:
    return 4 * NORM_NODES + 2 * RESIDUAL_NODES + ATTENTION_NODES + FFN_NODES


GEMMA3 = Architecture("gemma3", read, tensors, build, _layer_nodes)
