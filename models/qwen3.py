"""qwen3 and qwen3moe: llama with NEOX rotation and norms of each head of q and k before it, no biases.

qwen3moe has experts in every layer, with softmax routing renormalised over the chosen ones. Their width is a key of its own; older
files state ``feed_forward_length`` as the width of all experts a token uses together.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

import msgspec

from ggufc.ir import Graph
from ggufc.models.architecture import Architecture, common_tensors, norm_tensors
from ggufc.models.attention import attention_tensors
from ggufc.models.blocks import Builder
from ggufc.models.errors import ModelError
from ggufc.models.ffn import ffn_tensors
from ggufc.models.hparams import DenseKeys, HParams, per_layer, resolve
from ggufc.models.metadata import Experts, Width, read_keys
from ggufc.models.moe import moe_tensors
from ggufc.models.prenorm import pre_norm_decoder, pre_norm_nodes
from ggufc.models.weights import TensorSpec


class Qwen3MoeKeys(DenseKeys, frozen=True, kw_only=True):
    """The shared keys and those of the experts."""

    n_expert: Experts = msgspec.field(name="expert_count")
    n_expert_used: Experts = msgspec.field(name="expert_used_count")
    n_ff_exp: Width | None = msgspec.field(name="expert_feed_forward_length", default=None)


def read(metadata: Mapping[str, Any]) -> HParams:
    """Hyperparameters of qwen3."""
    return resolve(read_keys(DenseKeys, metadata, "qwen3"), metadata, "qwen3", "neox")


def read_moe(metadata: Mapping[str, Any]) -> HParams:
    """Hyperparameters of qwen3moe."""
    keys = read_keys(Qwen3MoeKeys, metadata, "qwen3moe")
    if keys.n_expert == 0 or keys.n_expert_used == 0:
        raise ModelError(
            "keys qwen3moe.expert_count and qwen3moe.expert_used_count must be above 0; every layer of this family has experts"
        )
    if keys.n_ff_exp is not None:
        n_ff: tuple[int, ...] = (keys.n_ff_exp,) * keys.n_layer
    else:
        n_ff = tuple(f // keys.n_expert_used for f in per_layer(keys.n_ff, keys.n_layer, "qwen3moe.feed_forward_length"))
    return resolve(keys, metadata, "qwen3moe", "neox", n_ff=n_ff)


def tensors(hp: HParams, present: Container[str]) -> Iterator[TensorSpec]:
    """Tensors of the file."""
    yield from common_tensors(hp)
    for i, layer in enumerate(hp.layers):
        yield from norm_tensors(hp, i, "attn_norm", "ffn_norm")
        yield from attention_tensors(hp, i, head_norms=True)
        yield from moe_tensors(hp, i, present) if layer.n_expert else ffn_tensors(hp, i)


def build(b: Builder) -> Graph:
    """The unfused evaluation graph with the output ``logits`` f32 [n_vocab, O]."""
    return pre_norm_decoder(b)


QWEN3 = Architecture("qwen3", read, tensors, build, pre_norm_nodes)
QWEN3MOE = Architecture("qwen3moe", read_moe, tensors, build, pre_norm_nodes)
