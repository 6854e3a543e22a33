"""AMX kernels: the instructions, and the bits of AVX-512 over types, shapes and widths (emulated where the machine has no AMX)."""

from __future__ import annotations

import numpy as np
import pytest

import amx
from ggufc.codegen.cpu import image, objectcode
from ggufc.codegen.cpu.target import resolve, strongest_level
from ggufc.codegen.emitter import Emitter
from ggufc.codegen.kernels.base import symbol
from ggufc.codegen.kernels.matmul import MatMul
from ggufc.codegen.weights import weight_format
from products import BLOCK_TYPES, multiply, packed, weight_rows
from test_matmul_id import EXPERTS, USED, K, choices, choose

AMX, AVX512 = amx.AMX, amx.HOST
runs = pytest.mark.skipif(not amx.RUNS, reason=amx.REASON)


def same_bits(spec: MatMul, tokens: int, seed: int = 1, **more) -> int:
    """Products of tiles of a batch that has the same bits as with AVX-512, and whose tokens have them alone."""
    raw = weight_rows(spec.format, spec.k, spec.n)
    weights = packed(spec.format, raw, spec.k)
    x = np.random.default_rng(seed).standard_normal((tokens, spec.k)).astype(np.float32)
    want = multiply(spec, AVX512, weights, x, **more)
    got = multiply(spec, AMX, weights, x, **more)
    made = amx.STATE.products
    assert got.tobytes() == want.tobytes()
    alone = {name: value[5:6] if name == "residual" else value for name, value in more.items()}
    assert multiply(spec, AMX, weights, x[5:6], **alone).tobytes() == got[5:6].tobytes()
    return made


@runs
@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_bits_are_those_of_avx512(name):  # S65
    """53 tokens: three tiles of tokens and a ragged rest; 40 rows: a group of which half exists."""
    k, n = 768, 40
    made = same_bits(MatMul(name, k, n, "none", False, "T"), 53)
    fmt = weight_format(name)
    assert made == 3 * 3 * k // (32 if fmt.scaled_max else fmt.group)


@runs
@pytest.mark.parametrize("tokens", [1, 31, 32, 47, 48, 64, 150])
def test_any_width(tokens):  # S65
    spec = MatMul("q4_1", 96, 32, "none", False, "O")  # three blocks: the last one has no partner
    raw = packed("q4_1", weight_rows("q4_1", 96, 32), 96)
    x = np.random.default_rng(tokens).standard_normal((tokens, 96)).astype(np.float32)
    assert multiply(spec, AMX, raw, x).tobytes() == multiply(spec, AVX512, raw, x).tobytes()
    assert amx.STATE.products == (2 * (tokens // 16) * 3 if tokens >= 32 else 0)


@runs
@pytest.mark.parametrize("name", ["q8_0", "q6_k"])
def test_gates_biases_and_residuals(name):
    rng = np.random.default_rng(3)
    assert same_bits(MatMul(name, 256, 64, "silu_glu", False, "T"), 40)
    bias, residual = rng.standard_normal(48).astype(np.float32), rng.standard_normal((40, 48)).astype(np.float32)
    assert same_bits(MatMul(name, 256, 48, "add", True, "T"), 40, bias=bias, residual=residual)


@runs
@pytest.mark.parametrize(("name", "broadcast"), [("q4_k", True), ("iq4_nl", False)])
def test_chosen_experts(name, broadcast):
    """Tokens of an expert lie anywhere, so their activations are gathered first."""
    tokens = 150
    ids = choices(tokens, np.random.default_rng(4))
    x = np.random.default_rng(5).standard_normal((tokens if broadcast else tokens * USED, K)).astype(np.float32)
    assert np.bincount(ids.reshape(-1), minlength=EXPERTS).max() >= 64
    got = choose(name, x, ids, AMX, broadcast)
    assert amx.STATE.products
    assert got.tobytes() == choose(name, x, ids, AVX512, broadcast).tobytes()


def assembly(name: str) -> str:
    spec = MatMul(name, 512, 64, "none", False, "T")
    module = objectcode.new_module(AMX, "test")
    spec.emit(Emitter(module, AMX, symbol(spec)))
    return objectcode.emit_assembly(AMX, module)


@pytest.mark.parametrize(("name", "halves"), [("q4_1", 1), ("q6_k", 2)])
def test_code_uses_tiles_and_keeps_vectors_for_few_tokens(name, halves):
    code = assembly(name)
    for instruction in ("ldtilecfg", "tilezero", "tileloadd", "tdpbsud", "tilestored", "tilerelease"):
        assert f"\t{instruction}" in code
    assert "vpdpbusd" in code and f"16x{32 // halves}_" in code
    assert "tdp" not in assembly("f16")


def test_code_links():
    spec = MatMul("q4_k", 512, 64, "none", False, "T")
    module = objectcode.new_module(AMX, symbol(spec))
    spec.emit(Emitter(module, AMX, symbol(spec)))
    assert image.link([objectcode.emit_object(AMX, module)]).symbols[symbol(spec)][1]


def test_emulation_refuses_what_the_instructions_refuse():
    tiles = amx.Tiles()
    tiles.tilezero(0)
    assert "without a configuration" in tiles.problem
    tiles = amx.Tiles()
    tiles.shapes = [(16, 64), (16, 32), (4, 64)] + [(0, 0)] * 5
    tiles.tdpbsud(0, 1, 2)
    assert "shapes 16x64 += 16x32 * 4x64" in tiles.problem


def test_level():
    assert resolve("amx-int8").level == "amx" == strongest_level(frozenset(AMX.features))
    assert strongest_level(frozenset(AMX.features) - {"amx-int8"}) == "avx512vbmi"
