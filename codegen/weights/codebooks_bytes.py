"""Look-ups in codebooks with AVX512-VBMI: permutes of bytes over 128 entries, and shifts that cut fields out of quadwords.

All 64 indices of a word of 16 rows are looked up at once, lower and upper byte of the entries apart. The last step finds the signed value
of a column by its code *and* its sign in a table of 64 bytes, so signs cost no step of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

from ggufc.codegen.emitter import I8, I64, Emitter, Value, vec
from ggufc.codegen.weights import tables
from ggufc.codegen.weights.base import masked

_BYTES = vec(I8, 64)


def signed_by_bytes(
    e: Emitter,
    name: str,
    entries: Sequence[int],
    words: Sequence[Value],
    high: Value | None,
    high_bits: int,
    signs: Value,
    columns: int,
    values: Sequence[int],
) -> list[Value]:
    """The eight quads of a block: ``values[code]`` (an offset plus a magnitude), or its mirror about the offset 64 where the sign is set.

    ``entries``, ``words``, ``high``, ``high_bits``: as in ``codebooks.look_up``. ``signs``: bit q of byte c belongs to column 4 q + c.
    """
    mirror = [128 - v for v in values]
    quads: list[Value] = []
    for w, word in enumerate(words):
        lower, upper = _entries(e, name, entries, e.b.bitcast(word, _BYTES), _high_bytes(e, high), 4 * w, high_bits)
        even, odd = _halves(e, lower, upper)
        for i in range(4):
            nibbles = _spread(e, odd if i % 2 else even, 16 * (i // 2))
            index = 4 * w + i
            if columns == 8:
                # Codes of columns c and c + 4 in bits 0-3, their signs in bits 4 and 5.
                key = _select(e, nibbles, masked(e, signs, 4 - 2 * index, 0xF0), 15)
                for half in range(2):
                    table = [(mirror if i >> (4 + half) & 1 else values)[min(i >> 2 * half & 3, len(values) - 1)] for i in range(64)]
                    quads.append(tables.lookup64(e, key, table))
            else:
                # The code in bits 0-2; its sign is one of bits 3 to 5, so that three quads share a shift of the signs.
                shift, bit = ((3, 3 + index), (0, index), (-2, index - 2))[index // 3]
                key = _select(e, nibbles, masked(e, signs, shift, 0xF8), 7)
                quads.append(tables.lookup64(e, key, [(mirror if i >> bit & 1 else values)[i & 7] for i in range(64)]))
    return quads


def _entries(
    e: Emitter, name: str, entries: Sequence[int], index: Value, high: Value | None, first: int, high_bits: int
) -> tuple[Value, Value]:
    """Lower and upper bytes of the entries."""
    b = e.b
    permute = e.intrinsic("llvm.x86.avx512.vpermi2var.qi.512", _BYTES, [_BYTES] * 3)
    chunks = len(entries) // 128
    bits = [b.icmp_signed("<", index, e.const(_BYTES, 0))]
    for i in range(high_bits):
        place = [1 << (high_bits * (first + j) + i) for j in range(4)] * 16
        chosen = b.and_(high, e.const_vec(I8, [v - 256 if v > 127 else v for v in place]))
        bits.append(b.icmp_unsigned("!=", chosen, e.const(_BYTES, 0)))
    out = []
    for part in range(2):
        table = e.global_const(I8, [_signed(v >> 8 * part & 0xFF) for v in entries], f"book8_{part}_{name}")
        registers = [e.load(_BYTES, e.gep(table, 64 * i), 64) for i in range(2 * chunks)]
        found = [b.call(permute, [registers[2 * i], index, registers[2 * i + 1]]) for i in range(chunks)]
        for bit in bits:
            found = [b.select(bit, hi, lo) for lo, hi in zip(found[::2], found[1::2])]
        out.append(b.bitcast(found[0], vec(I64, 8)))
    return out[0], out[1]


def _high_bytes(e: Emitter, high: Value | None) -> Value | None:
    """The lowest byte of each row in all four bytes of its lane."""
    if high is None:
        return None
    return e.shuffle(e.b.bitcast(high, _BYTES), None, [4 * (i // 4) for i in range(64)])


def _halves(e: Emitter, lower: Value, upper: Value) -> tuple[Value, Value]:
    """Entries of 16 bits: those of the even and of the odd indices of a row."""
    b, ty = e.b, lower.type
    mask, eight = e.const(ty, 0x00FF00FF00FF00FF), e.const(ty, 8)
    even = b.or_(b.and_(lower, mask), b.shl(b.and_(upper, mask), eight))
    odd = b.or_(b.and_(b.lshr(lower, eight), mask), b.and_(upper, e.const(ty, -0x00FF00FF00FF0100)))
    return even, odd


def _spread(e: Emitter, entries: Value, at: int) -> Value:
    """The four nibbles of the entry at bit ``at`` of each lane to its bytes; upper halves of the bytes hold anything."""
    control = e.const_vec(I8, [32 * (i // 4 % 2) + at + 4 * (i % 4) for i in range(64)])
    fn = e.intrinsic("llvm.x86.avx512.pmultishift.qb.512", _BYTES, [_BYTES, _BYTES])
    return e.b.bitcast(e.b.call(fn, [control, e.b.bitcast(entries, _BYTES)]), vec(e.i32(0).type, 16))


def _select(e: Emitter, codes: Value, signs: Value, code_mask: int) -> Value:
    """``codes`` in the bits of ``code_mask`` of each byte, ``signs`` (clear there) in the others."""
    return e.b.or_(e.b.and_(codes, e.const(codes.type, code_mask * 0x01010101)), signs)


def _signed(v: int) -> int:
    return v - 256 if v > 127 else v
