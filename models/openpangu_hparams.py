"""Hyperparameters of openpangu (openPangu-2.0-Flash): latent attention, parameter sinks, streams, a schedule of windows and an indexer."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ggufc.models.errors import ModelError
from ggufc.models.hparams import DenseKeys, HParams, LatentParams, LayerParams, Routing, n_vocab, rope_params
from ggufc.models.metadata import Experts, Heads, Width, read_keys

ARCH = "openpangu"
SIGMOID = 2
"""Value of ``expert_gating_func``; 0 means the same for this family."""

Windows = Annotated[list[Annotated[int, Meta(ge=0, le=1 << 30)]], Meta(max_length=4096)]


class OpenPanguKeys(DenseKeys, frozen=True, kw_only=True):
    """Keys of the family beside the common ones (spec/openpangu.md, section 1)."""

    q_rank: Width = msgspec.field(name="attention.q_lora_rank")
    kv_rank: Width = msgspec.field(name="attention.kv_lora_rank")
    n_dense: Annotated[int, Meta(ge=0, le=4096)] = msgspec.field(name="leading_dense_block_count")
    n_ff_expert: Width = msgspec.field(name="expert_feed_forward_length")
    n_shared: Experts = msgspec.field(name="expert_shared_count")
    weights_scale: Annotated[float, Meta(gt=0, le=1e6)] = msgspec.field(name="expert_weights_scale")
    weights_norm: bool = msgspec.field(name="expert_weights_norm", default=False)
    gating: int = msgspec.field(name="expert_gating_func", default=SIGMOID)
    n_index_head: Annotated[int, Meta(ge=0, le=1 << 14)] = msgspec.field(name="attention.indexer.head_count", default=0)
    n_index: Annotated[int, Meta(ge=0, le=1 << 14)] = msgspec.field(name="attention.indexer.key_length", default=0)
    top_k: Annotated[int, Meta(ge=0, le=1 << 30)] = msgspec.field(name="attention.indexer.top_k", default=0)
    streams: Annotated[int, Meta(ge=1, le=8)] = msgspec.field(name="mhc_num_stream")
    iterations: Annotated[int, Meta(ge=2, le=200)] = msgspec.field(name="mhc_recur_norm")
    n_sink: Heads = msgspec.field(name="param_sink_number")
    n_predict: Annotated[int, Meta(ge=0, le=4096)] = msgspec.field(name="nextn_predict_layers", default=0)
    swa_layers: Windows | None = msgspec.field(name="swa_layers", default=None)
    swa_windows: Windows | None = msgspec.field(name="sliding_window_list", default=None)
    key_length_swa: int | None = msgspec.field(name="attention.key_length_swa", default=None)
    value_length_swa: int | None = msgspec.field(name="attention.value_length_swa", default=None)


class IndexerParams(msgspec.Struct, frozen=True):
    """The lightning indexer: ``n_head`` heads of ``head_dim`` values choose ``top_k`` rows."""

    n_head: int
    head_dim: int
    top_k: int


class OpenPanguLayer(LayerParams, frozen=True, kw_only=True):
    """One base layer. ``dense`` has one feed-forward of width ``n_ff`` instead of experts; ``indexer`` None reads every row."""

    indexer: IndexerParams | None = None


class OpenPanguParams(HParams, frozen=True, kw_only=True):
    """The family's own numbers; ``layers`` are the base layers, without the NextN heads that follow them in the file."""

    streams: int
    iterations: int
    n_sink: int
    n_predict: int
    window: int
    unpaired: str = ""
    """Why the keys of the schedule name no windows; empty where they do, or where the file has neither."""


def remarks(hp: HParams) -> list[str]:
    """What becomes of a schedule that cannot be read (spec/openpangu.md, section 1)."""
    unpaired = hp.unpaired if isinstance(hp, OpenPanguParams) else ""
    return [f"{unpaired}, so all layers are dense: no windows and no indexer"] if unpaired else []


