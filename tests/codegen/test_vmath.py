"""Error bounds of the elementary functions, on every level, against float64 numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from ggufc.codegen.emitter import F32, F64, Emitter, vec
from ggufc.codegen.kernels import vmath
from harness import build, run, runnable_targets


@dataclass(frozen=True)
class Apply:
    """y[i] = fn(x[i]) with the whole vector (``scalar``: lane by lane) for 4096 f32."""

    fn: str
    scalar: bool = False
    arg_names: ClassVar[tuple[str, ...]] = ("x", "y")

    def emit(self, e: Emitter) -> None:
        n = 1 if self.scalar else e.target.lanes
        x, y = e.arg_ptr(0), e.arg_ptr(1)
        with e.for_range(0, 4096, n) as i:
            e.store(getattr(vmath, self.fn)(e, e.load(vec(F32, n), e.at(x, i, 4))), e.at(y, i, 4))
        e.ret()

    def scratch_bytes(self, target) -> int:
        return 0


@dataclass(frozen=True)
class SinCos:
    arg_names: ClassVar[tuple[str, ...]] = ("x", "sin", "cos")

    def emit(self, e: Emitter) -> None:
        n = e.target.lanes // 2
        with e.for_range(0, 4096, n) as i:
            s, c = vmath.sincos(e, e.load(vec(F64, n), e.at(e.arg_ptr(0), i, 8)))
            e.store(s, e.at(e.arg_ptr(1), i, 8))
            e.store(c, e.at(e.arg_ptr(2), i, 8))
        e.ret()

    def scratch_bytes(self, target) -> int:
        return 0


def reference(fn, x):
    x = x.astype(np.float64)
    with np.errstate(all="ignore"):
        return {
            "exp": lambda: np.exp(x),
            "exp_flushed": lambda: np.exp(x),
            "log": lambda: np.log(x),
            "tanh": lambda: np.tanh(x),
            "sigmoid": lambda: 1 / (1 + np.exp(-x)),
            "silu": lambda: x / (1 + np.exp(-x)),
            "gelu": lambda: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * x * (1 + 0.044715 * x * x))),
            "softplus": lambda: np.logaddexp(0, x),
        }[fn]()


FUNCTIONS = ("exp", "exp_flushed", "log", "tanh", "sigmoid", "silu", "gelu", "softplus")


@pytest.fixture(scope="module", params=runnable_targets(), ids=lambda t: t.level)
def loaded(request):
    specs = [Apply(fn) for fn in FUNCTIONS] + [Apply("gelu", scalar=True), SinCos()]
    return request.param, build(specs, request.param)


def inputs(fn):
    rng = np.random.default_rng(5)
    spread = [-110.0, 95.0] if fn == "exp" else [-87.0, 20.0] if fn == "exp_flushed" else [-30.0, 30.0]
    x = np.concatenate([rng.uniform(*spread, 3000), rng.uniform(-1, 1, 800), np.linspace(-0.01, 0.01, 200)]).astype(np.float32)
    special = [-np.inf, np.inf, -3e38, 3e38, -104.2, -88.0, 88.72, 1e-40, -0.0, 0.0]
    x = np.concatenate([x, np.array(special, np.float32), np.zeros(96 - len(special), np.float32)])
    if fn == "log":
        x = np.abs(x)
    if fn == "exp_flushed":
        x = np.minimum(x, 80)
    return x


@pytest.mark.parametrize("fn", FUNCTIONS)
def test_error_bound(loaded, fn):
    target, image = loaded
    x = inputs(fn)
    y = run(Apply(fn), target, [x, np.zeros(4096, np.float32)], 1, loaded=image)[1]
    want = reference(fn, x)
    finite = np.isfinite(x)
    assert not np.isnan(y[finite]).any()
    with np.errstate(all="ignore"):
        rounded = want.astype(np.float32)
    ok = np.isfinite(rounded) & finite
    err = np.abs(y[ok] - want[ok])
    ulp = err / np.spacing(np.maximum(np.abs(rounded[ok]), np.float32(1e-38)))
    if fn == "exp":
        assert ulp.max() <= 2 and (y[finite & np.isinf(rounded)] == np.inf).all()
        assert y[x == -np.inf][0] == 0 and y[x == np.inf][0] == np.inf
    elif fn == "exp_flushed":
        normal = x[ok] >= -87.3
        assert ulp[normal].max() <= 2 and (y[x < -87.3] == 0).all() and (y[x == 0] == 1).all()
    else:
        assert np.minimum(ulp / 4, err / 1e-6).max() <= 1
    if fn == "tanh":
        assert ulp.max() <= 4


def test_scalar_and_vector_code_round_alike(loaded):
    target, image = loaded
    x = inputs("gelu")
    wide, narrow = (run(Apply("gelu", s), target, [x, np.zeros(4096, np.float32)], 1, loaded=image)[1] for s in (False, True))
    assert (wide.view(np.uint32) == narrow.view(np.uint32))[np.isfinite(x)].all()


def test_sincos_of_large_angles(loaded):
    target, image = loaded
    rng = np.random.default_rng(6)
    x = np.concatenate([rng.uniform(-1e6, 1e6, 2048), rng.uniform(-10, 10, 1024), np.arange(1024) * (np.pi / 4)])
    _, s, c = run(SinCos(), target, [x, np.zeros(4096), np.zeros(4096)], 1, loaded=image)
    assert np.abs(s - np.sin(x)).max() < 1e-15 and np.abs(c - np.cos(x)).max() < 1e-15
