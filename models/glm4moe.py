"""glm4moe (GLM-4.5, 4.6): dense layers first, then sigmoid-routed experts with a selection bias and a shared expert; biases on q, k and
v, part of each head turned in NEOX pairs.

``block_count`` includes layers at the end that predict tokens further ahead; ordinary decoding ignores them.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Annotated, Any

import msgspec

from ggufc.ir import Graph
from ggufc.models.architecture import Architecture, common_tensors, norm_tensors
from ggufc.models.attention import attention_tensors
from ggufc.models.blocks import Builder
from ggufc.models.errors import ModelError
from ggufc.models.experts import ExpertKeys, resolve_experts
from ggufc.models.ffn import ffn_tensors
from ggufc.models.hparams import HParams
from ggufc.models.metadata import read_keys
from ggufc.models.moe import moe_tensors
from ggufc.models.prenorm import pre_norm_decoder, pre_norm_nodes
from ggufc.models.weights import TensorSpec

FFN_NORM = "post_attention_norm"
"""Despite its name the norm before the feed-forward."""


class Glm4MoeKeys(ExpertKeys, frozen=True, kw_only=True):
    """The keys of experts and the number of layers that predict further ahead."""

    n_nextn: Annotated[int, msgspec.Meta(ge=0, le=4096)] = msgspec.field(name="nextn_predict_layers", default=0)


def read(metadata: Mapping[str, Any]) -> HParams:
    """Hyperparameters of the layers that ordinary decoding runs."""
    keys = read_keys(Glm4MoeKeys, metadata, "glm4moe")
    n_layer = keys.n_layer - keys.n_nextn
    if n_layer < 1:
        raise ModelError(
            f"key glm4moe.nextn_predict_layers is {keys.n_nextn}, which leaves none of the {keys.n_layer} layers of glm4moe.block_count"
        )
    hp = resolve_experts(keys, metadata, "glm4moe", "neox", default_gate="sigmoid")
    return msgspec.structs.replace(hp, n_layer=n_layer, layers=hp.layers[:n_layer])


def tensors(hp: HParams, present: Container[str]) -> Iterator[TensorSpec]:
    """Tensors of the file."""
    yield from common_tensors(hp)
    for i, layer in enumerate(hp.layers):
        yield from norm_tensors(hp, i, "attn_norm", FFN_NORM)
        yield from attention_tensors(hp, i, biases=("attn_q", "attn_k", "attn_v"), optional_head_norms=True)
        yield from moe_tensors(hp, i, present, selection_bias=True) if layer.n_expert else ffn_tensors(hp, i)


def build(b: Builder) -> Graph:
    """The unfused evaluation graph with the output ``logits`` f32 [n_vocab, O]."""
    return pre_norm_decoder(b, ffn_norm=FFN_NORM)


GLM4MOE = Architecture("glm4moe", read, tensors, build, pre_norm_nodes)
