"""Kernels over rows on a GPU: rounding of activations, look-ups, rotation, and stores into the cache. A block takes a row."""

from __future__ import annotations

from collections.abc import Callable

from ggufc.codegen.emitter import F32, F64, I8, I16, I32, Value
from ggufc.codegen.kernels import cache, cache_blocks, vmath
from ggufc.codegen.kernels.base import symbol
from ggufc.codegen.kernels.cache_blocks import BLOCKS, VALUES, block_bytes
from ggufc.codegen.kernels.decode import DecodeRows
from ggufc.codegen.kernels.get_rows import GetRows
from ggufc.codegen.kernels.quantize import Quantize
from ggufc.codegen.kernels.rope import RopeApply, RopeTable, inverse_frequencies, magnitude
from ggufc.codegen.kernels.rowwise import rms_scale
from ggufc.codegen.weights import q8_record, weight_format
from ggufc.codegen.weights.activations import ISUM_FACTOR
from ggufc.codegen.weights.base import ROWS, Cursor
from ggufc.codegen.weights.floats import FloatFormat

from .emitter import WARP, PtxEmitter
from .entry import Entry, Form, power_of_two

_MOST_THREADS = 256


def _threads(work: int) -> int:
    """Threads of a block for ``work`` items of one row."""
    return min(_MOST_THREADS, max(WARP, power_of_two(work)))


def _form(spec: object, suffix: str, block: int, body: Callable[[PtxEmitter], None], group: int = WARP) -> Form:
    return Form((Entry(symbol(spec) + suffix, block, body, group),))  # type: ignore[arg-type]


# Activations


