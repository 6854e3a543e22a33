"""In-memory model files of tiny models, for tests that need no tensor data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

E, F, H, G, D, V = 32, 48, 4, 2, 8, 100


@dataclass
class Type:
    name: str


@dataclass
class Tensor:
    ne: tuple[int, ...]
    type: Type


@dataclass
class ModelFile:
    """What ``load_model`` reads of a GGUF file; edit the dictionaries to damage it."""

    metadata: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, *ne: int, dtype: str = "f32") -> None:
        self.tensors[name] = Tensor(ne, Type(dtype))


def llama_file(
    n_layer: int = 2, experts: int = 0, used: int = 2, split: bool = False, biases: bool = False, tied: bool = False, d: int = D
) -> ModelFile:
    """A llama model of E=32, F=48, 4 query and 2 key/value heads of ``d`` values."""
    file = ModelFile(_common_keys("llama", n_layer))
    if d != D:
        file.metadata |= {"llama.attention.key_length": d, "llama.attention.value_length": d}
    _common_tensors(file, tied)
    for i in range(n_layer):
        _attention_tensors(file, i, d)
        if experts:
            _expert_tensors(file, i, experts, split)
        else:
            _ffn_tensors(file, i)
        if biases:
            for name, n in (
                ("attn_q", H * d),
                ("attn_k", G * d),
                ("attn_v", G * d),
                ("attn_output", E),
                ("ffn_gate", F),
                ("ffn_up", F),
                ("ffn_down", E),
            ):
                file.add(f"blk.{i}.{name}.bias", n)
    if experts:
        file.metadata |= {"llama.expert_count": experts, "llama.expert_used_count": used}
    return file


def gemma3_file(n_layer: int = 2, window: int = 16) -> ModelFile:
    """A gemma3 model of the same sizes, tied output."""
    file = ModelFile(_common_keys("gemma3", n_layer) | {"gemma3.attention.sliding_window": window, "gemma3.rope.freq_base": 1e6})
    _common_tensors(file, tied=True)
    for i in range(n_layer):
        _attention_tensors(file, i, D)
        _ffn_tensors(file, i)
        for name, n in (("attn_q_norm", D), ("attn_k_norm", D), ("post_attention_norm", E), ("post_ffw_norm", E)):
            file.add(f"blk.{i}.{name}.weight", n)
    return file


def _common_keys(arch: str, n_layer: int) -> dict[str, Any]:
    return {
        "general.architecture": arch,
        f"{arch}.block_count": n_layer,
        f"{arch}.context_length": 512,
        f"{arch}.embedding_length": E,
        f"{arch}.feed_forward_length": F,
        f"{arch}.attention.head_count": H,
        f"{arch}.attention.head_count_kv": G,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.tokens": [f"token{i}" for i in range(V)],
    }


def _common_tensors(file: ModelFile, tied: bool) -> None:
    file.add("token_embd.weight", E, V)
    file.add("output_norm.weight", E)
    if not tied:
        file.add("output.weight", E, V)


def _attention_tensors(file: ModelFile, i: int, d: int) -> None:
    for name, ne in (("attn_q", (E, H * d)), ("attn_k", (E, G * d)), ("attn_v", (E, G * d)), ("attn_output", (H * d, E))):
        file.add(f"blk.{i}.{name}.weight", *ne)
    for name in ("attn_norm", "ffn_norm"):
        file.add(f"blk.{i}.{name}.weight", E)


def _ffn_tensors(file: ModelFile, i: int) -> None:
    for name, ne in (("ffn_gate", (E, F)), ("ffn_up", (E, F)), ("ffn_down", (F, E))):
        file.add(f"blk.{i}.{name}.weight", *ne)


def _expert_tensors(file: ModelFile, i: int, experts: int, split: bool) -> None:
    file.add(f"blk.{i}.ffn_gate_inp.weight", E, experts)
    for name, ne in (("ffn_gate", (E, F)), ("ffn_up", (E, F)), ("ffn_down", (F, E))):
        if split:
            for x in range(experts):
                file.add(f"blk.{i}.{name}.{x}.weight", *ne)
        else:
            file.add(f"blk.{i}.{name}_exps.weight", *ne, experts)
