"""gpt-oss: attention sinks, sliding-window and global layers in turn, experts with biases and a clamped SwiGLU.

A token's experts are chosen by the router's logits and weighed by a softmax over the chosen ones alone.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

import msgspec

from ggufc.ir import Graph
from ggufc.models.architecture import Architecture, common_tensors, norm_tensors
from ggufc.models.attention import PROJECTIONS, attention_tensors
from ggufc.models.blocks import Builder
from ggufc.models.errors import ModelError
from ggufc.models.ffn import CLAMPED_SWIGLU
from ggufc.models.hparams import DenseKeys, HParams, Routing, resolve
from ggufc.models.metadata import Experts, Positions, Width, read_keys
from ggufc.models.moe import moe_tensors
from ggufc.models.prenorm import pre_norm_decoder, pre_norm_nodes
from ggufc.models.weights import TensorSpec

FFN_NORM = "post_attention_norm"
"""Despite its name the norm before the feed-forward."""


class GptOssKeys(DenseKeys, frozen=True, kw_only=True):
    """The shared keys, the window of the sliding layers (itself counted) and those of the experts."""

    window: Positions = msgspec.field(name="attention.sliding_window")
    n_expert: Experts = msgspec.field(name="expert_count")
    n_expert_used: Experts = msgspec.field(name="expert_used_count")
    n_ff_exp: Width = msgspec.field(name="expert_feed_forward_length")


def read(metadata: Mapping[str, Any]) -> HParams:
    """Hyperparameters; layers 0, 2, 4, ... slide."""
    keys = read_keys(GptOssKeys, metadata, "gpt-oss")
    if keys.n_expert == 0:
        raise ModelError("key gpt-oss.expert_count is 0; every layer of this family has experts")
    hp = resolve(keys, metadata, "gpt-oss", "neox", n_ff=(keys.n_ff_exp,) * keys.n_layer)
    routing = Routing("softmax_chosen")
    layers = (msgspec.structs.replace(layer, window=0 if i % 2 else keys.window, routing=routing) for i, layer in enumerate(hp.layers))
    return msgspec.structs.replace(hp, layers=tuple(layers))


def tensors(hp: HParams, present: Container[str]) -> Iterator[TensorSpec]:
    """Tensors of the file."""
    yield from common_tensors(hp, tied=False)
    for i in range(hp.n_layer):
        yield from norm_tensors(hp, i, "attn_norm", FFN_NORM)
        yield from attention_tensors(hp, i, biases=PROJECTIONS, sinks=True)
        yield from moe_tensors(hp, i, present, biases=True)


def build(b: Builder) -> Graph:
    """The unfused evaluation graph with the output ``logits`` f32 [n_vocab, O]."""
    return pre_norm_decoder(b, act=CLAMPED_SWIGLU, ffn_norm=FFN_NORM)


GPT_OSS = Architecture("gpt-oss", read, tensors, build, pre_norm_nodes)
