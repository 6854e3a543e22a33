"""llama: Llama 1 to 3, SmolLM2, Mistral 7B and, with experts, Mixtral.

Pre-norm layers, rotation in NORM pairing over the whole head, silu feed-forward or softmax-routed experts. Llama 3's frequency
divisors are the tensor ``rope_freqs.weight``, shared by all layers.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

from ggufc.ir import Graph
from ggufc.models.architecture import Architecture, common_tensors, norm_tensors
from ggufc.models.attention import PROJECTIONS, attention_tensors
from ggufc.models.blocks import Builder
from ggufc.models.caches import ROPE_FACTORS
from ggufc.models.errors import ModelError
from ggufc.models.ffn import ffn_tensors
from ggufc.models.hparams import DenseKeys, HParams, resolve
from ggufc.models.metadata import read_keys
from ggufc.models.moe import moe_tensors
from ggufc.models.prenorm import pre_norm_decoder, pre_norm_nodes
from ggufc.models.weights import TensorSpec


def read(metadata: Mapping[str, Any]) -> HParams:
    """Hyperparameters; refuses partial rotation, which no file of this architecture means."""
    hp = resolve(read_keys(DenseKeys, metadata, "llama"), metadata, "llama", "norm")
    layer = hp.layers[0]
    if layer.rope is not None and layer.rope.n_dims != layer.head_dim:
        raise ModelError(
            f"key llama.rope.dimension_count is {layer.rope.n_dims}, but a llama model turns the whole head of {layer.head_dim}"
        )
    return hp


def tensors(hp: HParams, present: Container[str]) -> Iterator[TensorSpec]:
    """Tensors of the file; experts replace the feed-forward where there are any."""
    yield from common_tensors(hp)
    yield TensorSpec(ROPE_FACTORS, (hp.layers[0].head_dim // 2,), optional=True)
    for i, layer in enumerate(hp.layers):
        yield from norm_tensors(hp, i, "attn_norm", "ffn_norm")
        yield from attention_tensors(hp, i, optional_biases=PROJECTIONS)
        yield from moe_tensors(hp, i, present) if layer.n_expert else ffn_tensors(hp, i, optional_biases=True)


def build(b: Builder) -> Graph:
    """The unfused evaluation graph with the output ``logits`` f32 [n_vocab, O]."""
    return pre_norm_decoder(b)


LLAMA = Architecture("llama", read, tensors, build, pre_norm_nodes)
