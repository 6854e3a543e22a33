"""deepseek2 (DeepSeek V2, V2-lite, V3, R1): latent attention, dense layers first, then routed experts with a shared one.

Routing is a plain choice of the best experts, also for models trained with expert groups (spec/deepseek2.md, section 1). Under YaRN
the rotation itself keeps its magnitude and the score scale carries all of the correction.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec

from ggufc.ir import Graph
from ggufc.models.architecture import RESIDUAL_NODES, Architecture, common_tensors, norm_tensors
from ggufc.models.blocks import NORM_NODES, Builder
from ggufc.models.errors import ModelError
from ggufc.models.experts import DenseLayers, ExpertKeys, resolve_experts
from ggufc.models.ffn import ffn_tensors
from ggufc.models.hparams import HParams, LatentParams, LayerParams, per_layer
from ggufc.models.latent import LATENT_ATTENTION_NODES, latent_attention, latent_attention_tensors
from ggufc.models.metadata import Experts, HeadDim, Width, read_keys
from ggufc.models.moe import moe_tensors
from ggufc.models.prenorm import feed_forward_nodes, pre_norm_decoder
from ggufc.models.weights import TensorSpec

LITE_LAYERS = (26, 27)
"""Models with so many layers project queries directly, without a latent of their own; no key says so."""
SIGMOID_LAYERS = (47, 48)
"""Models with so many layers use sigmoid routing where the file does not say which."""


class LatentKeys(ExpertKeys, frozen=True, kw_only=True):
    """The keys of experts and of latent attention."""

    n_shared: Experts = msgspec.field(name="expert_shared_count")
    rank: Width = msgspec.field(name="attention.kv_lora_rank")
    q_rank: Width | None = msgspec.field(name="attention.q_lora_rank", default=None)
    key_length_mla: HeadDim = msgspec.field(name="attention.key_length_mla", default=192)
    value_length_mla: HeadDim = msgspec.field(name="attention.value_length_mla", default=128)


class DeepSeek2Keys(LatentKeys, frozen=True, kw_only=True):
    """What only this family reads."""

    n_dense: DenseLayers = msgspec.field(name="leading_dense_block_count")
    yarn_log_multiplier: Annotated[float, msgspec.Meta(ge=0, le=10)] = msgspec.field(name="rope.scaling.yarn_log_multiplier", default=0.0)


def read(metadata: Mapping[str, Any]) -> HParams:
    """Hyperparameters, with the sizes of latent attention and its score scale."""
    keys = read_keys(DeepSeek2Keys, metadata, "deepseek2")
    lite = keys.n_layer in LITE_LAYERS
    latent = latent_params(keys, "deepseek2", lite=lite)
    gate: Literal["softmax", "sigmoid"] = "sigmoid" if keys.n_layer in SIGMOID_LAYERS else "softmax"
    head_dim = latent.n_nope + latent.n_rot
    hp = resolve_experts(keys, metadata, "deepseek2", "norm", default_gate=gate, head_dim=head_dim)
    layers = tuple(latent_layer(layer, latent, keys.yarn_log_multiplier) for layer in hp.layers)
    return msgspec.structs.replace(hp, layers=layers)


def latent_params(keys: LatentKeys, arch: str, *, lite: bool = False) -> LatentParams:
    """Sizes from either form of the keys: true head counts and sizes, or one KV head as wide as the cached row. ``lite`` models project
    queries directly. ``ModelError`` for sizes that do not fit together."""
    n_head = _uniform(keys.n_head, keys, f"{arch}.attention.head_count")
    n_head_kv = n_head if keys.n_head_kv is None else _uniform(keys.n_head_kv, keys, f"{arch}.attention.head_count_kv")
    key, value = (n if n is not None else keys.n_embd // n_head for n in (keys.key_length, keys.value_length))
    n_rot = key if keys.n_rot is None else keys.n_rot
    if n_head_kv == 1 and (key, value) == (keys.rank + n_rot, keys.rank) and n_head > 1:
        key, value = keys.key_length_mla, keys.value_length_mla
    elif n_head_kv != n_head:
        raise ModelError(
            f"key {arch}.attention.head_count_kv is {n_head_kv}; it must be {n_head} as {arch}.attention.head_count, or 1 with "
            f"a {arch}.attention.key_length of {keys.rank + n_rot} and a value_length of {keys.rank}"
        )
    if key <= n_rot or value < 1:
        raise ModelError(
            f"a key head has {key} values ({arch}.attention.key_length or key_length_mla), of which {arch}.rope.dimension_count "
            f"turns {n_rot}, and a value head {value}; some of a key head must stay unturned"
        )
    if not lite and keys.q_rank is None:
        raise ModelError(
            f"the file has no key {arch}.attention.q_lora_rank, which a {arch} model of {keys.n_layer} layers requires "
            f"(only those of {' or '.join(map(str, LITE_LAYERS))} layers project queries directly)"
        )
    q_rank = 0 if lite or keys.q_rank is None else keys.q_rank
    return LatentParams(n_nope=key - n_rot, n_rot=n_rot, n_value=value, rank=keys.rank, q_rank=q_rank)


def _uniform(value: Any, keys: LatentKeys, name: str) -> int:
    counts = set(per_layer(value, keys.n_layer, name))
    if len(counts) > 1:
        raise ModelError(f"key {name} differs between layers; this architecture has as many heads in all of them")
    return int(counts.pop())


def latent_layer(layer: LayerParams, latent: LatentParams, log_multiplier: float) -> LayerParams:
    """Score scale and rotation (spec/deepseek2.md, section 4): the rotation undoes the magnitude that YaRN gives it.

    Without YaRN a scaled rotation keeps that factor, since nothing else would meet the reference.
    """
    rope = layer.rope
    if rope is None:
        raise ModelError("latent attention without rotation cannot be built")
    stretch = math.log(1.0 / rope.freq_scale)
    magnitude = rope.attn_factor * (1.0 + log_multiplier * stretch)
    scale = magnitude * magnitude / math.sqrt(layer.head_dim)
    rope = msgspec.structs.replace(rope, attn_factor=1.0 / (1.0 + 0.1 * stretch))
    return msgspec.structs.replace(layer, n_head_kv=layer.n_head, latent=latent, attn_scale=scale, rope=rope)


def tensors(hp: HParams, present: Container[str]) -> Iterator[TensorSpec]:
    """Tensors of the file."""
    yield from common_tensors(hp, tied=False)
    for i, layer in enumerate(hp.layers):
        yield from norm_tensors(hp, i, "attn_norm", "ffn_norm")
        yield from latent_attention_tensors(hp, i, present)
        yield from moe_tensors(hp, i, present, selection_bias=True) if layer.n_expert else ffn_tensors(hp, i)


def build(b: Builder) -> Graph:
    """The unfused evaluation graph with the output ``logits`` f32 [n_vocab, O]; the option ``mla`` chooses the form of attention."""
    return pre_norm_decoder(b, attend=latent_attention)


def _layer_nodes(layer: LayerParams) -> int:
    return 2 * (NORM_NODES + RESIDUAL_NODES) + LATENT_ATTENTION_NODES + feed_forward_nodes(layer)


DEEPSEEK2 = Architecture("deepseek2", read, tensors, build, _layer_nodes)
