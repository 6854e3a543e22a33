"""Hyperparameters: every key is typed and range-checked, and an error names the key, what was expected and what was found."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufc.models import ModelError, load_model
from model_files import V, gemma3_file, llama_file

FILES = {"llama": llama_file, "gemma3": gemma3_file}

REQUIRED = {
    "llama": ("block_count", "context_length", "embedding_length", "attention.head_count", "attention.layer_norm_rms_epsilon"),
}
REQUIRED["gemma3"] = (*REQUIRED["llama"], "attention.sliding_window")

KEYS = [(arch, key) for arch, keys in REQUIRED.items() for key in keys]
OPTIONAL = [
    (arch, key)
    for arch in FILES
    for key in (
        "feed_forward_length",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scale_linear",
        "rope.scaling.original_context_length",
        "rope.scaling.attn_factor",
        "vocab_size",
        "expert_count",
        "expert_used_count",
    )
]


def refused(file: Any, *words: str) -> None:
    with pytest.raises(ModelError) as error:
        load_model(file)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("arch, key", KEYS)
def test_missing_required_key_is_named(arch: str, key: str) -> None:
    file = FILES[arch]()
    del file.metadata[f"{arch}.{key}"]
    refused(file, f"{arch}.{key}", "requires", "expected")


@pytest.mark.parametrize("arch, key", KEYS + OPTIONAL)
@pytest.mark.parametrize("value", ["many", True, [], {"a": 1}, math.nan, 1e30, 2**63], ids=str)
def test_wrong_type_and_huge_values_are_named(arch: str, key: str, value: Any) -> None:
    file = FILES[arch]()
    file.metadata[f"{arch}.{key}"] = value
    refused(file, f"{arch}.{key}", "must be")


@pytest.mark.parametrize("arch, key", KEYS + OPTIONAL)
@pytest.mark.parametrize("value", [0, -1, 0.0, -1.0])
def test_zero_and_negative_values(arch: str, key: str, value: float) -> None:  # S70: a norm without epsilon cannot be built
    zero_means_absent = {"rope.scaling.factor", "rope.scale_linear", "expert_count", "expert_used_count"}
    file = FILES[arch]()
    file.metadata[f"{arch}.{key}"] = value
    if value == 0 and key in zero_means_absent and not (isinstance(value, float) and key.startswith("expert")):
        load_model(file)
    else:
        refused(file, f"{arch}.{key}")


def test_numpy_values_are_numbers() -> None:
    file = llama_file()
    file.metadata["llama.attention.head_count"] = np.array([4, 4], np.uint32)
    file.metadata["llama.feed_forward_length"] = np.uint32(48)
    assert [layer.n_head for layer in load_model(file).hparams.layers] == [4, 4]


def test_per_layer_lists() -> None:
    file = llama_file()
    file.metadata["llama.attention.head_count_kv"] = [2, 4]
    file.metadata["llama.feed_forward_length"] = [48, 16]
    file.add("blk.1.attn_k.weight", 32, 32)
    file.add("blk.1.attn_v.weight", 32, 32)
    for name, ne in (("ffn_gate", (32, 16)), ("ffn_up", (32, 16)), ("ffn_down", (16, 32))):
        file.add(f"blk.1.{name}.weight", *ne)
    model = load_model(file)
    assert [(layer.n_head_kv, layer.n_ff) for layer in model.hparams.layers] == [(2, 48), (4, 16)]
    assert [c.width for c in model.caches()] == [16, 16, 32, 32]
    model.build()


@pytest.mark.parametrize("key", ["attention.head_count", "attention.head_count_kv", "feed_forward_length"])
def test_per_layer_list_of_another_length(key: str) -> None:
    file = llama_file()
    file.metadata[f"llama.{key}"] = [4, 4, 4]
    refused(file, f"llama.{key}", "3 values for 2 layers")


def test_heads_must_divide() -> None:
    file = llama_file()
    file.metadata["llama.attention.head_count_kv"] = 3
    refused(file, "layer 0", "4 query heads", "llama.attention.head_count_kv")
    file = llama_file()
    file.metadata |= {"llama.attention.head_count": 3, "llama.attention.head_count_kv": 3}
    refused(file, "llama.embedding_length", "llama.attention.key_length")


def test_key_and_value_heads_must_be_equal() -> None:
    file = llama_file()
    file.metadata["llama.attention.value_length"] = 4
    refused(file, "llama.attention.key_length", "llama.attention.value_length")


def test_rotation_of_part_of_a_head() -> None:
    file = llama_file()
    file.metadata["llama.rope.dimension_count"] = 4
    refused(file, "llama.rope.dimension_count", "whole head of 8")
    for arch, make in FILES.items():
        for n in (5, 10):
            file = make()
            file.metadata[f"{arch}.rope.dimension_count"] = n
            refused(file, f"{arch}.rope.dimension_count", "even")


@pytest.mark.parametrize("count, used", [(4, 0), (4, 5), (0, 2)])
def test_expert_counts_must_agree(count: int, used: int) -> None:
    file = llama_file(experts=4)
    file.metadata |= {"llama.expert_count": count, "llama.expert_used_count": used}
    refused(file, "llama.expert_used_count", "llama.expert_count")


def test_gemma3_has_no_experts() -> None:
    file = gemma3_file()
    file.metadata["gemma3.expert_count"] = 4
    refused(file, "gemma3.expert_count")


def test_vocabulary_size() -> None:
    file = llama_file()
    assert load_model(file).n_vocab == V
    del file.metadata["tokenizer.ggml.tokens"]
    refused(file, "llama.vocab_size", "tokenizer.ggml.tokens")
    file.metadata["llama.vocab_size"] = V
    assert load_model(file).n_vocab == V


def test_unknown_rope_scaling_is_refused() -> None:
    file = llama_file()
    file.metadata["llama.rope.scaling.type"] = "longrope"
    refused(file, "llama.rope.scaling.type", "'yarn'", "longrope")


@pytest.mark.parametrize(
    "keys, freq_scale, ext_factor",
    [
        ({}, 1.0, 0.0),
        ({"rope.scaling.factor": 0.0}, 1.0, 0.0),
        ({"rope.scaling.factor": 4.0}, 0.25, 0.0),
        ({"rope.scale_linear": 4.0}, 0.25, 0.0),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "rope.scale_linear": 4.0}, 0.125, 0.0),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, 1.0, 0.0),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, 0.25, 1.0),
    ],
)
def test_rope_scaling(keys: dict[str, Any], freq_scale: float, ext_factor: float) -> None:
    file = llama_file()
    file.metadata |= {f"llama.{key}": value for key, value in keys.items()}
    rope = load_model(file).cache_rope(0)
    assert (rope["freq_scale"], rope["ext_factor"], rope["mode"], rope["n_dims"]) == (freq_scale, ext_factor, "norm", 8)
    assert rope["n_ctx_orig"] == 512


def test_tiny_rope_factor_is_refused() -> None:
    file = llama_file()
    file.metadata["llama.rope.scaling.factor"] = 1e-40
    refused(file, "llama.rope.scaling.factor", "at least")


def test_gemma3_layers_alternate() -> None:
    file = gemma3_file(n_layer=12)
    file.metadata["gemma3.rope.scaling.factor"] = 8.0
    layers = load_model(file).hparams.layers
    assert [i for i, layer in enumerate(layers) if layer.window == 0] == [5, 11]
    ropes = {(layer.window, layer.rope.base, layer.rope.freq_scale) for layer in layers if layer.rope}
    assert ropes == {(0, 1e6, 0.125), (16, 10000.0, 1.0)}
    assert {layer.attn_scale for layer in layers} == {1 / math.sqrt(8)}


def test_gemma3_27b_scales_by_embedding_width() -> None:
    file = gemma3_file(n_layer=62)
    file.metadata |= {"gemma3.attention.key_length": 16, "gemma3.attention.value_length": 16}
    for i in range(62):
        for name, ne in (("attn_q", (32, 64)), ("attn_k", (32, 32)), ("attn_v", (32, 32)), ("attn_output", (64, 32))):
            file.add(f"blk.{i}.{name}.weight", *ne)
        for name in ("attn_q_norm", "attn_k_norm"):
            file.add(f"blk.{i}.{name}.weight", 16)
    assert {layer.attn_scale for layer in load_model(file).hparams.layers} == {1 / math.sqrt(32 // 4)}


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 200),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.lists(st.integers(-1, 40), max_size=4),
    st.sampled_from(
        ["none", "linear", "yarn", np.float32(4), np.float64(1e-5), np.uint32(2), np.bool_(True), np.array([4, 2]), np.array(7)]
    ),
)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(sorted(FILES)),
    st.dictionaries(st.sampled_from(sorted({key for _, key in KEYS + OPTIONAL})), VALUES, min_size=1, max_size=3),
)
def test_any_metadata_builds_or_is_refused(arch: str, values: dict[str, Any]) -> None:
    """Whatever a file says, the answer is a graph within its budget or a ``ModelError``, never another exception."""
    file = FILES[arch]()
    file.metadata |= {f"{arch}.{key}": value for key, value in values.items()}
    try:
        model = load_model(file)
    except ModelError as error:
        assert str(error)
        return
    assert len(model.build().nodes) <= model.node_estimate()