def read(metadata: Mapping[str, Any]) -> OpenPanguParams:
    """Hyperparameters; raises ``ModelError`` where keys contradict each other."""
    keys = read_keys(OpenPanguKeys, metadata, ARCH)
    heads = keys.n_head
    if not isinstance(heads, int):
        raise ModelError(f"key {ARCH}.attention.head_count must be one number for all layers")
    d_k = keys.key_length or keys.n_embd // heads
    d_v = keys.value_length or keys.n_embd // heads
    n_rot = d_k if keys.n_rot is None else keys.n_rot
    if n_rot % 2 or n_rot >= d_k:
        raise ModelError(
            f"key {ARCH}.rope.dimension_count is {n_rot}; it must be even and leave room for the plain part of the {d_k} values of a key"
        )
    if keys.n_predict >= keys.n_layer:
        raise ModelError(f"key {ARCH}.nextn_predict_layers is {keys.n_predict}, but there are only {keys.n_layer} layers in all")
    if keys.gating not in (0, SIGMOID):
        raise ModelError(f"key {ARCH}.expert_gating_func is {keys.gating}; this architecture gates with a sigmoid ({SIGMOID}, or 0)")
    if not 1 <= keys.n_expert_used <= keys.n_expert:
        raise ModelError(f"key {ARCH}.expert_used_count is {keys.n_expert_used}; of {keys.n_expert} experts a token uses at least 1")
    for name, found, full in (("key", keys.key_length_swa, d_k), ("value", keys.value_length_swa, d_v)):
        if found is not None and found != full:
            raise ModelError(
                f"key {ARCH}.attention.{name}_length_swa is {found}; windows with other head sizes than {full} are not supported"
            )
    n_base = keys.n_layer - keys.n_predict
    windows = _schedule(keys, n_base)
    base = _one_window(windows, range(n_base))
    _one_window(windows, range(n_base, keys.n_layer))  # the heads that predict further must agree, too
    rope = rope_params(keys, "neox", n_rot, ARCH)
    latent = LatentParams(n_nope=d_k - n_rot, n_rot=n_rot, n_value=d_v, rank=keys.kv_rank, q_rank=keys.q_rank)
    indexer = IndexerParams(keys.n_index_head, keys.n_index, keys.top_k) if min(keys.n_index_head, keys.n_index, keys.top_k) > 0 else None
    if indexer is not None and indexer.head_dim < n_rot:
        raise ModelError(f"key {ARCH}.attention.indexer.key_length is {indexer.head_dim}, less than the {n_rot} rotated values")
    ff = keys.n_ff
    if not isinstance(ff, int) or (ff < 1 and keys.n_dense):
        raise ModelError(f"key {ARCH}.feed_forward_length must be one positive number: the width of the {keys.n_dense} dense layers")
    layers = []
    for i in range(n_base):
        moe = i >= keys.n_dense
        window = windows.get(i, 0)
        layers.append(
            OpenPanguLayer(
                n_head=heads,
                n_head_kv=1,
                head_dim=d_k,
                rope=rope,
                attn_scale=1.0 / math.sqrt(d_k),
                window=window,
                latent=latent,
                n_ff=keys.n_ff_expert if moe else ff,
                n_expert=keys.n_expert if moe else 0,
                n_expert_used=keys.n_expert_used if moe else 0,
                n_ff_shared=keys.n_shared * keys.n_ff_expert if moe else 0,
                routing=Routing(gate="sigmoid", normalise=keys.weights_norm, scale=keys.weights_scale),
                indexer=indexer if base and not window else None,
            )
        )
    return OpenPanguParams(
        arch=ARCH, n_layer=n_base, n_ctx_train=keys.n_ctx_train, n_embd=keys.n_embd, n_vocab=n_vocab(keys, metadata, ARCH),
        norm_eps=keys.norm_eps, layers=tuple(layers), streams=keys.streams, iterations=keys.iterations, n_sink=keys.n_sink,
        n_predict=keys.n_predict, window=base, unpaired=_unpaired(keys),
    )  # fmt: skip


def with_tensors(hp: OpenPanguParams, present: Container[str]) -> OpenPanguParams:
    """``hp`` without the indexers whose tensors the file lacks: such layers read every row."""
    layers = []
    for i, layer in enumerate(hp.layers):
        lacks = f"blk.{i}.attn_indexer_q_b.weight" not in present
        layers.append(msgspec.structs.replace(layer, indexer=None) if lacks else layer)
    return msgspec.structs.replace(hp, layers=tuple(layers))


def _unpaired(keys: OpenPanguKeys) -> str:
    layers, windows = (None if given is None else len(given) for given in (keys.swa_layers, keys.swa_windows))
    if layers == windows:
        return ""
    entries = ["no entries" if n is None else f"{n} entries" for n in (layers, windows)]
    return f"key {ARCH}.swa_layers has {entries[0]} and {ARCH}.sliding_window_list {entries[1]}"


def _schedule(keys: OpenPanguKeys, n_base: int) -> dict[int, int]:
    """Layer to window. Without both arrays, or with arrays of unequal length, all layers are dense."""
    layers, windows = keys.swa_layers, keys.swa_windows
    if layers is None or windows is None or len(layers) != len(windows):
        return {}
    for i in layers:
        if i >= keys.n_layer:
            raise ModelError(f"key {ARCH}.swa_layers names layer {i}; the model has layers 0..{keys.n_layer - 1}")
    return {i: w for i, w in zip(layers, windows) if w > 0}


def _one_window(windows: Mapping[int, int], layers: range) -> int:
    """The window that all windowed layers of a range share, 0 if there is none."""
    found = sorted({windows[i] for i in layers if i in windows})
    if len(found) > 1:
        raise ModelError(f"key {ARCH}.sliding_window_list has windows {found} among layers {layers[0]}..{layers[-1]}; they must be equal")
    return found[0] if found else 0
