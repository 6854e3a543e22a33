"""Rotation tables and their application against float64 formulas; storing into caches of every dtype."""

from __future__ import annotations

import numpy as np
import pytest

from ggufc.codegen.errors import CodegenError
from ggufc.codegen.kernels.cache import StoreRows, row_bytes
from ggufc.codegen.kernels.rope import RopeApply, RopeTable
from harness import build, run, runnable_targets

POSITIONS = np.array([0, 1, 7, 511, 8191, 131071, 999999], np.int32)
YARN = dict(freq_scale=0.25, ext_factor=1.0, attn_factor=0.9, beta_fast=32.0, beta_slow=1.0, n_ctx_orig=2048)
TABLES = [
    RopeTable(64, 10000.0),
    RopeTable(18, 1e6, freq_scale=0.125, attn_factor=1.2),
    RopeTable(64, 150000.0, **YARN),
    RopeTable(32, 500000.0, freq_factors=True),
    RopeTable(10, 500000.0, freq_factors=True),
]
APPLIES = [
    RopeApply(64, 3, 64, "norm"),
    RopeApply(64, 2, 64, "neox"),
    RopeApply(24, 2, 10, "neox"),
    RopeApply(24, 4, 10, "norm", norm=True, eps=1e-6),
    RopeApply(80, 2, 80, "neox", norm=True, eps=1e-6, store=True, to="q8_0"),
    RopeApply(16, 3, 16, "norm", store=True, to="f16"),
    RopeApply(16, 3, 8, "neox", store=True, to="bf16"),
    RopeApply(16, 3, 8, "neox", store=True, to="f32"),
    RopeApply(24, 2, 0, "norm", norm=True, eps=1e-6, store=True, to="f16"),
]
STORES = [StoreRows(row, dtype) for dtype in ("f32", "f16", "bf16") for row in (48, 37)] + [StoreRows(96, "q8_0")]


@pytest.fixture(scope="module", params=runnable_targets(), ids=lambda t: t.level)
def loaded(request):
    return request.param, build([*TABLES, *APPLIES, *STORES], request.param)


