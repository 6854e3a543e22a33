"""In-memory files of tiny models of every family but llama and gemma3, with the tensors their tables ask for.

That the tables themselves are right is shown by the golden files, which another program wrote.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ggufc.models import ARCHITECTURES
from model_files import ModelFile, V

L = 2
_COMMON: dict[str, Any] = {
    "block_count": L,
    "context_length": 512,
    "embedding_length": 32,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
_EXPERTS: dict[str, Any] = {"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 32}
_ROUTED: dict[str, Any] = _EXPERTS | {"expert_shared_count": 1, "leading_dense_block_count": 1, "expert_weights_scale": 2.5}
_LATENT: dict[str, Any] = _ROUTED | {
    "attention.head_count_kv": 4,
    "attention.key_length": 64,
    "attention.value_length": 32,
    "rope.dimension_count": 32,
    "attention.kv_lora_rank": 32,
    "attention.q_lora_rank": 32,
}
_INDEXER: dict[str, Any] = {"attention.indexer.head_count": 4, "attention.indexer.key_length": 32, "attention.indexer.top_k": 8}

FAMILIES: dict[str, tuple[str, dict[str, Any], Collection[str]]] = {
    "deepseek2": ("deepseek2", _LATENT, ()),
    "deepseek2-split": ("deepseek2", _LATENT, [f"blk.{i}.attn_{part}_b.weight" for i in range(L) for part in "kv"]),
    "deepseek2-lite": ("deepseek2", _LATENT | {"block_count": 26}, ()),
    "gemma2": ("gemma2", {"attention.sliding_window": 16}, ()),
    "glm4moe": ("glm4moe", _ROUTED | {"rope.dimension_count": 4}, ()),
    "glm4moe-nextn": ("glm4moe", _ROUTED | {"block_count": 3, "nextn_predict_layers": 1}, ()),
    "glm-dsa": ("glm-dsa", _LATENT | _INDEXER, ()),
    "glm-dsa-nextn": ("glm-dsa", _LATENT | _INDEXER | {"block_count": 5, "nextn_predict_layers": 1}, ()),
    "gpt-oss": ("gpt-oss", _EXPERTS | {"attention.sliding_window": 16}, ()),
    "phi3": ("phi3", {"attention.sliding_window": 0}, ()),
    "phi3-factors": ("phi3", {"attention.sliding_window": 16, "rope.dimension_count": 4}, ["rope_factors_long.weight"]),
    "qwen2": ("qwen2", {}, ()),
    "qwen3": ("qwen3", {"attention.key_length": 16, "attention.value_length": 16}, ()),
    "qwen3moe": ("qwen3moe", _EXPERTS, ()),
    "qwen3moe-packed": ("qwen3moe", _EXPERTS, [f"blk.{i}.ffn_gate_up_exps.weight" for i in range(L)]),
    "qwen3moe-one-used": ("qwen3moe", _EXPERTS | {"expert_used_count": 1}, ()),
    "smollm3": ("smollm3", {"block_count": 5}, ()),
}
"""Name: architecture, keys beyond the common ones, tensors that choose among the forms a file may have."""


def family_metadata(name: str) -> dict[str, Any]:
    arch, keys, _ = FAMILIES[name]
    metadata = {f"{arch}.{key}": value for key, value in (_COMMON | keys).items()}
    return metadata | {"general.architecture": arch, "tokenizer.ggml.tokens": [f"token{i}" for i in range(V)]}


def family_file(name: str, *, optional: bool = True, vectors: str = "f32") -> ModelFile:
    """The file of a family, with or without optional tensors; ``vectors`` is the type of one-dimensional ones."""
    arch, _, present = FAMILIES[name]
    file = ModelFile(family_metadata(name))
    architecture = ARCHITECTURES[arch]
    for spec in architecture.tensors(architecture.read(file.metadata), present):
        if optional or not spec.optional:
            file.add(spec.name, *spec.ne, dtype=vectors if spec.vector else "f32")
    return file
