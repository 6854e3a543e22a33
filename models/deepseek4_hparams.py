"""Hyperparameters of deepseek4 (DeepSeek-V4): three kinds of attention layers, residual streams, an indexer, hash-routed layers."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ggufc.models.cache_types import hadamard_block
from ggufc.models.errors import ModelError
from ggufc.models.hparams import DenseKeys, HParams, LayerParams, RopeParams, Routing, n_vocab, rope_params
from ggufc.models.metadata import Base, Epsilon, Experts, Heads, Width, read_keys

ARCH = "deepseek4"
CSA, HCA = 4, 128
"""Positions per compressed entry of the two kinds of compressed attention; the numbers are fixed."""
SQRT_SOFTPLUS = 4
"""Value of ``expert_gating_func``."""
TRUNK_ONLY = 43
"""A file of so many blocks has no predictor blocks, whatever ``nextn_predict_layers`` says."""
SMALLEST_LIMIT = 1e-6
"""A clamp below this is none."""

Limit = Annotated[float, Meta(ge=0, le=1e9)]
Limits = Limit | Annotated[list[Limit], Meta(min_length=1)]


class DeepSeek4Keys(DenseKeys, frozen=True, kw_only=True):
    """Keys of the family beside the common ones (spec/deepseek4.md, section 1)."""

    q_rank: Width = msgspec.field(name="attention.q_lora_rank")
    window: Annotated[int, Meta(ge=0, le=1 << 30)] = msgspec.field(name="attention.sliding_window", default=0)
    groups: Heads | None = msgspec.field(name="attention.output_group_count", default=None)
    output_rank: Width | None = msgspec.field(name="attention.output_lora_rank", default=None)
    ratios: list[int] | None = msgspec.field(name="attention.compress_ratios", default=None)
    compress_base: Base | None = msgspec.field(name="attention.compress_rope_freq_base", default=None)
    base_swa: Base | None = msgspec.field(name="rope.freq_base_swa", default=None)
    n_index_head: Heads = msgspec.field(name="attention.indexer.head_count")
    n_index: Width = msgspec.field(name="attention.indexer.key_length")
    top_k: Annotated[int, Meta(ge=1, le=1 << 30)] = msgspec.field(name="attention.indexer.top_k")
    n_shared: Experts = msgspec.field(name="expert_shared_count")
    n_ff_expert: Width = msgspec.field(name="expert_feed_forward_length")
    weights_scale: Annotated[float, Meta(gt=0, le=1e6)] = msgspec.field(name="expert_weights_scale")
    weights_norm: bool = msgspec.field(name="expert_weights_norm", default=False)
    gating: int = msgspec.field(name="expert_gating_func", default=SQRT_SOFTPLUS)
    clamp: Limits = msgspec.field(name="swiglu_clamp_exp")
    clamp_shared: Limits | None = msgspec.field(name="swiglu_clamp_shexp", default=None)
    streams: Annotated[int, Meta(ge=1, le=8)] = msgspec.field(name="hyper_connection.count")
    iterations: Annotated[int, Meta(ge=2, le=200)] = msgspec.field(name="hyper_connection.sinkhorn_iterations", default=3)
    stream_eps: Epsilon | None = msgspec.field(name="hyper_connection.epsilon", default=None)
    n_hash: Annotated[int, Meta(ge=0, le=4096)] = msgspec.field(name="hash_layer_count", default=0)
    n_dense: Literal[0] = msgspec.field(name="leading_dense_block_count", default=0)
    n_predict: Annotated[int, Meta(ge=0, le=4096)] = msgspec.field(name="nextn_predict_layers", default=0)


class DeepSeek4Layer(LayerParams, frozen=True, kw_only=True):
    """One layer. ``ratio`` 0 reads raw keys only; ``hashed`` takes its experts from a table of tokens; limits of 0 clamp nothing."""

    ratio: int = 0
    hashed: bool = False
    limit: float = 0.0
    limit_shared: float = 0.0


class DeepSeek4Params(HParams, frozen=True, kw_only=True):
    """The family's own numbers; ``layers`` are those of the trunk. ``groups`` and ``output_rank`` 0 follow from tensor shapes."""

    q_rank: int
    n_rot: int
    groups: int
    output_rank: int
    n_index_head: int
    n_index: int
    top_k: int
    streams: int
    iterations: int
    stream_eps: float
    ratios_given: bool
    raw_rope: RopeParams
    entry_rope: RopeParams