def quantize(spec: Quantize) -> Form:
    """A warp rounds 32 (or 256) values; the sum of squares before it goes over the whole block."""
    step = 32 if spec.mode == "q8_2" else 256
    warps = min(8, power_of_two(spec.k // step))
    block = WARP * warps

    def body(e: PtxEmitter) -> None:
        b = e.b
        warp, lane = b.lshr(e.thread, e.i64(5)), b.and_(e.thread, e.i64(WARP - 1))
        e.begin_tiles()
        x = e.at(e.arg_ptr(0), b.mul(e.tile, e.arg_int(1)), 4)
        record = e.at(e.arg_ptr(3), e.tile, q8_record(spec.k).stride)
        scale = _rms(e, x, spec.k, spec.eps) if spec.norm else None

        def value(i: Value) -> Value:
            v = e.load(F32, e.at(x, i, 4))
            return v if scale is None else b.fmul(b.fmul(v, scale), e.load(F32, e.at(e.arg_ptr(2), i, 4)))

        with e.strided(warp, spec.k // step, warps, "block") as i:
            first = b.add(b.mul(i, e.i64(step)), lane)
            values = [value(b.add(first, e.i64(32 * j))) for j in range(step // 32)]
            top = e.fabs(values[0])
            for v in values[1:]:
                top = e.fmax(top, e.fabs(v))
            d, inverse = _scales(e, e.reduce_warp(top, "max"), spec.mode)
            for j, v in enumerate(values):
                _store_codes(e, spec.k, record, b.add(b.mul(i, e.i64(step // 32)), e.i64(j)), lane, b.fmul(v, inverse), d)

    return _form(spec, "", block, body, group=block)


def _rms(e: PtxEmitter, x: Value, k: int, eps: float) -> Value:
    """1 / sqrt(mean square + eps): squares in f32, their sum in f64."""
    b = e.b
    total = e.var(F64, e.const(F64, 0.0))
    with e.for_threads(k) as i:
        v = e.load(F32, e.at(x, i, 4))
        total.set(b.fadd(total.get(), b.fpext(b.fmul(v, v), F64)))
    mean = b.fdiv(e.reduce(total.get(), "add"), e.const(F64, k))
    return b.fdiv(e.f32(1.0), e.fsqrt(b.fadd(b.fptrunc(mean, F32), e.f32(eps))))


def _scales(e: PtxEmitter, top: Value, mode: str) -> tuple[Value, Value]:
    """Scale and its inverse from the largest magnitude, as ``formats.activations`` defines them."""
    b, zero = e.b, e.f32(0.0)
    if mode == "q8_2":
        d = e.bf16_to_f32(e.f32_to_bf16(b.fdiv(top, e.f32(127.0))))
        return d, b.select(b.fcmp_ordered(">", d, zero), b.fdiv(e.f32(1.0), d), zero)
    return b.fdiv(top, e.f32(127.0)), b.select(b.fcmp_ordered(">", top, zero), b.fdiv(e.f32(127.0), top), zero)


def _store_codes(e: PtxEmitter, k: int, record: Value, index: Value, lane: Value, scaled: Value, d: Value) -> None:
    """One value per lane of a block of 32, and the block's words."""
    b, at = e.b, q8_record(k)
    q = b.sub(b.bitcast(b.fadd(scaled, e.f32(vmath.ROUND_F32)), I32), b.bitcast(e.f32(vmath.ROUND_F32), I32))
    q = b.select(b.icmp_signed("<", q, e.i32(127)), q, e.i32(127))
    q = b.select(b.icmp_signed(">", q, e.i32(-128)), q, e.i32(-128))
    e.store(b.trunc(q, I8), e.gep(e.at(record, index, 32), lane))
    half = e.reduce_warp(q, "add", 16)
    both = b.add(half, e.shuffle_xor(half, 16))
    factor = e.i32(ISUM_FACTOR)
    with e.if_(b.icmp_signed("==", b.and_(lane, e.i64(15)), e.i64(0))):
        e.store(b.mul(half, factor), e.at(e.at(e.gep(record, at.off_c16), index, 8), b.lshr(lane, e.i64(4)), 4))
    with e.if_(b.icmp_signed("==", lane, e.i64(0))):
        e.store(d, e.at(e.gep(record, at.off_d), index, 4))
        e.store(b.mul(both, factor), e.at(e.gep(record, at.off_c32), index, 4))
        e.store(b.fmul(d, b.sitofp(both, F32)), e.at(e.gep(record, at.off_s), index, 4))


# Look-ups


def get_rows(spec: GetRows) -> Form:
    """A thread unpacks 32 columns of the row (one column of float formats)."""
    format, k = weight_format(spec.format), spec.k
    floats = isinstance(format, FloatFormat)

    def body(e: PtxEmitter) -> None:
        b = e.b
        e.begin_tiles()
        row = e.sext64(e.load(I32, e.at(e.arg_ptr(1), e.tile, 4)))
        group = e.at(e.arg_ptr(0), b.lshr(row, e.i64(4)), format.group_bytes(k))
        part = b.and_(row, e.i64(ROWS - 1))
        out = e.at(e.arg_ptr(2), e.tile, 4 * k)
        if isinstance(format, FloatFormat):
            with e.for_threads(k) as i:
                e.store(format.column(e, group, i, part), e.at(out, i, 4))
            return
        m = format.chunk_blocks(k)
        with e.for_threads(k // 32) as i:
            cursor = format.cursor(e, group, k, b.udiv(i, e.i64(m)), b.urem(i, e.i64(m)), part)
            _dequantise(e, format.offset, cursor, format, e.at(out, i, 128))

    return _form(spec, "", _threads(k if floats else k // 32), body)


def _dequantise(e: PtxEmitter, offset: int, cursor: Cursor, format: object, out: Value) -> None:
    """scale * code, then + min, each rounded to f32, as the reference dequantiser."""
    b = e.b
    u = format.unpack(e, cursor)  # type: ignore[attr-defined]
    for q, quad in enumerate(u.quads):
        g = q * len(u.scales) // 8
        values = []
        for j in range(4):
            code = b.and_(b.lshr(quad, e.i32(8 * j)), e.i32(255))
            v = b.fmul(u.scales[g], b.sitofp(b.sub(code, e.i32(offset)), F32))
            values.append(b.fadd(v, u.mins[g]) if u.mins else v)
        e.vector_store(values, e.gep(out, 16 * q), 4)


# Rotation and the cache


def rope_table(spec: RopeTable) -> Form:
    pairs = spec.n_dims // 2

    def body(e: PtxEmitter) -> None:
        b = e.b
        f = inverse_frequencies(spec.n_dims, spec.base, spec.freq_scale, spec.ext_factor, spec.beta_fast, spec.beta_slow, spec.n_ctx_orig)
        constants = e.global_const(F64, f, f"frequencies_{e.fn.name}")
        e.begin_tiles()
        position = b.sitofp(e.load(I32, e.at(e.arg_ptr(0), e.tile, 4)), F64)
        out = e.at(e.arg_ptr(2), e.tile, 4 * spec.n_dims)
        factor = e.const(F64, magnitude(spec.freq_scale, spec.ext_factor, spec.attn_factor))
        with e.for_threads(pairs) as i:
            angle = b.fmul(position, e.load(F64, e.at(constants, i, 8)))
            if spec.freq_factors:
                angle = b.fdiv(angle, b.fpext(e.load(F32, e.at(e.arg_ptr(1), i, 4)), F64))
            sin, cos = (b.fptrunc(b.fmul(v, factor), F32) for v in vmath.sincos(e, angle))
            at = e.at(out, i, 8)
            e.store(cos, at)
            e.store(b.fneg(sin) if spec.inverse else sin, e.gep(at, 4))

    return _form(spec, "", _threads(pairs), body)


def rope_apply(spec: RopeApply) -> Form:
    """A warp takes a head. Rows for a cache of blocks are rotated into shared memory first."""
    row = spec.d * spec.n_head
    staged = spec.store and spec.to in BLOCKS

    def body(e: PtxEmitter) -> None:
        b = e.b
        stage = e.shared(4 * row, "row") if staged else None
        e.begin_tiles()
        x = e.at(e.arg_ptr(0), b.mul(e.tile, e.arg_int(1)), 4)
        table = e.at(e.arg_ptr(2), e.tile, 4 * spec.n_dims)
        if spec.store:
            slot = e.sext64(e.load(I32, e.at(e.arg_ptr(6), e.tile, 4)))
            target = e.at(e.arg_ptr(4), slot, cache.row_bytes(spec.to, row))
        else:
            target = e.at(e.arg_ptr(4), b.mul(e.tile, e.arg_int(5)), 4)

        def put(i: Value, v: Value) -> None:
            if stage is not None:
                e.store(v, e.at(stage, i, 4))
            else:
                e.store(cache.narrow(e, spec.to, v), e.at(target, i, cache.SIZES[spec.to]))

        with e.for_groups(e.i64(0), e.i64(spec.n_head), "head") as h:
            _rotate_head(e, spec, x, table, b.mul(h, e.i64(spec.d)), put)
        if stage is not None:
            e.barrier()
            _store_blocks(e, spec.to, stage, target, row)

    return _form(spec, "", WARP * min(8, power_of_two(spec.n_head)), body)


def _rotate_head(e: PtxEmitter, spec: RopeApply, x: Value, table: Value, start: Value, put: Callable[[Value, Value], None]) -> None:
    b, half = e.b, spec.n_dims // 2
    scale = rms_scale(e, e.at(x, start, 4), spec.d, spec.eps) if spec.norm else None

    def load(i: Value) -> Value:
        v = e.load(F32, e.at(x, b.add(start, i), 4))
        return v if scale is None else b.fmul(b.fmul(v, scale), e.load(F32, e.at(e.arg_ptr(3), i, 4)))

    with e.for_lanes(half) as i:
        first = i if spec.mode == "neox" else b.add(i, i)
        second = b.add(first, e.i64(half if spec.mode == "neox" else 1))
        u, v = load(first), load(second)
        at = e.at(table, i, 8)
        cos, sin = e.load(F32, at), e.load(F32, e.gep(at, 4))
        put(b.add(start, first), e.fma(u, cos, b.fneg(b.fmul(v, sin))))
        put(b.add(start, second), e.fma(u, sin, b.fmul(v, cos)))
    if spec.n_dims < spec.d:
        with e.for_lanes(spec.d - spec.n_dims) as i:
            at = b.add(i, e.i64(spec.n_dims))
            put(b.add(start, at), load(at))


def store_rows(spec: cache.StoreRows) -> Form:
    def body(e: PtxEmitter) -> None:
        b = e.b
        e.begin_tiles()
        x = e.at(e.arg_ptr(0), b.mul(e.tile, e.arg_int(1)), 4)
        slot = e.sext64(e.load(I32, e.at(e.arg_ptr(3), e.tile, 4)))
        target = e.at(e.arg_ptr(2), slot, cache.row_bytes(spec.dtype, spec.row))
        if spec.dtype in BLOCKS:
            _store_blocks(e, spec.dtype, x, target, spec.row)
            return
        with e.for_threads(spec.row) as i:
            v = cache.narrow(e, spec.dtype, e.load(F32, e.at(x, i, 4)))
            e.store(v, e.at(target, i, cache.SIZES[spec.dtype]))

    return _form(spec, "", _threads(spec.row), body)


def _store_blocks(e: PtxEmitter, dtype: str, source: Value, target: Value, row: int) -> None:
    """A thread rounds a block of 32 values."""
    with e.alone(), e.for_threads(row // VALUES) as i:
        cache_blocks.store(e, dtype, e.at(source, i, 4 * VALUES), e.at(target, i, block_bytes(dtype)))


def decode_rows(spec: DecodeRows) -> Form:
    """A thread takes a value."""

    def body(e: PtxEmitter) -> None:
        e.begin_tiles()
        source = e.at(e.arg_ptr(0), e.tile, cache.row_bytes(spec.dtype, spec.row))
        with e.for_threads(spec.row) as i:
            e.store(load_stored(e, spec.dtype, source, i), e.at(e.at(e.arg_ptr(1), e.tile, 4 * spec.row), i, 4))

    return _form(spec, "", _threads(spec.row), body)


def load_stored(e: PtxEmitter, dtype: str, p: Value, i: Value) -> Value:
    """Value ``i`` (f32) of a stored row at ``p``."""
    if dtype in BLOCKS:
        block = e.at(p, e.b.udiv(i, e.i64(VALUES)), block_bytes(dtype))
        return cache_blocks.load(e, dtype, 1, block, e.b.urem(i, e.i64(VALUES)))
    element = F32 if dtype == "f32" else I16
    return cache.widen(e, dtype, e.load(element, e.at(p, i, cache.SIZES[dtype])))
