"""Typed hyperparameters of a transformer, resolved per layer.

``DenseKeys`` declares the GGUF keys all plain transformers share; ``resolve`` applies the defaults that depend on other keys and
checks what a single key cannot show, such as head counts that must divide each other. Builders read only ``HParams``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Sized
from typing import Any, Literal

import msgspec
import numpy as np

from ggufc.models.errors import ModelError
from ggufc.models.metadata import (
    Base,
    Epsilon,
    Experts,
    Factor,
    HeadDim,
    Layers,
    Magnitude,
    PerLayerFeedForward,
    PerLayerHeads,
    Positions,
    Vocabulary,
    Width,
)

RopeMode = Literal["norm", "neox"]
TOKENS_KEY = "tokenizer.ggml.tokens"

# YaRN's ramp bounds are options of the engine, not keys of these files; the values are the ones the YaRN paper recommends for Llama models.
YARN_BETA_FAST = 32.0
YARN_BETA_SLOW = 1.0

SMALLEST_FACTOR = 1e-3
"""Below this a rope scaling factor is no stretched or squeezed context but a damaged number."""


class DenseKeys(msgspec.Struct, frozen=True, kw_only=True):
    """The keys every plain transformer reads; families with more keys derive from it."""

    n_layer: Layers = msgspec.field(name="block_count")
    n_ctx_train: Positions = msgspec.field(name="context_length")
    n_embd: Width = msgspec.field(name="embedding_length")
    n_ff: PerLayerFeedForward = msgspec.field(name="feed_forward_length", default=0)
    n_head: PerLayerHeads = msgspec.field(name="attention.head_count")
    n_head_kv: PerLayerHeads | None = msgspec.field(name="attention.head_count_kv", default=None)
    key_length: HeadDim | None = msgspec.field(name="attention.key_length", default=None)
    value_length: HeadDim | None = msgspec.field(name="attention.value_length", default=None)
    norm_eps: Epsilon = msgspec.field(name="attention.layer_norm_rms_epsilon")
    n_rot: HeadDim | None = msgspec.field(name="rope.dimension_count", default=None)
    rope_base: Base = msgspec.field(name="rope.freq_base", default=10000.0)
    rope_scaling: Literal["none", "linear", "yarn"] = msgspec.field(name="rope.scaling.type", default="linear")
    rope_factor: Factor | None = msgspec.field(name="rope.scaling.factor", default=None)
    rope_factor_old: Factor = msgspec.field(name="rope.scale_linear", default=0.0)
    rope_n_ctx_orig: Positions | None = msgspec.field(name="rope.scaling.original_context_length", default=None)
    rope_attn_factor: Magnitude = msgspec.field(name="rope.scaling.attn_factor", default=1.0)
    n_vocab: Vocabulary | None = msgspec.field(name="vocab_size", default=None)
    n_expert: Experts = msgspec.field(name="expert_count", default=0)
    n_expert_used: Experts = msgspec.field(name="expert_used_count", default=0)


class RopeParams(msgspec.Struct, frozen=True):
    """Rotary position embedding of one layer; the fields are the attributes of the ``rope`` operator.

    ``freq_scale`` multiplies positions (1/factor), ``ext_factor`` is 1 with YaRN and 0 without, ``attn_factor`` multiplies the
    magnitude.
    """

    mode: RopeMode
    n_dims: int
    base: float = 10000.0
    freq_scale: float = 1.0
    ext_factor: float = 0.0
    attn_factor: float = 1.0
    beta_fast: float = YARN_BETA_FAST
    beta_slow: float = YARN_BETA_SLOW
    n_ctx_orig: int = 0

    def attrs(self) -> dict[str, Any]:
        """Keyword attributes for ``graph.add("rope", ...)``."""
        return msgspec.structs.asdict(self)


class Routing(msgspec.Struct, frozen=True):
    """How router scores choose and weigh experts.

    ``gate`` is what makes scores of the router's logits: ``softmax`` over all experts, ``sigmoid`` or ``sqrt_softplus`` of each, or
    ``softmax_chosen``: the logits choose, and a softmax over the chosen ones alone weighs. ``normalise`` divides the chosen scores by
    their sum, ``scale`` multiplies them afterwards.
    """

    gate: Literal["softmax", "softmax_chosen", "sigmoid", "sqrt_softplus"] = "softmax"
    normalise: bool = True
    scale: float = 1.0


class LatentParams(msgspec.Struct, frozen=True):
    """Sizes of latent attention (MLA): a query or key head is ``n_nope`` plain and ``n_rot`` rotated values, a value head ``n_value``.

    ``rank`` is the length of a cell's latent, ``q_rank`` that of the queries' own latent, 0 where queries are projected directly.
    """

    n_nope: int
    n_rot: int
    n_value: int
    rank: int
    q_rank: int

    @property
    def row(self) -> int:
        """Values per cell of the latent cache."""
        return self.rank + self.n_rot


class LayerParams(msgspec.Struct, frozen=True):
    """What one layer is made of. ``window`` 0 sees everything; ``rope`` None turns nothing; ``softcap`` 0 leaves scores unbounded;
    ``n_expert`` 0 has one dense feed-forward; ``n_ff_shared`` 0 has no shared expert; ``latent`` None is ordinary attention.

    ``n_ff`` is the width of the feed-forward, or of each expert.
    """

    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    rope: RopeParams | None
    attn_scale: float
    window: int = 0
    n_expert: int = 0
    n_expert_used: int = 0
    softcap: float = 0.0
    routing: Routing = Routing()
    n_ff_shared: int = 0
    latent: LatentParams | None = None

    @property
    def q_width(self) -> int:
        return self.n_head * self.head_dim

    @property
    def kv_width(self) -> int:
        """Values per cell of the layer's K cache (and, equally, of its V cache)."""
        return self.n_head_kv * self.head_dim


