"""Composes GGUF bytes without the writer, so that tests can say anything, however wrong."""

from __future__ import annotations

import struct
from pathlib import Path

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
F32_TENSOR, F16_TENSOR, Q4_0_TENSOR, I8_TENSOR = 0, 1, 2, 24


def string(text: str | bytes, length: int | None = None) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def kv(key: str | bytes, kind: int, body: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + body


def text(key: str, value: str | bytes) -> bytes:
    return kv(key, STRING, string(value))


def u32(key: str, value: int) -> bytes:
    return kv(key, U32, struct.pack("<I", value))


def array(key: str, element: int, count: int, body: bytes) -> bytes:
    return kv(key, ARRAY, struct.pack("<IQ", element, count) + body)


def strings(key: str, values: list[str] | list[bytes]) -> bytes:
    return array(key, STRING, len(values), b"".join(map(string, values)))


def tensor(name: str | bytes, ne: tuple[int, ...], kind: int = F32_TENSOR, offset: int = 0, n_dims: int | None = None) -> bytes:
    dims = struct.pack(f"<{len(ne)}Q", *ne)
    return string(name) + struct.pack("<I", len(ne) if n_dims is None else n_dims) + dims + struct.pack("<IQ", kind, offset)


def file(
    kvs: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    data: bytes = b"",
    *,
    n_kv: int | None = None,
    n_tensors: int | None = None,
    version: int = 3,
    magic: bytes = b"GGUF",
    alignment: int = 32,
    pad: bool = True,
) -> bytes:
    kvs, tensors = kvs or [], tensors or []
    counts = struct.pack("<IQQ", version, len(tensors) if n_tensors is None else n_tensors, len(kvs) if n_kv is None else n_kv)
    header = magic + counts + b"".join(kvs) + b"".join(tensors)
    return header + (bytes(-len(header) % alignment) if pad else b"") + data


def model(*, tokens: int = 4, extra: list[bytes] | None = None) -> bytes:
    """A small well-formed model file: architecture keys, a vocabulary, three tensors."""
    kvs = [
        text("general.architecture", "llama"),
        u32("llama.block_count", 2),
        u32("llama.attention.head_count", 4),
        kv("llama.rope.freq_base", F32, struct.pack("<f", 1e4)),
        kv("tokenizer.ggml.add_bos_token", BOOL, b"\1"),
        text("tokenizer.ggml.model", "llama"),
        strings("tokenizer.ggml.tokens", [b"<unk>", b"<s>", b"</s>", b"\xe2\x96\x81", *[b"t%d" % i for i in range(4, tokens)]][:tokens]),
        array("tokenizer.ggml.scores", F32, tokens, struct.pack(f"<{tokens}f", *range(tokens))),
        array("tokenizer.ggml.token_type", I32, tokens, struct.pack(f"<{tokens}i", *[1] * tokens)),
        u32("tokenizer.ggml.bos_token_id", 1),
        *(extra or []),
    ]
    tensors = [tensor("a", (8, 2)), tensor("b", (64,), Q4_0_TENSOR, 64), tensor("c", (3, 2, 2), F16_TENSOR, 128)]
    return file(kvs, tensors, bytes(range(64)) + bytes(36) + bytes(28) + bytes(24))


def save(folder: Path, content: bytes, name: str = "x.gguf") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path
