"""The persistent KV resources of a layer: what a graph declares and a runtime allocates, from one description.

Ordinary attention keeps roped keys and values, ``n_head_kv`` heads per cell each. Latent attention in its absorbed form keeps one row
per cell that all heads share, and no values: they are part of that row (see ``latent``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from ggufc.models.cache_types import layer_type, rotation
from ggufc.models.hparams import HParams, LayerParams
from ggufc.models.step import Step
from ggufc.models.weights import Weights

ROPE_FACTORS = "rope_freqs.weight"
ROPE_FACTORS_LONG = "rope_factors_long.weight"
ROPE_FACTORS_SHORT = "rope_factors_short.weight"

UNSHIFTABLE: dict[str, Any] = {"mode": "latent"}
"""``CacheInfo.rope`` of keys that a shift of positions cannot turn in place: they are not whole rotated heads."""


class CacheInfo(msgspec.Struct, frozen=True):
    """One persistent KV resource of a model: ``width`` values per cell, in heads of ``head_dim``.

    ``rope`` holds what rotated the keys (empty for values and keys that are not rotated, ``UNSHIFTABLE`` where no shift is possible),
    ``window`` the layer's attention window. ``rows`` says how many rows there are, as a dimension of the graph; ``hadamard`` the block of
    the transform under which values are stored (0: as they are).
    """

    name: str
    layer: int
    part: str
    dtype: str
    width: int
    head_dim: int
    window: int
    rope: dict[str, Any]
    rows: str = "C"
    hadamard: int = 0


def absorbed(step: Step) -> bool:
    """Whether latent attention works on cached latents instead of keys and values."""
    return bool(step.observe("mla != 0"))


def rope_factors(layer: LayerParams, weights: Weights, step: Step) -> str | None:
    """The tensor of frequency divisors of a layer, if the model has one.

    Where there are two of them, the context size asked for chooses once and for all, not the positions that occur (spec/dense.md,
    section 9): keys already in the cache could not be turned again.
    """
    if ROPE_FACTORS in weights:
        return ROPE_FACTORS
    if layer.rope is None or ROPE_FACTORS_LONG not in weights:
        return None
    return ROPE_FACTORS_LONG if step.observe(f"n_ctx_seq > {layer.rope.n_ctx_orig}") else ROPE_FACTORS_SHORT


def key_rope(layer: LayerParams, weights: Weights, step: Step) -> dict[str, Any]:
    """Attributes of the operator that rotated a layer's keys, and under ``factors`` the tensor of divisors where there is one."""
    if layer.latent is not None:
        return dict(UNSHIFTABLE)
    if layer.rope is None:
        return {}
    factors = rope_factors(layer, weights, step)
    return layer.rope.attrs() | ({"factors": factors} if factors else {})


def layer_caches(hp: HParams, i: int, weights: Weights, step: Step) -> Iterator[CacheInfo]:
    """The caches of layer ``i`` under the options of ``step``: ``blk.<i>.k`` and, unless keys and values share rows, ``blk.<i>.v``."""
    layer = hp.layers[i]
    type_k = layer_type(step, "k", i, hp.n_layer)
    rope = key_rope(layer, weights, step)
    latent = layer.latent
    if latent is not None and absorbed(step):
        block = rotation(step, "k", type_k, latent.row, (latent.rank, latent.n_rot))
        yield CacheInfo(f"blk.{i}.k", i, "k", type_k, latent.row, latent.row, layer.window, rope, hadamard=block)
        return
    block = rotation(step, "k", type_k, layer.head_dim)
    yield CacheInfo(f"blk.{i}.k", i, "k", type_k, layer.kv_width, layer.head_dim, layer.window, rope, hadamard=block)
    value = layer.head_dim if latent is None else latent.n_value
    type_v = layer_type(step, "v", i, hp.n_layer)
    block = rotation(step, "v", type_v, value)
    yield CacheInfo(f"blk.{i}.v", i, "v", type_v, layer.n_head_kv * value, value, layer.window, {}, hadamard=block)
