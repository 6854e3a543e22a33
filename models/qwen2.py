"""qwen2 (Qwen 2 and 2.5): llama with NEOX rotation and biases on q, k and v."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

from ggufc.ir import Graph
from ggufc.models.architecture import Architecture, common_tensors, norm_tensors
from ggufc.models.attention import attention_tensors
from ggufc.models.blocks import Builder
from ggufc.models.ffn import ffn_tensors
from ggufc.models.hparams import DenseKeys, HParams, resolve
from ggufc.models.metadata import read_keys
from ggufc.models.prenorm import pre_norm_decoder, pre_norm_nodes
from ggufc.models.weights import TensorSpec


def read(metadata: Mapping[str, Any]) -> HParams:
    """Hyperparameters."""
    return resolve(read_keys(DenseKeys, metadata, "qwen2"), metadata, "qwen2", "neox")


def tensors(hp: HParams, present: Container[str]) -> Iterator[TensorSpec]:
    """Tensors of the file."""
    yield from common_tensors(hp)
    for i in range(hp.n_layer):
        yield from norm_tensors(hp, i, "attn_norm", "ffn_norm")
        yield from attention_tensors(hp, i, biases=("attn_q", "attn_k", "attn_v"))
        yield from ffn_tensors(hp, i)


def build(b: Builder) -> Graph:
    """The unfused evaluation graph with the output ``logits`` f32 [n_vocab, O]."""
    return pre_norm_decoder(b)


QWEN2 = Architecture("qwen2", read, tensors, build, pre_norm_nodes)
