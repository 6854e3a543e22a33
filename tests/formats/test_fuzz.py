"""Damaged files give success or a GGUFError, nothing else; what opens can be read without surprises."""

from __future__ import annotations

import struct
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import gguf_bytes as g
from ggufc.formats.errors import GGUFError
from ggufc.formats.gguf_reader import GGUFFile

MODEL = g.model(tokens=6)
HEADER = len(MODEL) - 152
INTERESTING = [0, 1, 2, 3, 7, 8, 12, 13, 31, 32, 0x7F, 0x80, 0xFF]
WIDE = [0, 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**61, 2**63 - 1, 2**63, 2**64 - 1]

mutations = st.lists(
    st.one_of(
        st.tuples(st.just("byte"), st.integers(0, HEADER), st.one_of(st.sampled_from(INTERESTING), st.integers(0, 255))),
        st.tuples(st.just("word"), st.integers(0, HEADER), st.sampled_from(WIDE)),
        st.tuples(st.just("cut"), st.integers(0, HEADER), st.integers(1, 40)),
        st.tuples(st.just("copy"), st.integers(0, HEADER), st.integers(1, 40)),
    ),
    min_size=1,
    max_size=6,
)


def mutate(steps: list[tuple[str, int, int]]) -> bytes:
    content = bytearray(MODEL)
    for kind, at, value in steps:
        if kind == "byte" and at < len(content):
            content[at] = value
        elif kind == "word":
            content[at : at + 8] = struct.pack("<Q", value)
        elif kind == "cut":
            del content[at : at + value]
        elif kind == "copy":
            content[at:at] = content[at : at + value]
    return bytes(content)


def check(path: Path) -> bool:
    """Open and read everything; True where the file was accepted."""
    size = path.stat().st_size
    try:
        f = GGUFFile.open(path)
    except GGUFError as error:
        assert error.offset is None or 0 <= error.offset <= size
        return False
    with f:
        values = dict(f.metadata)
        assert all(f.kv_type(key) for key in values)
        ends = sorted((t.offset, t.offset + t.nbytes) for t in f.tensors.values())
        assert all(0 < a < b <= size for a, b in ends)
        assert all(first[1] <= second[0] for first, second in pairwise(ends))
        assert all(len(f.data(name)) == t.nbytes for name, t in f.tensors.items())
    return True


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@settings(max_examples=300, deadline=2000, suppress_health_check=[HealthCheck.too_slow])
@given(steps=mutations)
@example(steps=[("byte", 4, 2)])
def test_mutations(steps: list[tuple[str, int, int]], folder: Path):
    check(g.save(folder, mutate(steps)))


def test_every_byte_of_the_header_replaced(folder: Path):
    """Systematic single-byte damage: most of it is noticed, none of it escapes as another exception."""
    accepted = refused = 0
    for at in range(HEADER):
        content = bytearray(MODEL)
        content[at] = (0, 0xFF, MODEL[at] ^ 1)[at % 3]
        if check(g.save(folder, bytes(content))):
            accepted += 1
        else:
            refused += 1
    assert check(g.save(folder, MODEL))
    assert refused > accepted / 4


@settings(max_examples=100, deadline=2000)
@given(tail=st.binary(max_size=200), n_kv=st.integers(0, 3), n_tensors=st.integers(0, 3))
def test_random_bytes_behind_a_valid_start(tail: bytes, n_kv: int, n_tensors: int, folder: Path):
    check(g.save(folder, g.file(n_kv=n_kv, n_tensors=n_tensors, pad=False) + tail))
