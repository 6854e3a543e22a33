"""Code tables and the byte look-up that applies them."""

from __future__ import annotations

from collections.abc import Sequence

from ggufc.codegen.emitter import I8, I32, Emitter, Value, vec

IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Values of IQ4_NL and IQ4_XS (spec: quantised tensor types, section 2)."""

E2M1_TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the FP4 (E2M1) values of MXFP4."""


def lookup16(e: Emitter, quads: list[Value], table: Sequence[int]) -> list[Value]:
    """Replace every byte 0..15 of the quads by ``table[byte]`` (unsigned bytes)."""
    if e.spmd:
        return [e.lookup16(q, table) for q in quads]
    lanes = e.target.lanes
    bytes_ = vec(I8, 4 * lanes)
    if e.target.is_arm:
        fn = e.intrinsic("llvm.aarch64.neon.tbl1.v16i8", bytes_, [bytes_, bytes_])
        entries = e.const_vec(I8, [_signed(v) for v in table])
        return [e.b.bitcast(e.b.call(fn, [entries, e.b.bitcast(q, bytes_)]), q.type) for q in quads]
    name = {16: "llvm.x86.avx512.pshuf.b.512", 8: "llvm.x86.avx2.pshuf.b"}.get(lanes) if "avx2" in e.target.features else None
    if name is None:
        return [_steps(e, q, table) for q in quads]
    shuffle = e.intrinsic(name, bytes_, [bytes_, bytes_])
    register = e.const_vec(I8, [_signed(v) for v in table] * (lanes // 4))
    return [e.b.bitcast(e.b.call(shuffle, [register, e.b.bitcast(q, bytes_)]), q.type) for q in quads]


def byte_permutes(e: Emitter) -> bool:
    """Whether the target permutes the bytes of whole 512-bit registers (AVX512-VBMI)."""
    return e.target.lanes == 16 and "avx512vbmi" in e.target.features


def lookup64(e: Emitter, key: Value, table: Sequence[int]) -> Value:
    """``table[byte & 63]`` for every byte of a quad, where ``byte_permutes``."""
    bytes_ = vec(I8, 64)
    fn = e.intrinsic("llvm.x86.avx512.permvar.qi.512", bytes_, [bytes_, bytes_])
    found = e.b.call(fn, [e.const_vec(I8, [_signed(v) for v in table]), e.b.bitcast(key, bytes_)])
    return e.b.bitcast(found, key.type)


def select_bits(e: Emitter, codes: Value, others: Value, code_mask: int) -> Value:
    """``codes`` in the bits of ``code_mask`` of each byte, ``others`` in the rest, where ``byte_permutes``: one instruction, which LLVM
    would take apart where it sees that look-ups pass over some of the bits."""
    ty = codes.type
    fn = e.intrinsic("llvm.x86.avx512.pternlog.d.512", ty, [ty, ty, ty, I32])
    return e.b.call(fn, [codes, others, e.const(ty, code_mask * 0x01010101), e.i32(0xE4)])


def rotate(e: Emitter, words: Value, by: Value) -> Value:
    """Words <n x i32> rotated to the left."""
    fn = e.intrinsic(f"llvm.fshl.v{words.type.count}i32", words.type, [words.type] * 3)
    return e.b.call(fn, [words, words, by])


def lookup_pair(e: Emitter, quad: Value, table: Sequence[int]) -> tuple[Value, Value]:
    """Entries ``16 + byte`` and ``byte`` of a table of 32, for bytes 0..15."""
    return lookup16(e, [quad], table[16:])[0], lookup16(e, [quad], table[:16])[0]


def _steps(e: Emitter, quad: Value, table: Sequence[int]) -> Value:
    """Without a byte shuffle: start at the first entry and add the step at each threshold the code has passed."""
    bytes_ = vec(I8, 4 * e.target.lanes)
    code = e.b.bitcast(quad, bytes_)
    value = e.const(bytes_, _signed(table[0]))
    for i in range(1, 16):
        passed = e.b.sext(e.b.icmp_signed(">", code, e.const(bytes_, i - 1)), bytes_)
        value = e.b.add(value, e.b.and_(passed, e.const(bytes_, _signed(table[i] - table[i - 1] & 0xFF))))
    return e.b.bitcast(value, quad.type)


def _signed(v: int) -> int:
    return v - 256 if v > 127 else v
