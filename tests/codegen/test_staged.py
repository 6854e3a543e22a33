"""Codebooks in two short tables: every entry has an index of its own. S65."""

from __future__ import annotations

import numpy as np
import pytest

from ggufc.codegen.weights import weight_format
from ggufc.codegen.weights.grids import Grid
from ggufc.codegen.weights.staged import parity_classes, staged
from products import packed, weight_rows


def test_every_word_has_an_index_of_its_own():
    classes = parity_classes((2, 4, 6))
    assert [len(c) for c in classes] == [14, 13]
    words = [prefix | third for prefix in (0, 0b1001000110) for third in (member << 8 for member in classes[0])]
    stages, index = staged(words, classes, 4, 4, 0x03)
    assert len(set(index)) == len(words)
    assert [stages.entry(i) for i in index] == words
    assert [stages.entries()[i] for i in index] == words
    assert len(stages.first) == 256 and len(stages.second) == 32


def test_a_pattern_with_many_completions_takes_two_places():
    classes = parity_classes((2, 4, 6))
    words = [member << 8 for c in classes for member in c]
    stages, index = staged(words, classes, 4, 4, 0x03)
    assert {i & 255 for i in index} == {0, 1}
    assert [stages.entry(i) for i in index] == words


@pytest.mark.parametrize("name", ["iq2_xs", "iq2_s", "iq1_s", "iq1_m"])
def test_staged_books_are_those_of_the_file(name):
    """Indices of random rows, looked up one by one, give the codes that the reference unpacking gives."""
    fmt = weight_format(name)
    assert isinstance(fmt, Grid) and fmt.codebook.stages is not None
    entries = np.array(fmt.codebook.entries)
    rng = np.random.default_rng(5)
    ranks = fmt.ranks[rng.integers(0, len(fmt.ranks), (4, 2, 4))]
    index = fmt.indices(ranks.reshape(4, -1))
    found = entries[index]
    nibbles = found[..., None] >> np.arange(0, 16, 4) & 15
    nibbles = nibbles[..., np.argsort(fmt.codebook.order)]
    assert (np.concatenate([nibbles & 3, nibbles >> 2], axis=-1) == ranks).all()
    assert packed(name, weight_rows(name, 256, 16), 256).size == fmt.packed_bytes(256, 16)
