"""Weights, activation records and float64 products for the tests of the product kernels."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import numpy as np

from ggufc.codegen.cpu import image, objectcode
from ggufc.codegen.cpu.target import Target
from ggufc.codegen.emitter import Emitter
from ggufc.codegen.kernels.base import KernelSpec, symbol
from ggufc.codegen.kernels.matmul import MatMul, grid
from ggufc.codegen.kernels.matmul_product import rows_argument
from ggufc.codegen.weights import known_formats, q8_record, weight_format
from ggufc.formats.activations import round_activations, round_q8_2, round_q8_k
from ggufc.formats.ggml_types import row_bytes, type_by_name
from ggufc.formats.quants import codes
from harness import Loaded, run, runnable_targets

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "formats"))
from quant_golden import quant_cases

NATIVE = runnable_targets()[-1]
BLOCK_TYPES = tuple(t for t in known_formats() if t not in ("f32", "f16", "bf16"))
FEW_TYPES = ("q4_1", "q8_0", "q2_k", "q6_k", "iq4_nl", "iq2_xs", "iq2_s", "iq1_m", "iq3_s", "iq2_kl", "iq5_k", "f16")
"""Types for the levels below the machine's best: they cover offsets, minima, scales per 16 and per 32, tables, codebooks and floats."""

CASES = [(t, NATIVE) for t in known_formats()] + [(t, level) for level in runnable_targets()[:-1] for t in FEW_TYPES]
CASE_IDS = [f"{t}-{level.level}" for t, level in CASES]


def kernel_name(name: str) -> str:
    """The type whose kernel serves ``name``: two types differ in their data only, so their tests share code."""
    return "iq4_ks" if name == "iq4_kss" else name


def weight_rows(name: str, k: int, n: int, seed: int = 0) -> np.ndarray:
    """``n`` raw rows of ``k`` values: blocks of the golden tensors in random order."""
    rng = np.random.default_rng(seed)
    if name == "f32":
        return rng.standard_normal((n, k)).astype(np.float32).view(np.uint8)
    if name == "f16":
        return rng.standard_normal((n, k)).astype(np.float16).view(np.uint8)
    if name == "bf16":
        return np.ascontiguousarray(rng.standard_normal((n, k)).astype(np.float32).view(np.uint16)[:, 1::2]).view(np.uint8)
    info = type_by_name(name)
    raw = quant_cases()[name].raw
    blocks = raw[:, info.row_header :].reshape(-1, info.bytes)
    body = blocks[rng.integers(0, len(blocks), (n, k // info.block))].reshape(n, -1)
    head = raw[rng.integers(0, len(raw), n), : info.row_header]
    return np.ascontiguousarray(np.concatenate([head, body], axis=1))


def weight_values(name: str, raw: np.ndarray, k: int) -> np.ndarray:
    """What a product multiplies, float64 [rows, k]."""
    if name == "f32":
        return raw.view(np.float32).astype(np.float64)
    if name == "f16":
        return raw.view(np.float16).astype(np.float64)
    if name == "bf16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    code, scale, low, g = codes(name, raw, k)
    w = np.repeat(scale.astype(np.float64), g, axis=1) * code
    return w if low is None else w - np.repeat(low.astype(np.float64), g, axis=1)


def product(name: str, raw: np.ndarray, k: int, x: np.ndarray) -> np.ndarray:
    """float64 [tokens, rows] with activations rounded as the kernels round them."""
    mode = weight_format(name).mode
    return round_activations(x, mode).astype(np.float64) @ weight_values(name, raw, k).T


def records(x: np.ndarray, mode: str) -> np.ndarray:
    """The argument ``x`` of a product: q8 records made by numpy (uint8 [tokens, stride]), or the rows themselves."""
    if mode == "f32":
        return np.ascontiguousarray(x, np.float32)
    k = x.shape[1]
    at = q8_record(k)
    qs, d = round_q8_2(x) if mode == "q8_2" else round_q8_k(x)
    isum16 = qs.reshape(len(x), -1, 16).sum(axis=-1, dtype=np.int32)
    isum32 = isum16[:, ::2] + isum16[:, 1::2]
    out = np.zeros((len(x), at.stride), np.uint8)
    fields = {0: qs, at.off_d: d, at.off_c16: -128 * isum16, at.off_c32: -128 * isum32, at.off_s: d * isum32.astype(np.float32)}
    for offset, values in fields.items():
        data = np.ascontiguousarray(values).view(np.uint8).reshape(len(x), -1)
        out[:, offset : offset + data.shape[1]] = data
    return out


@cache
def loaded(spec: KernelSpec, target: Target) -> Loaded:
    """The compiled kernel alone; tests share it."""
    module = objectcode.new_module(target, symbol(spec))
    spec.emit(Emitter(module, target, symbol(spec)))
    return Loaded(image.link([objectcode.emit_object(target, module)]))


def multiply(
    spec: MatMul,
    target: Target,
    packed: np.ndarray,
    x: np.ndarray,
    *,
    ldy: int | None = None,
    residual: np.ndarray | None = None,
    bias: np.ndarray | None = None,
) -> np.ndarray:
    """f32 [tokens, ldy] of all tiles; memory the kernel does not write stays NaN."""
    n_out = spec.n // spec.unit
    ldy = ldy or n_out
    y = np.full((len(x), ldy), np.nan, np.float32)
    args = [packed, records(x, weight_format(spec.format).mode), y, spec.k, ldy, residual, n_out, bias, rows_argument(spec.rows)]
    result = run(spec, target, args, grid(spec), loaded=loaded(spec, target), **{spec.rows: len(x)})[2]
    assert result is not None
    return result


def packed(name: str, raw: np.ndarray, k: int) -> np.ndarray:
    assert raw.shape[1] == row_bytes(name, k)
    return weight_format(name).repack(raw, k)
