"""Codebooks of eight columns found in two short tables instead of a long one.

The index becomes a byte and a nibble. The byte finds, in a table of 256 entries, the codes of the first five columns and bits that tell
which completions those columns have in the book (a *class*); class and nibble find the last three in a second table. Both tables fit
vector registers, where a book of 1024 entries or more does not: five columns of three values have 243 patterns, and a class holds up to
16 of the 27 completions.

An entry is 16 bits, four nibbles with the codes of columns c and c + 4. The upper byte of the first table holds the class in bits 4 to
6, where codes of completions belong; the second table is combined with it by exclusive or, so it takes the class away again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NIBBLE_BITS = 4
"""Bits of an index that choose the completion."""


@dataclass(frozen=True)
class Staged:
    """``first``: 256 entries of 16 bits. ``second``: for class and nibble, what the upper byte is combined with."""

    first: tuple[int, ...]
    second: tuple[int, ...]

    def entry(self, index: int) -> int:
        """The entry of an index: the byte in its low bits, the nibble above."""
        word = self.first[index & 255]
        return word ^ self.second[(word >> 8 & len(self.second) - 1 & 0xF0) | index >> 8] << 8

    def entries(self) -> list[int]:
        """All 4096 entries; those that no index of the book uses are arbitrary."""
        return [self.entry(i) for i in range(256 << NIBBLE_BITS)]


def staged(words: Sequence[int], classes: Sequence[Sequence[int]]) -> tuple[Staged, list[int]]:
    """The tables for a book of ``words`` (entries of 16 bits), and the index of each word.

    ``classes``: sets of up to 16 completions: bits 2 to 7 of upper bytes. The completions of every pattern must lie in one of them, or
    in two (the pattern then takes two places of the first table).
    """
    completions: dict[int, set[int]] = {}
    for word in words:
        completions.setdefault(word & 0x3FF, set()).add(word >> 8 & 0xFC)
    bits = max(1, (len(classes) - 1).bit_length())
    second = [0] * (1 << NIBBLE_BITS + bits)
    for c, members in enumerate(classes):
        for i, member in enumerate(members):
            second[c << 4 | i] = member ^ c << 4
    first: list[int] = []
    index: dict[int, int] = {}
    for prefix, wanted in sorted(completions.items()):
        for c in _cover(wanted, classes):
            for i, member in enumerate(classes[c]):
                index.setdefault(prefix | member << 8, len(first) | i << 8)
            first.append(prefix | c << 12)
    return Staged(tuple(first + [0] * (256 - len(first))), tuple(second)), [index[word] for word in words]


def _cover(wanted: set[int], classes: Sequence[Sequence[int]]) -> list[int]:
    """The fewest classes, one or two, that hold all of ``wanted``."""
    sets = [set(members) for members in classes]
    for c, have in enumerate(sets):
        if wanted <= have:
            return [c]
    return next([c, d] for c, have in enumerate(sets) for d, more in enumerate(sets) if wanted <= have | more)


def parity_classes(ranks: int) -> list[list[int]]:
    """Completions by the parity of the sum of their codes, for books whose entries all have an even sum: the class is the parity of the
    first five columns."""
    triples = [(a << 2 | b << 4 | c << 6, a + b + c) for a in range(ranks) for b in range(ranks) for c in range(ranks)]
    return [[code for code, total in triples if total % 2 == parity] for parity in range(2)]
