"""Activation rounding: the kernel's records equal numpy's, byte for byte. S64."""

from __future__ import annotations

import numpy as np
import pytest

from ggufc.codegen.errors import CodegenError
from ggufc.codegen.kernels.quantize import Quantize
from ggufc.codegen.weights import q8_record
from harness import run, runnable_targets
from products import loaded, records

LEVELS = [pytest.param(t, id=t.level) for t in runnable_targets()]


def rows(k: int) -> np.ndarray:
    """Ordinary rows and awkward ones: zero blocks, ties, one huge value, tiny values, a constant sign."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, k)).astype(np.float32)
    x[1] = 0
    x[2, ::2] = 0
    x[3] = np.resize(np.arange(-127, 128, dtype=np.float32) / 2, k)
    x[4, 5] = 1e30
    x[5] *= np.float32(1e-30)
    x[6] = np.abs(x[6])
    x[7] = np.resize(np.float32([127.0, -127.0, 126.5, 0.5, 1.5, -0.5, -2.5]), k)
    return x


def quantize(spec: Quantize, target, x: np.ndarray, ldx: int, weight=None) -> np.ndarray:
    stride = q8_record(spec.k).stride
    out = np.zeros((len(x), stride), np.uint8)
    return run(spec, target, [x, ldx, weight, out], len(x), loaded=loaded(spec, target), T=len(x))[3]


@pytest.mark.parametrize("target", LEVELS)
@pytest.mark.parametrize(("mode", "k"), [("q8_2", 32), ("q8_2", 576), ("q8_k", 256), ("q8_k", 1024)])
def test_records_equal_numpy(mode, k, target):
    x = rows(k)
    assert (quantize(Quantize(k, mode, False, 0.0), target, x, k) == records(x, mode)).all()


@pytest.mark.parametrize("target", LEVELS)
def test_rows_may_lie_apart(target):
    wide = rows(96)
    out = quantize(Quantize(64, "q8_2", False, 0.0), target, wide, 96)
    assert (out == records(wide[:, :64], "q8_2")).all()


@pytest.mark.parametrize("target", LEVELS)
@pytest.mark.parametrize("mode", ["q8_2", "q8_k"])
def test_normalised_rows(mode, target):
    k, eps = 768, 1e-5
    rng = np.random.default_rng(1)
    x = (3 * rng.standard_normal((5, k))).astype(np.float32)
    weight = rng.uniform(0.5, 2, k).astype(np.float32)
    got = quantize(Quantize(k, mode, True, eps), target, x, k, weight)
    mean = (x * x).astype(np.float64).mean(axis=1).astype(np.float32)
    scale = np.float32(1) / np.sqrt(mean + np.float32(eps))
    want = records((x * scale[:, None]) * weight, mode)
    same = got == want
    assert same.mean() > 0.99
    # A mean that rounds the other way moves the row by one unit in the last place, which can tip single codes.
    codes = got[:, :k].view(np.int8).astype(int) - want[:, :k].view(np.int8)
    assert np.abs(codes).max() <= 1


def test_refusals():
    with pytest.raises(CodegenError, match="blocks of 32"):
        Quantize(48, "q8_2", False, 0.0)
    with pytest.raises(CodegenError, match="blocks of 256"):
        Quantize(576, "q8_k", False, 0.0)
    with pytest.raises(CodegenError, match="only q8_2 and q8_k"):
        Quantize(64, "f32", False, 0.0)
