"""Look-ups in codebooks with AVX512-VBMI: permutes of bytes over 128 entries, and shifts that cut fields out of quadwords.

All 64 indices of a word of 16 rows are looked up at once, lower and upper byte of the entries apart. The last step finds the signed value
of a column by its code *and* its sign in a table of 64 bytes, so signs cost no step of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

from ggufc.codegen.emitter import I8, I16, I32, I64, Emitter, Value, vec
from ggufc.codegen.weights import tables
from ggufc.codegen.weights.codebooks import Codebook, shifted

_BYTES = vec(I8, 64)


def signed_by_bytes(
    e: Emitter, book: Codebook, words: Sequence[Value], high: Value | None, signs: Value, columns: int, values: Sequence[int]
) -> list[Value]:
    """The eight quads of a block: ``values[code]`` (an offset plus a magnitude), or its mirror about the offset 128 where the sign is set.

    ``words``, ``high``: as in ``codebooks.look_up``. ``signs``: bit q of byte c belongs to column 4 q + c.
    """
    mirror = [256 - v for v in values]
    quads: list[Value] = []
    for w, word in enumerate(words):
        even, odd = _halves(e, *_entries(e, book, e.b.bitcast(word, _BYTES), high, w))
        for i in range(4):
            nibbles = _spread(e, book, odd if i % 2 else even, 16 * (i // 2))
            index = 4 * w + i
            if columns == 8:
                # Codes of columns c and c + 4 in bits 0-3, their signs in bits 4 and 5.
                key = tables.select_bits(e, nibbles, shifted(e, signs, 4 - 2 * index), 15)
                for half in range(2):
                    table = [(mirror if i >> (4 + half) & 1 else values)[min(i >> 2 * half & 3, len(values) - 1)] for i in range(64)]
                    quads.append(tables.lookup64(e, key, table))
            else:
                # The code in bits 0-2; its sign is one of bits 3 to 5, so that three quads share a shift of the signs.
                shift, bit = ((3, 3 + index), (0, index), (-2, index - 2))[index // 3]
                key = tables.select_bits(e, nibbles, shifted(e, signs, shift), 7)
                quads.append(tables.lookup64(e, key, [(mirror if i >> bit & 1 else values)[i & 7] for i in range(64)]))
    return quads


def ternary_by_bytes(
    e: Emitter, book: Codebook, word: Value, high: Value, minus: Sequence[Value], values: Sequence[int], step: int
) -> list[Value]:
    """The eight quads of a block: ``values[code]``, less ``step`` where bit 4 is set in the bytes of ``minus``, one for each index."""
    even, odd = _halves(e, *_entries(e, book, e.b.bitcast(word, _BYTES), high, 0))
    quads: list[Value] = []
    for i, lower in enumerate(minus):
        key = tables.select_bits(e, _spread(e, book, odd if i % 2 else even, 16 * (i // 2)), lower, 15)
        quads += [tables.lookup64(e, key, [values[i >> 2 * half & 3] - step * (i >> 4 & 1) for i in range(64)]) for half in range(2)]
    return quads


def _entries(e: Emitter, book: Codebook, index: Value, high: Value | None, word: int) -> tuple[Value, Value]:
    """Lower and upper bytes of the entries of the four indices of a word."""
    b = e.b
    if book.stages:
        stages, nibbles = book.stages, fields(e, high, 16 * word, book.high_bits)
        more = [_bit_set(e, b.bitcast(nibbles, _BYTES), [1 << bit] * 64) for bit in range(stages.choice_bits, book.high_bits)]
        lower, upper = (_choose(e, book.name, [v >> 8 * part & 0xFF for v in stages.first], part, index, more) for part in range(2))
        # The upper byte holds nothing between the class and the bits that a table of 64 passes over.
        key = tables.select_bits(e, nibbles, b.bitcast(upper, nibbles.type), stages.choice_mask)
        return lower, b.xor(upper, b.bitcast(tables.lookup64(e, key, stages.second * (64 // len(stages.second))), _BYTES))
    bits = []
    if high is not None:
        bytes_ = _high_bytes(e, high)
        for i in range(book.high_bits):
            bits.append(_bit_set(e, bytes_, [1 << book.high_bits * (4 * word + j) + i for j in range(4)] * 16))
    lower, upper = (_choose(e, book.name, [v >> 8 * part & 0xFF for v in book.entries], part, index, bits) for part in range(2))
    return lower, upper


def _choose(e: Emitter, name: str, entries: Sequence[int], part: int, index: Value, above: Sequence[Value] = ()) -> Value:
    """``entries[index]`` of bytes, where ``above`` are the bits of the indices beyond eight: each permute finds one in 128."""
    b = e.b
    permute = e.intrinsic("llvm.x86.avx512.vpermi2var.qi.512", _BYTES, [_BYTES] * 3)
    table = e.global_const(I8, [_signed(v) for v in entries], f"book8_{part}_{name}")
    registers = [e.load(_BYTES, e.gep(table, i), 64) for i in range(0, len(entries), 64)]
    found = [b.call(permute, [registers[i], index, registers[i + 1]]) for i in range(0, len(registers), 2)]
    for bit in (b.icmp_signed("<", index, e.const(_BYTES, 0)), *above):
        found = [b.select(bit, hi, lo) for lo, hi in zip(found[::2], found[1::2])]
    return found[0]


def _bit_set(e: Emitter, bytes_: Value, bits: Sequence[int]) -> Value:
    """Whether each byte has its bit of ``bits``."""
    return e.b.icmp_unsigned("!=", e.b.and_(bytes_, e.const_vec(I8, [_signed(v) for v in bits])), e.const(_BYTES, 0))


def fields(e: Emitter, words: Value, first: int, step: int) -> Value:
    """Bits ``first``, ``first + step``, ... of each lane at the bottom of its four bytes; what lies above may be anything."""
    control = e.const_vec(I8, [32 * (i // 4 % 2) + first + step * (i % 4) & 63 for i in range(64)])
    return e.b.bitcast(_multishift(e, control, e.b.bitcast(words, vec(I64, 8))), words.type)


def _high_bytes(e: Emitter, high: Value) -> Value:
    """The lowest byte of each row in all four bytes of its lane."""
    return e.shuffle(e.b.bitcast(high, _BYTES), None, [4 * (i // 4) for i in range(64)])


def _halves(e: Emitter, lower: Value, upper: Value) -> tuple[Value, Value]:
    """Entries of 16 bits: those of the even and of the odd indices of a row."""
    b, ty = e.b, vec(I16, 32)
    lower, upper = b.bitcast(lower, ty), b.bitcast(upper, ty)
    low, eight = e.const(ty, 0x00FF), e.const(ty, 8)
    even = b.or_(b.and_(lower, low), b.shl(upper, eight))
    odd = b.or_(b.lshr(lower, eight), b.and_(upper, e.const(ty, -0x0100)))
    return b.bitcast(even, vec(I64, 8)), b.bitcast(odd, vec(I64, 8))


def _spread(e: Emitter, book: Codebook, entries: Value, at: int) -> Value:
    """The four nibbles of the entry at bit ``at`` of each lane to its bytes, by columns; upper halves of the bytes hold anything."""
    control = e.const_vec(I8, [32 * (i // 4 % 2) + at + 4 * book.order.index(i % 4) for i in range(64)])
    return e.b.bitcast(_multishift(e, control, entries), vec(I32, 16))


def _multishift(e: Emitter, control: Value, words: Value) -> Value:
    """Eight bits from any place of a quadword to each of its bytes."""
    fn = e.intrinsic("llvm.x86.avx512.pmultishift.qb.512", _BYTES, [_BYTES, _BYTES])
    return e.b.call(fn, [control, e.b.bitcast(words, _BYTES)])


def _signed(v: int) -> int:
    return v - 256 if v > 127 else v