class HParams(msgspec.Struct, frozen=True):
    """Everything a builder reads. Lengths are counts of values; ``norm_eps`` belongs to every norm of the model.

    ``logit_softcap`` bounds the logits where it is not 0.
    """

    arch: str
    n_layer: int
    n_ctx_train: int
    n_embd: int
    n_vocab: int
    norm_eps: float
    layers: tuple[LayerParams, ...]
    logit_softcap: float = 0.0

    def windows(self) -> tuple[int, ...]:
        """The distinct attention windows, smallest first."""
        return tuple(sorted({layer.window for layer in self.layers}))


def resolve(
    keys: DenseKeys,
    metadata: Mapping[str, Any],
    arch: str,
    mode: RopeMode,
    *,
    n_ff: Sequence[int] | None = None,
    head_dim: int | None = None,
) -> HParams:
    """Hyperparameters of a uniform pre-norm transformer with full attention and score scale 1/sqrt(head_dim).

    ``n_ff`` gives the width of each layer's feed-forward or experts where other keys than the shared one decide it, ``head_dim`` the
    size of a query and key head likewise. Raises ``ModelError`` where keys contradict each other.
    """

    def key(name: str) -> str:
        return f"{arch}.{name}"

    n_head = per_layer(keys.n_head, keys.n_layer, key("attention.head_count"))
    n_head_kv = n_head if keys.n_head_kv is None else per_layer(keys.n_head_kv, keys.n_layer, key("attention.head_count_kv"))
    if n_ff is None:
        n_ff = per_layer(keys.n_ff, keys.n_layer, key("feed_forward_length"))
    for i, (h, g) in enumerate(zip(n_head, n_head_kv)):
        if h % g:
            raise ModelError(
                f"layer {i} has {h} query heads ({key('attention.head_count')}) that {g} key/value heads "
                f"({key('attention.head_count_kv')}) cannot share equally; the first must be a multiple of the second"
            )
    if head_dim is None:
        head_dim = _head_dim(keys, n_head[0], key)
    n_rot = head_dim if keys.n_rot is None else keys.n_rot
    if n_rot > head_dim or n_rot % 2:
        raise ModelError(
            f"key {key('rope.dimension_count')} is {n_rot}; rotation needs an even number of dimensions, at most the head's {head_dim}"
        )
    n_expert, n_used = keys.n_expert, keys.n_expert_used
    if n_expert and not 1 <= n_used <= n_expert:
        raise ModelError(
            f"key {key('expert_used_count')} is {n_used}; of {n_expert} experts ({key('expert_count')}) a token uses 1 to {n_expert}"
        )
    if n_used and not n_expert:
        raise ModelError(f"key {key('expert_used_count')} is {n_used}, but {key('expert_count')} says the model has no experts")
    for i, width in enumerate(n_ff):
        if width == 0:
            raise ModelError(f"layer {i} has no feed-forward: key {key('feed_forward_length')} must be a positive number, or one per layer")
    rope = rope_params(keys, mode, n_rot, arch)
    scale = 1.0 / math.sqrt(head_dim)
    layers = tuple(
        LayerParams(n_head=h, n_head_kv=g, head_dim=head_dim, n_ff=f, rope=rope, attn_scale=scale, n_expert=n_expert, n_expert_used=n_used)
        for h, g, f in zip(n_head, n_head_kv, n_ff)
    )
    return HParams(
        arch=arch,
        n_layer=keys.n_layer,
        n_ctx_train=keys.n_ctx_train,
        n_embd=keys.n_embd,
        n_vocab=n_vocab(keys, metadata, arch),
        norm_eps=keys.norm_eps,
        layers=layers,
    )


