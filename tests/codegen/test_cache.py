"""Storing rows in block types: bytes against the reference quantisers, sizes, and how far values may move."""

from __future__ import annotations

import numpy as np
import pytest

from ggufc.codegen.errors import CodegenError
from ggufc.codegen.kernels.cache import STORAGE, StoreRows, row_bytes
from ggufc.codegen.kernels.cache_blocks import BLOCKS
from ggufc.codegen.kernels.rope import RopeApply
from ggufc.formats import ggml_types
from ggufc.formats.quants.dequantize import dequantize
from ggufc.formats.quants.quantize import quantize
from ggufc.models.cache_types import CACHE_TYPES
from harness import build, run, runnable_targets

STORES = [StoreRows(96, dtype) for dtype in BLOCKS]
ROPES = [RopeApply(48, 2, 48, "neox", store=True, to=dtype) for dtype in BLOCKS]

LARGEST_STEP = {"q8_0": 1 / 254, "q5_1": 1 / 31, "q5_0": 1 / 16, "q4_1": 1 / 15, "q4_0": 1 / 8, "iq4_nl": 0.15}
"""Largest error relative to the largest value of a block: half a step, a whole one where the range is not symmetric."""


@pytest.fixture(scope="module", params=runnable_targets(), ids=lambda t: t.level)
def loaded(request):
    return request.param, build([*STORES, *ROPES], request.param)


def store(loaded, spec, rows):
    target, image = loaded
    slots = np.random.default_rng(1).permutation(len(rows) + 3)[: len(rows)].astype(np.int32)
    raw = np.full((len(rows) + 3, row_bytes(spec.dtype, spec.row)), 0xEE, np.uint8)
    got = run(spec, target, [rows, rows.shape[1], raw, slots], len(rows), loaded=image, T=len(rows))[2]
    free = np.setdiff1d(np.arange(len(raw)), slots)
    assert (got[free] == 0xEE).all()
    return got[slots]


def rows_of_every_kind():
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(40, 96)).astype(np.float32)
    rows[1] = 0
    rows[2, :32] = 1e-38
    rows[3] = np.abs(rows[3])
    rows[4] = -np.abs(rows[4])
    rows[5] *= 1e4
    rows[6] *= 1e-4
    rows[7, 32:64] = 2.5
    rows[8, 5], rows[8, 20] = 9.0, -9.0  # the first of two equal extremes decides the sign of the scale
    rows[9, 20], rows[9, 5] = 9.0, -9.0
    return rows


@pytest.mark.parametrize("spec", STORES, ids=lambda s: s.dtype)
def test_stored_rows(loaded, spec):
    rows = rows_of_every_kind()
    got = store(loaded, spec, rows)
    values = dequantize(spec.dtype, got, 96)
    blocks, held = rows.reshape(-1, 32), values.reshape(-1, 32)
    largest = np.abs(blocks).max(1, keepdims=True)
    reach = np.ptp(blocks, 1, keepdims=True) + 0.01 * largest if spec.dtype.endswith("_1") else largest
    allowed = (LARGEST_STEP[spec.dtype] * 1.01 + 1e-3) * reach
    assert (np.abs(held - blocks) <= allowed + 127 * 2.0**-25).all()  # small scales are subnormal halves
    reference = quantize(spec.dtype, rows)
    if spec.dtype == "iq4_nl":
        # The reference tries many scales; one least-squares step must come close.
        assert np.linalg.norm(held - blocks) <= 1.25 * np.linalg.norm(dequantize(spec.dtype, reference, 96).reshape(-1, 32) - blocks)
    elif spec.dtype == "q8_0":
        assert (got != reference).mean() < 0.002  # only rounding of exact halves may differ
    else:
        np.testing.assert_array_equal(got, reference)


@pytest.mark.parametrize("spec", ROPES, ids=lambda s: s.to)
def test_rotation_stores_what_set_rows_would(loaded, spec):
    target, image = loaded
    rng = np.random.default_rng(5)
    x = rng.normal(size=(6, 96)).astype(np.float32)
    angles = rng.uniform(0, 6, size=(6, 24))
    table = np.stack([np.cos(angles), np.sin(angles)], 2).reshape(6, 48).astype(np.float32)
    raw = np.zeros((6, row_bytes(spec.to, 96)), np.uint8)
    slots = np.arange(6, dtype=np.int32)
    got = run(spec, target, [x, 96, table, None, raw, 96, slots], 6, loaded=image, T=6)[4]
    u, v = x.reshape(6, 2, 48)[:, :, :24], x.reshape(6, 2, 48)[:, :, 24:]
    cos, sin = table[:, None, 0::2], table[:, None, 1::2]
    turned = np.concatenate([u * cos - v * sin, u * sin + v * cos], 2).reshape(6, 96).astype(np.float32)
    want = store(loaded, StoreRows(96, spec.to), turned)
    a, b = (dequantize(spec.to, r, 96) for r in (got, want))
    assert (np.abs(a - b) > 1e-3 * np.abs(turned).max()).mean() < 0.02  # a rounding of f32 may move a code by one


@pytest.mark.parametrize("dtype", STORAGE)
def test_sizes_are_those_of_the_file_format(dtype):
    assert row_bytes(dtype, 96) == ggml_types.row_bytes(dtype, 96)


def test_every_type_a_model_may_ask_for_can_be_stored():
    assert sorted(STORAGE) == sorted(CACHE_TYPES)


def test_refusals():
    with pytest.raises(CodegenError, match="q4_0 needs a multiple of 32 values, not 48"):
        StoreRows(48, "q4_0")
    with pytest.raises(CodegenError, match="'q4_k' is not a storage type"):
        StoreRows(256, "q4_k")