def table_reference(spec: RopeTable, positions, ff):
    i = np.arange(spec.n_dims // 2)
    theta = positions[:, None].astype(np.float64) * spec.base ** (-2.0 * i / spec.n_dims) / ff
    m = spec.attn_factor
    phi = spec.freq_scale * theta
    if spec.ext_factor:

        def c(beta):
            return spec.n_dims * np.log(spec.n_ctx_orig / (2 * np.pi * beta)) / (2 * np.log(spec.base))

        lo, hi = max(0, np.floor(c(spec.beta_fast))), min(spec.n_dims - 1, np.ceil(c(spec.beta_slow)))
        r = 1 - np.clip((i - lo) / max(0.001, hi - lo), 0, 1)
        phi = phi * (1 - r) + theta * r
        m *= 1 + 0.1 * np.log(1 / spec.freq_scale)
    return np.stack([m * np.cos(phi), m * np.sin(phi)], 2).reshape(len(positions), -1)


@pytest.mark.parametrize("spec", TABLES, ids=str)
def test_table(loaded, spec):
    target, image = loaded
    ff = np.linspace(1, 8, spec.n_dims // 2).astype(np.float32) if spec.freq_factors else np.ones(spec.n_dims // 2, np.float32)
    out = np.zeros((len(POSITIONS), spec.n_dims), np.float32)
    got = run(spec, target, [POSITIONS, ff, out], len(POSITIONS), loaded=image)[2]
    np.testing.assert_allclose(got, table_reference(spec, POSITIONS, ff.astype(np.float64)), rtol=0, atol=2e-7)


def decode(raw, dtype, row):
    """Cache rows (bytes) to f32."""
    if dtype == "f32":
        return raw.view(np.float32)
    if dtype == "f16":
        return raw.view(np.float16).astype(np.float32)
    if dtype == "bf16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    blocks = raw.reshape(len(raw), row // 32, 34)
    d = blocks[:, :, :2].copy().view(np.float16).astype(np.float32)
    return (blocks[:, :, 2:].view(np.int8) * d).reshape(len(raw), row)


def tolerance(dtype, want):
    return {"f32": 1e-6, "f16": 1e-3, "bf16": 8e-3}.get(dtype, 0) * np.abs(want) + (np.abs(want).max() / 250 if dtype == "q8_0" else 1e-6)


@pytest.mark.parametrize("spec", APPLIES, ids=str)
def test_apply(loaded, spec):
    target, image = loaded
    rng = np.random.default_rng(3)
    tokens, row = 4, spec.d * spec.n_head
    ldx = row + 4
    x = rng.normal(size=(tokens, ldx)).astype(np.float32)
    w = rng.normal(size=spec.d).astype(np.float32)
    angle = rng.uniform(0, 6, (tokens, spec.n_dims // 2))
    table = np.stack([np.cos(angle), np.sin(angle)], 2).reshape(tokens, -1).astype(np.float32)
    a = x[:, :row].reshape(tokens, spec.n_head, spec.d).astype(np.float64)
    if spec.norm:
        a = a / np.sqrt((a**2).mean(2, keepdims=True) + spec.eps) * w
    want = a.copy()
    half = spec.n_dims // 2
    pairs = (slice(0, half), slice(half, 2 * half)) if spec.mode == "neox" else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    cos, sin = (np.asarray(f(angle))[:, None, :] for f in (np.cos, np.sin))
    u, v = a[:, :, pairs[0]], a[:, :, pairs[1]]
    want[:, :, pairs[0]], want[:, :, pairs[1]] = u * cos - v * sin, u * sin + v * cos
    want = want.reshape(tokens, row)
    slots = np.array([5, 0, 3, 2], np.int32)
    if not spec.store:
        y = np.zeros((tokens, row + 8), np.float32)
        got = run(spec, target, [x, ldx, table, w, y, row + 8, slots], tokens, loaded=image)[4]
        np.testing.assert_allclose(got[:, :row], want, rtol=1e-5, atol=1e-5)
        assert (got[:, row:] == 0).all()
        return
    cache = np.full((6, row_bytes(spec.to, row)), 0x11, np.uint8)
    got = run(spec, target, [x, ldx, table, w, cache, 0, slots], tokens, loaded=image)[4]
    assert (got[[1, 4]] == 0x11).all()
    assert (np.abs(decode(got[slots], spec.to, row) - want) <= tolerance(spec.to, want) + 1e-5).all()


@pytest.mark.parametrize("spec", STORES, ids=str)
def test_store_rows_rounds_to_nearest_even(loaded, spec):  # S65
    target, image = loaded
    rng = np.random.default_rng(4)
    x = (rng.normal(size=(3, spec.row + 1)) * 10.0 ** rng.integers(-6, 3, (3, spec.row + 1))).astype(np.float32)
    x[1] = 0
    slots = np.array([2, 0, 3], np.int32)
    cache = np.full((4, row_bytes(spec.dtype, spec.row)), 0x22, np.uint8)
    got = run(spec, target, [x, spec.row + 1, cache, slots], 3, loaded=image)[2]
    assert (got[1] == 0x22).all()
    values, want = decode(got[slots], spec.dtype, spec.row), x[:, : spec.row]
    if spec.dtype == "f32":
        assert (values == want).all()
    elif spec.dtype == "f16":
        assert (values == want.astype(np.float16).astype(np.float32)).all()
    elif spec.dtype == "bf16":
        bits = want.view(np.uint32)
        assert (values.view(np.uint32) == ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000)).all()
    else:
        blocks = want.reshape(3, -1, 32)
        top = np.abs(blocks).max(2, keepdims=True)
        inverse = np.where(top > 0, np.float32(127) / np.where(top > 0, top, 1), 0).astype(np.float32)
        d = (top / np.float32(127)).astype(np.float16).astype(np.float32)
        assert (values.reshape(blocks.shape) == np.rint(blocks * inverse) * d).all()


def test_refusals_name_the_way_out():
    with pytest.raises(CodegenError, match="f16 cache"):
        StoreRows(48, "q8_0")
    with pytest.raises(CodegenError, match="q4_k"):
        StoreRows(256, "q4_k")
    with pytest.raises(CodegenError, match="norm or neox"):
        RopeApply(64, 1, 64, "mrope")
