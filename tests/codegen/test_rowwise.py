"""RMS norm and layer norm against numpy, with row strides, in place, odd sizes."""

from __future__ import annotations

import numpy as np
import pytest

from ggufc.codegen.kernels.rowwise import Norm, RmsNorm
from harness import build, run, runnable_targets

EPS = 1e-5
SPECS = [
    RmsNorm(64, EPS),
    RmsNorm(1, EPS),
    RmsNorm(45, EPS, weight=False),
    RmsNorm(83, EPS, add=True),
    RmsNorm(30, EPS, weight=False, add=True),
    Norm(64, EPS),
    Norm(37, EPS),
]


@pytest.fixture(scope="module", params=runnable_targets(), ids=lambda t: t.level)
def loaded(request):
    return request.param, build(SPECS, request.param)


def norm_reference(spec, x):
    wide = x[:, : spec.ne0].astype(np.float64)
    if isinstance(spec, Norm):
        wide = wide - wide.mean(1, keepdims=True)
    return wide / np.sqrt((wide**2).mean(1, keepdims=True) + EPS)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_rows(loaded, spec):
    target, image = loaded
    rng = np.random.default_rng(1)
    rows, n = 5, spec.ne0
    ldx, ldr, ldy = n + 3, n + 2, n + 5
    x = rng.normal(3, 2, (rows, ldx)).astype(np.float32)
    w = rng.normal(size=n).astype(np.float32)
    residual = rng.normal(size=(rows, ldr)).astype(np.float32)
    y = np.full((rows, ldy), 7, np.float32)
    want = norm_reference(spec, x)
    if isinstance(spec, Norm):
        got = run(spec, target, [x, ldx, y, ldy], rows, loaded=image)[2]
    else:
        got = run(spec, target, [x, ldx, w, residual, ldr, y, ldy], rows, loaded=image)[5]
        want = want * w if spec.weight else want
        want = want + residual[:, :n] if spec.add else want
    np.testing.assert_allclose(got[:, :n], want, rtol=2e-6, atol=1e-6)
    assert (got[:, n:] == 7).all()


def test_in_place_gives_the_same_bits(loaded):
    """y = x, and y = residual, as the residual stream of gemma uses it."""
    import ctypes

    from ggufc.codegen.kernels.base import symbol

    _, image = loaded
    spec = RmsNorm(83, EPS, add=True)
    rng = np.random.default_rng(2)
    x, r = rng.normal(size=(2, 83)).astype(np.float32)
    w = np.ones(83, np.float32)
    fn = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)(image.address(symbol(spec)))

    def call(x, r, y):
        words = np.array([x.ctypes.data, 83, w.ctypes.data, r.ctypes.data, 83, y.ctypes.data, 83], np.int64)
        fn(words.ctypes.data, None, 0, None)
        return y.view(np.uint32).copy()

    want = call(x, r, np.empty(83, np.float32))
    x2, r2 = x.copy(), r.copy()
    assert (call(x, r2, r2) == want).all()
    assert (call(x2, r, x2) == want).all()
