"""Look-ups of indices in a codebook that is a constant table of the image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llvmlite import ir

from ggufc.codegen.emitter import I1, I8, I16, I32, I64, PTR, Emitter, Value, vec
from ggufc.codegen.weights.base import masked
from ggufc.codegen.weights.staged import Staged

_PERMUTED = 1024
"""Books up to this size are permuted in registers: beyond, gathers are faster."""


@dataclass(frozen=True)
class Codebook:
    """A table of ``entries`` (16 bits, four nibbles) for indices of ``8 + high_bits`` bits.

    ``order``: the column of each nibble. Columns 0 and 1 are lower nibbles of bytes, so that one shift serves both. ``stages``: the same
    entries in two short tables.
    """

    name: str
    entries: tuple[int, ...]
    high_bits: int
    order: tuple[int, int, int, int] = (0, 2, 1, 3)
    stages: Staged | None = None


def look_up(e: Emitter, book: Codebook, words: Sequence[Value], high: Value | None) -> list[Value]:
    """Entries of the indices of a block, as quads with a nibble per byte.

    ``words``: <n x i32>, four low bytes of indices each. ``high``: <n x i32>, the high bits of the indices one after the other; what lies
    between or above them may be anything.
    """
    if e.target.lanes == 16 and (book.stages or len(book.entries) <= _PERMUTED):
        return _permuted(e, book, words, high)
    table = e.global_const(I32, [_spread(v, book.order) for v in book.entries], f"book_{book.name}")
    out = []
    for w, word in enumerate(words):
        for i in range(4):
            index = e.b.and_(shifted(e, word, -8 * i), e.const(word.type, 255))
            if high is not None:
                part = shifted(e, high, -(4 * w + i) * book.high_bits)
                part = e.b.and_(part, e.const(word.type, (1 << book.high_bits) - 1))
                index = e.b.or_(index, e.b.shl(part, e.const(word.type, 8)))
            out.append(_gather(e, table, index))
    return out


def _spread(entry: int, order: Sequence[int]) -> int:
    """Four nibbles to the low halves of four bytes."""
    return sum((entry >> 4 * n & 15) << 8 * c for n, c in enumerate(order))


def shifted(e: Emitter, v: Value, by: int) -> Value:
    """Left for positive ``by``."""
    if by == 0:
        return v
    amount = e.const(v.type, abs(by))
    return e.b.shl(v, amount) if by > 0 else e.b.lshr(v, amount)


def _gather(e: Emitter, table: Value, index: Value) -> Value:
    """Words of ``table`` at <n x i32> ``index``."""
    lanes = e.target.lanes
    if lanes == 1:
        return e.load(I32, e.at(table, e.b.zext(index, I64), 4))
    ints = vec(I32, lanes)
    if lanes == 16:
        fn = e.intrinsic("llvm.x86.avx512.mask.gather.dpi.512", ints, [ints, PTR, ints, vec(I1, 16), I32])
        return e.b.call(fn, [e.const(ints, 0), table, index, e.const(vec(I1, 16), 1), e.i32(4)])
    if lanes == 8:
        fn = e.intrinsic("llvm.x86.avx2.gather.d.d.256", ints, [ints, PTR, ints, ints, I8])
        return e.b.call(fn, [e.const(ints, 0), table, index, e.const(ints, -1), ir.Constant(I8, 4)])
    out: Value = e.const(ints, 0)
    for lane in range(lanes):
        i = e.b.zext(e.b.extract_element(index, e.i32(lane)), I64)
        out = e.b.insert_element(out, e.load(I32, e.at(table, i, 4)), e.i32(lane))
    return out


def _permuted(e: Emitter, book: Codebook, words: Sequence[Value], high: Value | None) -> list[Value]:
    """Two indices of a row per word of 16 bits and look-up; the entry is then spread over the bytes of the row."""
    b, halves, bytes_ = e.b, vec(I16, 32), vec(I8, 64)
    shifts = e.const_vec(I16, [0, 4] * 16)
    out: list[Value] = []
    for w, word in enumerate(words):
        found = {}
        for first in range(2):
            index = masked_halves(e, word, first)
            if high is not None:
                for at, i in ((8, first), (24, first + 2)):
                    piece = shifted(e, high, at - (4 * w + i) * book.high_bits)
                    index = b.or_(index, b.and_(piece, e.const(word.type, ((1 << book.high_bits) - 1) << at)))
            index = b.bitcast(index, halves)
            entry = _in_stages(e, book.name, book.stages, index) if book.stages else _choose(e, _table(e, book.name, book.entries), index)
            found[first] = b.bitcast(entry, bytes_)
        for i in range(4):
            lane = [4 * d + 2 * (i // 2) + book.order.index(c) // 2 for d in range(16) for c in range(4)]
            twice = b.bitcast(e.shuffle(found[i % 2], None, lane), halves)
            out.append(masked(e, b.bitcast(b.lshr(twice, shifts), word.type), 0, 15))
    return out


def masked_halves(e: Emitter, word: Value, first: int) -> Value:
    """Bytes ``first`` and ``first + 2`` of every lane as words of 16 bits."""
    return e.b.and_(shifted(e, word, -8 * first), e.const(word.type, 0x00FF00FF))


def _table(e: Emitter, name: str, entries: Sequence[int]) -> list[Value]:
    """Registers of a constant table."""
    table = e.global_const(I16, [v - (v >> 15 << 16) for v in entries], f"book16_{name}")
    return [e.load(vec(I16, 32), e.gep(table, 2 * i), 64) for i in range(0, len(entries), 32)]


def _in_stages(e: Emitter, name: str, stages: Staged, index: Value) -> Value:
    """The entries of indices: the bits beyond eight choose among completions, and where there are more, among halves of the first table."""
    b, ty = e.b, index.type
    first = _choose(e, _table(e, name, stages.first), index, above=8 + stages.choice_bits)
    chosen = b.and_(b.lshr(first, e.const(ty, 8)), e.const(ty, stages.class_mask))
    choice = b.and_(b.lshr(index, e.const(ty, 8)), e.const(ty, stages.choice_mask))
    return b.xor(first, _choose(e, _table(e, f"{name}_second", [v << 8 for v in stages.second]), b.or_(chosen, choice)))


def _choose(e: Emitter, registers: Sequence[Value], index: Value, above: int = 8) -> Value:
    """<32 x i16> entries: a permute of two registers finds one in 64; the bits above choose among the results. Of a place in the table,
    bits beyond eight are those of ``index`` from ``above`` on."""
    b, ty = e.b, index.type
    if len(registers) == 1:
        registers = [registers[0], registers[0]]
    permute = e.intrinsic("llvm.x86.avx512.vpermi2var.hi.512", ty, [ty, ty, ty])
    found = [b.call(permute, [registers[i], index, registers[i + 1]]) for i in range(0, len(registers), 2)]
    bits = [6, 7, *range(above, 16)]
    while len(found) > 1:
        upper = b.icmp_unsigned("!=", b.and_(index, e.const(ty, 1 << bits.pop(0))), e.const(ty, 0))
        found = [b.select(upper, hi, lo) for lo, hi in zip(found[::2], found[1::2])]
    return found[0]
