"""Block types as storage: 32 values share a scale, and a minimum where the codes do not lie around zero (spec: quantised tensor types).

A value is ``d * code`` or ``d * code + m``. ``d * code`` is exact in f32 (a half times at most eight bits), so reading rounds once at
most, on every target alike. Writing follows ggml's quantisers of these types.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llvmlite import ir

from ggufc.codegen.emitter import F32, I1, I8, I16, I32, I64, Emitter, Value, vec
from ggufc.codegen.kernels.vmath import ROUND_F32
from ggufc.codegen.weights.tables import IQ4
from ggufc.formats.ggml_types import TYPES

VALUES = 32
"""Values per block."""

_TINY = 1e-30
"""Scales up to this have no finite inverse worth using; their blocks become zeros, as in ``formats.quants``."""


@dataclass(frozen=True)
class Block:
    """Where the parts of a block lie, in bytes: codes of ``bits`` bits, a minimum and a plane of fifth bits where ``low``, ``high`` say.

    Codes of four and five bits keep value j in the low and value j + 16 in the high half of byte j. ``zero`` is the code of 0.
    """

    bits: int
    codes: int
    zero: int = 0
    low: int = 0
    high: int = 0
    table: tuple[int, ...] = ()


BLOCKS = {
    "q8_0": Block(8, 2),
    "q5_1": Block(5, 8, low=2, high=4),
    "q5_0": Block(5, 6, zero=16, high=2),
    "q4_1": Block(4, 4, low=2),
    "q4_0": Block(4, 2, zero=8),
    "iq4_nl": Block(4, 2, table=IQ4),
}


def block_bytes(dtype: str) -> int:
    """Bytes of a block; even, so the halves in it are aligned."""
    return TYPES[dtype].bytes


def load(e: Emitter, dtype: str, n: int, block: Value, at: Value) -> Value:
    """f32 lanes: ``n`` values (a power of two up to 16) of the block at ``block``, from value ``at`` (i64, a multiple of ``n``) on."""
    layout = BLOCKS[dtype]
    values, scale = codes(e, dtype, n, block, at), _halves(e, block, n)
    # d * code is exact, so a fused chain and separate operations agree.
    return e.fma(values, scale, _halves(e, e.gep(block, layout.low), n)) if layout.low else e.b.fmul(values, scale)


def codes(e: Emitter, dtype: str, n: int, block: Value, at: Value) -> Value:
    """As ``load`` without scale and minimum: the codes around zero, as f32."""
    b, layout, ints = e.b, BLOCKS[dtype], vec(I32, n)
    where = e.gep(block, layout.codes)
    if layout.bits == 8:
        return b.sitofp(b.sext(e.load(vec(I8, n), e.gep(where, at)), ints), vec(F32, n))
    bytes_ = e.load(vec(I8, n), e.gep(where, b.and_(at, e.i64(15))))
    shift = b.trunc(b.lshr(b.and_(at, e.i64(16)), e.i64(2)), I32)
    code = b.lshr(b.zext(bytes_, ints), e.splat(shift, n))
    if layout.bits == 4 and n == 16 and e.target.lanes == 16:
        # Look-ups read the lowest four bits of an index alone.
        table = e.const_vec(F32, [float(v) for v in layout.table or range(-layout.zero, 16 - layout.zero)])
        return b.call(e.intrinsic("llvm.x86.avx512.permvar.sf.512", vec(F32, n), [vec(F32, n), ints]), [table, code])
    code = b.and_(code, e.const(ints, 15))
    if layout.high:
        word = b.lshr(b.load(e.gep(block, layout.high), align=2, typ=I32), b.trunc(at, I32))
        fifth = b.bitcast(b.trunc(word, ir.IntType(n)), vec(I1, n))
        code = b.add(code, b.select(fifth, e.const(ints, 16 - layout.zero), e.const(ints, -layout.zero)))
    elif layout.table:
        code = _look_up(e, code, n, layout.table)
    elif layout.zero:
        code = b.sub(code, e.const(ints, layout.zero))
    return b.sitofp(code, vec(F32, n))


def _halves(e: Emitter, p: Value, n: int) -> Value:
    """The half at ``p`` in every f32 lane; spread before it is widened where the CPU widens vectors."""
    half = e.load(I16, p)
    return e.f16_to_f32(e.splat(half, n)) if e.target.has_f16c else e.splat(e.f16_to_f32(half), n)


def _look_up(e: Emitter, code: Value, n: int, table: Sequence[int]) -> Value:
    """``table[code]`` for i32 lanes 0..15."""
    b, ints = e.b, vec(I32, n)
    if "avx2" in e.target.features and n > 1:
        bytes_ = vec(I8, 16)
        shuffle = e.intrinsic("llvm.x86.ssse3.pshuf.b.128", bytes_, [bytes_, bytes_])
        narrow = b.trunc(code, vec(I8, n))
        index = e.shuffle(narrow, None, [i % n for i in range(16)]) if n < 16 else narrow
        found = b.call(shuffle, [e.const_vec(I8, table), index])
        return b.sext(e.extract_vector(found, 0, n) if n < 16 else found, ints)
    value = e.const(ints, table[0])
    for i in range(1, len(table)):
        passed = b.sext(b.icmp_signed(">", code, e.const(ints, i - 1)), ints)
        value = b.add(value, b.and_(passed, e.const(ints, table[i] - table[i - 1])))
    return value


def store(e: Emitter, dtype: str, source: Value, target: Value) -> None:
    """Quantise 32 f32 values at ``source`` to the block at ``target``; values and the block's scale must be finite halves."""
    layout, n = BLOCKS[dtype], e.target.lanes
    x = [e.load(vec(F32, n), e.gep(source, 4 * i)) for i in range(0, VALUES, n)]
    if dtype == "q8_0":
        _store_bytes(e, x, target)
    elif layout.table:
        _store_table(e, x, source, target, layout)
    elif layout.low:
        _store_span(e, x, target, layout)
    else:
        _store_signed(e, x, source, target, layout)


