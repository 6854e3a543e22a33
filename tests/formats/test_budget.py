"""A header costs at most 64 MiB and two seconds, whatever it claims and however large the file around it is; real ones cost far less."""

from __future__ import annotations

import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

import gguf_bytes as g
from ggufc.formats import gguf_values as gv
from ggufc.formats.errors import GGUFError
from ggufc.formats.gguf_reader import GGUFFile
from test_hostile import HOSTILE

MEMORY = 64 << 20
SECONDS = 2.0
PART = 8


def attempt(path: Path) -> str:
    try:
        GGUFFile.open(path).close()
    except GGUFError as e:
        return str(e)
    return ""


def seconds(path: Path) -> tuple[str, float]:
    """Message and processor seconds; these do not depend on what else the machine does."""
    start = time.process_time()
    message = attempt(path)
    return message, time.process_time() - start


def peak(path: Path) -> int:
    """Largest number of bytes allocated at a time. Tracing is slow, so heavy files are measured at a fraction of their size."""
    tracemalloc.start()
    attempt(path)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most


def sparse(path: Path, content: bytes, size: int) -> None:
    """``content`` followed by zeros up to ``size``; takes no room on disk."""
    with path.open("wb") as f:
        f.write(content)
        f.truncate(size)


def zero_strings(path: Path, part: int) -> None:
    sparse(path, g.file([g.array("a", g.STRING, gv.MAX_STRINGS // part, b"")], pad=False), gv.MAX_HEADER_BYTES)


def too_many_strings(path: Path, part: int) -> None:
    sparse(path, g.file([g.array("a", g.STRING, gv.MAX_STRINGS + 1, b"")], pad=False), 1 << 36)


def long_strings(path: Path, part: int) -> None:
    one = g.string(bytes(256))
    count = (gv.MAX_HEADER_BYTES - 4096) // len(one) // part
    with path.open("wb") as f:
        f.write(g.file([g.array("a", g.STRING, count, b"")], pad=False))
        for _ in range(count // 1024 + 1):
            f.write(one * 1024)


def many_keys(path: Path, part: int) -> None:
    path.write_bytes(g.file([g.kv(f"k{i}", g.U8, b"\1") for i in range(gv.MAX_KEYS // part)]))


def many_tensors(path: Path, part: int) -> None:
    n = gv.MAX_TENSORS // part
    sparse(path, g.file(tensors=[g.tensor(f"blk.{i}.ffn_gate_exps.weight", (8,), offset=32 * i) for i in range(n)]), 16 << 20)


def empty_keys(path: Path, part: int) -> None:
    sparse(path, g.file(n_kv=gv.MAX_KEYS), 1 << 40)


def wide_array(path: Path, part: int) -> None:
    sparse(path, g.file([g.array("a", g.U8, gv.MAX_HEADER_BYTES - 4096, b"")], pad=False), gv.MAX_HEADER_BYTES)


def endless_array(path: Path, part: int) -> None:
    sparse(path, g.file([g.array("a", g.F64, 1 << 36, b"")], pad=False), 1 << 40)


def many_bools(path: Path, part: int) -> None:
    sparse(path, g.file([g.array("a", g.BOOL, gv.MAX_HEADER_BYTES - 4096, b"")], pad=False), gv.MAX_HEADER_BYTES)


def long_texts(path: Path, part: int) -> None:
    """Strings whose decoded form would be four times as long, the last of them invalid at its end."""
    n = gv.MAX_STRING_BYTES
    body = "\U0001f600".encode() + b"x" * (n - 5)
    with path.open("wb") as f:
        f.write(g.file(n_kv=7, pad=False))
        for i in range(7):
            f.write(g.string(f"k{i}") + struct.pack("<IQ", g.STRING, n) + body + (b"\xff" if i == 6 else b"."))
        f.write(bytes(4096))


def overlong_header(path: Path, part: int) -> None:
    sparse(path, g.file([g.array(f"a{i}", g.U8, 1 << 26, b"") for i in range(1)], n_kv=5, pad=False), 1 << 40)


HEAVY: dict[str, tuple[Callable[[Path, int], None], str]] = {
    "strings of length 0": (zero_strings, ""),
    "too many strings": (too_many_strings, "more than 4194304 strings"),
    "strings of 256 bytes": (long_strings, ""),
    "as many keys as allowed": (many_keys, ""),
    "as many tensors as allowed": (many_tensors, ""),
    "keys of length 0": (empty_keys, "metadata key 0 is empty"),
    "one wide array": (wide_array, ""),
    "an array of half a terabyte": (endless_array, "beyond the largest header"),
    "bools": (many_bools, ""),
    "long texts": (long_texts, "'k6' is not valid UTF-8"),
    "a header beyond the limit": (overlong_header, "metadata key 1 is empty"),
}


@pytest.mark.parametrize("name", HEAVY)
def test_heavy_headers(name: str, tmp_path: Path):
    make, message = HEAVY[name]
    path = tmp_path / "x.gguf"
    make(path, 1)
    said, took = seconds(path)
    assert (message in said) if message else not said
    assert took < SECONDS
    make(path, PART)
    assert peak(path) < MEMORY // PART
    path.unlink()


def test_hostile_files_cost_nothing(tmp_path: Path):
    for name, (content, _) in HOSTILE.items():
        path = g.save(tmp_path, content)
        said, took = seconds(path)
        assert said and took < SECONDS / 10 and peak(path) < 1 << 20, name


def test_large_vocabulary_parses_quickly(tmp_path: Path):
    """Opening walks the lengths only; strings are decoded when somebody asks for them."""
    n = 262144
    tokens = [f"token{i:x}" for i in range(n)]
    tokens[1000] = "x" * 300
    content = g.file([g.strings("tokenizer.ggml.tokens", tokens), g.array("tokenizer.ggml.scores", g.F32, n, bytes(4 * n))])
    path = g.save(tmp_path, content)
    assert min(seconds(path)[1] for _ in range(3)) < 0.3
    with GGUFFile.open(path) as f:
        start = time.process_time()
        assert f.metadata["tokenizer.ggml.tokens"] == tokens
        assert time.process_time() - start < 1.0