def remarks(hp: HParams) -> list[str]:
    """Ratios that are no kind of layer (spec/deepseek4.md, section 1)."""
    odd = [f"layer {i} has ratio {_ratio(layer)}" for i, layer in enumerate(hp.layers) if _ratio(layer) not in (0, CSA, HCA)]
    said = ", ".join(odd[:8]) + (", ..." if len(odd) > 8 else "")
    why = f"which no compressor serves ({CSA} and {HCA} exist): such layers read raw keys only"
    return [f"key {ARCH}.attention.compress_ratios: {said}, {why}"] if odd else []


def read(metadata: Mapping[str, Any]) -> DeepSeek4Params:
    """Hyperparameters; raises ``ModelError`` where keys contradict each other."""
    keys = read_keys(DeepSeek4Keys, metadata, ARCH)
    heads = keys.n_head
    if not isinstance(heads, int) or keys.n_head_kv not in (None, 1):
        raise ModelError(
            f"key {ARCH}.attention.head_count must be one number, and {ARCH}.attention.head_count_kv 1: all heads share one key"
        )
    d = keys.key_length or keys.n_embd // heads
    if (keys.value_length or d) != d:
        raise ModelError(f"key {ARCH}.attention.value_length is {keys.value_length}; values are the keys themselves, so it must be {d}")
    n_rot = d if keys.n_rot is None else keys.n_rot
    if n_rot % 2 or n_rot >= d or d % 32:
        raise ModelError(f"a head has {d} values of which {n_rot} turn; it must be a multiple of 32, more than what turns, and that even")
    if keys.n_index < n_rot or keys.n_index % 32:
        raise ModelError(f"key {ARCH}.attention.indexer.key_length is {keys.n_index}; it must be a multiple of 32, at least {n_rot}")
    index_block(keys.n_index)
    if keys.gating != SQRT_SOFTPLUS:
        raise ModelError(
            f"key {ARCH}.expert_gating_func is {keys.gating}; this architecture scores by the root of softplus ({SQRT_SOFTPLUS})"
        )
    if not 1 <= keys.n_expert_used <= keys.n_expert:
        raise ModelError(f"key {ARCH}.expert_used_count is {keys.n_expert_used}; of {keys.n_expert} experts a token uses at least 1")
    if keys.n_predict >= keys.n_layer:
        raise ModelError(f"key {ARCH}.nextn_predict_layers is {keys.n_predict}, but there are only {keys.n_layer} layers in all")
    # Files of the released model count predictor blocks that they do not hold.
    n_layer = keys.n_layer - (0 if keys.n_layer == TRUNK_ONLY else keys.n_predict)
    if keys.ratios is not None and len(keys.ratios) < n_layer:
        raise ModelError(f"key {ARCH}.attention.compress_ratios lists {len(keys.ratios)} layers of {n_layer}")
    raw, entry = _ropes(keys, n_rot)
    clamp, shared = keys.clamp, keys.clamp if keys.clamp_shared is None else keys.clamp_shared
    layers = tuple(
        DeepSeek4Layer(
            n_head=heads, n_head_kv=1, head_dim=d, n_ff=keys.n_ff_expert, attn_scale=1.0 / math.sqrt(d), window=keys.window, rope=raw,
            n_expert=keys.n_expert, n_expert_used=keys.n_expert_used, n_ff_shared=keys.n_shared * keys.n_ff_expert,
            routing=Routing(gate="sqrt_softplus", normalise=keys.weights_norm, scale=keys.weights_scale),
            ratio=keys.ratios[i] if keys.ratios is not None else 0, hashed=i < keys.n_hash,
            limit=_limit(clamp, i, "swiglu_clamp_exp"), limit_shared=_limit(shared, i, "swiglu_clamp_shexp"),
        )
        for i in range(n_layer)
    )  # fmt: skip
    hp = DeepSeek4Params(
        arch=ARCH, n_layer=n_layer, n_ctx_train=keys.n_ctx_train, n_embd=keys.n_embd, n_vocab=n_vocab(keys, metadata, ARCH),
        norm_eps=keys.norm_eps, layers=layers, q_rank=keys.q_rank, n_rot=n_rot, groups=keys.groups or 0, output_rank=keys.output_rank or 0,
        n_index_head=keys.n_index_head, n_index=keys.n_index, top_k=keys.top_k, streams=keys.streams, iterations=keys.iterations,
        stream_eps=keys.norm_eps if keys.stream_eps is None else keys.stream_eps, ratios_given=keys.ratios is not None,
        raw_rope=raw, entry_rope=entry,
    )  # fmt: skip
    return _with_ropes(hp)