def _store_bytes(e: Emitter, x: list[Value], target: Value) -> None:
    """d = max|x| / 127; halves round to even, as in ggml's vector code."""
    scale, shifted = rounded(e, x)
    e.store(e.f32_to_f16(scale), target)
    for i, v in enumerate(shifted):
        e.store(low_bytes(e, v), e.gep(target, 2 + i * e.target.lanes))


def rounded(e: Emitter, x: list[Value]) -> tuple[Value, list[Value]]:
    """Scale of a block, max|x| / 127, and the values over it plus ``ROUND_F32``: integers whose ``low_bytes`` are the codes."""
    b, n = e.b, e.target.lanes
    top = _largest(e, x)
    inverse = b.select(b.fcmp_ordered(">", top, e.f32(0.0)), b.fdiv(e.f32(127.0), top), e.f32(0.0))
    return b.fdiv(top, e.f32(127.0)), [b.fadd(b.fmul(v, e.splat(inverse, n)), e.const(v.type, ROUND_F32)) for v in x]


def low_bytes(e: Emitter, v: Value) -> Value:
    """The lowest byte of each f32 lane."""
    n = e.target.lanes
    return e.b.trunc(e.b.bitcast(v, vec(I32, n)), vec(I8, n))


def _store_signed(e: Emitter, x: list[Value], source: Value, target: Value, layout: Block) -> None:
    """The value of largest magnitude gets the lowest code, -zero: the one without a positive counterpart."""
    b, n = e.b, e.target.lanes
    ty = x[0].type
    d = b.fmul(_extreme(e, x, source), e.f32(-1.0 / layout.zero))
    inverse = e.splat(_inverse(e, d), n)
    middle, top = e.const(ty, layout.zero + 0.5), e.const(vec(I32, n), 2 * layout.zero - 1)
    codes = [_bounded(e, b.fptosi(b.fadd(b.fmul(v, inverse), middle), vec(I32, n)), top) for v in x]
    e.store(e.f32_to_f16(d), target)
    _store_codes(e, codes, target, layout)


def _store_span(e: Emitter, x: list[Value], target: Value, layout: Block) -> None:
    """Codes 0..2^bits-1 from the smallest to the largest value."""
    b, n = e.b, e.target.lanes
    ty, most = x[0].type, (1 << layout.bits) - 1
    low, high = x[0], x[0]
    for v in x[1:]:
        low, high = e.fmin(low, v), e.fmax(high, v)
    # The minimum is the negated maximum of negated values: exact.
    low, high = b.fneg(e.reduce(b.fneg(low), "max")), e.reduce(high, "max")
    d = b.fdiv(b.fsub(high, low), e.f32(float(most)))
    inverse, base = e.splat(_inverse(e, d), n), e.splat(low, n)
    half, top = e.const(ty, 0.5), e.const(vec(I32, n), most)
    codes = [_bounded(e, b.fptosi(b.fadd(b.fmul(b.fsub(v, base), inverse), half), vec(I32, n)), top) for v in x]
    e.store(e.f32_to_f16(d), target)
    e.store(e.f32_to_f16(low), e.gep(target, layout.low))
    _store_codes(e, codes, target, layout)


