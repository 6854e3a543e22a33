"""Products by weights of every type: right against float64, and the same bits whatever the batch.

Systems: S30 S31 S65.
"""

from __future__ import annotations

import numpy as np
import pytest

from ggufc.codegen.cpu import objectcode
from ggufc.codegen.cpu.target import resolve
from ggufc.codegen.emitter import Emitter
from ggufc.codegen.errors import CodegenError
from ggufc.codegen.kernel_build import build_image
from ggufc.codegen.kernels.base import symbol
from ggufc.codegen.kernels.matmul import MatMul, grid
from harness import run, runnable_targets
from products import CASE_IDS, CASES, FEW_TYPES, NATIVE, kernel_name, loaded, multiply, packed, product, records, weight_rows
from quant_golden import quant_cases

GOLDEN_K = 512
MANY = 75  # whole panels of tokens and a tail
TOKENS = (1, 2, 3, 7, 8, 9, 16, 33)
LEVELS = [pytest.param(t, id=t.level) for t in runnable_targets()]


def activations(tokens: int, k: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((tokens, k)).astype(np.float32)


@pytest.mark.parametrize(("name", "target"), CASES, ids=CASE_IDS)
def test_product_is_right_and_does_not_depend_on_the_batch(name, target):
    """Many tokens against float64, then every smaller batch against the bits of the large one."""
    k, n = GOLDEN_K, 40
    raw = weight_rows(name, k, n)
    x = activations(MANY, k)
    spec = MatMul(kernel_name(name), k, n, "none", False, "T")
    w = packed(name, raw, k)
    y = multiply(spec, target, w, x)
    want = product(name, raw, k, x)
    assert np.abs(y - want).max() <= 3e-6 * want.std()
    for tokens in TOKENS:
        assert multiply(spec, target, w, x[MANY - tokens :]).tobytes() == y[MANY - tokens :].tobytes()
    order = np.random.default_rng(2).permutation(MANY)
    assert multiply(spec, target, w, x[order]).tobytes() == y[order].tobytes()


@pytest.mark.parametrize("name", [t for t in FEW_TYPES if t != "f16"])
def test_levels_that_fuse_multiplications_agree(name):
    """Sums of integers are exact, so levels that look codes up in other ways, or add in other orders, give the same bits."""
    k, n = GOLDEN_K, 40
    w = packed(name, weight_rows(name, k, n), k)
    x = activations(9, k)
    spec = MatMul(name, k, n, "none", False, "T")
    want = multiply(spec, NATIVE, w, x)
    for target in runnable_targets():
        if target.has_fma:
            assert multiply(spec, target, w, x).tobytes() == want.tobytes()
            assert multiply(spec, target, w, x[:1]).tobytes() == want[:1].tobytes()


@pytest.mark.parametrize("name", sorted(quant_cases()))
def test_product_equals_the_golden_engine(name):
    case = quant_cases()[name]
    n, k = case.deq.shape
    assert k == GOLDEN_K and n <= 40
    raw = np.resize(case.raw, (40, case.raw.shape[1]))  # rows repeat: the kernel of the test above serves
    y = multiply(MatMul(kernel_name(name), k, 40, "none", False, "T"), NATIVE, packed(name, raw, k), case.x)[:, :n]
    # The golden rounds BF16's activations too, which ours keep in f32; IQ6_K's products here and there round its cubic to integers,
    # the golden reference does not.
    want = case.ref if name == "bf16" else case.ref_rounded
    assert np.abs(y - want).max() < (0.03 if name == "iq6_k" else 1e-5) * case.sigma


@pytest.mark.parametrize("target", LEVELS)
@pytest.mark.parametrize(("name", "k", "n"), [("q8_0", 32, 1), ("q4_0", 96, 17), ("f32", 7, 21)])
def test_odd_shapes(name, k, n, target):
    raw = weight_rows(name, k, n, seed=3)
    x = activations(9, k)
    spec = MatMul(name, k, n, "none", False, "T")
    for tokens in (1, 9):
        y = multiply(spec, target, packed(name, raw, k), x[:tokens], ldy=n + 3)
        want = product(name, raw, k, x[:tokens])
        assert np.abs(y[:, :n] - want).max() <= 1e-5 * np.abs(want).max()
        assert np.isnan(y[:, n:]).all()  # a view into a wider buffer: its neighbours are untouched


@pytest.mark.parametrize("target", LEVELS)
def test_bias_and_residual(target):
    k, n = 64, 21
    w = packed("q8_0", weight_rows("q8_0", k, n, seed=4), k)
    for tokens in (3, 70):
        x = activations(tokens, k)
        bias, residual = activations(1, n, 5)[0], activations(tokens, n, 6)
        plain = multiply(MatMul("q8_0", k, n, "none", False, "O"), target, w, x)
        both = multiply(MatMul("q8_0", k, n, "add", True, "O"), target, w, x, residual=residual, bias=bias)
        assert both.tobytes() == ((plain + bias) + residual).tobytes()


def test_a_fixed_number_of_rows():
    x = activations(3, 64)
    w = packed("q8_0", weight_rows("q8_0", 64, 16), 64)
    y = np.zeros((4, 16), np.float32)
    spec = MatMul("q8_0", 64, 16, "none", False, "3")
    y = run(spec, NATIVE, [w, records(x, "q8_2"), y, 64, 16, None, 0, None, -3], grid(spec), loaded=loaded(spec, NATIVE), T=1)[2]
    assert y[:3].all() and not y[3].any()


def test_products_over_other_rows_share_their_code():
    specs = [MatMul("q8_0", 64, 16, "none", False, rows) for rows in ("T", "O", "3")]
    _, kernels = build_image([*specs, MatMul("q8_0", 64, 32, "none", False, "T")], NATIVE, jobs=1)
    assert len({kernel.symbol for kernel in kernels}) == 4
    assert len({kernel.offset for kernel in kernels[:3]}) == 1 and kernels[3].offset != kernels[0].offset


@pytest.mark.parametrize("target", LEVELS)
@pytest.mark.parametrize("fn", ["silu", "gelu"])
@pytest.mark.parametrize("name", ["q4_1"])
def test_gated_products(name, fn, target):
    k, n = 64, 48
    gate, up = weight_rows(name, k, n, seed=7), weight_rows(name, k, n, seed=8)
    x = activations(MANY, k)
    pairs = np.stack([gate.reshape(-1, 16, gate.shape[1]), up.reshape(-1, 16, up.shape[1])], axis=1).reshape(2 * n, -1)
    w = packed(name, pairs, k)
    spec = MatMul(name, k, 2 * n, f"{fn}_glu", False, "T")
    y = multiply(spec, target, w, x)
    g, u = product(name, gate, k, x), product(name, up, k, x)
    if fn == "silu":
        want = g / (1 + np.exp(-g)) * u
    else:
        want = 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))) * u
    assert np.abs(y - want).max() <= 2e-6 * np.abs(want).max()
    for tokens in (1, 2, 13):
        assert multiply(spec, target, w, x[:tokens]).tobytes() == y[:tokens].tobytes()


