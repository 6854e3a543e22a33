"""gemma2: sliding-window and global layers in turn, scores and logits bounded by ``cap * tanh(x / cap)``, always tied."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Annotated, Any

import msgspec

from ggufc.ir import Graph
from ggufc.models.architecture import Architecture, common_tensors
from ggufc.models.attention import attention_tensors
from ggufc.models.blocks import Builder
from ggufc.models.ffn import ffn_tensors
from ggufc.models.gemma import sandwich_decoder, sandwich_nodes, sandwich_norm_tensors, scaled_by_embedding_width
from ggufc.models.hparams import DenseKeys, HParams, resolve
from ggufc.models.metadata import Magnitude, Positions, read_keys
from ggufc.models.weights import TensorSpec

LAYERS_27B = 46
"""The 27B model is known by its layer count."""


class Gemma2Keys(DenseKeys, frozen=True, kw_only=True):
    """The shared keys, the window of the sliding layers (itself counted) and the bounds of scores and logits."""

    window: Positions = msgspec.field(name="attention.sliding_window", default=4096)
    attn_softcap: Magnitude = msgspec.field(name="attn_logit_softcapping", default=50.0)
    logit_softcap: Magnitude = msgspec.field(name="final_logit_softcapping", default=30.0)
    n_expert: Annotated[int, msgspec.Meta(ge=0, le=0)] = msgspec.field(name="expert_count", default=0)


def read(metadata: Mapping[str, Any]) -> HParams:
    """Hyperparameters; layers 0, 2, 4, ... slide."""
    keys = read_keys(Gemma2Keys, metadata, "gemma2")
    hp = resolve(keys, metadata, "gemma2", "neox")
    if hp.n_layer == LAYERS_27B:
        hp = scaled_by_embedding_width(hp)
    layers = (
        msgspec.structs.replace(layer, softcap=keys.attn_softcap, window=0 if i % 2 else keys.window) for i, layer in enumerate(hp.layers)
    )
    return msgspec.structs.replace(hp, layers=tuple(layers), logit_softcap=keys.logit_softcap)


def tensors(hp: HParams, present: Container[str]) -> Iterator[TensorSpec]:
    """Tensors of the file."""
    yield from common_tensors(hp, tied=True)
    for i in range(hp.n_layer):
        yield from sandwich_norm_tensors(hp, i)
        yield from attention_tensors(hp, i)
        yield from ffn_tensors(hp, i)


def build(b: Builder) -> Graph:
    """The unfused evaluation graph with the output ``logits`` f32 [n_vocab, O]."""
    return sandwich_decoder(b)


GEMMA2 = Architecture("gemma2", read, tensors, build, sandwich_nodes)