def _store_table(e: Emitter, x: list[Value], source: Value, target: Value, layout: Block) -> None:
    """Codes for the scale that maps the extreme value to the first entry, then the scale that fits these codes best, weighted by x^2."""
    b, n, table = e.b, e.target.lanes, layout.table
    ty, ints = x[0].type, vec(I32, n)
    inverse = e.splat(_inverse(e, b.fmul(_extreme(e, x, source), e.f32(1.0 / table[0]))), n)
    codes, product, square = [], e.const(ty, 0.0), e.const(ty, 0.0)
    for v in x:
        scaled = b.fmul(v, inverse)
        code, entry = e.const(ints, 0), e.const(ints, table[0])
        for i in range(1, len(table)):
            passed = b.fcmp_ordered(">", scaled, e.const(ty, (table[i - 1] + table[i]) / 2))
            code = b.add(code, b.zext(passed, ints))
            entry = b.add(entry, b.and_(b.sext(passed, ints), e.const(ints, table[i] - table[i - 1])))
        codes.append(code)
        value = b.sitofp(entry, ty)
        weighted = b.fmul(b.fmul(v, v), value)
        product = b.fadd(product, b.fmul(weighted, v))
        square = b.fadd(square, b.fmul(weighted, value))
    total = e.reduce(square, "add")
    d = b.fmul(e.reduce(product, "add"), _inverse(e, total))
    e.store(e.f32_to_f16(d), target)
    _store_codes(e, codes, target, layout)


def _store_codes(e: Emitter, codes: list[Value], target: Value, layout: Block) -> None:
    b, n = e.b, e.target.lanes
    ints, half = vec(I32, n), len(codes) // 2
    for i in range(half):
        low, high = (b.and_(c, e.const(ints, 15)) for c in (codes[i], codes[half + i]))
        both = b.or_(low, b.shl(high, e.const(ints, 4)))
        e.store(b.trunc(both, vec(I8, n)), e.gep(target, layout.codes + n * i))
    if layout.high:
        word: Value = e.i32(0)
        for i, code in enumerate(codes):
            word = b.or_(word, b.shl(_mask_word(e, b.icmp_signed(">", code, e.const(ints, 15))), e.i32(n * i)))
        b.store(word, e.gep(target, layout.high), align=2)


def _bounded(e: Emitter, code: Value, top: Value) -> Value:
    return e.b.select(e.b.icmp_signed("<", code, top), code, top)


def _inverse(e: Emitter, d: Value) -> Value:
    """1/d, and 0 where |d| is too small."""
    usable = e.b.fcmp_ordered(">", e.fabs(d), e.f32(_TINY))
    return e.b.select(usable, e.b.fdiv(e.f32(1.0), d), e.f32(0.0))


def _largest(e: Emitter, x: list[Value]) -> Value:
    largest = e.fabs(x[0])
    for v in x[1:]:
        largest = e.fmax(largest, e.fabs(v))
    return e.reduce(largest, "max")


def _extreme(e: Emitter, x: list[Value], source: Value) -> Value:
    """The first value of largest magnitude, with its sign."""
    b, n = e.b, e.target.lanes
    top = e.splat(_largest(e, x), n)
    word: Value = e.i32(0)
    for i, v in enumerate(x):
        word = b.or_(word, b.shl(_mask_word(e, b.fcmp_ordered("==", e.fabs(v), top)), e.i32(n * i)))
    first = b.call(e.intrinsic("llvm.cttz.i32", I32, [I32, I1]), [word, ir.Constant(I1, 0)])
    # Among values that are not numbers there may be none: any of them will do then.
    return e.load(F32, e.at(source, b.zext(b.and_(first, e.i32(VALUES - 1)), I64), 4))


def _mask_word(e: Emitter, mask: Value) -> Value:
    """Lane conditions as the low bits of an i32."""
    lanes = mask.type.count if isinstance(mask.type, ir.VectorType) else 1
    return e.b.zext(e.b.bitcast(mask, ir.IntType(lanes)), I32)
