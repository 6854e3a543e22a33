"""smollm3: llama without biases in which every fourth layer turns neither queries nor keys (NoPE: positions reach it only through
the layers below). Part of a head may be turned."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

import msgspec

from ggufc.ir import Graph
from ggufc.models.architecture import Architecture, common_tensors, norm_tensors
from ggufc.models.attention import attention_tensors
from ggufc.models.blocks import Builder
from ggufc.models.ffn import ffn_tensors
from ggufc.models.hparams import DenseKeys, HParams, resolve
from ggufc.models.metadata import read_keys
from ggufc.models.prenorm import pre_norm_decoder, pre_norm_nodes
from ggufc.models.weights import TensorSpec

UNROTATED_EVERY = 4
"""Layers 3, 7, ... turn nothing; the interval is part of the architecture, not a key."""


def read(metadata: Mapping[str, Any]) -> HParams:
    """Hyperparameters, with the rotation of each layer."""
    hp = resolve(read_keys(DenseKeys, metadata, "smollm3"), metadata, "smollm3", "norm")
    layers = (msgspec.structs.replace(layer, rope=None) if (i + 1) % UNROTATED_EVERY == 0 else layer for i, layer in enumerate(hp.layers))
    return msgspec.structs.replace(hp, layers=tuple(layers))


def tensors(hp: HParams, present: Container[str]) -> Iterator[TensorSpec]:
    """Tensors of the file."""
    yield from common_tensors(hp)
    for i in range(hp.n_layer):
        yield from norm_tensors(hp, i, "attn_norm", "ffn_norm")
        yield from attention_tensors(hp, i)
        yield from ffn_tensors(hp, i)


def build(b: Builder) -> Graph:
    """The unfused evaluation graph with the output ``logits`` f32 [n_vocab, O]."""
    return pre_norm_decoder(b)


SMOLLM3 = Architecture("smollm3", read, tensors, build, pre_norm_nodes)
