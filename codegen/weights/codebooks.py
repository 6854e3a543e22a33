"""Look-ups of indices in a codebook that is a constant table of the image."""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from ggufc.codegen.emitter import I1, I8, I16, I32, I64, PTR, Emitter, Value, vec
from ggufc.codegen.weights.base import masked

_PERMUTED = 1024
"""Books up to this size are permuted in registers: beyond, gathers are faster."""


def look_up(
    e: Emitter, name: str, entries: Sequence[int], words: Sequence[Value], high: Value | None, high_bits: int, high_step: int = 0
) -> list[Value]:
    """Entries (16 bits, four nibbles) of the indices of a block, as quads with a nibble per byte.

    ``words``: <n x i32>, four low bytes of indices each. ``high``: <n x i32>, the ``high_bits`` bits beyond them, index i's at bit
    ``i * high_step`` (default: side by side); other bits may be anything.
    """
    high_step = high_step or high_bits
    if e.target.lanes == 16 and len(entries) <= _PERMUTED:
        return _permuted(e, name, entries, words, high, high_bits, high_step)
    table = e.global_const(I32, [_spread(v) for v in entries], f"book_{name}")
    out = []
    for w, word in enumerate(words):
        for i in range(4):
            index = e.b.and_(_shifted(e, word, -8 * i), e.const(word.type, 255))
            if high is not None:
                part = _shifted(e, high, -(4 * w + i) * high_step)
                part = e.b.and_(part, e.const(word.type, (1 << high_bits) - 1))
                index = e.b.or_(index, e.b.shl(part, e.const(word.type, 8)))
            out.append(_gather(e, table, index))
    return out


def _spread(entry: int) -> int:
    """Four nibbles to the low halves of four bytes."""
    return sum((entry >> 4 * c & 15) << 8 * c for c in range(4))


def _shifted(e: Emitter, v: Value, by: int) -> Value:
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


def _permuted(
    e: Emitter, name: str, entries: Sequence[int], words: Sequence[Value], high: Value | None, high_bits: int, high_step: int
) -> list[Value]:
    """Two indices of a row per word of 16 bits and look-up; the entry is then spread over the bytes of the row."""
    b, halves, bytes_ = e.b, vec(I16, 32), vec(I8, 64)
    # Nibbles of columns 0 and 2 in the lower byte, of 1 and 3 in the upper one: what a shift of every other word leaves in place.
    swapped = [v & 0xF00F | (v >> 4 & 0x00F0) | (v << 4 & 0x0F00) for v in entries]
    table = e.global_const(I16, [v - (v >> 15 << 16) for v in swapped], f"book16_{name}")
    shifts = e.const_vec(I16, [0, 4] * 16)
    out: list[Value] = []
    for w, word in enumerate(words):
        found = {}
        for first in range(2):
            index = masked_halves(e, word, first)
            if high is not None:
                for at, i in ((8, first), (24, first + 2)):
                    piece = _shifted(e, high, at - (4 * w + i) * high_step)
                    index = b.or_(index, b.and_(piece, e.const(word.type, ((1 << high_bits) - 1) << at)))
            found[first] = b.bitcast(_choose(e, table, b.bitcast(index, halves), len(entries)), bytes_)
        for i in range(4):
            lane = [4 * d + 2 * (i // 2) + j % 2 for d in range(16) for j in range(4)]
            twice = b.bitcast(e.shuffle(found[i % 2], None, lane), halves)
            out.append(masked(e, b.bitcast(b.lshr(twice, shifts), word.type), 0, 15))
    return out


def masked_halves(e: Emitter, word: Value, first: int) -> Value:
    """Bytes ``first`` and ``first + 2`` of every lane as words of 16 bits."""
    return e.b.and_(_shifted(e, word, -8 * first), e.const(word.type, 0x00FF00FF))


def _choose(e: Emitter, table: Value, index: Value, size: int) -> Value:
    """<32 x i16> entries: a permute of two registers finds one in 64; the bits above choose among the results."""
    b, ty = e.b, index.type
    permute = e.intrinsic("llvm.x86.avx512.vpermi2var.hi.512", ty, [ty, ty, ty])
    registers = [e.load(ty, e.gep(table, 64 * i), 64) for i in range(size // 32)]
    found = [b.call(permute, [registers[i], index, registers[i + 1]]) for i in range(0, len(registers), 2)]
    bit = 64
    while len(found) > 1:
        upper = b.icmp_unsigned("!=", b.and_(index, e.const(ty, bit)), e.const(ty, 0))
        found = [b.select(upper, hi, lo) for lo, hi in zip(found[::2], found[1::2])]
        bit *= 2
    return found[0]