def _limit(limits: float | list[float], i: int, key: str) -> float:
    if isinstance(limits, list) and i >= len(limits):
        raise ModelError(f"key {ARCH}.{key} lists {len(limits)} layers; layer {i} is missing")
    limit = limits[i] if isinstance(limits, list) else limits
    return limit if limit > SMALLEST_LIMIT else 0.0


def _ropes(keys: DeepSeek4Keys, n_rot: int) -> tuple[RopeParams, RopeParams]:
    """The rotation of raw layers, which no scaling key touches, and the one of everything in compressed layers.

    The engine cancels YaRN's magnitude; the operator multiplies by 1 + 0.1 ln(1/s), so ``attn_factor`` is the inverse of that.
    """
    raw = RopeParams(mode="norm", n_dims=n_rot, base=keys.rope_base, n_ctx_orig=keys.n_ctx_train)
    entry = rope_params(keys, "norm", n_rot, ARCH)
    base = keys.compress_base or keys.base_swa or keys.rope_base
    magnitude = 1.0 + 0.1 * math.log(1.0 / entry.freq_scale) if entry.ext_factor else 1.0
    return raw, msgspec.structs.replace(entry, base=base, attn_factor=1.0 / magnitude)


def _with_ropes(hp: DeepSeek4Params) -> DeepSeek4Params:
    """Layers with a ratio turn everything as their entries, also raw keys and queries."""
    layers = (msgspec.structs.replace(layer, rope=hp.entry_rope if _ratio(layer) else hp.raw_rope) for layer in hp.layers)
    return msgspec.structs.replace(hp, layers=tuple(layers))


def _ratio(layer: LayerParams) -> int:
    return layer.ratio if isinstance(layer, DeepSeek4Layer) else 0


def with_tensors(hp: HParams, present: Container[str]) -> DeepSeek4Params:
    """``hp`` with the kinds of layers that tensors show where no key tells them: an indexer means 4, a compressor alone 128."""
    if not isinstance(hp, DeepSeek4Params):
        raise ModelError(f"hyperparameters of architecture {hp.arch!r} are no {ARCH} ones")
    if hp.ratios_given:
        return hp
    layers = []
    for i, layer in enumerate(hp.layers):
        compressed = any(f"blk.{i}.{stem}_kv.weight" in present for stem in COMPRESSOR_STEMS)
        ratio = CSA if f"blk.{i}.indexer.attn_q_b.weight" in present else HCA if compressed else 0
        layers.append(msgspec.structs.replace(layer, ratio=ratio))
    return _with_ropes(msgspec.structs.replace(hp, layers=tuple(layers)))


COMPRESSOR_STEMS = ("attn_compressor", "attn_compress")
INDEXER_STEMS = ("indexer_compressor", "indexer.compress")


def index_block(n: int) -> int:
    """Size of the Walsh-Hadamard transform of indexer vectors of ``n`` values."""
    block = hadamard_block(n)
    if not block:
        raise ModelError(f"key {ARCH}.attention.indexer.key_length is {n}; it must be a power of two or a multiple of 64")
    return block