def per_layer(value: int | Sequence[int], n_layer: int, key: str) -> tuple[int, ...]:
    """One number per layer from a key that holds a number or a list of them."""
    if isinstance(value, int):
        return (value,) * n_layer
    if len(value) != n_layer:
        raise ModelError(f"key {key} lists {len(value)} values for {n_layer} layers; expected one value for all layers or one per layer")
    return tuple(value)


def rope_params(keys: DenseKeys, mode: RopeMode, n_rot: int, arch: str) -> RopeParams:
    """The rotation the scaling keys describe (YaRN: Peng et al. 2023; its magnitude correction belongs to the ``rope`` operator)."""
    factor = keys.rope_factor if keys.rope_factor is not None else keys.rope_factor_old
    scaled = keys.rope_scaling != "none" and factor > 0
    if scaled and factor < SMALLEST_FACTOR:
        raise ModelError(
            f"key {arch}.rope.scaling.factor (or the older {arch}.rope.scale_linear) is {factor}; "
            f"a scaled rotation needs a factor of at least {SMALLEST_FACTOR}, and 0 means none"
        )
    # The engine keeps the scale in f32; positions in the thousands make the difference to 1/factor in double visible.
    freq_scale = float(np.float32(1.0) / np.float32(factor)) if scaled else 1.0
    return RopeParams(
        mode=mode,
        n_dims=n_rot,
        base=keys.rope_base,
        freq_scale=freq_scale,
        ext_factor=1.0 if keys.rope_scaling == "yarn" else 0.0,
        attn_factor=keys.rope_attn_factor,
        n_ctx_orig=keys.rope_n_ctx_orig or keys.n_ctx_train,
    )


def _head_dim(keys: DenseKeys, n_head: int, key: Any) -> int:
    if keys.key_length is None and keys.n_embd % n_head:
        raise ModelError(
            f"key {key('embedding_length')} is {keys.n_embd}, not a multiple of the {n_head} heads of {key('attention.head_count')}; "
            f"such a model must state its head size in {key('attention.key_length')}"
        )
    head_dim = keys.n_embd // n_head if keys.key_length is None else keys.key_length
    value_dim = keys.n_embd // n_head if keys.value_length is None else keys.value_length
    if value_dim != head_dim:
        raise ModelError(
            f"keys have {head_dim} values per head ({key('attention.key_length')}) and values {value_dim} "
            f"({key('attention.value_length')}); this architecture needs both equal"
        )
    return head_dim


def n_vocab(keys: DenseKeys, metadata: Mapping[str, Any], arch: str) -> int:
    """Tokens of the vocabulary, from the key or the list of tokens."""
    if keys.n_vocab is not None:
        return keys.n_vocab
    tokens = metadata.get(TOKENS_KEY)
    # The list may be a lazy sequence of a reader; only its length matters here.
    if not isinstance(tokens, Sized) or isinstance(tokens, str) or not len(tokens):
        raise ModelError(
            f"the file has neither {arch}.vocab_size (an integer) nor {TOKENS_KEY} (a list of strings); "
            "one of them must say how many tokens there are"
        )
    return len(tokens)
