"""``--fast-prefill``: batches of float weights as bf16, single tokens exact, and an artifact that says so."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from ggufc.cli import cli
from ggufc.codegen.cpu import objectcode
from ggufc.codegen.cpu.target import host_features, resolve
from ggufc.codegen.emitter import Emitter
from ggufc.codegen.errors import CodegenError
from ggufc.codegen.kernels.base import symbol
from ggufc.codegen.kernels.matmul import MatMul
from products import multiply, packed, weight_rows, weight_values
from test_matmul_id import K, choices, choose, dense

FAST, EXACT = resolve("avx512vnni,fast-prefill"), resolve("avx512vnni")
runs = pytest.mark.skipif(
    not host_features().issuperset(FAST.features), reason="this machine has no AVX512-BF16, so the code is only generated, not run"
)
GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "llama-gqa-tied" / "model.gguf"


def as_bf16(x: np.ndarray) -> np.ndarray:
    """Rounded to nearest even, float64."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32).astype(np.float64)


@runs
@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
@pytest.mark.parametrize(("tokens", "fast"), [(31, 0), (32, 32), (150, 144)])
def test_batches_are_products_of_rounded_values(name, tokens, fast):
    k, n = 96, 40
    spec = MatMul(name, k, n, "none", False, "T")
    raw = weight_rows(name, k, n)
    x = np.random.default_rng(tokens).standard_normal((tokens, k)).astype(np.float32)
    got = multiply(spec, FAST, packed(name, raw, k), x)
    exact = multiply(spec, EXACT, packed(name, raw, k), x)
    weights = weight_values(name, raw, k)
    want = as_bf16(x[:fast]) @ as_bf16(weights).T
    assert np.abs(got[:fast] - want).max(initial=0) <= 1e-5 * np.abs(x).max() * k
    assert got[fast:].tobytes() == exact[fast:].tobytes()
    assert (got[:fast] != exact[:fast]).any() or not fast


@runs
def test_gates_and_long_prompts():
    """More tokens than one run: activations are rounded once for each run."""
    spec = MatMul("f16", 2048, 64, "silu_glu", False, "T")
    raw = weight_rows("f16", 2048, 64)
    x = (0.1 * np.random.default_rng(1).standard_normal((300, 2048))).astype(np.float32)
    got, exact = (multiply(spec, target, packed("f16", raw, 2048), x) for target in (FAST, EXACT))
    assert np.abs(got - exact).max() <= 0.02 * np.abs(exact).max()


@runs
def test_chosen_experts():
    tokens = 150
    ids = choices(tokens, np.random.default_rng(4))
    x = np.random.default_rng(5).standard_normal((tokens, K)).astype(np.float32)
    got, exact = choose("f16", x, ids, FAST), dense("f16", x, ids, EXACT, True)
    assert np.abs(got - exact).max() <= 0.02 * np.abs(exact).max()
    assert got.tobytes() != exact.tobytes()


def assembly(name: str, target) -> str:
    spec = MatMul(name, 512, 64, "none", False, "T")
    module = objectcode.new_module(target, "test")
    spec.emit(Emitter(module, target, symbol(spec)))
    return objectcode.emit_assembly(target, module)


def test_only_float_weights_change():
    assert "vdpbf16ps" in assembly("f16", FAST)
    assert "vdpbf16ps" not in assembly("f16", EXACT)
    assert assembly("q4_1", FAST) == assembly("q4_1", EXACT)


def test_levels_without_bf16_are_refused():
    with pytest.raises(CodegenError, match="AVX512-BF16, which level x86-64-v3 lacks; leave it out, or name a level with AVX-512"):
        resolve("x86-64-v3,fast-prefill")
    assert "avx512bf16" in FAST.features and "avx512bf16" not in EXACT.features


def test_the_artifact_says_so(tmp_path):
    output = tmp_path / "fast.ggufc"
    made = CliRunner().invoke(cli, ["compile", str(GOLDEN), "-o", str(output), "--target", "avx512vnni", "--fast-prefill", "-j", "1"])
    assert made.exit_code == 0, made.output
    shown = CliRunner().invoke(cli, ["inspect", str(output)])
    if "needs CPU features" in shown.output:
        pytest.skip("this machine cannot open the artifact")
    assert "prefill       fast: batches multiply float weights as bf16" in shown.output
    data = json.loads(CliRunner().invoke(cli, ["inspect", str(output), "--json"]).output)
    assert data["fast_prefill"] and data["options"]["target"] == "avx512vnni,fast-prefill"
