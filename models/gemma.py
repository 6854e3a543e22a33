"""What the Gemma families share: a norm after each branch as well as before it, gelu feed-forward, embeddings scaled by sqrt(E), and
a score scale of their own in the 27B models. Gemma's "1 + w" norm is already folded into the stored weights."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec
import numpy as np

from ggufc.ir import Graph, Node
from ggufc.models.architecture import RESIDUAL_NODES, decoder, norm_tensors, residual
from ggufc.models.attention import ATTENTION_NODES, attention
from ggufc.models.blocks import NORM_NODES, Builder
from ggufc.models.errors import ModelError
from ggufc.models.ffn import FFN_NODES, ffn
from ggufc.models.hparams import HParams, LayerParams
from ggufc.models.weights import TensorSpec

NORMS = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")


def scaled_by_embedding_width(hp: HParams) -> HParams:
    """The 27B rule: scores are scaled by the width per head of the embedding instead of the head size."""
    layers = []
    for layer in hp.layers:
        width = hp.n_embd // layer.n_head
        if width == 0:
            raise ModelError(
                f"key {hp.arch}.embedding_length is {hp.n_embd}, less than the {layer.n_head} heads of {hp.arch}.attention.head_count"
            )
        layers.append(msgspec.structs.replace(layer, attn_scale=1.0 / math.sqrt(width)))
    return msgspec.structs.replace(hp, layers=tuple(layers))


def sandwich_norm_tensors(hp: HParams, i: int) -> Iterator[TensorSpec]:
    """The four norms of layer ``i``."""
    return norm_tensors(hp, i, *NORMS)


def sandwich_decoder(b: Builder) -> Graph:
    """The whole graph; token embeddings are scaled in f32, embeddings given from outside are not."""
    return decoder(b, _layer, embd_scale=float(np.sqrt(np.float32(b.hp.n_embd))))


def _layer(b: Builder, x: Node, i: int, rows: Node | None) -> Node:
    branch = attention(b, b.rms_norm(x, f"blk.{i}.attn_norm"), i, rows=rows)
    x = residual(b, x, b.rms_norm(branch, f"blk.{i}.post_attention_norm"), f"blk.{i}.attn_residual", rows)
    branch = ffn(b, b.rms_norm(x, f"blk.{i}.ffn_norm"), i, "gelu")
    return residual(b, x, b.rms_norm(branch, f"blk.{i}.post_ffw_norm"), f"blk.{i}.ffn_residual")


def sandwich_nodes(layer: LayerParams) -> int:
    """The most nodes of one layer."""
    return 4 * NORM_NODES + 2 * RESIDUAL_NODES + ATTENTION_NODES + FFN_NODES
