"""phi3 (Phi-3, Phi-3.5, Phi-4 mini): one matrix for q, k and v, one for gate and up, NEOX rotation with two sets of frequency
divisors.

The divisors for long contexts apply when a sequence may grow beyond the original context, those for short ones otherwise. A window, if
the file states one, holds for every layer.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Annotated, Any

import msgspec

from ggufc.ir import Graph
from ggufc.models.architecture import Architecture, common_tensors, norm_tensors
from ggufc.models.attention import packed_attention_tensors
from ggufc.models.blocks import Builder
from ggufc.models.caches import ROPE_FACTORS_LONG, ROPE_FACTORS_SHORT
from ggufc.models.errors import ModelError
from ggufc.models.ffn import packed_ffn_tensors
from ggufc.models.hparams import DenseKeys, HParams, resolve
from ggufc.models.metadata import read_keys
from ggufc.models.prenorm import pre_norm_decoder, pre_norm_nodes
from ggufc.models.weights import TensorSpec


class Phi3Keys(DenseKeys, frozen=True, kw_only=True):
    """The shared keys and the window of all layers (0: none), which old files leave out."""

    window: Annotated[int, msgspec.Meta(ge=0, le=1 << 30)] | None = msgspec.field(name="attention.sliding_window", default=None)
    n_expert: Annotated[int, msgspec.Meta(ge=0, le=0)] = msgspec.field(name="expert_count", default=0)


def read(metadata: Mapping[str, Any]) -> HParams:
    """Hyperparameters, with the window."""
    keys = read_keys(Phi3Keys, metadata, "phi3")
    hp = resolve(keys, metadata, "phi3", "neox")
    window = _known_window(hp) if keys.window is None else keys.window
    return msgspec.structs.replace(hp, layers=tuple(msgspec.structs.replace(layer, window=window) for layer in hp.layers))


def _known_window(hp: HParams) -> int:
    """The window of the released models whose files do not state it (spec/dense.md, section 9)."""
    if hp.n_layer in (32, 40) and hp.n_ctx_train == 4096:
        return 2047
    if hp.n_layer == 32 and hp.layers[0].n_head_kv == 32 and hp.n_ctx_train == 131072:
        return 262144
    if hp.n_layer == 40 and hp.n_ctx_train == 131072:
        return 131072
    raise ModelError(
        "the file has no key phi3.attention.sliding_window and is none of the released models whose window is known; "
        "add the key (0: no window) with a GGUF editor"
    )


def tensors(hp: HParams, present: Container[str]) -> Iterator[TensorSpec]:
    """Tensors of the file. Divisors come in pairs, one per pair of values that turn or, in older files, of the whole head."""
    yield from common_tensors(hp, tied=False)
    if ROPE_FACTORS_LONG in present or ROPE_FACTORS_SHORT in present:
        layer = hp.layers[0]
        turning = layer.head_dim if layer.rope is None else layer.rope.n_dims
        for name in (ROPE_FACTORS_LONG, ROPE_FACTORS_SHORT):
            yield TensorSpec(name, (turning // 2,), also=((layer.head_dim // 2,),))
    for i in range(hp.n_layer):
        yield from norm_tensors(hp, i, "attn_norm", "ffn_norm")
        yield from packed_attention_tensors(hp, i)
        yield from packed_ffn_tensors(hp, i)


def build(b: Builder) -> Graph:
    """The unfused evaluation graph with the output ``logits`` f32 [n_vocab, O]."""
    return pre_norm_decoder(b)


PHI3 = Architecture("phi3", read, tensors, build, pre_norm_nodes)