def test_extreme_codes_and_activations_do_not_saturate():
    """All codes and activations at their ends: 16-bit pair sums of the narrow levels would overflow here."""
    k, n = GOLDEN_K, 40
    x = np.full((2, k), 127.0, np.float32)
    x[1] = -127.0
    for name in ("q8_0", "iq4_nl"):
        raw = weight_rows(name, k, n).copy()
        if name == "q8_0":
            raw.reshape(n, -1, 34)[:, :, 2:] = 0x7F
        else:
            raw.reshape(n, -1, 18)[:, :, 2:] = 0xFF
        want = product(name, raw, k, x)
        for target in runnable_targets():
            y = multiply(MatMul(name, k, n, "none", False, "T"), target, packed(name, raw, k), x)
            assert np.abs(y - want).max() <= 2e-6 * np.abs(want).max()


@pytest.mark.parametrize(("k", "n"), [(576, 192), (576, 49152), (1536, 576), (4096, 4096), (64, 16)])
def test_tiles_cover_all_rows_and_are_large_enough(k, n):
    spec = MatMul("q4_1", k, n, "none", False, "T")
    groups = -(-n // 16)
    tiles = grid(spec)
    assert 1 <= tiles <= groups
    if groups >= 16:
        assert tiles >= 8  # enough for a few threads to share evenly


def assembly(name: str, level: str) -> str:
    target = resolve(level)
    spec = MatMul(name, 512, 64, "none", False, "T")
    module = objectcode.new_module(target, "test")
    spec.emit(Emitter(module, target, symbol(spec)))
    return objectcode.emit_assembly(target, module)


def test_code_uses_the_dot_instructions_of_its_level():
    best = assembly("q4_1", "avx512vnni")
    assert any("vpdpbusd" in line and "{1to16}" in line and "zmm" in line for line in best.splitlines())
    assert "vpdpbusd" in assembly("q4_1", "avxvnni") and "zmm" not in assembly("q4_1", "avxvnni")
    assert "vpmaddubsw" in assembly("q4_1", "x86-64-v3")
    assert "pmaddwd" in assembly("q4_1", "x86-64")


def test_refusals_name_the_format():
    with pytest.raises(CodegenError, match="q4_k weight cannot have rows of 96"):
        MatMul("q4_k", 96, 16, "none", False, "T")
    with pytest.raises(CodegenError, match="'q9_9' cannot be multiplied"):
        MatMul("q9_9", 256, 16, "none", False, "T")
    with pytest.raises(CodegenError, match="cannot end with 'relu'"):
        MatMul("q8_0", 256, 16, "relu", False, "T")
    with pytest.raises(CodegenError, match="multiple of 32 rows"):
        MatMul("q8_0", 256, 48, "silu_glu", False, "T")
