"""One fixture per published GGUF vulnerability and per rule of the reader; each is refused with the byte that is wrong."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

import gguf_bytes as g
from ggufc.formats.errors import GGUFError
from ggufc.formats.gguf_reader import GGUFFile

HUGE = (1 << 64) - 1
TOKENS = "tokenizer.ggml.tokens"


def vocabulary(*extra: bytes, count: int = 3) -> bytes:
    return g.file([g.text("tokenizer.ggml.model", "gpt3"), g.strings(TOKENS, [f"t{i}" for i in range(count)]), *extra])


def nested(depth: int) -> bytes:
    return struct.pack("<IQ", g.ARRAY, 1) * depth + struct.pack("<IQ", g.U8, 0)


def arch(key: str, kind: int, body: bytes) -> bytes:
    return g.file([g.text("general.architecture", "llama"), g.kv(f"llama.{key}", kind, body)])


U32 = struct.Struct("<I").pack
U64 = struct.Struct("<Q").pack

# id -> (file, what the message says). Ids are those of the advisories. Two rows are not about files: the token count of a long text
# (CVE-2025-52566) belongs to the tokenizer, and what a template may do (CVE-2024-34359, CVE-2026-5760) to the sandbox it runs in.
HOSTILE: dict[str, tuple[bytes, str]] = {
    "CVE-2024-21825": (g.file([g.array("a", g.STRING, (1 << 61) + 1, bytes(64))]), "claims 2305843009213693953 elements"),
    "CVE-2024-23496-value": (g.file([g.kv("a", g.STRING, g.string(b"x" * 20, HUGE))]), f"'a' claims {HUGE} bytes"),
    "CVE-2024-23496-key": (g.file([g.string(b"x" * 40, HUGE)]), f"metadata key 0 has {HUGE} bytes"),
    "CVE-2024-23496-element": (g.file([g.array("a", g.STRING, 1, g.string(b"x" * 20, HUGE))]), f"string 0 of 'a' claims {HUGE} bytes"),
    "CVE-2024-21802": (g.file(tensors=[g.tensor("t", (1,) * 5)], data=bytes(64)), "has 5 dimensions"),
    "CVE-2024-21836": (g.file(n_tensors=(1 << 64) // 56 + 1), "tensors; at most"),
    "CVE-2024-23605": (g.file(n_kv=(1 << 64) // 48 + 1), "keys; at most"),
    "CVE-2024-25664-count": (g.file([g.array("a", g.U64, 1 << 61, bytes(64))]), "do not fit into the"),
    "CVE-2024-25665-key-length": (g.file([g.string("key", 1 << 63) + bytes(40)]), "metadata key 0 has 9223372036854775808 bytes"),
    "CVE-2024-25666-value-type": (g.file([g.kv("a", 13, bytes(8))]), "unknown value type 13"),
    "CVE-2024-25667-element-type": (g.file([g.array("a", 255, 1, bytes(8))]), "unknown value type 255"),
    "CVE-2024-25668-name-length": (
        g.file(tensors=[g.string("t", 1 << 63) + bytes(60)]),
        "the name of tensor 0 has 9223372036854775808 bytes",
    ),
    "CVE-2024-41130": (g.file(tensors=[g.tensor("", (1,))], data=bytes(32)), "the name of tensor 0 is empty"),
    "CVE-2025-49847": (
        g.file([g.array(TOKENS, g.STRING, 2, g.string("a") + g.string("b", (1 << 31) + 5))]),
        "string 1 of .* claims 2147483653 bytes",
    ),
    "CVE-2025-53630": (
        g.file(tensors=[g.tensor(n, ((1 << 63) - 32,), g.I8_TENSOR) for n in "ab"], data=bytes(64)),
        "more than the file has",
    ),
    "CVE-2026-27940": (
        g.file(
            tensors=[g.tensor("a", (0x7FFFFFFFFFFFFFC0,), 24), g.tensor("b", (0x7FFFFFFFFFFFFFC0,), 24, 0x7FFFFFFFFFFFFFC0)], data=bytes(64)
        ),
        "needs 9223372036854775744 bytes, more than the file has",
    ),
    "CVE-2026-33298": (g.file(tensors=[g.tensor("a", (1 << 31, 1 << 31))], data=bytes(64)), "needs 18446744073709551616 bytes"),
    "GHSA-g4cc-763q-h9h6": (g.file([g.text("tokenizer.ggml.model", "llama"), g.strings(TOKENS, ["a"])]), "no token 1, the default bos id"),
    "CVE-2024-34359": (g.file([g.u32("tokenizer.chat_template", 1)]), "chat_template must be a string"),
    "CVE-2026-7482": (g.file(tensors=[g.tensor("a", (64,))], data=bytes(255)), "ends 1 bytes beyond the end"),
    "CVE-2024-39720": (b"GGUF", "the version needs 4 bytes but only 0 remain"),
    "CVE-2025-66959-version-1": (g.file([g.text("a", "b")], version=1), "version 1 is not supported"),
    "CVE-2025-66960-length": (g.file([g.kv("a", g.STRING, g.string("abc", 4))], pad=False), "needs 4 bytes but only 3 remain"),
    "CVE-2025-0315": (g.file([g.array("a", g.U8, 1 << 30, bytes(450))]), "claims 1073741824 elements"),
    "CVE-2025-0317": (g.file([g.u32("general.alignment", 0)]), "general.alignment is 0"),
    "CVE-2024-8063-zero": (arch("block_count", g.U32, U32(0)), "llama.block_count is unusable: .*>= 1"),
    "CVE-2024-8063-text": (arch("block_count", g.STRING, g.string("2")), "llama.block_count is unusable: Expected `int`"),
    "CVE-2024-8063-float": (arch("block_count", g.F32, struct.pack("<f", 2.5)), "llama.block_count is unusable: Expected `int`"),
    "CVE-2024-8063-bool": (arch("block_count", g.BOOL, b"\1"), "llama.block_count is unusable: Expected `int`"),
    "CVE-2024-8063-negative": (arch("block_count", g.I32, struct.pack("<i", -3)), "llama.block_count is unusable"),
    "CVE-2024-8063-heads": (arch("attention.head_count", g.U32, U32(0)), "head_count is unusable"),
    "CVE-2024-8063-long": (arch("attention.head_count", g.ARRAY, struct.pack("<IQ", g.U8, 5000) + bytes(5000)), "has 5000 elements"),
    "CVE-2026-108955": (
        g.file([g.u32("general.alignment", 1 << 16)], [g.tensor("a", (1,))], bytes(64)),
        "starts at byte 65536, beyond the end",
    ),
    "openvino-4170": (g.file(tensors=[g.tensor("t", (1,) * 9)], data=bytes(64)), "has 9 dimensions"),
    "gguf-tools-25": (g.file(tensors=[g.tensor("t", (1,), n_dims=(1 << 32) - 1)], data=bytes(64)), "has 4294967295 dimensions"),
    "no-dimensions": (g.file(tensors=[g.tensor("t", ())], data=bytes(64)), "has 0 dimensions"),
    "dimension-0": (g.file(tensors=[g.tensor("t", (32, 0))], data=bytes(64)), r"dimension of 0 in \[32, 0\]"),
    "padding-wraps": (g.file(tensors=[g.tensor("t", ((1 << 63) - 3,), g.I8_TENSOR)], data=bytes(64)), "more than the file has"),
    "padding-wraps-blocks": (g.file(tensors=[g.tensor("t", ((1 << 63) - 3,), g.Q4_0_TENSOR)], data=bytes(64)), "blocks hold 32 values"),
    "alignment-2-31": (g.file([g.u32("general.alignment", 1 << 31)]), "power of two up to 65536"),
    "alignment-24": (g.file([g.u32("general.alignment", 24)]), "power of two"),
    "alignment-int32": (g.file([g.kv("general.alignment", g.I32, U32(32))]), "must be uint32, not int32"),
    "alignment-uint64": (g.file([g.kv("general.alignment", g.U64, U64(32))]), "must be uint32, not uint64"),
    "scores-int8": (vocabulary(g.array("tokenizer.ggml.scores", g.I8, 3, bytes(3))), "array of float32, not array.int8"),
    "scores-scalar": (vocabulary(g.kv("tokenizer.ggml.scores", g.F32, bytes(4))), "must be an array of float32, not float32"),
    "scores-short": (vocabulary(g.array("tokenizer.ggml.scores", g.F32, 2, bytes(8))), "2 elements for 3 tokens"),
    "token-type-long": (vocabulary(g.array("tokenizer.ggml.token_type", g.I32, 4, bytes(16))), "4 elements for 3 tokens"),
    "token-type-text": (vocabulary(g.strings("tokenizer.ggml.token_type", ["1", "1", "1"])), "int32 or uint32, not array.string"),
    "merges-numbers": (vocabulary(g.array("tokenizer.ggml.merges", g.U32, 1, bytes(4))), "array of string, not array.uint32"),
    "tokens-numbers": (g.file([g.array(TOKENS, g.U32, 1, bytes(4))]), "array of string"),
    "tokens-none": (g.file([g.strings(TOKENS, [])]), "tokens is empty"),
    "eos-outside": (vocabulary(g.u32("tokenizer.ggml.eos_token_id", 3)), "eos_token_id is 3, outside the vocabulary of 3 tokens"),
    "pad-negative": (vocabulary(g.kv("tokenizer.ggml.padding_token_id", g.I32, struct.pack("<i", -1))), "padding_token_id is -1"),
    "eos-list": (vocabulary(g.array("tokenizer.ggml.eos_token_ids", g.U32, 2, struct.pack("<II", 1, 9))), "eos_token_ids is 9"),
    "bos-text": (vocabulary(g.text("tokenizer.ggml.bos_token_id", "1")), "must be an integer token id, not string"),
    "arch-number": (g.file([g.u32("general.architecture", 1)]), "architecture must be a string"),
    "nested-arrays": (g.file([g.kv("a", g.ARRAY, nested(5000))]), "array of arrays"),
    "array-2-30": (g.file([g.array("a", g.F64, 1 << 30, bytes(480))]), "claims 1073741824 elements"),
    "type-unknown": (g.file(tensors=[g.tensor("t", (32,), 1000)], data=bytes(64)), "tensor type 1000 is unknown"),
    "type-minus-1": (g.file(tensors=[g.tensor("t", (32,), (1 << 32) - 1)], data=bytes(64)), "tensor type 4294967295 is unknown"),
    "type-interleaved": (g.file(tensors=[g.tensor("t", (32,), 202)], data=bytes(64)), "row-interleaved"),
    "type-unsupported": (g.file(tensors=[g.tensor("t", (256,), 34)], data=bytes(64)), "tq1_0.* is not supported"),
    "duplicate-key": (g.file([g.u32("a", 1), g.u32("a", 2)]), "'a' appears twice"),
    "duplicate-tensor": (g.file(tensors=[g.tensor("t", (8,)), g.tensor("t", (8,), offset=32)], data=bytes(64)), "'t' appears twice"),
    "overlap": (g.file(tensors=[g.tensor("a", (16,)), g.tensor("b", (8,), offset=32)], data=bytes(64)), "'a' and 'b' overlap"),
    "offset-unaligned": (g.file(tensors=[g.tensor("a", (4,), offset=4)], data=bytes(64)), "not a multiple of the alignment 32"),
    "offset-wraps": (g.file(tensors=[g.tensor("a", (4,), offset=HUGE - 31)], data=bytes(64)), "beyond the end of the file"),
    "row-not-blocks": (g.file(tensors=[g.tensor("a", (33,), g.Q4_0_TENSOR)], data=bytes(64)), "cannot be q4_0"),
    "name-65-bytes": (g.file(tensors=[g.tensor("a" * 65, (1,))], data=bytes(64)), "has 65 bytes; at most 64"),
    "name-not-utf8": (g.file(tensors=[g.tensor(b"a\xff", (1,))], data=bytes(64)), "not valid UTF-8"),
    "name-escape": (g.file(tensors=[g.tensor("a\x1b[2J", (1,))], data=bytes(64)), "unprintable"),
    "key-braces": (g.file([g.array("a}{0}", g.STRING, 1, g.string("x", 99))]), r"string 0 of 'a\}\{0\}' needs 99 bytes"),
    "key-nul": (g.file([g.u32("a\0b", 1)]), "unprintable"),
    "key-not-utf8": (g.file([g.kv(b"a\xc3", g.U8, b"\1")]), "not valid UTF-8"),
    "key-empty": (g.file([g.kv("", g.U8, b"\1" * 8)]), "metadata key 0 is empty"),
    "key-long": (g.file([g.u32("k" * 65536, 1)]), "65536 bytes; at most 65535"),
    "value-not-utf8": (g.file([g.text("a", b"ok \xed\xa0\x80")]), "not valid UTF-8"),
    "bool-2": (g.file([g.kv("a", g.BOOL, b"\2")]), "a bool that is 2"),
    "bools-255": (g.file([g.array("a", g.BOOL, 3, b"\1\0\xff")]), "a bool that is 255"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "version-4": (g.file(version=4), "version 4 is not supported"),
    "not-gguf": (b"PK\3\4" + bytes(60), "not a GGUF file"),
    "ggml-magic": (g.file(magic=b"tjgg"), "not a GGUF file"),
    "more-keys-than-bytes": (g.file([g.u32("a", 1)], n_kv=2, pad=False), "2 keys, which do not fit"),
    "more-keys-than-given": (g.file([g.u32("a", 1)], n_kv=2), "metadata key 1 is empty"),
    "split-count-negative": (g.file([g.kv("split.count", g.I32, struct.pack("<i", -2))]), "split.count must be a non-negative integer"),
    "split-count-text": (g.file([g.text("split.count", "2")]), "split.count must be a non-negative integer, not string"),
    "split-count-huge": (g.file([g.u32("split.count", 1 << 31)]), "2147483648 files; at most"),
    "split-without-name": (g.file([g.u32("split.count", 2)]), "its name does not end in -00001-of-00002.gguf"),
}
HOSTILE |= {
    f"type-{n}-removed": (g.file(tensors=[g.tensor("t", (32,), n)], data=bytes(64)), f"tensor type {n} was removed")
    for n in (4, 5, 31, 32, 33, 36, 37, 38)
}


@pytest.mark.parametrize("name", HOSTILE)
def test_refused_with_its_byte(name: str, tmp_path: Path):
    content, message = HOSTILE[name]
    path = g.save(tmp_path, content)
    with pytest.raises(GGUFError, match=message) as error:
        GGUFFile.open(path)
    offset = error.value.offset
    assert offset is not None and 0 <= offset <= len(content)
    assert f"(byte {offset})" in str(error.value) and str(path) in str(error.value)


def test_offsets_point_at_the_defect(tmp_path: Path):
    """The byte is that of the wrong field itself, checked where it can be computed by hand."""
    lead = g.text("general.architecture", "llama")
    cases = [
        (g.file([lead, g.kv("a", 13, bytes(8))]), 24 + len(lead) + 8 + 1),
        (g.file([lead, g.array("a", g.U8, 1 << 40, b"")]), 24 + len(lead) + 8 + 1 + 8),
        (g.file([lead], [g.tensor("t", (32, 0))], bytes(64)), 24 + len(lead) + 8 + 1 + 4),
        (g.file([lead], [g.tensor("t", (32,), 5)], bytes(64)), 24 + len(lead) + 8 + 1 + 4 + 8),
        (g.file([lead], [g.tensor("t", (8,), 0, 4)], bytes(64)), 24 + len(lead) + 8 + 1 + 4 + 8 + 4),
        (g.file([lead, g.kv("a", g.BOOL, b"\7")]), 24 + len(lead) + 8 + 1 + 4),
    ]
    for content, at in cases:
        with pytest.raises(GGUFError) as error:
            GGUFFile.open(g.save(tmp_path, content))
        assert error.value.offset == at, str(error.value)


def test_truncation_at_every_byte(tmp_path: Path):
    """CVE-2024-32878: whatever is missing, the answer is an error."""
    content = g.model()
    path = g.save(tmp_path, content)
    GGUFFile.open(path).close()
    for n in range(len(content) - 1, -1, -1):
        os.truncate(path, n)
        with pytest.raises(GGUFError) as error:
            GGUFFile.open(path)
        assert error.value.offset is not None and error.value.offset <= len(content)


def test_truncation_of_a_header_without_tensors(tmp_path: Path):
    content = g.file([g.text("a", "b"), g.strings("s", ["x" * 300, "y"]), g.array("n", g.I16, 2, bytes(4))], pad=False)
    path = g.save(tmp_path, content)
    GGUFFile.open(path).close()
    for n in range(len(content)):
        path.write_bytes(content[:n])
        with pytest.raises(GGUFError):
            GGUFFile.open(path)


@pytest.mark.parametrize("key", ["general.architecture", "llama.block_count", "llama.attention.head_count"])
def test_required_keys(key: str, tmp_path: Path):
    """CVE-2025-0312: a missing or mistyped required key is an error that names it, never a missing object."""
    kind = str if key == "general.architecture" else int
    with GGUFFile.open(g.save(tmp_path, g.model())) as f:
        assert f.require(key, kind) == f.metadata[key]
        with pytest.raises(GGUFError, match=rf"{key} must be a float, not .* \(byte \d+\)"):
            f.require(key, float)
        with pytest.raises(GGUFError, match="add_bos_token must be an integer, not bool"):
            f.require("tokenizer.ggml.add_bos_token", int)
    with (
        GGUFFile.open(g.save(tmp_path, g.file([g.u32("a", 1)]))) as f,
        pytest.raises(GGUFError, match=rf"required key {key} is missing \(byte 41\)"),
    ):
        f.require(key, kind)


def test_what_is_not_a_file_is_refused_at_once(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.gguf")
    for path, message in (
        (tmp_path / "pipe.gguf", "not a regular file"),
        (tmp_path, "not a regular file|cannot open"),
        (tmp_path / "none.gguf", "cannot open the file: No such file"),
        (g.save(tmp_path, b""), "the file is empty"),
    ):
        with pytest.raises(GGUFError, match=message):
            GGUFFile.open(path)
