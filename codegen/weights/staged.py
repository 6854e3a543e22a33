"""Codebooks of eight columns found in two short tables instead of a long one.

The index has ten or twelve bits. Most of them find, in a first table of 256 or 512 entries, the codes of five columns and bits that tell
which completions those columns have in the book (a *class*); class and the other bits, the *choice*, find the last three columns in a
second table. Both tables fit vector registers, where a book of 1024 entries or more does not: five columns of three values have 243
patterns, and a class of 4, 8 or 16 of the 27 completions serves many of them.

An entry is 16 bits, four nibbles with the codes of columns c and c + 4. The upper byte of the first table holds the class, in bits where
codes of completions belong; the second table is combined with it by exclusive or, so it takes the class away again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations


@dataclass(frozen=True)
class Staged:
    """``first``: entries of 16 bits. ``second``: for class and choice, what the upper byte is combined with.

    The choice is the lowest ``choice_bits`` of the bits of the index beyond eight; those above are the highest of the place in ``first``.
    """

    first: tuple[int, ...]
    second: tuple[int, ...]
    choice_bits: int
    high_bits: int
    """Bits of an index beyond the lowest eight."""

    @property
    def choice_mask(self) -> int:
        return (1 << self.choice_bits) - 1

    @property
    def class_mask(self) -> int:
        """Bits of the upper byte, and of a place in ``second``, that hold the class."""
        return len(self.second) - 1 & ~self.choice_mask

    def entry(self, index: int) -> int:
        """The entry of an index."""
        high = index >> 8
        word = self.first[index & 255 | high >> self.choice_bits << 8]
        return word ^ self.second[word >> 8 & self.class_mask | high & self.choice_mask] << 8

    def entries(self) -> list[int]:
        """The entries of all indices; those that no index of the book uses are arbitrary."""
        return [self.entry(i) for i in range(256 << self.high_bits)]


def staged(
    words: Sequence[int], classes: Sequence[Sequence[int]], high_bits: int, choice_bits: int, fifth: int
) -> tuple[Staged, list[int]]:
    """The tables for a book of ``words`` (entries of 16 bits), and the index of each word.

    The first four columns are the lower byte, the fifth the bits ``fifth`` of the upper one. ``classes``: sets of up to
    ``1 << choice_bits`` completions, the other bits of upper bytes. A pattern whose completions lie in several classes takes as many places
    of the first table.
    """
    completions: dict[int, set[int]] = {}
    for word in words:
        completions.setdefault(word & (fifth << 8 | 0xFF), set()).add(word >> 8 & ~fifth)
    bits = max(1, (len(classes) - 1).bit_length())
    second = [0] * (1 << choice_bits + bits)
    for c, members in enumerate(classes):
        for i, member in enumerate(members):
            second[c << choice_bits | i] = member ^ c << choice_bits
    first: list[int] = []
    index: dict[int, int] = {}
    for prefix, wanted in sorted(completions.items()):
        for c in _cover(wanted, classes):
            place = len(first) & 255 | len(first) >> 8 << 8 + choice_bits
            for i, member in enumerate(classes[c]):
                index.setdefault(prefix | member << 8, place | i << 8)
            first.append(prefix | c << 8 + choice_bits)
    size = 256 << high_bits - choice_bits
    assert len(first) <= size, "classes must serve more patterns"
    return Staged(tuple(first + [0] * (size - len(first))), tuple(second), choice_bits, high_bits), [index[word] for word in words]


def _cover(wanted: set[int], classes: Sequence[Sequence[int]]) -> Sequence[int]:
    """The fewest classes that hold all of ``wanted``."""
    sets = [set(members) for members in classes]
    chosen = (c for n in range(1, len(sets) + 1) for c in combinations(range(len(sets)), n))
    return next(c for c in chosen if wanted <= set().union(*(sets[i] for i in c)))


def parity_classes(places: Sequence[int]) -> list[list[int]]:
    """Completions by the parity of the sum of their codes 0 to 2, for books whose entries all have an even sum: the class is the parity of
    the first five columns. ``places``: the bit of each column's code."""
    triples = [(a << places[0] | b << places[1] | c << places[2], a + b + c) for a in range(3) for b in range(3) for c in range(3)]
    return [[code for code, total in triples if total % 2 == parity] for parity in range(2)]


def listed_classes(masks: Sequence[int], places: Sequence[int]) -> list[list[int]]:
    """Completions from sets of 27 bits: bit a + 3 b + 9 c stands for the codes a, b and c."""
    codes = [i % 3 << places[0] | i // 3 % 3 << places[1] | i // 9 << places[2] for i in range(27)]
    return [[code for i, code in enumerate(codes) if mask >> i & 1] for mask in masks]
